"""Skipping a message of a held key: it becomes a discarded dead letter, which may be reopened.

What goes is what holds the key: the dead letter, or the message whose retry is waited for. What
waits behind it is healthy and runs then; one of those goes only when it is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sqlalchemy import delete, select, update

from holdfast.consumer.held import Held
from holdfast.consumer.schema import held, held_key
from holdfast.dlq import StoreHome, capture
from holdfast.dlq.audit import Audit
from holdfast.dlq.audit import Warrant as LetterWarrant
from holdfast.dlq.closing import close
from holdfast.dlq.replay.schema import item
from holdfast.dlq.rows import DISCARDED
from holdfast.dlq.schema import message as letters
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.audit import Warrant
    from holdfast.clock import Clock
    from holdfast.consumer.held import HeldKey, HeldRow


_MOST = 100_000  # more than any key is allowed to have parked


class Skipped(PoisonMessage):
    """An operator decided that the message is not handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """One message that a skip discards."""

    message_id: str
    why: str
    """What holds it, in words."""
    dlq_id: str | None = None
    """The dead letter that it is already; None while it is parked."""
    number: int | None = None
    """Its number among the parked ones."""


class Skipping:
    """Discards messages of one held key, in the caller's transaction."""

    def __init__(self, engine: Engine, group: str, key: HeldKey, clock: Clock) -> None:
        self._engine = engine
        self._group = group
        self._key = key
        self._held = Held(group)
        self._clock = clock

    def going(self, db: Connection, numbers: Sequence[int]) -> list[Going]:
        """Return what goes: the parked messages of *numbers*, or else what holds the key."""
        if numbers:
            return [_parked(row, "parked behind its key") for row in self._rows(db, numbers)]
        dlq_id = self._held.held_by(db, self._key)
        if dlq_id is not None:
            return [_dead(db, dlq_id)]
        first = self._held.rows(db, self._key, 1)
        return [_parked(row, f"waits for attempt {row.attempt}") for row in first]

    def skip(self, db: Connection, numbers: Sequence[int], warrant: Warrant) -> list[Going]:
        """Discard what `going` says; return it, each with the dead letter that it is now."""
        done = []
        for one in self.going(db, numbers):
            if one.number is not None:
                [row] = self._rows(db, [one.number])
                one = replace(one, dlq_id=self._buried(db, row, warrant))  # noqa: PLW2901
            _discard(db, str(one.dlq_id), warrant, self._clock)
            done.append(one)
        if not numbers:
            self._held.release(db, self._key)
        return done

    def _rows(self, db: Connection, numbers: Sequence[int]) -> list[HeldRow]:
        """Return the parked messages of *numbers*, in order; all of them must be there."""
        found = [row for row in self._held.rows(db, self._key, _MOST) if row.seq in numbers]
        missing = set(numbers) - {row.seq for row in found}
        if missing:
            shown = ", ".join(map(str, sorted(missing)))
            raise NotFound(f"no message {shown} is parked behind the key: see  holdfast keys show")
        return found

    def _buried(self, db: Connection, row: HeldRow, warrant: Warrant) -> str:
        """Make a dead letter of a parked message; return its id."""
        error = Skipped(f"skipped by {warrant.actor}: {warrant.reason}")
        letter = capture(
            row.origin.message, error, group=self._group, handler=self._key.topic,
            delivery=row.origin, attempts=row.attempt, clock=self._clock,
        )  # fmt: skip
        StoreHome(self._engine, clock=self._clock, triage=None).put(letter, db)
        gone = db.execute(delete(held).where(held.c.seq == row.seq)).rowcount
        db.execute(
            update(held_key)
            .where(
                held_key.c.grp == self._group,
                held_key.c.topic == self._key.topic,
                held_key.c.key_hash == self._key.key_hash,
            )
            .values(parked=held_key.c.parked - gone)
        )
        return letter.dlq_id


def _dead(db: Connection, dlq_id: str) -> Going:
    row = db.execute(
        select(letters.c.message_id, letters.c.error_type).where(letters.c.dlq_id == dlq_id)
    ).one_or_none()
    if row is None:
        raise NotFound(
            f"the key waits for dead letter {dlq_id}, which is not in this database: let it go "
            "with  holdfast keys release"
        )
    plan = db.execute(select(item.c.plan_id).where(item.c.live == dlq_id)).scalar()
    if plan is not None:
        raise ConfigurationError(
            f"dead letter {dlq_id} is on its way in plan {plan}: wait for it, or  holdfast dlq "
            f"plans abort {plan}"
        )
    return Going(message_id=row.message_id, why=f"dead letter, {row.error_type}", dlq_id=dlq_id)


def _parked(row: HeldRow, why: str) -> Going:
    return Going(message_id=row.origin.message.id, why=why, number=row.seq)


def _discard(db: Connection, dlq_id: str, warrant: Warrant, clock: Clock) -> None:
    """Close the letter as the desk of dead letters does, with its entry in the trail."""
    close(db, [dlq_id], DISCARDED, actor=warrant.actor, reason=warrant.reason, clock=clock)
    who = LetterWarrant(actor=warrant.actor, reason=warrant.reason)
    Audit(clock=clock).append(db, who, "discard", dlq_id, {"by": "keys skip"})
