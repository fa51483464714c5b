"""How well triage finds causes that are known: precision and recall over records.

A group speaks for the cause that most of its records have: precision is the share of records in a
group that speaks for their cause. A cause is found by its largest group: recall is the share of
records that are in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Precision and recall over some causes."""

    causes: int
    groups: int
    records: int
    precision: float
    recall: float

    def __str__(self) -> str:
        return (
            f"{self.causes} causes, {self.records:,} records, {self.groups:,} groups: "
            f"precision {self.precision:.4f}, recall {self.recall:.4f}"
        )


def scores(
    confusion: Mapping[tuple[str, str], int], causes: Mapping[str, bool]
) -> tuple[Score, Score]:
    """Return the scores of the causes that the rules were written for, and of the others.

    *confusion* has the records by group and true cause, *causes* says which are known.
    """
    by_group: dict[str, Counter[str]] = defaultdict(Counter)
    by_cause: dict[str, Counter[str]] = defaultdict(Counter)
    for (group, cause), count in confusion.items():
        by_group[group][cause] += count
        by_cause[cause][group] += count
    speaks = {
        group: max(counts, key=lambda cause: (counts[cause], cause))
        for group, counts in by_group.items()
    }
    return _score(True, by_cause, speaks, causes), _score(False, by_cause, speaks, causes)


def _score(
    known: bool,
    by_cause: Mapping[str, Counter[str]],
    speaks: Mapping[str, str],
    causes: Mapping[str, bool],
) -> Score:
    mine = {cause: counts for cause, counts in by_cause.items() if causes[cause] is known}
    records = sum(counts.total() for counts in mine.values())
    right = sum(
        count
        for cause, counts in mine.items()
        for group, count in counts.items()
        if speaks[group] == cause
    )
    together = sum(max(counts.values()) for counts in mine.values())
    return Score(
        causes=len(mine), groups=len({group for counts in mine.values() for group in counts}),
        records=records, precision=right / records if records else 1.0,
        recall=together / records if records else 1.0,
    )  # fmt: skip
