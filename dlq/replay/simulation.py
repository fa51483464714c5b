"""Simulation: the new handler runs on the dead letters, and nothing of it stays.

Every message is handled in a sandbox, with effects switched off, so that the outcome of a
replay is known per kind of failure before anything is sent.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.dlq.capture import capture
from holdfast.dlq.replay.letters import WITHHELD, Opened, open_messages
from holdfast.dlq.replay.sandbox import Escaped, Sandbox
from holdfast.dlq.rows import fingerprint_of
from holdfast.effects import suppressed
from holdfast.errors import ConfigurationError
from holdfast.message import handling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Engine
    from sqlalchemy.orm import Session

    from holdfast.dlq.replay.cases import Cases
    from holdfast.dlq.replay.manifest import Candidate
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

_CHUNK = 200  # messages per rolled-back transaction: on SQLite it holds the one write lock


class Trial(Protocol):
    """The handler as a consumer calls it."""

    name: str
    wants_session: bool

    def __call__(self, message: Message, session: Session | None, letter: Candidate) -> None:
        """Handle *message*, a dead *letter*, or raise what the handler raises."""


@dataclass(slots=True)
class Prediction:
    """What would become of the messages of one failure group that failed alike."""

    group_id: str
    fingerprint: str
    passes: int = 0
    fails_alike: int = 0
    fails_anew: Counter[str] = field(default_factory=Counter)
    """Failures of another kind, by fingerprint."""
    example: str | None = None
    effects: Counter[str] = field(default_factory=Counter)
    """Effects that a real run would have had."""
    untried: Counter[str] = field(default_factory=Counter)
    """Messages that were not tried, by the reason."""

    @property
    def count(self) -> int:
        """How many messages were tried."""
        return self.passes + self.fails

    @property
    def fails(self) -> int:
        """How many would fail again."""
        return self.fails_alike + sum(self.fails_anew.values())


def simulate(
    store: Engine,
    cases: Cases,
    handler: Trial,
    *,
    database: Engine | None = None,
    vault: Vault | None = None,
    observe: Callable[[int], Any] | None = None,
) -> list[Prediction]:
    """Return the prediction for each group and fingerprint in *cases*, the largest first.

    *database* is where the handler's session works. Without the *vault* messages with
    encrypted fields are not tried. Every message of *cases* is counted: as one that passes,
    that fails, or that was not tried and why.
    """
    if handler.wants_session and database is None:
        raise ConfigurationError(
            f"{handler.name} wants a session: give the service's database, with --database"
        )
    predictions: dict[tuple[str, str], Prediction] = {}

    def of(letter: Candidate) -> Prediction:
        kind = letter.failure_group, letter.fingerprint or ""
        return predictions.setdefault(kind, Prediction(*kind))

    for letter, why in cases.untried:
        of(letter).untried[why] += 1
    done = 0
    for chunk, opened in _read(store, cases.letters, vault):
        with contextlib.nullcontext() if database is None else Sandbox(database) as sandbox:
            for letter in chunk:
                prediction = of(letter)
                if (message := opened.messages.get(letter.dlq_id)) is None:
                    prediction.untried[opened.closed.get(letter.dlq_id, "it is gone")] += 1
                    continue
                error = _tried(handler, message, sandbox, letter, prediction)
                if error is not None:
                    is_secret = letter.dlq_id in opened.secret
                    _note(prediction, message, error, letter, is_secret=is_secret)
        done += len(chunk)
        if observe is not None:
            observe(done)
    return sorted(predictions.values(), key=lambda one: (-one.count, one.fingerprint, one.group_id))


def _tried(
    handler: Trial,
    message: Message,
    sandbox: Sandbox | None,
    letter: Candidate,
    prediction: Prediction,
) -> BaseException | None:
    """Run the handler once; return what it raised."""
    try:
        with suppressed() as skipped, handling(message):
            if sandbox is None:
                handler(message, None, letter)
            else:
                sandbox.run(lambda session: handler(message, session, letter))
    except KeyboardInterrupt:
        raise
    except Escaped as error:
        raise Escaped(f"message {letter.dlq_id}: {error}") from error
    except BaseException as error:  # noqa: BLE001 - any end is an answer, sys.exit(0) too
        return error
    else:
        prediction.passes += 1
        prediction.effects.update(skipped)
        return None


def _note(
    prediction: Prediction,
    message: Message,
    error: BaseException,
    letter: Candidate,
    *,
    is_secret: bool,
) -> None:
    failure = capture(message, error, group=letter.group, handler="simulated").failure
    kind = fingerprint_of(failure).value
    if kind == prediction.fingerprint:
        prediction.fails_alike += 1
    else:
        prediction.fails_anew[kind] += 1
    if prediction.example is None:
        words = WITHHELD if is_secret else failure.root.text[:200]
        prediction.example = f"{failure.root.type}: {words}"


def _read(
    store: Engine, letters: Sequence[Candidate], vault: Vault | None
) -> Iterator[tuple[list[Candidate], Opened]]:
    for start in range(0, len(letters), _CHUNK):
        chunk = list(letters[start : start + _CHUNK])
        yield chunk, open_messages(store, [letter.dlq_id for letter in chunk], vault)
