"""Sagas without an orchestrator: services react to each other's events, each of them once.

A reaction does one step for a key, and the reactions that undo it keep the same barrier as the
participants of an orchestrated saga: what was undone before it was done is never done. The mark,
the effect and the events that follow commit together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.orm import Session  # noqa: TC002 - the consumer looks at the annotations

from holdfast.codec import Decoder, JsonCodec, payload_annotation
from holdfast.dlq import dead_letter
from holdfast.errors import ConfigurationError, PoisonMessage, Transient
from holdfast.idempotency import idempotent
from holdfast.ids import derived_id, require_name
from holdfast.message import Message, current_message
from holdfast.outbox import Event, Outbox
from holdfast.retry import retry
from holdfast.sagas.barrier import BarrierVerdict, marked, verdict
from holdfast.sagas.participant import AGAIN, StepFailed, locked_mark, write_mark
from holdfast.sagas.states import Answer, Direction
from holdfast.sagas.wire import CommandHeaders, running

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.backoff import Backoff
    from holdfast.consumer import Consumer

F = TypeVar("F", bound="Callable[[Any, Session], Any]")

log = logging.getLogger("holdfast.sagas")
_codec = JsonCodec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """What a service does when an event comes."""

    step: str
    direction: Direction
    function: Callable[[Any, Session], Any]
    decode: Decoder
    topic: str | None
    """Where what the function returns is published."""


class Reactions:
    """What one service does about the events of others, and what it publishes then.

    ```python
    payment = Reactions("payment", outbox=Outbox(source="payment"))

    @payment.on(topic="payments")
    def charge(event: OrderPlaced, session: Session) -> PaymentProcessed:
        if not covered(event):
            raise StepFailed("no cover", event=PaymentFailed(event.order))
        ...

    @payment.undo(charge, topic="payments")
    def refund(event: ShippingFailed, session: Session) -> PaymentRefunded: ...

    payment.attach(consumer, "orders")
    payment.attach(consumer, "shipments")
    ```
    A step is done once for a key and undone at most once, in whatever order the events come and
    however often. The key is that of the message, or what *key* makes of the event. What fails
    and may pass is tried again as *retry* says, and is a dead letter then.
    """

    def __init__(
        self,
        service: str,
        *,
        outbox: Outbox,
        key: Callable[[Any], str] | None = None,
        retry: Backoff = AGAIN,
    ) -> None:
        self.service = require_name(service, "Reactions(service)")
        self._outbox = outbox
        self._key = key
        self._retry = retry
        self._reactions: dict[str, list[Reaction]] = {}

    def on(self, *, topic: str | None = None) -> Callable[[F], F]:
        """Do a step when an event comes whose type is the class of the function's argument.

        What the function returns, an event or a list of them, is published to *topic* under the
        same key. Raise `StepFailed` if it cannot be done: what it wrote is rolled back, and the
        error's own event is published; with *again* the event is tried again instead.
        """

        def register(function: F) -> F:
            self._add(function, _name(function), Direction.DO, topic)
            return function

        return register

    def undo(self, step: Callable[..., object], *, topic: str | None = None) -> Callable[[F], F]:
        """Undo *step* when an event comes; where it was not done, keep it from being done later.

        One that raises `StepFailed` is a dead letter: a human is needed.
        """
        done = {
            one.step
            for several in self._reactions.values()
            for one in several
            if one.direction is Direction.DO
        }
        if _name(step) not in done:
            raise ConfigurationError(
                f"{self.service}.undo({_name(step)!r}): there is no such step above: write it with "
                "on() first"
            )

        def register(function: F) -> F:
            self._add(function, _name(step), Direction.UNDO, topic)
            return function

        return register

    def attach(self, consumer: Consumer, topic: str) -> None:
        """Register as the handler of *topic*; events that nothing here reacts to pass."""

        def react(event: bytes | None, session: Session) -> None:
            message = current_message()
            assert message is not None  # noqa: S101 - a handler always has one
            self.handle(session, message, event)

        consumer.on(topic)(dead_letter()(retry(self._retry)(idempotent()(react))))

    def handle(self, session: Session, message: Message, payload: bytes | None) -> None:
        """React to *message* in the caller's transaction."""
        for reaction in self._reactions.get(message.type, ()):
            event = reaction.decode(payload)
            self._react(session, message, reaction, event)

    def _react(self, session: Session, message: Message, reaction: Reaction, event: Any) -> None:
        key = self._key_of(message, event)
        own = derived_id("choreography", self.service, key)
        db = session.connection()
        bare = CommandHeaders(
            saga_id=own, saga_type=self.service, step=reaction.step, reply_to="",
            direction=reaction.direction, attempt=1,
        )  # fmt: skip
        known, row = locked_mark(db, bare)
        # The inbox knows this message: another one about a step that failed is another attempt.
        step = CommandHeaders(
            saga_id=own, saga_type=self.service, step=reaction.step, reply_to="",
            direction=reaction.direction, attempt=row.attempt + 1,
        )  # fmt: skip
        found = verdict(known, step.direction, step.attempt)
        if found in (BarrierVerdict.REPEAT, BarrierVerdict.REFUSE):
            why = "was done before" if found is BarrierVerdict.REPEAT else "was undone before"
            log.info("%s: %s of %s %s: event %s changes nothing", self.service, reaction.step, key,
                     why, message.id)  # fmt: skip
            return
        answer, error, result = Answer.DONE, "", None
        if found is BarrierVerdict.EXECUTE:
            try:
                with session.begin_nested(), running(step):
                    result = reaction.function(event, session)
            except StepFailed as failed:
                _require_answer(reaction, key, failed)
                answer, error, result = failed.answer, str(failed), failed.event
        left = marked(known, step.direction, step.attempt, answer)
        if left != known:
            write_mark(db, step, left, None, error)
        self._publish(session, message, reaction, result)

    def _publish(self, session: Session, message: Message, reaction: Reaction, result: Any) -> None:
        events = result if isinstance(result, list | tuple) else [result]
        wanted = [one for one in events if one is not None]
        if wanted and reaction.topic is None:
            raise ConfigurationError(
                f"{reaction.function.__name__}() returned a {type(wanted[0]).__name__}, and there "
                "is no topic to publish it to: give on() or undo() a topic="
            )
        if wanted:
            topic = str(reaction.topic)
            self._outbox.add_all(
                session, [Event(body=one, topic=topic, key=message.key) for one in wanted]
            )

    def _key_of(self, message: Message, event: Any) -> str:
        key = message.key_text if self._key is None else self._key(event)
        if not key or not isinstance(key, str):
            raise PoisonMessage(
                f"event {message.type!r} has no key: {self.service} cannot tell what it is about; "
                "publish it with key=, or give Reactions(key=…) a function"
            )
        return key

    def _add(
        self,
        function: Callable[[Any, Session], Any],
        step: str,
        direction: Direction,
        topic: str | None,
    ) -> None:
        annotation = payload_annotation(function)
        name = getattr(annotation, "__name__", "")
        if not isinstance(annotation, type) or not name:
            raise ConfigurationError(
                f"{_name(function)!r} does not say which event it reacts to: annotate its first "
                "argument with a class"
            )
        if topic is not None:
            require_name(topic, f"{self.service}.{_name(function)}(topic=…)")
        known = self._reactions.setdefault(name, [])
        if any(one.step == step for one in known):
            raise ConfigurationError(f"step {step!r} reacts to {name!r} already: keep one")
        known.append(
            Reaction(
                step=step, direction=direction, function=function, topic=topic,
                decode=_codec.decoder_for(annotation),
            )
        )  # fmt: skip


def _require_answer(reaction: Reaction, key: str, failed: StepFailed) -> None:
    """Raise unless it is the step that has failed, and for good: nobody else would try again."""
    if failed.again:
        raise Transient(str(failed)) from failed
    if reaction.direction is Direction.UNDO:
        raise PoisonMessage(f"{reaction.step} of {key} cannot be undone: {failed}") from failed


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", function))
