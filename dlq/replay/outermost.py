"""The newest, or the earliest, message of a key: compared once with each letter of the key.

Which of two came first is told by their positions where they share a lane, else by the
order in which the store received them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from holdfast.dlq.positions import place_of
from holdfast.dlq.rows import key_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.dlq.replay.manifest import Candidate

    Further = Callable[[Any, Any], bool]

Key = tuple[str, str, str]
"""The topic, the group and the hash of the key."""


def by_key(letters: Iterable[Candidate]) -> dict[Key, list[Candidate]]:
    """Return those of *letters* that have a key, by it."""
    found: dict[Key, list[Candidate]] = {}
    for letter in letters:
        if (name := key_hash(letter.key)) is not None:
            found.setdefault((letter.topic, letter.group, name), []).append(letter)
    return found


@dataclass(slots=True)
class _Lane:
    """The outermost rows of one lane, and where the first of them is."""

    place: tuple[int, ...] | None = None
    placed: Any = None
    unplaced: Any = None
    """Of those whose position is only a name."""
    of_all: Any = None
    """By when they were received."""


class Outermost:
    """Keeps of the rows of each key only those that decide, however many there are."""

    def __init__(self, further: Further) -> None:
        self._further = further
        self._keys: dict[Key, dict[int, _Lane]] = {}

    @classmethod
    def newest(cls) -> Self:
        """Keep the last one of each key."""
        return cls(operator.gt)

    @classmethod
    def earliest(cls) -> Self:
        """Keep the first one of each key."""
        return cls(operator.lt)

    def add(self, row: Any) -> None:
        """Take *row* into account."""
        lanes = self._keys.setdefault((row.topic, row.consumer_group, row.key_hash), {})
        lane = lanes.setdefault(-1 if row.lane is None else row.lane, _Lane())
        place = place_of(row.position)
        if place is None:
            lane.unplaced = self._beyond(lane.unplaced, row)
        elif lane.place is None or self._further(place, lane.place):
            lane.place, lane.placed = place, row
        lane.of_all = self._beyond(lane.of_all, row)

    def beyond(self, letters: Mapping[Key, list[Candidate]]) -> dict[str, Any]:
        """Return the row beyond each of *letters* that has one, by the letter's id."""
        found = {}
        for key, rows in letters.items():
            lanes = self._keys.get(key, {})
            for letter in rows if lanes else ():
                if (row := self._row(lanes, letter)) is not None:
                    found[letter.dlq_id] = row
        return found

    def _row(self, lanes: Mapping[int, _Lane], letter: Candidate) -> Any:
        place = place_of(letter.position)
        for number, lane in lanes.items():
            rest = lane.of_all
            if number == letter.partition and place is not None:
                if lane.place is not None and self._further(lane.place, place):
                    return lane.placed
                rest = lane.unplaced
            if rest is not None and self._further(rest.seq, letter.seq):
                return rest
        return None

    def _beyond(self, known: Any, row: Any) -> Any:
        return row if known is None or self._further(row.seq, known.seq) else known
