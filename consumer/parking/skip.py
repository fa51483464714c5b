"""Skipping a message of a held key: it becomes a discarded dead letter, which may be reopened.

What goes is what holds the key: the dead letter, or the message whose retry is waited for. What
waits behind it is healthy and runs then; one of those goes only when it is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sqlalchemy import delete, select, update

from holdfast.consumer.parking.store import ParkedMessages
from holdfast.consumer.schema import held, held_key
from holdfast.db.audit import Audit, Operator
from holdfast.dlq import CaptureSettings, DeadLetterStore, capture
from holdfast.dlq.replay.schema import item
from holdfast.dlq.store.closing import close
from holdfast.dlq.store.rows import DISCARDED
from holdfast.dlq.store.schema import message as letters
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.consumer.parking.store import ParkedKey, ParkedRow


_MOST = 100_000  # more than any key is allowed to have parked


class Skipped(PoisonMessage):
    """An operator decided that the message is not handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRun:
    """One message that a skip discards."""

    message_id: str
    why: str
    """What holds it, in words."""
    dlq_id: str | None = None
    """The dead letter that it is already; None while it is parked."""
    number: int | None = None
    """Its number among the parked ones."""


class SkipParked:
    """Discards messages of one held key, in the caller's transaction."""

    def __init__(self, engine: Engine, group: str, key: ParkedKey, clock: Clock) -> None:
        self._engine = engine
        self._group = group
        self._key = key
        self._held = ParkedMessages(group)
        self._clock = clock

    def going(self, db: Connection, numbers: Sequence[int]) -> list[SkippedRun]:
        """Return what goes: the parked messages of *numbers*, or else what holds the key."""
        if numbers:
            return [_parked(row, "parked behind its key") for row in self._rows(db, numbers)]
        dlq_id = self._held.held_by(db, self._key)
        if dlq_id is not None:
            return [_dead(db, dlq_id)]
        first = self._held.rows(db, self._key, 1)
        return [_parked(row, f"waits for attempt {row.attempt}") for row in first]

    def skip(
        self, db: Connection, numbers: Sequence[int], operator: Operator, *, unredacted: bool
    ) -> list[SkippedRun]:
        """Discard what `going` says; return it, each with the dead letter that it is now.

        A dead letter hides what the handler hides. Where an older version parked the message,
        that is not known: it goes only as it is, and only if *unredacted* says so.
        """
        done = []
        for one in self.going(db, numbers):
            if one.number is not None:
                [row] = self._rows(db, [one.number])
                if row.rules is None and not unredacted:
                    raise _unprotected(one)
                one = replace(one, dlq_id=self._buried(db, row, operator))  # noqa: PLW2901
            _discard(db, str(one.dlq_id), operator, self._clock)
            done.append(one)
        if not numbers:
            self._held.release(db, self._key)
        return done

    def _rows(self, db: Connection, numbers: Sequence[int]) -> list[ParkedRow]:
        """Return the parked messages of *numbers*, in order; all of them must be there."""
        found = [row for row in self._held.rows(db, self._key, _MOST) if row.seq in numbers]
        missing = set(numbers) - {row.seq for row in found}
        if missing:
            shown = ", ".join(map(str, sorted(missing)))
            raise NotFound(f"no message {shown} is parked behind the key: see  holdfast keys show")
        return found

    def _buried(self, db: Connection, row: ParkedRow, operator: Operator) -> str:
        """Make a dead letter of a parked message; return its id."""
        error = Skipped(f"skipped by {operator.actor}: {operator.reason}")
        letter = capture(
            row.origin.message, error, group=self._group,
            handler=CaptureSettings.handler_by(row.rules) or self._key.topic,
            delivery=row.origin, attempts=row.attempt, origin=CaptureSettings.by(row.rules),
            clock=self._clock,
        )  # fmt: skip
        DeadLetterStore(self._engine, clock=self._clock, triage=None).put(letter, db)
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


def _dead(db: Connection, dlq_id: str) -> SkippedRun:
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
    return SkippedRun(
        message_id=row.message_id, why=f"dead letter, {row.error_type}", dlq_id=dlq_id
    )


def _unprotected(one: SkippedRun) -> ConfigurationError:
    return ConfigurationError(
        f"message {one.message_id} was parked by an older version, which did not keep what its "
        "handler hides: let it run with  holdfast keys release ; or, if its payload may be kept "
        "as it is among the dead letters, say --unredacted"
    )


def _parked(row: ParkedRow, why: str) -> SkippedRun:
    return SkippedRun(message_id=row.origin.message.id, why=why, number=row.seq)


def _discard(db: Connection, dlq_id: str, operator: Operator, clock: Clock) -> None:
    """Close the letter as `holdfast dlq discard` does, with its entry in the trail."""
    close(db, [dlq_id], DISCARDED, actor=operator.actor, reason=operator.reason, clock=clock)
    Audit(clock=clock).append(db, operator, "discard", dlq_id, {"by": "keys skip"})
