"""The SQL store of dead letters: durable, idempotent, and without rows that writers fight over.

Changes of the figures: appended by whoever stores or closes, folded by somebody later.

A stored letter that fails again: what of its row changes, and which figures.

What is on top is the latest failure, in the group of that failure; the earlier ones stay in
the history. The original message, and where it came from, never change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import down, is_about_data, refuse_too_large
from holdfast.db.sql import insert_ignoring
from holdfast.db.text import ascii_only, cut, document
from holdfast.db.transactions import committed, take_turns
from holdfast.dlq.capture import fingerprint
from holdfast.dlq.letter import (
    MOST_FAILURES,
    DeadLetter,
    Occurrence,
    ThreadedDestination,
    own_id,
    renamed,
)
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.store.counters import fold
from holdfast.dlq.store.rows import (
    PENDING,
    change_row,
    exact_of,
    fingerprint_of,
    group_of,
    is_of,
    least,
    letter_of,
    occurrences,
    read_envelope,
    row_of,
    whole,
)
from holdfast.dlq.store.schema import change, group, message
from holdfast.dlq.triage import BUILT_IN, Triage
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.store.rows import Row


log = logging.getLogger("holdfast.dlq")
_MOST_SKEW = 60.0  # seconds by which the clocks of two hosts may differ
_LATE = ("collected", "imported")
"""Letters of these origins may be stored long after the failure; others are stored with it."""
_FAILURE = (
    "group_id", "fingerprint", "handler", "service_version", "stage", "class", "error_type",
    "error_text",
)  # fmt: skip


def is_same_message(stored: Row, row: Row) -> bool:
    """Whether *row* is of the message in *stored*: marks of a replay are only headers."""
    if stored["consumer_group"] != row["consumer_group"]:
        return False
    return _source(stored) == _source(row) and is_of(stored, _id(row))


def _id(row: Row) -> str:
    """Return the id of the message in *row*, whole."""
    own: str = row["message_id"]
    return own if row["exact"] is None else exact_of(row["exact"]).get("id", own)


def _source(row: Row) -> str:
    """Return the source of the message in *row*, whole."""
    own: str = row["source"]
    return own if row["exact"] is None else exact_of(row["exact"]).get("source", own)


def merged(
    stored: Row, letter: DeadLetter, row: dict[str, Any], triage: Triage | None, now: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns to set in *stored* and the changes of figures; nothing if it is known."""
    kept = occurrences(stored["history"])
    fresh = _fresh(letter.history.failures, kept, stored["occurrences"])
    if not fresh:
        return {}, []
    together = sorted((*kept, *fresh), key=lambda one: one.at)[-MOST_FAILURES:]
    values: dict[str, Any] = {
        "attempts": whole(stored["attempts"] + sum(one.attempts for one in fresh)),
        "occurrences": stored["occurrences"] + len(fresh),
        "first_failed_at": min(stored["first_failed_at"], row["first_failed_at"]),
        "last_failed_at": max(stored["last_failed_at"], row["last_failed_at"]),
        "history": document(together),
        "replay_count": max(stored["replay_count"], row["replay_count"]),
    }
    if stored["state"] != PENDING and _is_past(letter, fresh, stored["closed_at"]):
        log.warning("dead letter %s stays %s: by the clock of its host it failed before that, and "
                    "only arrives now", row["dlq_id"], stored["state"])  # fmt: skip
        return values, []
    if triage is not None:
        # It failed again: the next automatic retry is further away, and they are counted.
        values |= triage.judge({**row, "retries": stored["retries"]}, now)
    reopened = stored["state"] != PENDING
    if reopened:
        values |= {"state": PENDING, "stored_at": now}
        values |= dict.fromkeys(("closed_at", "closed_by", "closed_reason"))
    known = read_envelope(stored["envelope"])
    known = msgspec.structs.replace(known, timeouts=known.timeouts + letter.history.timeouts)
    # What was collected late, or has an envelope of a newer version on top, changes no more.
    if row["last_failed_at"] >= stored["last_failed_at"] and known.newer is None:
        known = msgspec.structs.replace(known, culprit=letter.culprit, failure=letter.failure)
        values |= {name: row[name] for name in _FAILURE}
    values["envelope"] = document(known)
    return values, _changes(stored, {**stored, **values}, now, reopened=reopened)


def _is_past(letter: DeadLetter, fresh: Sequence[Occurrence], closed_at: float | None) -> bool:
    """Whether all of *fresh* happened before the letter was closed and only arrive now.

    Never for what a consumer stores itself: whatever its clock says, it failed just now. In
    doubt, for hosts have clocks of their own, it failed after that and is shown again.
    """
    if letter.origin not in _LATE or letter.newer is not None or closed_at is None:
        return False
    return max(one.at for one in fresh) < closed_at - _MOST_SKEW


def _changes(before: Row, after: Row, now: float, *, reopened: bool) -> list[dict[str, Any]]:
    if before["group_id"] == after["group_id"]:
        # Nothing is added by one that was pending; that it was seen is said all the same.
        return [change_row(after, "reopened" if reopened else "arrived", now, int(reopened))]
    came = change_row(after, "arrived", now)
    if reopened:
        return [came]
    return [change_row(before, "arrived", before["stored_at"], -1), came]


def _fresh(given: Sequence[Occurrence], kept: Sequence[Occurrence], count: int) -> list[Occurrence]:
    """Return what the row does not know yet; failures older than all it keeps were known."""
    known = {one.id for one in kept}
    oldest = min((one.at for one in kept), default=0.0) if count > len(kept) else 0.0
    return [one for one in given if one.id not in known and one.at >= oldest]


_MOST_KNOWN = 10_000
_FOLD_EVERY = 500
_MOST_TITLE = 300


class LetterStore(ThreadedDestination):
    """Keeps dead letters in the application's database.

    One letter is one row however often it is put; each new failure of it is added to its
    history, and reopens it when it was closed. Figures are appended as changes and folded
    later, so writers never wait for one another's counters.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock = SYSTEM_CLOCK,
        triage: Triage | None = BUILT_IN,
        on_failed_again: Callable[[Connection, DeadLetter], object],
    ) -> None:
        if not hasattr(engine, "dialect"):
            raise ConfigurationError(
                f"DeadLetterStore({engine!r}): pass the engine of a database, open_database(url)"
            )
        self.engine = engine
        self._clock = clock
        self._triage = triage
        self._on_failed_again = on_failed_again
        self._known: set[str] = set()
        self._unfolded = 0
        self.in_thread = str(engine.url) not in ("sqlite://", "sqlite:///:memory:")

    def put(self, letter: DeadLetter, connection: Connection | None = None) -> None:
        """Return once *letter* is durable, or part of the *connection*'s transaction."""
        self.put_all([letter], connection)

    def put_all(self, letters: Sequence[DeadLetter], connection: Connection | None = None) -> None:
        """Put several letters in one transaction, always in the same order: no deadlocks."""
        ordered = sorted(letters, key=lambda letter: letter.dlq_id)
        try:
            if connection is not None:
                self._write(connection, ordered, set(), carefully=True)
            else:
                self._known |= self._committed(ordered)
                self._fold_sometimes(len(ordered))
        except SQLAlchemyError as error:
            METRICS.write_failed("store")
            refuse_too_large(self.engine, map(_size, ordered), error)
            raise down(error) from error
        except DependencyDown as error:
            METRICS.write_failed("store")
            refuse_too_large(self.engine, map(_size, ordered), error)
            raise
        for letter in ordered:
            METRICS.put(letter)

    def _committed(self, letters: Sequence[DeadLetter]) -> set[str]:
        """Write in a transaction of our own; return the groups that are then known to exist."""
        try:
            return committed(self.engine, lambda db: self._own(db, letters), clock=self._clock)
        except Exception as error:
            if not is_about_data(error):
                raise
        return committed(
            self.engine, lambda db: self._own(db, letters, carefully=True), clock=self._clock
        )

    def _fold_sometimes(self, written: int) -> None:
        """Keep the changes few; whoever reads counts the unfolded ones, too."""
        self._unfolded += written
        if self._unfolded < _FOLD_EVERY:
            return
        self._unfolded = 0
        try:
            fold(self.engine, clock=self._clock, batches=2)
        except DependencyDown as error:
            log.info("figures are folded later: %s", error)

    def get(self, dlq_id: str) -> DeadLetter | None:
        """Return the stored letter, or None."""
        with self.engine.connect() as db:
            row = db.execute(select(message).where(message.c.dlq_id == dlq_id)).mappings().first()
        return None if row is None else letter_of(row)

    def _own(
        self, db: Connection, letters: Sequence[DeadLetter], *, carefully: bool = False
    ) -> set[str]:
        if len(self._known) > _MOST_KNOWN:
            self._known = set()
        known = set(self._known)
        self._write(db, letters, known, carefully=carefully)
        return known

    def _write(
        self, db: Connection, letters: Sequence[DeadLetter], known: set[str], *, carefully: bool
    ) -> None:
        now = self._clock.now().timestamp()
        changes: list[dict[str, Any]] = []
        keep = self._keep if carefully else self._one
        for letter in letters:
            changes += keep(db, letter, now, known)
        if changes:
            db.execute(insert(change), changes)

    def _keep(
        self, db: Connection, letter: DeadLetter, now: float, known: set[str]
    ) -> list[dict[str, Any]]:
        """Write *letter*, with what can be stored of it if the database refuses something.

        A refusal that is about the row is no outage: the same would come for ever.
        """
        if db.dialect.name == "sqlite":
            # Else an engine of the caller's own would commit with the savepoint.
            db.execute(select(1))
            take_turns(db)
        point = db.begin_nested()
        try:
            changes = self._one(db, letter, now, known)
        except Exception as error:
            # What else it is rolls back the whole; MySQL's deadlock has taken the point with it.
            if not is_about_data(error):
                raise
            log.warning("dead letter %s is stored in plain characters: %s",
                        letter.dlq_id, told(error))  # fmt: skip
        else:
            point.commit()
            return changes
        point.rollback()
        known.discard(group_of(letter, fingerprint_of(letter.failure)))
        point = db.begin_nested()
        try:
            changes = self._one(db, letter, now, known, plainly=True)
        except Exception as error:
            if not is_about_data(error):
                raise
            log.error("dead letter %s is stored without what its failure says: %s",  # noqa: TRY400
                      letter.dlq_id, told(error))  # fmt: skip
            left = least(letter, error)
        else:
            point.commit()
            return changes
        point.rollback()
        return self._one(db, left, now, known, plainly=True)

    def _one(
        self,
        db: Connection,
        letter: DeadLetter,
        now: float,
        known: set[str],
        *,
        plainly: bool = False,
    ) -> list[dict[str, Any]]:
        letter = _as_stored(db, letter)
        found = fingerprint_of(letter.failure)
        row = row_of(letter, found, now=now, plainly=plainly)
        # A letter that is there has a group; it gets another only if it fails in another way.
        if row["group_id"] not in known and (
            _has_group(db, row) or not _is_there(db, row["dlq_id"])
        ):
            ensure_group(db, letter, row, found)
            known.add(row["group_id"])
        if self._triage is not None:
            row |= self._triage.judge(row, now)
        changes = self._put(db, letter, row, now)
        if letter.lineage.replay_id is not None:
            self._on_failed_again(db, msgspec.structs.replace(letter, dlq_id=row["dlq_id"]))
        return changes

    def _put(
        self, db: Connection, letter: DeadLetter, row: dict[str, Any], now: float
    ) -> list[dict[str, Any]]:
        if _insert_if_new(db, row):
            return [change_row(row, "arrived", now)]
        return self._merge(db, letter, row, now)

    def _merge(
        self, db: Connection, letter: DeadLetter, row: dict[str, Any], now: float
    ) -> list[dict[str, Any]]:
        """Add the failures of *letter* to its stored row; return the changes of figures."""
        where = message.c.dlq_id == row["dlq_id"]
        stored = db.execute(select(message).where(where).with_for_update()).mappings().one()
        own = own_id(letter)
        if not is_same_message(stored, row) and row["dlq_id"] != own:
            # The marks of a replay that this message never was in: it is a letter of its own.
            row["dlq_id"] = own
            ensure_group(db, letter, row, fingerprint_of(letter.failure))
            return self._put(db, letter, row, now)
        values, changes = merged(stored, letter, row, self._triage, now)
        if values:
            if values.get("group_id", stored["group_id"]) != stored["group_id"]:
                ensure_group(db, letter, row, fingerprint_of(letter.failure))
            db.execute(update(message).where(where).values(**values))
            if "state" in values:
                log.warning("dead letter %s was %s by %s and failed again: it is open again",
                            row["dlq_id"], stored["state"], stored["closed_by"])  # fmt: skip
        return changes


def _size(letter: DeadLetter) -> int:
    return len(letter.message.payload or b"")


def _is_there(db: Connection, dlq_id: str) -> bool:
    there = select(message.c.seq).where(message.c.dlq_id == dlq_id)
    return db.execute(there).first() is not None


def _as_stored(db: Connection, letter: DeadLetter) -> DeadLetter:
    """Return *letter* under the id that it is stored by.

    The ids of older versions covered hidden fields too; such a letter may come from a topic or
    a replay, or be stored since before.
    """
    if letter.formerly:
        letter = _as_named_before(db, letter)
    kept = letter.governance
    if not (kept.redacted or kept.sealed) or _is_there(db, letter.dlq_id):
        return letter
    own = own_id(letter)
    same = select(message).where(
        message.c.message_id == cut(letter.message.id),
        message.c.consumer_group == cut(letter.culprit.group),
        message.c.handler == cut(letter.culprit.handler),
    )
    for row in db.execute(same).mappings():
        if own_id(letter_of(row)) == own:
            return renamed(letter, row["dlq_id"])
    replayed = letter.lineage.replay_id is not None
    return letter if replayed or letter.dlq_id == own else renamed(letter, own)


def _as_named_before(db: Connection, letter: DeadLetter) -> DeadLetter:
    """Return *letter* under the id that it has by an earlier name of its handler, if it has one."""
    ids = (letter.dlq_id, *letter.formerly)
    there = set(db.execute(select(message.c.dlq_id).where(message.c.dlq_id.in_(ids))).scalars())
    known = next((one for one in ids if one in there), letter.dlq_id)
    return letter if known == letter.dlq_id else renamed(letter, known)


def _insert_if_new(db: Connection, row: dict[str, Any]) -> bool:
    # On MySQL a refused duplicate would keep a shared lock, on which two writers can deadlock.
    if db.dialect.name in ("mysql", "mariadb") and _is_there(db, row["dlq_id"]):
        return False
    return bool(db.execute(insert_ignoring(db, message), row).rowcount == 1)


def _has_group(db: Connection, row: dict[str, Any]) -> bool:
    there = select(group.c.group_id).where(group.c.group_id == row["group_id"])
    return db.execute(there).first() is not None


def ensure_group(
    db: Connection, letter: DeadLetter, row: dict[str, Any], found: fingerprint.Fingerprint
) -> None:
    """Make sure that the group of *row* exists; an existing one is left as it is."""
    if _has_group(db, row):
        return
    root = letter.failure.root
    title = cut(f"{root.type}: {fingerprint.parameterised(root.text)}", _MOST_TITLE)
    values = {
        "group_id": row["group_id"],
        "fingerprint": found.value,
        "algorithm": found.algorithm,
        "title": ascii_only(title) if row["error_text"].isascii() else title,
        "hints": document({"by": found.by, "hints": found.hints}),
        "sample": row["dlq_id"],
        "state": "new",
        "first_seen": row["first_failed_at"],
        "last_seen": row["last_failed_at"],
        **dict.fromkeys(("arrived", "reopened", "confirmed", "discarded", "parked"), 0),
    }
    for name in ("consumer_group", "topic", "handler", "error_type", "class", "stage"):
        values[name] = row[name]
    if db.execute(insert_ignoring(db, group), values).rowcount == 1:
        METRICS.new_group()
