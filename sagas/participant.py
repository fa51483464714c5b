"""The other side: a service that carries out the commands of sagas, each of them once.

The mark of the step, the effect and the reply commit together. So a command may come twice, late,
or after the one that undoes it, and the reply is always the right one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
from sqlalchemy import and_, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from holdfast import codec
from holdfast.backoff import Backoff
from holdfast.codec import Decoder, JsonCodec, payload_annotation
from holdfast.db.clock import database_now
from holdfast.db.text import plain
from holdfast.dlq import dead_letter
from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.message import Message, current_message
from holdfast.outbox import Outbox
from holdfast.retry import retry
from holdfast.sagas.barrier import BarrierVerdict, Mark, MarkStatus, marked, verdict
from holdfast.sagas.schema import mark
from holdfast.sagas.states import Answer, Direction
from holdfast.sagas.wire import CommandHeaders, command_headers, running
from holdfast.scrubbing import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.consumer import Consumer

P = ParamSpec("P")
R = TypeVar("R")

AGAIN = Backoff(first=0.2, ceiling=30.0, attempts=8)
"""How often a message is tried again whose handling failed, and may pass."""
_OUTBOX = Outbox(source="participant")
_codec = JsonCodec()


class StepFailed(Exception):
    """Raise it in a local step or a participant: it has failed, and had no effect.

    With *again* another attempt may succeed, and the saga tries the step again as its retry
    policy says; otherwise it turns back. In a reaction to an event, *event* is what is
    published to say so.
    """

    def __init__(self, reason: str = "", *, again: bool = False, event: Any = None) -> None:
        super().__init__(reason)
        self.again = again
        self.event = event

    @property
    def answer(self) -> Answer:
        """What it means to the saga."""
        return Answer.FAILED_FOR_NOW if self.again else Answer.FAILED


def participant(function: Callable[P, R]) -> Callable[P, R]:
    """Let a handler carry out one command of sagas: below `consumer.on`, with a session.

    What it returns is the reply. What it does through its session happens once, and not at all
    once the step was undone. Raise `StepFailed` to answer that it cannot be done; any other error
    is the handler's own, and is retried and dead-lettered as such.
    """

    @functools.wraps(function)
    def handle(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args, *kwargs.values())
        session = next((one for one in given if isinstance(one, Session)), None)
        message = current_message()
        if session is None or message is None:
            raise ConfigurationError(
                f"@participant {getattr(function, '__name__', function)!r}: let it be a handler of "
                "a consumer with a database, and take a session: Session"
            )
        return carry_out(session, message, lambda: function(*args, **kwargs), _OUTBOX)

    return handle


class Participant:
    """Carries out the commands of one topic, each by the function for its type.

    ```python
    inventory = Participant()

    @inventory.command
    def reserve(command: ReserveStock, session: Session) -> StockReserved: ...

    inventory.attach(consumer, "inventory")
    ```
    What fails otherwise than by `StepFailed` and may pass is tried again as *retry* says, and is
    a dead letter then; the saga sends the command again meanwhile.
    """

    def __init__(self, *, outbox: Outbox = _OUTBOX, retry: Backoff = AGAIN) -> None:
        self._outbox = outbox
        self._retry = retry
        self._functions: dict[str, tuple[Callable[..., Any], Decoder]] = {}

    def command(self, function: Callable[[Any, Session], R]) -> Callable[[Any, Session], R]:
        """Carry out with *function* the commands whose type is the class of its argument."""
        annotation = payload_annotation(function)
        name = getattr(annotation, "__name__", "")
        if not isinstance(annotation, type) or not name:
            raise ConfigurationError(
                f"{function.__name__!r} does not say which command it carries out: annotate its "
                "first argument with a class"
            )
        if name in self._functions:
            raise ConfigurationError(f"the command {name!r} has a function already: keep one")
        self._functions[name] = (function, _codec.decoder_for(annotation))
        return function

    def attach(self, consumer: Consumer, topic: str) -> None:
        """Register as the handler of *topic*."""

        def carry_out_command(command: bytes, session: Session) -> None:
            message = current_message()
            assert message is not None  # noqa: S101 - a handler always has one
            self.handle(session, message, command)

        # The barrier takes commands in any order: one that is poison holds no others back.
        again = retry(self._retry)
        consumer.on(topic, ordered=False)(dead_letter()(again(carry_out_command)))

    def handle(self, session: Session, message: Message, payload: bytes | None) -> None:
        """Carry out *message* in the caller's transaction."""
        found = self._functions.get(message.type)
        if found is None:
            there = ", ".join(sorted(self._functions)) or "none"
            raise PoisonMessage(f"no function carries out {message.type!r}; there are: {there}")
        function, decode = found
        command = decode(payload)
        carry_out(session, message, lambda: function(command, session), self._outbox)


def carry_out(session: Session, message: Message, execute: Callable[[], R], outbox: Outbox) -> R:
    """Run *execute* if the barrier lets it, and reply; returns None where it was not run."""
    command = command_headers(message)
    db = session.connection()
    known, row = locked_mark(db, command)
    result: Any = None
    match verdict(known, command.direction, command.attempt):
        case BarrierVerdict.EXECUTE:
            answer, error = Answer.DONE, ""
            try:
                with session.begin_nested(), running(command):
                    result = execute()
            except StepFailed as failed:
                answer, error, result = failed.answer, text_of(failed), None
            left = marked(known, command.direction, command.attempt, answer)
            if left != known:  # an undoing that failed leaves what is known of the do
                write_mark(db, command, left, result, error)
            _reply(session, outbox, command, answer, result, error)
        case BarrierVerdict.REPEAT if command.direction is Direction.DO:
            assert known is not None  # noqa: S101 - there is something to repeat
            _reply(session, outbox, command, known.answer, _first_reply(row), row.error or "",
                   type_=row.reply_type)  # fmt: skip
        case BarrierVerdict.REFUSE:
            _reply(session, outbox, command, Answer.FAILED, None, "it was undone before it came")
        case _:
            # Nothing was done, or it is undone already: the mark keeps a late do from happening.
            left = marked(known, command.direction, command.attempt, Answer.DONE)
            write_mark(db, command, left, None, "")
            _reply(session, outbox, command, Answer.DONE, None, "")
    return result  # type: ignore[no-any-return]


def locked_mark(db: Connection, command: CommandHeaders) -> tuple[Mark | None, Any]:
    """Return the mark of the step, which no rival changes until the commit."""
    # "Failed at attempt 0" is the mark of a step that nothing has happened to.
    first = {
        "saga_id": command.saga_id, "step": command.step, "status": MarkStatus.FAILED.value,
        "attempt": 0, "answer": Answer.FAILED.value, "at": database_now(),
    }  # fmt: skip
    db.execute(_insert_unless_there(db, first))
    row = db.execute(select(mark).where(_is(command)).with_for_update()).one()
    return Mark(MarkStatus(row.status), row.attempt, Answer(row.answer)), row


def _insert_unless_there(db: Connection, values: dict[str, Any]) -> Any:
    match db.dialect.name:
        case "postgresql":
            return postgresql.insert(mark).values(values).on_conflict_do_nothing()
        case "sqlite":
            return sqlite.insert(mark).values(values).on_conflict_do_nothing()
        case _:
            return insert(mark).values(values).prefix_with("IGNORE")


def write_mark(
    db: Connection, command: CommandHeaders, left: Mark | None, result: Any, error: str
) -> None:
    """Write what is known of the step from now on, and its reply."""
    if left is None:
        return  # nothing is known, and nothing has happened
    payload, content_type = _codec.encode(result)
    db.execute(
        update(mark)
        .where(_is(command))
        .values(
            status=left.status.value, attempt=left.attempt, answer=left.answer.value,
            reply=payload, reply_type=None if result is None else _type_of(result),
            content_type=content_type, error=plain(error) or None, at=database_now(),
        )
    )  # fmt: skip


def _reply(
    session: Session,
    outbox: Outbox,
    command: CommandHeaders,
    answer: Answer,
    body: Any,
    error: str,
    *,
    type_: str | None = None,
) -> None:
    outbox.add(
        session, body, topic=command.reply_to, key=command.saga_id,
        headers=command.reply(answer, error), type=type_ or (_type_of(body) if body else "reply"),
    )  # fmt: skip


def _first_reply(row: Any) -> Any:
    """Return what was replied, in a form that is encoded to the same payload and content type."""
    match row.content_type:
        case codec.JSON:
            return msgspec.json.decode(row.reply)
        case codec.TEXT:
            return row.reply.decode()
        case _:
            return row.reply


def _type_of(body: Any) -> str:
    return "reply" if isinstance(body, dict | list | bytes | str) else type(body).__name__


def _is(command: CommandHeaders) -> Any:
    return and_(mark.c.saga_id == command.saga_id, mark.c.step == command.step)
