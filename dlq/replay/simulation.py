"""Simulation: the new handler runs on the dead letters, and nothing of it stays.

Every message is handled in a sandbox, with effects switched off, so that the outcome of a
replay is known per kind of failure before anything is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.dlq.capture import capture
from holdfast.dlq.replay.letters import WITHHELD, Opened, open_messages
from holdfast.dlq.replay.sandbox import Escaped, Sandbox
from holdfast.dlq.rows import fingerprint_of
from holdfast.effects import suppressed
from holdfast.errors import ConfigurationError
from holdfast.message import handling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sqlalchemy.engine import Engine
    from sqlalchemy.orm import Session

    from holdfast.dlq.replay.handlers import Named
    from holdfast.dlq.replay.manifest import Candidate
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

_CHUNK = 200  # messages per rolled-back transaction: on SQLite it holds the one write lock


@dataclass(slots=True)
class Prediction:
    """What would become of the messages of one fingerprint."""

    fingerprint: str
    passes: int = 0
    fails_alike: int = 0
    fails_anew: Counter[str] = field(default_factory=Counter)
    """Failures of another kind, by fingerprint."""
    example: str | None = None
    effects: Counter[str] = field(default_factory=Counter)
    """Effects that a real run would have had."""
    unread: int = 0
    """Messages that were not tried: they have encrypted fields that could not be opened."""
    unread_because: str | None = None

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
    letters: Sequence[Candidate],
    handler: Named,
    *,
    database: Engine | None = None,
    vault: Vault | None = None,
    extras: Mapping[str, Any] | None = None,
    observe: Callable[[int], Any] | None = None,
) -> list[Prediction]:
    """Return the prediction for each fingerprint in *letters*, the largest first.

    *database* is where the handler's session works; *extras* are further arguments by name.
    Without the *vault* messages with encrypted fields are not tried, and counted as unread.
    """
    call = _Call(handler, extras or {})
    if call.wants_session and database is None:
        raise ConfigurationError(
            f"{handler.name} wants a session: give the service's database, with --database"
        )
    predictions: dict[str, Prediction] = {}
    done = 0
    for chunk, opened in _read(store, letters, vault):
        with contextlib.nullcontext() if database is None else Sandbox(database) as sandbox:
            for letter in chunk:
                kind = letter.fingerprint or ""
                prediction = predictions.setdefault(kind, Prediction(kind))
                if (message := opened.messages.get(letter.dlq_id)) is not None:
                    is_secret = letter.dlq_id in opened.secret
                    error = _tried(call, message, sandbox, letter, prediction)
                    if error is not None:
                        _note(prediction, message, error, letter, is_secret=is_secret)
                elif letter.dlq_id in opened.closed:
                    prediction.unread += 1
                    prediction.unread_because = opened.closed[letter.dlq_id]
        done += len(chunk)
        if observe is not None:
            observe(done)
    return sorted(predictions.values(), key=lambda one: (-one.count, one.fingerprint))


class _Call:
    """Calls the handler with what its signature asks for."""

    def __init__(self, handler: Named, extras: Mapping[str, Any]) -> None:
        self._handler = handler
        self._extras = extras
        parameters = list(inspect.signature(handler.function).parameters.values())
        self._names = {p.name for p in parameters[1:]}
        self.wants_session = "session" in self._names
        missing = [
            p.name
            for p in parameters[1:]
            if p.default is p.empty
            and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and p.name not in {"session", "message", *extras}
        ]
        if missing:
            raise ConfigurationError(
                f"{handler.name} wants {', '.join(missing)}, which a simulation cannot give: "
                "name a function of payload, session and message"
            )

    def __call__(self, message: Message, session: Session | None) -> None:
        given = {"session": session, "message": message, **self._extras}
        kwargs = {name: given[name] for name in self._names if name in given}
        result = self._handler.function(self._handler.decode(message.payload), **kwargs)
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))


async def _awaited(result: Any) -> Any:
    return await result


def _tried(
    call: _Call,
    message: Message,
    sandbox: Sandbox | None,
    letter: Candidate,
    prediction: Prediction,
) -> BaseException | None:
    """Run the handler once; return what it raised."""
    try:
        with suppressed() as skipped, handling(message):
            if sandbox is None:
                call(message, None)
            else:
                sandbox.run(lambda session: call(message, session))
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
