"""The operator's desk for held keys: see them, let them go on, or skip what holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import select, update

from holdfast.audit import Audit, entries
from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.consumer.held import Held, HeldKey, HeldRow, hash_of
from holdfast.consumer.schema import circuit, database_now, held_key
from holdfast.consumer.skipping import Going, Skipping
from holdfast.errors import ConfigurationError, NotFound
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.audit import Warrant


AREA = "keys."
"""How the actions begin in the trail that all share."""
_BY_ID = "id:"
_SHORTEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCircuit:
    """One circuit that processes share through the database."""

    name: str
    is_open: bool
    seconds: float
    """How long until it may be tried again."""


class NotHeld(NotFound):
    """No such key waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One held key as an operator sees it."""

    group: str
    topic: str
    id: str
    """How the key is named to a command: also one that is no text, or none at all."""
    key: str
    parked: int
    since: datetime
    dead_letter: str | None
    due: datetime | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One line of the audit trail."""

    at: datetime
    actor: str
    action: str
    subject: str
    reason: str
    detail: dict[str, Any]


class Desk:
    """Acts on held keys; every act is audited in its own transaction."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock

    def waiting(
        self, *, group: str | None = None, topic: str | None = None, limit: int = 100
    ) -> list[Waiting]:
        """Return the held keys, the longest waiting first."""
        wanted = select(held_key).order_by(held_key.c.since).limit(limit)
        if group is not None:
            wanted = wanted.where(held_key.c.grp == group)
        if topic is not None:
            wanted = wanted.where(held_key.c.topic == topic)
        with self._engine.connect() as db:
            return [_waiting(row) for row in db.execute(wanted)]

    def messages(self, group: str, topic: str, key: str, *, limit: int = 100) -> list[HeldRow]:
        """Return what is parked behind *key*, in order."""
        with self._engine.connect() as db:
            found, _ = self._require(db, group, topic, key)
            return Held(group).rows(db, found, limit)

    def release(self, group: str, topic: str, key: str, warrant: Warrant) -> int:
        """Let *key* go on whatever became of its dead letter; return how many were parked."""

        def act(db: Connection) -> int:
            found, parked = self._require(db, group, topic, key)
            Held(group).release(db, found)
            self._record(db, warrant, "release", f"{group} {topic} {key}", {"parked": parked})
            return parked

        return transact(self._engine, act, clock=self._clock)

    def skippable(
        self, group: str, topic: str, key: str, *, numbers: Sequence[int] = ()
    ) -> tuple[list[Going], int]:
        """Return what `skip` would discard, and how many messages wait behind the key."""
        with self._engine.connect() as db:
            found, parked = self._require(db, group, topic, key)
            return Skipping(self._engine, group, found, self._clock).going(db, numbers), parked

    def skip(
        self, group: str, topic: str, key: str, warrant: Warrant, *, numbers: Sequence[int] = ()
    ) -> list[Going]:
        """Discard the message that holds *key*, so that what waits behind it runs; return it.

        It becomes a discarded dead letter, which can be reopened. *numbers* name parked
        messages that go instead; the key then waits as before.
        """

        def act(db: Connection) -> list[Going]:
            found, _ = self._require(db, group, topic, key)
            gone = Skipping(self._engine, group, found, self._clock).skip(db, numbers, warrant)
            if not gone:
                raise NotHeld(f"nothing of key {key!r} is left to skip: let it go on with release")
            detail = {"messages": [one.message_id for one in gone],
                      "dead_letters": [one.dlq_id for one in gone]}  # fmt: skip
            self._record(db, warrant, "skip", f"{group} {topic} {key}", detail)
            return gone

        return transact(self._engine, act, clock=self._clock)

    def open_circuit(self, name: str, seconds: float, warrant: Warrant) -> None:
        """Hold the shared circuit *name* open for *seconds*, in every process; then it is tried."""
        if not 0 < seconds < math.inf:
            raise ConfigurationError(f"{seconds:g} s: a circuit is opened for more than 0 seconds")
        self._turn(name, "circuit.open", warrant, is_open=1, until=database_now() + seconds,
                   detail={"seconds": seconds})  # fmt: skip

    def close_circuit(self, name: str, warrant: Warrant) -> None:
        """Close the shared circuit *name* in every process, whatever they found out."""
        self._turn(name, "circuit.close", warrant, is_open=0, until=0.0, detail={})

    def circuits(self) -> list[SharedCircuit]:
        """Return the circuits that processes share, by name."""
        left = (circuit.c.until - database_now()).label("left")
        wanted = select(circuit.c.name, circuit.c.is_open, left).order_by(circuit.c.name)
        with self._engine.connect() as db:
            return [
                SharedCircuit(
                    name=row.name,
                    is_open=bool(row.is_open),
                    seconds=max(0.0, float(row.left)) if row.is_open else 0.0,
                )
                for row in db.execute(wanted)
            ]

    def audited(self, *, limit: int = 100) -> list[Act]:
        """Return what was done, newest first."""
        with self._engine.connect() as db:
            found = entries(db, limit=limit, within=AREA)
        return [
            Act(at=datetime.fromisoformat(one.at), actor=one.actor,
                action=one.action.removeprefix(AREA), subject=one.subject, reason=one.reason,
                detail=one.detail)
            for one in found
        ]  # fmt: skip

    def _turn(
        self, name: str, action: str, warrant: Warrant, *, is_open: int, until: Any,
        detail: dict[str, Any],
    ) -> None:  # fmt: skip
        def act(db: Connection) -> None:
            changed = update(circuit).where(circuit.c.name == name).values(
                is_open=is_open, until=until, version=circuit.c.version + 1
            )  # fmt: skip
            if db.execute(changed).rowcount == 0:
                raise NotFound(
                    f"no process shares a circuit {name!r} here: see  holdfast circuits list ; "
                    "circuits are shared by Consumer(…, share_circuits=True)"
                )
            self._record(db, warrant, action, name, detail)

        transact(self._engine, act, clock=self._clock)

    def _require(self, db: Connection, group: str, topic: str, key: str) -> tuple[HeldKey, int]:
        """Return the key that *key* names, by its text or by `id:` and its id."""
        columns = (held_key.c.topic, held_key.c.key_hash, held_key.c.key, held_key.c.parked)
        wanted = select(*columns).where(_is(group, topic))
        exact = wanted.where(held_key.c.key_hash == hash_of(key.encode(), ""))
        rows = db.execute(exact).all()
        start = key.removeprefix(_BY_ID).lower()
        if not rows and key.startswith(_BY_ID) and len(start) >= _SHORTEST:
            begins = held_key.c.key_hash.startswith(start, autoescape=True)
            rows = db.execute(wanted.where(begins).limit(2)).all()
        if not rows:
            raise NotHeld(
                f"key {key!r} of {topic!r} is not held for group {group!r}: see  holdfast keys list"
                f" ; a key that is no text is named by its id, as {_BY_ID}0f3a…"
            )
        if len(rows) > 1:
            raise ConfigurationError(f"{key!r} begins several ids: write more of it")
        (row,) = rows
        return HeldKey(*row[:3]), int(row.parked)

    def _record(
        self, db: Connection, warrant: Warrant, action: str, subject: str, detail: dict[str, Any]
    ) -> None:
        Audit(clock=self._clock).append(db, warrant, f"{AREA}{action}", subject, detail)


def _is(group: str, topic: str) -> Any:
    return (held_key.c.grp == group) & (held_key.c.topic == topic)


def _shown(key: bytes | None) -> str:
    if key is None:
        return "(no key)"
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        return f"0x{bytes(key).hex()}"


def _waiting(row: Any) -> Waiting:
    return Waiting(
        group=row.grp,
        topic=row.topic,
        id=f"{_BY_ID}{row.key_hash[:12]}",
        key=_shown(row.key),
        parked=row.parked,
        since=datetime.fromtimestamp(row.since, UTC),
        dead_letter=row.dlq_id,
        due=None if row.due is None else datetime.fromtimestamp(row.due, UTC),
        note=row.note,
    )
