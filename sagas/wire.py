"""How commands and replies travel: headers on CloudEvents, so that any language can take part.

A participant answers a command with a message to `x-saga-reply-to` that repeats `x-saga-id`,
`x-saga-step`, `x-saga-direction` and `x-saga-attempt`, and says `x-saga-answer`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import PoisonMessage
from holdfast.headers import Headers
from holdfast.ids import derived_id
from holdfast.sagas.states import Answer, Answered, Direction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.message import Message

SAGA = "x-saga-id"
TYPE = "x-saga-type"
STEP = "x-saga-step"
DIRECTION = "x-saga-direction"
ATTEMPT = "x-saga-attempt"
KEY = "x-saga-idempotency-key"
REPLY_TO = "x-saga-reply-to"
ANSWER = "x-saga-answer"
ERROR = "x-saga-error"
_MOST_ERROR = 500


class CommandHeaders(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a command says about the saga that sent it."""

    saga_id: str
    saga_type: str
    step: str
    direction: Direction
    attempt: int
    reply_to: str

    @property
    def idempotency_key(self) -> str:
        """What to hand to an external API: the same for every attempt at this step."""
        return idempotency_key(self.saga_id, self.step, self.direction)

    def headers(self) -> Headers:
        """Return them as headers of a message."""
        # Not checked again: the names are ours, and the definition has checked what is in them.
        return Headers.received(
            (
                (SAGA, self.saga_id.encode()),
                (TYPE, self.saga_type.encode()),
                (STEP, self.step.encode()),
                (DIRECTION, self.direction.value.encode()),
                (ATTEMPT, b"%d" % self.attempt),
                (KEY, self.idempotency_key.encode()),
                (REPLY_TO, self.reply_to.encode()),
            )
        )

    def reply(self, answer: Answer, error: str = "") -> dict[str, str]:
        """Return the headers of the reply."""
        said = {
            SAGA: self.saga_id,
            TYPE: self.saga_type,
            STEP: self.step,
            DIRECTION: self.direction.value,
            ATTEMPT: str(self.attempt),
            ANSWER: answer.value,
        }
        line = " ".join(error.split())  # some brokers end a header where its line ends
        return said | {ERROR: line[:_MOST_ERROR]} if line else said


_running: ContextVar[CommandHeaders | None] = ContextVar("holdfast_saga_step", default=None)


def current_step() -> CommandHeaders | None:
    """Return the step that runs here, in a local step or a participant; None outside of one.

    Its `idempotency_key` is what to hand to an external API.
    """
    return _running.get()


@contextmanager
def running(step: CommandHeaders) -> Iterator[None]:
    """Make *step* the one that runs here."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def idempotency_key(saga_id: str, step: str, direction: Direction) -> str:
    """Return the key of a step in one direction, constant over attempts."""
    return derived_id("saga", saga_id, step, direction.value)


def command_headers(message: Message) -> CommandHeaders:
    """Return what *message* says about its saga, or raise `PoisonMessage` if it is no command."""
    said = dict(message.headers.pairs)
    return CommandHeaders(
        saga_id=_text(said, SAGA, "command"),
        saga_type=_text(said, TYPE, "command"),
        step=_text(said, STEP, "command"),
        direction=_direction(said, "command"),
        attempt=_attempt(said, "command"),
        reply_to=_text(said, REPLY_TO, "command"),
    )


def answered(message: Message) -> tuple[str, Answered]:
    """Return the saga that *message* is a reply to, and what it says."""
    said = dict(message.headers.pairs)
    text = _text(said, ANSWER, "reply")
    try:
        answer = Answer(text)
    except ValueError as error:
        raise _wrong("reply", ANSWER, text, " or ".join(Answer)) from error
    event = Answered(
        step=_text(said, STEP, "reply"),
        direction=_direction(said, "reply"),
        attempt=_attempt(said, "reply"),
        answer=answer,
        error=(said.get(ERROR) or b"").decode("utf-8", "replace"),
    )
    return _text(said, SAGA, "reply"), event


def _text(headers: Mapping[str, bytes | None], name: str, what: str) -> str:
    found = headers.get(name)
    if not found:
        raise PoisonMessage(
            f"the message is no {what} of a saga: it lacks the header {name}; send back what the "
            "command's headers say"
        )
    return found.decode("utf-8", "replace")


def _direction(headers: Mapping[str, bytes | None], what: str) -> Direction:
    said = _text(headers, DIRECTION, what)
    try:
        return Direction(said)
    except ValueError as error:
        raise _wrong(what, DIRECTION, said, "do or undo") from error


def _attempt(headers: Mapping[str, bytes | None], what: str) -> int:
    said = _text(headers, ATTEMPT, what)
    if not (said.isascii() and said.isdigit() and 1 <= len(said) <= 9):
        raise _wrong(what, ATTEMPT, said, "the number that the command has")
    return int(said)


def _wrong(what: str, name: str, said: str, right: str) -> PoisonMessage:
    return PoisonMessage(f"the {what} says {name}: {said[:40]!r}; write {right}")
