"""What operators ask about dead letters and do with them, for commands and programs alike.

A question only reads. An act commits together with its entry in the audit trail, which says who
did it and why, or does nothing. Questions about groups alone are in `FailureGroups`, about plans in
`Plans`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, or_, select

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db import tables
from holdfast.db.audit import Audit, Operator
from holdfast.db.engine import reading
from holdfast.db.transactions import committed
from holdfast.dlq.letter import dlq_topic
from holdfast.dlq.replay.edits import Edits
from holdfast.dlq.replay.letters import messages
from holdfast.dlq.replay.retention import prune_plans
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.store.closing import Around, close, fix, look_around, reopen
from holdfast.dlq.store.groups import (
    FailureGroup,
    FailureGroups,
    Judged,
    NoSuchGroup,
    newest,
    verdicts,
)
from holdfast.dlq.store.regroup import moves
from holdfast.dlq.store.retention import prune
from holdfast.dlq.store.rows import CONFIRMED, DISCARDED, PARKED, PENDING, letter_of
from holdfast.dlq.store.schema import group, message, metadata, overtaken
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.letter import DeadLetter

_SHORTEST = 4  # characters of an id
_CHUNK = 500
_PAGE = 1000
_MOST_IDS = 1000  # in one audit entry
_MOST_TOPICS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSummary:
    """One dead letter in a list: what failed where, without its payload. Times are POSIX."""

    dlq_id: str
    group_id: str
    state: str
    message_id: str
    topic: str
    message_key: str | None
    lane: int | None
    position: str | None
    consumer_group: str
    handler: str
    service_version: str
    kind: str
    """The class: poison, transient, dependency, timeout or unknown."""
    stage: str
    error_type: str
    error_text: str
    tenant: str | None
    attempts: int
    occurrences: int
    first_failed_at: float
    last_failed_at: float
    replay_count: int
    revision: int
    replayable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLetter:
    """A dead letter whole, and how it stands in the store. Times are POSIX."""

    letter: DeadLetter
    state: str
    group_id: str
    tenant: str | None
    verdict: str
    due_at: float | None
    attempts: int
    occurrences: int
    replay_count: int
    first_failed_at: float
    last_failed_at: float
    closed_at: float | None
    closed_by: str | None
    closed_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """The newer event of the same key that was handled while the letter waited."""

    message_id: str
    position: str
    handled_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplay:
    """What became of a letter in one replay plan."""

    plan_id: str
    state: str
    note: str | None
    is_live: bool
    """Whether the plan still claims the letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterDetails:
    """A letter with its history of edits and replays."""

    stored: StoredLetter | None
    """None when the letter has been pruned since it was named."""
    superseded_by: Superseded | None
    revisions: list[dict[str, Any]]
    replays: list[PlannedReplay]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A failure group, what triage decided about it, and what failed around it."""

    group: FailureGroup
    triage: dict[str, Judged]
    around: Around


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What closing letters came to."""

    state: str
    count: int
    left: int
    """Those that were closed or claimed by a plan while the operator was asked."""
    claimed: int
    """Those of the selection that belong to a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was deleted because it was closed long enough ago."""

    letters: int
    plans: int
    left: int
    """Letters that remain."""


def require_tables(engine: Engine) -> None:
    """Raise `MissingTables` unless *engine* has every table of the dead letters."""
    with reading(engine).connect() as db:
        tables.require_tables(db, metadata)


class DeadLetterAdmin:
    """Everything an operator can ask of the dead letters in a database, and do about them."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def group(self, name: str) -> FailureGroup:
        """Return the failure group whose id begins with *name*; `NotFound` if there is none."""
        try:
            return FailureGroups(self._engine, clock=self._clock).find(name)
        except NoSuchGroup as error:
            if "several" in str(error):
                raise
            raise NotFound(str(error)) from error

    def letter_id(self, name: str) -> str:
        """Return the full id of the dead letter whose id begins with *name*."""
        text = name.strip()
        if len(text) < _SHORTEST:
            raise ConfigurationError(
                f"{name!r} is too short: write at least {_SHORTEST} characters"
            )
        own = message.c.dlq_id  # ours are lower case, those of other writers are as they are
        forms = (own.startswith(one, autoescape=True) for one in {text, text.lower()})
        query = select(own).where(or_(*forms))
        with self._reading() as db:
            found = db.execute(query.order_by(own).limit(3)).scalars().all()
        if not found:
            raise NotFound(f"no dead letter begins with {name!r}: see  holdfast dlq list")
        if len(found) > 1:
            raise ConfigurationError(f"{name!r} begins {', '.join(found)}: write more of it")
        return str(found[0])

    def correlated(self, correlation: str) -> str:
        """Return the id of the one letter with this correlation id, in whatever state."""
        wanted = Selection(correlation=correlation, state=None).where()
        with self._reading() as db:
            found = db.execute(select(message.c.dlq_id).where(*wanted).limit(2)).scalars().all()
        if not found:
            raise NotFound(f"no dead letter has the correlation id {correlation!r}")
        if len(found) > 1:
            raise ConfigurationError(
                "several letters have it: see  holdfast dlq list --state any --correlation "
                f"{correlation}"
            )
        return str(found[0])

    def count(self, selection: Selection) -> int:
        """Return how many letters *selection* means."""
        rows = select(func.count()).select_from(message).where(*selection.where())
        with self._reading() as db:
            return int(db.execute(rows).scalar_one())

    def ids(self, selection: Selection) -> list[str]:
        """Return the ids of *selection*, oldest first."""
        rows = select(message.c.dlq_id).where(*selection.where()).order_by(message.c.seq)
        with self._reading() as db:
            return list(db.execute(rows).scalars())

    def letters(self, selection: Selection, *, limit: int = 100) -> list[LetterSummary]:
        """Return the letters of *selection*, the newest first."""
        query = select(*_SUMMARY).where(*selection.where())
        with self._reading() as db:
            rows = db.execute(query.order_by(message.c.seq.desc()).limit(limit)).mappings()
            return [_summary(row) for row in rows]

    def pages(self, selection: Selection) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of *selection* as they are stored, in order and in pages.

        By ranges of numbers: no long transaction is held.
        """
        after = 0
        while True:
            query = select(message).where(*selection.where(), message.c.seq > after)
            with self._reading() as db:
                rows = db.execute(query.order_by(message.c.seq).limit(_PAGE)).mappings().all()
            if not rows:
                return
            after = rows[-1]["seq"]
            yield [dict(row) for row in rows]

    def payload(self, dlq_id: str) -> bytes | None:
        """Return the payload of a letter in its latest revision; encrypted fields stay so."""
        with self._reading() as db:
            return messages(db, [dlq_id])[dlq_id].payload

    def titles(self, group_ids: Sequence[str]) -> dict[str, str]:
        """Return what failure groups are called, in the order of *group_ids*."""
        query = select(group.c.group_id, group.c.title).where(group.c.group_id.in_(group_ids))
        with self._reading() as db:
            titles = {name: title for name, title in db.execute(query)}  # noqa: C416 - Rows
        return {name: titles.get(name, "") for name in group_ids}

    def topics(self) -> list[str]:
        """Return the dead-letter topics of all consumers that have failed so far."""
        query = select(group.c.topic, group.c.consumer_group).distinct().limit(_MOST_TOPICS)
        with self._reading() as db:
            return [dlq_topic(topic, consumers) for topic, consumers in db.execute(query)]

    def regrouped(self) -> list[tuple[str, str, int]]:
        """Return which groups became which by an upgrade: old, new, how many messages."""
        with self._reading() as db:
            return moves(db)

    def details(self, dlq_id: str) -> LetterDetails:
        """Return everything that is known of one letter."""
        query = select(message).where(message.c.dlq_id == dlq_id)
        passed = select(overtaken).where(overtaken.c.dlq_id == dlq_id)
        planned = (
            select(item.c.plan_id, item.c.state, item.c.note, item.c.live)
            .where(item.c.dlq_id == dlq_id)
            .order_by(item.c.plan_id)
        )
        with self._reading() as db:
            row = db.execute(query).mappings().first()
            newer = db.execute(passed).first()
            replays = db.execute(planned).all()
        return LetterDetails(
            stored=None if row is None else _stored(row),
            superseded_by=None if newer is None else Superseded(
                message_id=newer.message_id, position=newer.position, handled_at=newer.handled_at
            ),
            revisions=Edits(self._engine).revisions(dlq_id),
            replays=[
                PlannedReplay(plan_id=one.plan_id, state=one.state, note=one.note,
                              is_live=one.live is not None)
                for one in replays
            ],
        )  # fmt: skip

    def sample(self, found: FailureGroup) -> str:
        """Return the latest pending letter of a group, else the latest there is, else the first."""
        with self._reading() as db:
            last = newest(db, found.group_id, (PENDING,)) or newest(db, found.group_id)
            query = select(message.c.dlq_id).where(message.c.seq == last)
            return str(db.execute(query).scalar() or found.sample)

    def diagnosis(self, found: FailureGroup) -> Diagnosis:
        """Return what triage decided about the pending letters, and what failed around them."""
        with self._reading() as db:
            triage, around = verdicts(db, found.group_id), look_around(db, found.group_id)
        return Diagnosis(group=found, triage=triage, around=around)

    def group_of(self, dlq_id: str) -> FailureGroup:
        """Return the failure group of a letter."""
        query = select(message.c.group_id).where(message.c.dlq_id == dlq_id)
        with self._reading() as db:
            own = str(db.execute(query).scalar_one())
        return self.group(own)

    def closable(self, selection: Selection) -> list[str]:
        """Return the pending letters of *selection* that no plan claims; `NotFound` says why none.

        Oldest first.
        """
        query = select(message.c.dlq_id).where(*selection.where(), ~_claimed())
        with self._reading() as db:
            found = list(db.execute(query.order_by(message.c.seq)).scalars())
        if not found:
            raise self._nothing_open(selection)
        return found

    def close(
        self, dlq_ids: Sequence[str], state: str, operator: Operator, *, selection: Selection
    ) -> Closing:
        """Close *dlq_ids*, which *selection* meant, as discarded or parked.

        As confirmed they are closed because somebody brought their effect about by hand. Those
        that were closed, or claimed by a plan, meanwhile are left alone.
        """
        action = {PARKED: "park", CONFIRMED: "fix"}.get(state, "discard")

        def work(db: Connection) -> int:
            free = _unclaimed(db, dlq_ids)
            said = {"actor": operator.actor, "reason": operator.reason}
            if state == CONFIRMED:
                done = fix(db, free, **said, clock=self._clock)
            else:
                done = close(db, free, state, **said, clock=self._clock)
            self._record(db, operator, action, done, selection)
            return len(done)

        count = committed(self._engine, work, clock=self._clock)
        query = select(func.count()).select_from(message).where(*selection.where(), _claimed())
        with self._reading() as db:
            claimed = int(db.execute(query).scalar_one())
        return Closing(state=state, count=count, left=len(dlq_ids) - count, claimed=claimed)

    def reopenable(self, selection: Selection) -> list[str]:
        """Return what of *selection* may become pending again; `NotFound` if nothing may.

        Of a group those that are parked; what was discarded is named letter by letter.
        """
        named = selection.dlq_ids and not selection.groups
        states = (PARKED, DISCARDED) if named else (PARKED,)
        wanted = (*replace(selection, state=None).where(), message.c.state.in_(states))
        query = select(message.c.dlq_id).where(*wanted).order_by(message.c.seq)
        with self._reading() as db:
            found = list(db.execute(query).scalars())
        if not found:
            raise NotFound(
                "nothing of this is parked: see  holdfast dlq list --state parked ; a discarded "
                "letter is reopened by its --id"
            )
        return found

    def reopen(self, dlq_ids: Sequence[str], operator: Operator, *, selection: Selection) -> int:
        """Make parked or discarded letters pending again, with all their replays."""

        def work(db: Connection) -> int:
            moved = reopen(db, dlq_ids, clock=self._clock)
            self._record(db, operator, "reopen", moved, selection)
            return len(moved)

        return committed(self._engine, work, clock=self._clock)

    def prune(
        self,
        *,
        older_than: float,
        operator: Operator,
        observe: Callable[[int], object] = lambda _deleted: None,
    ) -> Pruned:
        """Delete letters and plans that were closed more than *older_than* seconds ago."""
        count = prune(self._engine, older_than=older_than, operator=operator, clock=self._clock,
                      observe=observe)  # fmt: skip
        left = self.count(Selection(state=None))
        plans = prune_plans(self._engine, older_than=older_than, operator=operator)
        return Pruned(letters=count, plans=plans, left=left)

    def exporting(self, selection: Selection, operator: Operator, **facts: object) -> None:
        """Write down that *selection* is exported: before anything leaves, or nothing does."""
        detail = {**facts, "selection": selection.described()}
        self._audit.record(self._engine, operator, "export", "dead letters", detail)

    def _reading(self) -> Connection:
        return reading(self._engine).connect()

    def _nothing_open(self, selection: Selection) -> NotFound:
        """Return why nothing can be closed: claimed, parked, closed before, or gone."""
        anything = replace(selection, state=None).where()
        states = select(message.c.state, func.count()).where(*anything).group_by(message.c.state)
        with self._reading() as db:
            counts = {state: count for state, count in db.execute(states)}  # noqa: C416 - Rows
        if counts.get(PENDING):
            return NotFound(
                f"{counts[PENDING]:,} are pending, but a plan has claimed them: see  holdfast dlq "
                "plans list --open , and abort it first"
            )
        if counts.get(PARKED):
            return NotFound(
                f"nothing of this is pending, {counts[PARKED]:,} are parked: make them pending "
                "with  holdfast dlq reopen"
            )
        told = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items()))
        return NotFound(f"nothing of this is pending: {told or 'nothing is left of it'}")

    def _record(
        self, db: Connection, operator: Operator, action: str, ids: list[str], selection: Selection
    ) -> None:
        """Write down every id, in as many entries as it takes: after a prune nothing else tells."""
        subject = ", ".join(selection.groups) or f"{len(ids)} letters"
        parts = [ids[start : start + _MOST_IDS] for start in range(0, len(ids), _MOST_IDS)] or [[]]
        for number, part in enumerate(parts, 1):
            detail: dict[str, Any] = {"count": len(ids), "ids": part}
            if len(parts) > 1:
                detail["part"] = f"{number} of {len(parts)}"
            detail["selection"] = selection.described()
            self._audit.append(db, operator, action, subject, detail)


_NAMES = tuple(name for name in LetterSummary.__dataclass_fields__ if name != "kind")
_SUMMARY = (*(message.c[name] for name in _NAMES), message.c["class"].label("kind"))
_STANDING = tuple(name for name in StoredLetter.__dataclass_fields__ if name != "letter")


def _summary(row: Any) -> LetterSummary:
    key = row["message_key"]
    text = None if key is None else bytes(key).decode("utf-8", "replace")
    return LetterSummary(**{**row, "message_key": text, "replayable": bool(row["replayable"])})


def _stored(row: Any) -> StoredLetter:
    return StoredLetter(letter=letter_of(row), **{name: row[name] for name in _STANDING})


def _claimed() -> Any:
    """Return the condition that a live plan claims the letter."""
    return select(item.c.live).where(item.c.live == message.c.dlq_id).exists()


def _unclaimed(db: Connection, ids: Sequence[str]) -> list[str]:
    """Lock *ids* and return those that no plan has claimed while the operator was asked."""
    free: list[str] = []
    ordered = sorted(ids)
    for start in range(0, len(ordered), _CHUNK):
        chunk = ordered[start : start + _CHUNK]
        rows = select(message.c.dlq_id).where(message.c.dlq_id.in_(chunk))
        db.execute(rows.order_by(message.c.dlq_id).with_for_update()).all()
        taken = set(db.execute(select(item.c.live).where(item.c.live.in_(chunk))).scalars())
        free += [dlq_id for dlq_id in chunk if dlq_id not in taken]
    return free
