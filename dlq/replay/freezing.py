"""Freezing a plan: the manifest is fixed, every message in it claimed, in one transaction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.audit import Audit
from holdfast.dlq.closing import SYSTEM, close
from holdfast.dlq.replay.letters import candidate, candidates, claims, high_water
from holdfast.dlq.replay.manifest import Candidate, arranged, digest, in_source_order
from holdfast.dlq.replay.plan import Plan, Terms
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.replay.state import ItemState, NotNow, PlanState
from holdfast.dlq.replay.supersession import superseded
from holdfast.dlq.rows import PARKED
from holdfast.dlq.schema import message
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, DependencyDown, NotFound
from holdfast.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.selection import Selection

_ROWS = 1000  # per statement
_RIVALS = 5  # times that others may be quicker to claim


class AlreadyClaimed(NotNow):
    """Every message that was asked for belongs to the live plan of somebody."""


class NothingToReplay(NotFound):
    """No pending dead letter matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a plan would send, and what it would not, with the reasons."""

    letters: list[Candidate]
    aside: list[tuple[Candidate, ItemState, str]] = field(default_factory=list)
    high_water: int
    claimed_elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The hash over every id, in the order of sending."""
        return digest([letter.dlq_id for letter in self.everything])

    @property
    def everything(self) -> list[Candidate]:
        """The letters to send, then those set aside."""
        return [*self.letters, *(letter for letter, _, _ in self.aside)]

    @property
    def fingerprints(self) -> list[str]:
        """The kinds of failure in it."""
        return sorted({letter.fingerprint or "" for letter in self.everything})


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A plan that has just been made."""

    plan: Plan
    manifest: Manifest


def survey(db: Connection, selection: Selection, terms: Terms) -> Manifest:
    """Return what a plan for *selection* would hold now; nothing is written."""
    if selection.is_empty:
        raise ConfigurationError("nothing is selected: name a group, or filter by topic and so on")
    below = high_water(db)
    rows = list(candidates(db, selection, below=below))
    elsewhere = claims(db, selection)
    if not rows:
        raise _nothing(selection, elsewhere)
    ordered = in_source_order(candidate(row) for row in rows)
    fit = {row.dlq_id for row in rows if row.replayable or row.revision}
    late = {} if terms.policy.commutative else superseded(db, ordered)
    letters, aside = [], []
    for letter in ordered:
        if (reason := late.get(letter.dlq_id)) is not None:
            aside.append((letter, ItemState.HELD, reason))
        elif letter.replay_count >= terms.policy.replay_cap:
            text = f"replayed {letter.replay_count} times already"
            aside.append((letter, ItemState.PARKED, text))
        elif letter.dlq_id not in fit:
            text = "what is stored is not what was sent (redacted, or of a newer version): edit it"
            aside.append((letter, ItemState.SKIPPED, text))
        else:
            letters.append(letter)
    return Manifest(
        letters=arranged(letters, terms.policy.canary),
        aside=aside,
        high_water=below,
        claimed_elsewhere=elsewhere,
    )


def freeze(
    engine: Engine,
    selection: Selection,
    terms: Terms,
    warrant: Warrant,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> Frozen:
    """Make a plan of what is pending in *selection* and claimed by nobody.

    Two operators at once: each message goes to one of them; who finds everything taken is
    told by whom.
    """
    for attempt in range(1, _RIVALS + 1):
        try:
            return committed(
                engine, lambda db: _frozen(db, selection, terms, warrant, clock), clock=clock
            )
        except DependencyDown as error:
            # Somebody else was quicker to claim one of them: look again at what is left.
            if attempt == _RIVALS or not isinstance(error.__cause__, IntegrityError):
                raise
    raise AssertionError("unreachable")


def _frozen(
    db: Connection, selection: Selection, terms: Terms, warrant: Warrant, clock: Clock
) -> Frozen:
    manifest = survey(db, selection, terms)
    total, now = len(manifest.letters), clock.now().timestamp()
    row: dict[str, Any] = {
        "id": new_id(),
        "state": PlanState.DRAFT,
        "created_at": now,
        "created_by": warrant.actor[:255],
        "reason": warrant.reason,
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
        **dict.fromkeys(("approved_by", "approved_at", "stopped_because", "owner", "ended_at")),
    }
    db.execute(insert(plan), row)
    _claim(db, row["id"], manifest, now)
    _take_from_triage(db, [letter.dlq_id for letter in manifest.letters])
    parked = [letter.dlq_id for letter, state, _ in manifest.aside if state is ItemState.PARKED]
    if parked:
        reason = f"replayed {terms.policy.replay_cap} times or more"
        close(db, parked, PARKED, actor=SYSTEM, reason=reason, clock=clock)
    counts = Counter(state.value for _, state, _ in manifest.aside)
    detail = {"total": total, "hash": manifest.hash, "aside": dict(counts),
              "selection": selection.described()}  # fmt: skip
    Audit(clock=clock).append(db, warrant, "replay.plan", f"plan {row['id']}", detail)
    return Frozen(plan=Plan.of(row), manifest=manifest)


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


def _take_from_triage(db: Connection, ids: list[str]) -> None:
    """Count the automatic retry, if one was due: what is planned is not planned twice."""
    for start in range(0, len(ids), _ROWS):
        chosen = message.c.dlq_id.in_(ids[start : start + _ROWS]), message.c.due_at.is_not(None)
        taken = {"due_at": None, "retries": message.c.retries + 1}
        db.execute(update(message).where(*chosen).values(**taken))


def _item(
    plan_id: str,
    number: int,
    letter: Candidate,
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
    }


def _chunks(rows: list[dict[str, Any]]) -> Sequence[list[dict[str, Any]]]:
    return [rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)]


def _nothing(selection: Selection, elsewhere: dict[str, int]) -> Exception:
    if elsewhere:
        plans = ", ".join(f"{plan_id[-8:]} ({count:,})" for plan_id, count in elsewhere.items())
        return AlreadyClaimed(
            f"everything here is claimed by another plan: {plans}; watch it with  holdfast dlq "
            "plans show, or abort it to free its messages"
        )
    what = ", ".join(f"{name}={value}" for name, value in selection.described().items())
    return NothingToReplay(
        f"no dead letter is pending under {what}: it was replayed, discarded or never there; "
        "see  holdfast dlq groups"
    )
