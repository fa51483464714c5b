"""What a simulation tries: every pending message of a selection, whoever has claimed it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.database import reading
from holdfast.dlq.replay.fitness import unfit
from holdfast.dlq.replay.letters import candidate, candidates, high_water
from holdfast.dlq.replay.manifest import Candidate, arranged, in_source_order
from holdfast.errors import NotFound

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """The messages to try, in the order in which their keys had them, and the others."""

    letters: list[Candidate]
    untried: list[tuple[Candidate, str]] = field(default_factory=list)
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
        reasons = unfit(db, rows)
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
