"""Near-duplicate groups: many groups that are probably one cause.

Groups by text are compared by the words of their titles, groups by stack by their calls; the
exception type must be the same. Candidates are found by MinHash and bands, so cost grows with
the number of groups, not with its square; each is then checked. The result does not depend on
order: a cluster is called after the smallest id in it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

ALIKE = 0.6
"""The share of words that two titles must have in common."""
_BANDS, _ROWS = 16, 2
_PRIME = (1 << 31) - 1
_CHECKED = 6
_WORD = re.compile(r"[^\s,;()\[\]{}=\"']+")
_MASK = re.compile(r"<[a-z0-9]{1,8}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """What a group is compared by."""

    group_id: str
    error_type: str
    title: str
    calls: str = ""
    """The group's own calls, `module:function`, parted by `>`; empty if it is one by text."""


def clusters(groups: Sequence[Likeness]) -> dict[str, str]:
    """Return the cluster of each group that has one: two groups at least."""
    by_type: dict[tuple[str, bool], list[Likeness]] = {}
    for one in sorted(groups, key=lambda one: one.group_id):
        by_type.setdefault((one.error_type, bool(one.calls)), []).append(one)
    found: dict[str, str] = {}
    for some in by_type.values():
        if len(some) > 1:
            found |= _clustered(some)
    return found


def words(one: Likeness) -> frozenset[str]:
    """Return what of *one* is compared: calls, or the words of the title without masks."""
    if one.calls:
        return frozenset(one.calls.split(">"))
    said = {_MASK.sub("", word).strip(".:-") for word in _WORD.findall(one.title)}
    return frozenset(said - {""})


def _clustered(groups: list[Likeness]) -> dict[str, str]:
    # Equal sets of words are equal groups; they are compared once.
    sets: dict[frozenset[str], list[int]] = {}
    for number, one in enumerate(groups):
        sets.setdefault(words(one), []).append(number)
    parents = list(range(len(groups)))
    for same in sets.values():
        for number in same[1:]:
            _join(parents, same[0], number)
    distinct = [key for key in sets if key]
    for first, second in _candidates(distinct):
        if _jaccard(distinct[first], distinct[second]) >= ALIKE:
            _join(parents, sets[distinct[first]][0], sets[distinct[second]][0])
    members: dict[int, list[str]] = {}
    for number, one in enumerate(groups):
        members.setdefault(_root(parents, number), []).append(one.group_id)
    return {
        name: min(together)
        for together in members.values()
        if len(together) > 1
        for name in together
    }


def _candidates(sets: Sequence[frozenset[str]]) -> Iterable[tuple[int, int]]:
    """Yield pairs that agree in a band of their signatures."""
    if len(sets) < 2:
        return
    signatures = _signatures(sets)
    for band in range(_BANDS):
        rows = signatures[:, band * _ROWS : (band + 1) * _ROWS]
        heads: dict[bytes, list[int]] = {}
        for number in range(len(sets)):
            bucket = heads.setdefault(rows[number].tobytes(), [])
            for head in bucket:
                yield head, number
            if len(bucket) < _CHECKED:
                bucket.append(number)


def _signatures(sets: Sequence[frozenset[str]]) -> NDArray[np.int64]:
    size = _BANDS * _ROWS
    random = np.random.default_rng(1)
    factor, offset = (random.integers(1, _PRIME, size, dtype=np.int64) for _ in range(2))
    known: dict[str, int] = {}
    signatures = np.empty((len(sets), size), dtype=np.int64)
    for number, one in enumerate(sets):
        values = np.fromiter((_number(word, known) for word in one), np.int64, len(one))
        signatures[number] = ((values[:, None] * factor + offset) % _PRIME).min(axis=0)
    return signatures


def _number(word: str, known: dict[str, int]) -> int:
    found = known.get(word)
    if found is None:
        digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=4).digest()
        found = known[word] = int.from_bytes(digest, "big") % _PRIME
    return found


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def _root(parents: list[int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _join(parents: list[int], one: int, other: int) -> None:
    low, high = sorted((_root(parents, one), _root(parents, other)))
    parents[high] = low
