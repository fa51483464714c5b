"""Freezing a plan: its manifest is fixed and every message in it claimed, at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit
from holdfast.db.text import cut, plain
from holdfast.db.transactions import committed
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.plan import NotNow, PlanState, ReplayOptions, ReplayPlan
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.survey import Manifest, surveyed
from holdfast.dlq.store.closing import SYSTEM, close
from holdfast.dlq.store.rows import PARKED, PENDING
from holdfast.dlq.store.schema import message
from holdfast.errors import DependencyDown
from holdfast.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.replay.selection import LetterRef, Selection

_ROWS = 1000  # per statement
_RIVALS = 5  # times that others may be quicker to claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A plan that has just been made."""

    plan: ReplayPlan
    manifest: Manifest


def freeze(
    engine: Engine,
    selection: Selection,
    terms: ReplayOptions,
    operator: Operator,
    *,
    clock: Clock = SYSTEM_CLOCK,
    agreed: Manifest | None = None,
) -> Frozen:
    """Make a plan of what is pending in *selection* and claimed by nobody.

    With a manifest that somebody *agreed* to, of nothing that came since it was shown.
    Two operators at once: each message goes to one of them; who finds everything taken is
    told by whom. The survey keeps no writer waiting; the claim looks again.
    """
    for attempt in range(1, _RIVALS + 1):
        manifest = surveyed(engine, selection, terms, agreed=agreed)

        def work(db: Connection, manifest: Manifest = manifest) -> Frozen:
            return _frozen(db, selection, manifest, terms, operator, clock)

        try:
            return committed(engine, work, clock=clock)
        except _ClosedMeanwhile:
            continue
        except DependencyDown as error:
            # Somebody else was quicker to claim one of them: look again at what is left.
            if attempt == _RIVALS or not isinstance(error.__cause__, IntegrityError):
                raise
    raise NotNow("others close these dead letters at this moment: try again")


class _ClosedMeanwhile(Exception):
    """Somebody closed a letter between the survey and the claim."""


def _frozen(
    db: Connection,
    selection: Selection,
    manifest: Manifest,
    terms: ReplayOptions,
    operator: Operator,
    clock: Clock,
) -> Frozen:
    total, now = len(manifest.letters), clock.now().timestamp()
    row: dict[str, Any] = {
        "id": new_id(),
        "state": PlanState.DRAFT,
        "created_at": now,
        "created_by": cut(operator.actor),
        "reason": plain(operator.reason),
        "total": total,
        "hash": manifest.hash,
        "high_water": manifest.high_water,
        "selection": msgspec.json.encode(selection.described()).decode(),
        "policy": msgspec.json.encode(terms.policy).decode(),
        "rate": terms.rate.per_second,
        "target": terms.to_topic,
        "fingerprints": msgspec.json.encode(manifest.fingerprints).decode(),
        "transform": terms.transform,
        "approval": int(total > terms.approve_above),
        "sent": 0,
        "forgiven": 0,
        "epoch": 0,
        "until": 0.0,
        **dict.fromkeys(
            ("approved_by", "approved_at", "stopped_because", "owner", "ended_at", "lanes")
        ),
    }
    db.execute(insert(plan), row)
    _claim(db, row["id"], manifest, now)
    take_from_triage(db, _locked(db, [letter.dlq_id for letter in manifest.letters]))
    parked = [letter.dlq_id for letter, state, _ in manifest.aside if state is ItemState.PARKED]
    if parked:
        reason = f"replayed {terms.policy.replay_cap} times or more"
        close(db, parked, PARKED, actor=SYSTEM, reason=reason, clock=clock)
    counts = Counter(state.value for _, state, _ in manifest.aside)
    detail = {"total": total, "hash": manifest.hash, "aside": dict(counts),
              "selection": selection.described()}  # fmt: skip
    Audit(clock=clock).append(db, operator, "replay.plan", f"plan {row['id']}", detail)
    return Frozen(plan=ReplayPlan.of(row), manifest=manifest)


def _claim(db: Connection, plan_id: str, manifest: Manifest, now: float) -> None:
    rows: list[dict[str, Any]] = [
        _item(plan_id, number, letter, ItemState.CLAIMED, live=letter.dlq_id)
        for number, letter in enumerate(manifest.letters)
    ]
    first = len(rows)
    for number, (letter, state, note) in enumerate(manifest.aside, first):
        rows.append(_item(plan_id, number, letter, state, note=note, settled_at=now))
    for chunk in _chunks(rows):
        db.execute(insert(item), chunk)


def _locked(db: Connection, ids: list[str]) -> list[str]:
    """Make sure that all are pending still, and return those due for an automatic retry.

    Who closes letters locks them, then looks at claims.
    """
    chosen, due = sorted(ids), []
    for start in range(0, len(chosen), _ROWS):
        # By the ids alone: right after a burst the database does not know yet that nearly all
        # are pending, and would look through all of those for every few ids.
        rows = db.execute(
            select(message.c.dlq_id, message.c.state, message.c.due_at)
            .where(message.c.dlq_id.in_(chosen[start : start + _ROWS]))
            .order_by(message.c.dlq_id)
            .with_for_update()
        ).all()
        if sum(row.state == PENDING for row in rows) < len(chosen[start : start + _ROWS]):
            raise _ClosedMeanwhile
        due += [row.dlq_id for row in rows if row.due_at is not None]
    return due


def take_from_triage(db: Connection, due: list[str]) -> None:
    """Count the automatic retries that were *due*: what is planned is not planned twice."""
    taken = {"due_at": None, "retries": message.c.retries + 1}
    for start in range(0, len(due), _ROWS):
        chosen = message.c.dlq_id.in_(due[start : start + _ROWS])
        db.execute(update(message).where(chosen).values(**taken))


def _item(
    plan_id: str,
    number: int,
    letter: LetterRef,
    state: ItemState,
    *,
    live: str | None = None,
    note: str | None = None,
    settled_at: float | None = None,
) -> dict[str, Any]:
    return {
        "plan_id": plan_id,
        "position": number,
        "dlq_id": letter.dlq_id,
        "live": live,
        "state": state.value,
        "key_hash": letter.key_hash,
        "fingerprint": letter.fingerprint,
        "again": None,
        "note": note,
        "settled_at": settled_at,
        "seq": letter.seq,
    }


def _chunks(rows: list[dict[str, Any]]) -> Sequence[list[dict[str, Any]]]:
    return [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]
