"""Where dead letters go: the port that the layer and the consumer write to.

`@dead_letter`: what cannot be handled is put aside whole, and the lane goes on.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

import msgspec

from holdfast.call import Call, Done, Stage
from holdfast.classification import Classify, check_classify, recognise
from holdfast.db.transactions import waits_for
from holdfast.dlq.capture.capture import NOWHERE, CaptureSettings, capture, scrubber
from holdfast.dlq.destination import DeadLetterDestination, DeadLetterStore
from holdfast.dlq.letter import puts_in_thread
from holdfast.dlq.protection.redaction import without_fields
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, Remedy
from holdfast.ids import derived_id, former_names, name_of
from holdfast.layer import Layer, is_function
from holdfast.message import Message, current_message
from holdfast.ports import Delivery
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

    from holdfast.dlq.letter import DeadLetter
    from holdfast.pipeline import Handler


P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("holdfast.dlq")
_MOST_REASON = 500


class DeadLetters(Layer):
    """Puts a message aside when its failure is final.

    Poison goes at once; passing and unknown errors go when every retry inside has given up;
    errors of a dependency that is down, of a shutdown or of a lost assignment never go. A
    `ConfigurationError` goes out: the program is at fault, not the message. When the dead
    letter cannot be stored, `DependencyDown` goes out and nothing may be acknowledged; where
    it would wait for the caller's own transaction, a `ConfigurationError` goes out at once.
    """

    stage: ClassVar[Stage] = Stage.SETTLE
    label: ClassVar[str] = "@dead_letter"

    def __init__(
        self,
        home: DeadLetterDestination | None = None,
        *,
        group: str | None = None,
        classify: Classify | None = None,
        origin: CaptureSettings = NOWHERE,
        commutative: bool = False,
    ) -> None:
        self.home = home
        self.group = group
        self.origin = replace(origin, commutative=True) if commutative else origin
        self._classify = recognise if classify is None else classify
        self._handler = ""
        self._function = ""
        self._formerly: tuple[str, ...] = ()
        self._named: tuple[str, str] | None = None

    def __call__(self, function: Callable[P, R]) -> Handler[P, R]:
        """Wrap *function*, whose name the letters carry."""
        own = copy.copy(self)
        inner = getattr(getattr(function, "plan", None), "function", function)
        own._handler = own._function = name_of(inner)
        own._formerly = former_names(inner)
        return super(DeadLetters, own).__call__(function)

    def describe(self) -> str:
        """Say where letters go."""
        return "home of the consumer" if self.home is None else type(self.home).__name__

    def using(
        self, home: DeadLetterDestination | None, origin: CaptureSettings | None = None
    ) -> DeadLetters:
        """Return the same layer with *home*, for a runtime that fills in its own."""
        own = copy.copy(self)
        own.home = home
        own.origin = self.origin if origin is None else origin
        return own

    def named(self, group: str, handler: str, function: Callable[..., Any]) -> DeadLetters:
        """Return the same layer for the *handler* of a consumer's *group*."""
        own = copy.copy(self)
        own._named = (group, handler)
        own._function, own._formerly = name_of(function), former_names(function)
        return own

    @property
    def visible(self) -> Callable[[bytes | None], bytes | None] | None:
        """How a payload is rid of the fields that its letter would hide."""
        hidden = self.origin.hidden
        return (lambda payload: without_fields(payload, hidden)[0]) if hidden else None

    def captured(self, message: Message, error: BaseException, **facts: Any) -> DeadLetter:
        """Return the letter of *message*, which says of the handler what this layer knows."""
        return capture(
            message, error, origin=self.origin, function=self._function, formerly=self._formerly,
            **facts,
        )  # fmt: skip

    def is_final(self, error: BaseException) -> bool:
        """Whether *error* ends the message's way, now that the layers inside let it out."""
        if not isinstance(error, Exception) or isinstance(error, ConfigurationError):
            return False
        remedy = self._classify(error)
        if remedy is None:
            remedy = recognise(error)
        return remedy not in (Remedy.PAUSE, Remedy.RELEASE)

    def fail(self, call: Call, error: BaseException) -> Done | None:
        """Put the message aside and end the run, or let *error* go on."""
        if not self.is_final(error):
            return None
        home = self._home()
        for engine, given in _held(home, call):
            _refuse_to_wait(engine, given, error)
        self._put(home, self._letter(call, error), call)
        call.failure = error
        return Done()

    async def fail_async(self, call: Call, error: BaseException) -> Done | None:
        """Do the same without blocking the event loop, where the home allows it."""
        if not self.is_final(error):
            return None
        home = self._home()
        for engine, given in _held(home, call):
            if hasattr(given, "run_sync"):
                await given.run_sync(partial(_refuse_to_wait, engine), error)
            else:
                await asyncio.to_thread(_refuse_to_wait, engine, given, error)
        letter = self._letter(call, error)
        if puts_in_thread(home):
            await asyncio.to_thread(self._put, home, letter, call)
        else:
            self._put(home, letter, call)
        call.failure = error
        return Done()

    def scrub(self, call: Call, text: str) -> str:
        """Return *text* without what the dead letter of *call* would hide."""
        if not self.origin.hidden:
            return self.origin.redaction.scrub(text)
        return scrubber(self._message(call)[0], self.origin)(text)

    def _message(self, call: Call) -> tuple[Message, Delivery | None]:
        return _message(call, self._handler, self.origin.hidden)

    def _home(self) -> DeadLetterDestination:
        if self.home is None:
            raise ConfigurationError(
                "@dead_letter() has no home: pass one, e.g. "
                "@dead_letter(DeadLetterStore(engine)), or "
                "register the handler with a Consumer, which fills it in"
            )
        return self.home

    def _put(self, home: DeadLetterDestination, letter: DeadLetter, call: Call) -> None:
        try:
            home.put(letter)
        except HoldfastError:
            raise
        except Exception as error:
            raise DependencyDown(
                f"dead letter {letter.dlq_id} cannot be stored: {told(error)}"[:_MOST_REASON]
            ) from error
        call.letter = letter
        log.warning(
            "message %s is dead-lettered as %s: %s", letter.message.id, letter.dlq_id,
            letter.failure.root.type,
        )  # fmt: skip

    def _letter(self, call: Call, error: BaseException) -> DeadLetter:
        group, _, handler = call.consumer.rpartition("/")
        if self._named is not None:
            group, handler = self._named
        message, found = self._message(call)
        return self.captured(
            message,
            error,
            group=group or self.group or "default",
            handler=handler or self._handler,
            delivery=found if call.delivery is None else call.delivery,
            attempts=call.attempt,
            clock=call.clock,
        )


@overload
def dead_letter(
    home: DeadLetterDestination | None = None,
    *,
    group: str | None = None,
    classify: Classify | None = None,
    origin: CaptureSettings = NOWHERE,
    commutative: bool = False,
) -> DeadLetters: ...
@overload
def dead_letter(function: Callable[P, R], /) -> Handler[P, R]: ...


def dead_letter(
    home: DeadLetterDestination | Callable[..., Any] | None = None,
    *,
    group: str | None = None,
    classify: Classify | None = None,
    origin: CaptureSettings = NOWHERE,
    commutative: bool = False,
) -> DeadLetters | Handler[..., Any]:
    """Put aside what the decorated function finally fails to handle.

    *home* is a `DeadLetterStore` or `DeadLetterTopic`; under a `Consumer` it may be left out, and
    the parentheses with it. *classify* replaces the judgement of errors; *origin* says version,
    tenant and what to redact. *commutative* declares that the messages of a key may take effect
    in any order: a replay then sends one also when a newer one of its key was handled.
    """
    if is_function(home):
        return DeadLetters()(home)
    if home is not None and not hasattr(home, "put"):
        raise ConfigurationError(
            f"@dead_letter({home!r}): that is no home of letters; pass a DeadLetterStore"
        )
    check_classify(classify, "@dead_letter")
    return DeadLetters(home, group=group, classify=classify, origin=origin, commutative=commutative)


def dead_lettered(call: Call) -> DeadLetter | None:
    """Return the letter that became of *call*, None when it was not dead-lettered."""
    letter: DeadLetter | None = call.letter
    return letter


def _held(home: DeadLetterDestination, call: Call) -> list[tuple[Engine, Any]]:
    """Return the caller's sessions and connections, beside the engine that may wait for them."""
    if not isinstance(home, DeadLetterStore) or home.engine.dialect.name != "sqlite":
        return []
    return [
        (home.engine, one)
        for one in (*call.args, *call.kwargs.values())
        if hasattr(one, "execute") and (hasattr(one, "get_bind") or hasattr(one, "dialect"))
    ]


def _refuse_to_wait(engine: Engine, given: Any, error: BaseException) -> None:
    if waits_for(engine, given):
        raise ConfigurationError(
            "the dead letter cannot be stored: the caller's own transaction holds SQLite's only "
            "write lock. Put @dead_letter on the function that opens the session, so that its "
            "transaction has ended, or register the handler with a Consumer"
        ) from error


def _message(call: Call, handler: str, hidden: tuple[str, ...]) -> tuple[Message, Delivery | None]:
    """Return the message that *call* handles; a call without one is written down as one."""
    if call.message is not None:
        return call.message, None
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, Delivery):
            return value.message, value
        if isinstance(value, Message):
            return value, None
    current = current_message()
    if current is not None:
        return current, None
    body = {"args": call.args, "kwargs": call.kwargs}
    try:
        payload = msgspec.json.encode(body, enc_hook=_described)
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeError):
        payload = _described(body).encode("utf-8", "backslashreplace")
    digest = hashlib.sha256(without_fields(payload, hidden)[0] or b"").hexdigest()
    made = Message(
        id=derived_id("call", handler, digest),
        topic=handler or "calls",
        payload=payload,
        type="call",
        time=call.clock.now(),
        content_type="application/json",
    )
    return made, None


def _described(value: Any) -> str:
    try:
        return repr(value)[:2000]
    except Exception:  # noqa: BLE001 - an argument that cannot be shown must not hide the failure
        return f"<{type(value).__name__}>"
