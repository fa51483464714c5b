"""Simulation: the new handler runs on the dead letters, and nothing of it stays.

Every message is handled in a sandbox, with effects switched off, so that the outcome of a
replay is known per kind of failure before anything is sent.

Sandbox: a handler works in a transaction that ends in a rollback, whatever it tries.

What a simulation tries: every pending message of a selection, whoever has claimed it.

A handler named on the command line: found, and asked what it takes.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast.codec import JsonCodec, payload_annotation
from holdfast.db.engine import reading
from holdfast.dlq.capture.capture import capture
from holdfast.dlq.replay.letters import (
    WITHHELD,
    Opened,
    candidate,
    candidates,
    high_water,
    open_messages,
)
from holdfast.dlq.replay.selection import LetterRef, arranged, in_source_order
from holdfast.dlq.replay.survey import unfit
from holdfast.dlq.store.rows import fingerprint_of
from holdfast.effects import suppressed
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage
from holdfast.message import handling
from holdfast.pipeline import Handler
from holdfast.statements import ends_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPICursor

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.selection import Selection
    from holdfast.message import Message


class EndsTransaction(PoisonMessage):
    """The handler tried to end a transaction that is not its own; the consumer refuses it too."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the handler called {what}: the consumer ends its transaction, together with the "
            "dedup row; leave it out"
        )
        self.what = what


class Escaped(ConfigurationError):
    """The handler ended the transaction by a way that nobody can hold back."""


class Sandbox:
    """Runs work between savepoints of one transaction, which never commits.

    What one piece of work wrote the next one sees. Commits are refused where they pass
    SQLAlchemy; one that goes behind its back, to the driver, is noticed. A connection that
    the handler opens by itself is out of reach.
    """

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.connect()
        self._mysql = engine.dialect.name in ("mysql", "mariadb")
        self._refused: list[EndsTransaction] | None = None  # a list while work is done
        event.listen(self._connection, "commit", self._on_commit)
        event.listen(self._connection, "rollback", self._on_rollback)
        event.listen(self._connection, "before_cursor_execute", self._on_statement)

    def __enter__(self) -> Self:
        self._connection.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()
        self._connection.close()

    def run(self, work: Callable[[Session], Any]) -> None:
        """Run *work*; it raises what *work* raises, and then nothing of it is left."""
        savepoint = self._connection.begin_nested()
        session = _GuardedSession(self._connection, join_transaction_mode="create_savepoint")
        try:
            self._work(work, session)
            self._keep(session, savepoint)
        except BaseException as error:
            self._undo(session, savepoint, error)
            raise

    def _work(self, work: Callable[[Session], Any], session: Session) -> None:
        refused: list[EndsTransaction] = []
        self._refused = refused
        try:
            work(session)
            session.flush()
        finally:
            self._refused = None
        if refused:  # and the handler has swallowed it
            raise refused[0]
        # PostgreSQL refuses this after an error that was swallowed, as it would the commit.
        self._connection.exec_driver_sql("SELECT 1")

    def _keep(self, session: _GuardedSession, savepoint: Any) -> None:
        """Let the next ones see what was written."""
        try:
            Session.commit(session)
            savepoint.commit()
        except SQLAlchemyError as error:
            raise _escaped() from error
        Session.close(session)

    def _undo(self, session: Session, savepoint: Any, error: BaseException) -> None:
        """Go back to the savepoint; where there is none any more, begin anew."""
        if isinstance(error, Escaped):
            self._renew()
            return
        try:
            Session.close(session)
            if savepoint.is_active:
                savepoint.rollback()
                return
        except SQLAlchemyError as lost:
            self._renew()
            # A deadlock also ends the transaction, but leaves nothing.
            if isinstance(lost, DBAPIError) and not isinstance(error, DBAPIError):
                raise _escaped() from error
        else:
            self._renew()

    def _renew(self) -> None:
        self._abandon()
        self._connection.begin()

    def _abandon(self) -> None:
        try:
            self._connection.rollback()
        except SQLAlchemyError:
            self._connection.invalidate()
            self._connection.rollback()

    def _on_commit(self, _: Connection) -> None:
        self._refuse("connection().commit()")

    def _on_rollback(self, _: Connection) -> None:
        self._refuse("connection().rollback()")

    def _on_statement(
        self,
        _: Connection,
        __: DBAPICursor,
        statement: str,
        *___: Any,
    ) -> None:
        if self._refused is None:
            return
        if ends_transaction(statement, mysql=self._mysql) is not None:
            self._refuse(f"execute({' '.join(statement.split())[:60]!r})")

    def _refuse(self, what: str) -> None:
        if self._refused is not None:
            self._refused.append(EndsTransaction(f"session.{what}"))
            raise self._refused[-1]


class _GuardedSession(Session):
    """A session that is not the handler's to end, as the consumer's is not."""

    def commit(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.commit()")

    def rollback(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.rollback()")

    def close(self) -> NoReturn:
        """Refuse."""
        raise EndsTransaction("session.close()")


def _escaped() -> Escaped:
    return Escaped(
        "the handler ended the transaction around the simulation behind its back: what it wrote "
        "may STAY; look at what it writes, and simulate on a copy, with --handler-database"
    )


_CHUNK = 200  # messages per rolled-back transaction: on SQLite it holds the one write lock


class HandlerTrial(Protocol):
    """The handler as a consumer calls it."""

    name: str
    wants_session: bool

    def __call__(self, message: Message, session: Session | None, letter: LetterRef) -> None:
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
    handler: HandlerTrial,
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

    def of(letter: LetterRef) -> Prediction:
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
    handler: HandlerTrial,
    message: Message,
    sandbox: Sandbox | None,
    letter: LetterRef,
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
    letter: LetterRef,
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
    store: Engine, letters: Sequence[LetterRef], vault: Vault | None
) -> Iterator[tuple[list[LetterRef], Opened]]:
    for start in range(0, len(letters), _CHUNK):
        chunk = list(letters[start : start + _CHUNK])
        yield chunk, open_messages(store, [letter.dlq_id for letter in chunk], vault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """The messages to try, in the order in which their keys had them, and the others."""

    letters: list[LetterRef]
    untried: list[tuple[LetterRef, str]] = field(default_factory=list)
    """Not to be tried, and why: what is stored of them is not what was sent."""
    beyond: int = 0
    """How many more there are than were asked for."""


def cases(engine: Engine, selection: Selection, *, limit: int | None = None) -> Cases:
    """Return what is pending in *selection*, claimed or not; at most *limit* to be tried.

    A limit takes some of every kind of failure and of every version of the service.
    """
    with reading(engine).connect() as db:
        below = high_water(db)
        rows = list(candidates(db, selection, below=below, claimed=True))
        reasons = unfit(db, [row.dlq_id for row in rows if not row.replayable])
    if not rows:
        raise NotFound("no dead letter is pending there: see  holdfast dlq groups")
    ordered = in_source_order(candidate(row) for row in rows)
    fit = [letter for letter in ordered if letter.dlq_id not in reasons]
    chosen = fit if limit is None else arranged(fit, limit)[:limit]
    return Cases(
        letters=chosen,
        untried=[(one, reasons[one.dlq_id]) for one in ordered if one.dlq_id in reasons],
        beyond=len(fit) - len(chosen),
    )


@dataclass(frozen=True, slots=True)
class Named:
    """A function by its name `module:function`, and how payloads are decoded for it."""

    name: str
    function: Callable[..., Any]
    decode: Callable[[bytes | None], Any]

    @classmethod
    def load(cls, name: str) -> Named:
        """Import `module:function`, also from the current folder; of a handler the function."""
        found = load(name)
        function = found.plan.function if isinstance(found, Handler) else found
        return cls(name, function, JsonCodec().decoder_for(payload_annotation(function)))


def load(name: str) -> Any:
    """Return the callable called `module:function`; say what is missing if it is not there."""
    found = loaded(name)
    if not callable(found):
        raise ConfigurationError(f"{name!r} is a {type(found).__name__}, not a function")
    return found


def loaded(name: str) -> Any:
    """Return what is called `module:name`, whatever it is."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"{name!r}: write module:function, e.g. shop.handlers:bill")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{name!r} cannot be imported: {error} (run this where the service's code is installed)"
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"{module_name!r} fails when it is imported: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
