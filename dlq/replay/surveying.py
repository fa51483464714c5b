"""Surveying a selection: what a plan would send, in which order, and what it must not send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.database import reading
from holdfast.dlq.replay.conflicts import behind, elsewhere
from holdfast.dlq.replay.fitness import unfit
from holdfast.dlq.replay.letters import candidate, candidates, claims, high_water
from holdfast.dlq.replay.manifest import Candidate, arranged, digest, in_source_order
from holdfast.dlq.replay.state import ItemState, NotNow
from holdfast.dlq.replay.supersession import commutative_among, superseded
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.replay.plan import Terms
    from holdfast.dlq.replay.selection import Selection


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


def survey(
    db: Connection, selection: Selection, terms: Terms, *, agreed: Manifest | None = None
) -> Manifest:
    """Return what a plan for *selection* would hold now; nothing is written.

    Of what was *agreed* upon it holds what is still there, and nothing that came since.
    """
    if selection.is_empty:
        raise ConfigurationError("nothing is selected: name a group, or filter by topic and so on")
    below = high_water(db)
    rows = list(candidates(db, selection, below=below))
    claimed = claims(db, selection)
    if not rows:
        raise _nothing(selection, claimed)
    ordered = in_source_order(candidate(row) for row in rows)
    cap, skipped = terms.policy.replay_cap, unfit(db, rows)
    parked = {
        letter.dlq_id: f"replayed {letter.replays} times already"
        for letter in ordered
        if letter.replays >= cap
    }
    fresh = _came_since(ordered, agreed)
    old: dict[str, str] = {}
    if terms.memory is not None and not terms.beyond_window:
        old = terms.memory.forgotten(ordered)
    held = old
    if not terms.policy.commutative:
        late = behind(ordered, fresh | skipped | parked | old) | elsewhere(db, selection, ordered)
        for dlq_id in commutative_among(db, late):
            del late[dlq_id]
        held = late | superseded(db, ordered) | old
    reasons = ((held, ItemState.HELD), (parked, ItemState.PARKED), (skipped, ItemState.SKIPPED))
    letters, aside = [], []
    for letter in ordered:
        if letter.dlq_id in fresh:
            continue
        for found, state in reasons:
            if letter.dlq_id in found:
                aside.append((letter, state, found[letter.dlq_id]))
                break
        else:
            letters.append(letter)
    if agreed is not None and agreed.letters and not letters:
        raise NotNow("all of these were closed, claimed or overtaken meanwhile: look again")
    return Manifest(
        letters=arranged(letters, terms.policy.canary),
        aside=aside,
        high_water=below,
        claimed_elsewhere=claimed,
    )


def surveyed(
    engine: Engine, selection: Selection, terms: Terms, *, agreed: Manifest | None = None
) -> Manifest:
    """Return the survey of *selection* in a transaction that keeps nobody waiting."""
    with reading(engine).connect() as db:
        return survey(db, selection, terms, agreed=agreed)


def _came_since(ordered: Sequence[Candidate], agreed: Manifest | None) -> dict[str, str]:
    """Return those of *ordered* that nobody agreed to send, and so do not belong to the plan."""
    if agreed is None:
        return {}
    known = {letter.dlq_id for letter in agreed.everything}
    return {one.dlq_id: "it came later" for one in ordered if one.dlq_id not in known}


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
