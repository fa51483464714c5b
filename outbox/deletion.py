"""Deleting rows that were published: these rows and no other, by ranges where that is cheaper."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from holdfast.sql import statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection

    from holdfast.outbox.leases import Leases

_LONG = 32  # rows; a statement for a shorter run costs more than to find its rows one by one


def delete_rows(db: Connection, leases: Leases, seqs: Sequence[int]) -> None:
    """Delete the rows with the numbers *seqs*; the caller guards it by the *leases*.

    A row that commits late, in between, is left alone: its number is missing in *seqs*, and
    no range is deleted that holds a number more than they do.
    """
    sql = statements("holdfast.outbox", db.dialect.name)
    found = runs(seqs) if "delete_run" in sql else []
    if found and len(found) * _LONG <= len(seqs):
        db.execute(sql["delete_run"], [{"first": first, "last": last} for first, last in found])
    else:
        db.execute(sql["delete"], {"seqs": leases.listed(seqs)})


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the fewest ranges, each from first to last, that hold *numbers* and nothing else."""
    ordered = sorted(set(numbers))
    if not ordered:
        return []
    first, last = ordered[0], ordered[-1]
    if last - first == len(ordered) - 1:
        return [(first, last)]
    gaps = [(below, above) for below, above in pairwise(ordered) if above - below > 1]
    ends, starts = zip(*gaps, strict=True)
    return list(zip((first, *starts), (*ends, last), strict=True))
