"""What became of a batch of rows: decisions only, no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, Remedy, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.outbox.rows import Row
    from holdfast.ports import Published

_error = attrgetter("error")
Refused = tuple["Row", HoldfastError | None]


class Overtaken(HoldfastError):
    """The broker refused an event and stored later ones of its key, sent in the same batch."""

    def __init__(self, refusal: HoldfastError, later: int) -> None:
        super().__init__(
            f"{refusal}; {later} later event(s) of its key, sent together with it, are stored "
            "already: a release puts it behind them, and then repeats them"
        )
        self.refusal = refusal
        self.later = later


@dataclass(slots=True)
class Outcome:
    """Which rows are done, which are to be parked, and the outage if there was one."""

    done: list[int] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    """Rows with the error that the broker gave, or None for those that wait behind one."""
    outage: HoldfastError | None = None
    missing: dict[str, UnknownTopic] = field(default_factory=dict)
    """Topics that do not exist; their rows are neither done nor refused."""


def sort_out(rows: Sequence[Row], results: Sequence[Published]) -> Outcome:
    """Return what became of *rows*.

    Of each key only the acknowledged prefix is done. A message that the broker refuses for
    good is parked with what follows of its key; an outage or a missing topic parks nothing.
    """
    outcome = Outcome()
    if not any(map(_error, results)):
        outcome.done = [row[0] for row in rows]
        return outcome
    stuck: set[tuple[str, str]] = set()
    blocked: dict[tuple[str, str], int] = {}
    later: Counter[tuple[str, str]] = Counter()
    for row, result in zip(rows, results, strict=True):
        error, key = result.error, None if row.key is None else (row.topic, row.key)
        if key in stuck:
            continue
        if isinstance(error, UnknownTopic):
            outcome.missing[row.topic] = error
            if key is not None:
                stuck.add(key)
            continue
        if error is None and key not in blocked:
            outcome.done.append(row.seq)
        elif error is None or error.remedy in (Remedy.FIX, Remedy.DEAD_LETTER):
            if key is not None:
                blocked.setdefault(key, len(outcome.refused))
                later[key] += error is None
            outcome.refused.append((row, error))
        else:
            outcome.outage = outcome.outage or error
            if key is not None:
                stuck.add(key)
    for key, place in blocked.items():
        row, error = outcome.refused[place]
        if later[key] and error is not None:
            outcome.refused[place] = row, Overtaken(error, later[key])
    return outcome
