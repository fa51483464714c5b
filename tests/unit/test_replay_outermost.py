"""Of the messages of a key only the outermost are compared, and the verdict is the same."""

from __future__ import annotations

import operator
import random
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.dlq.replay.selection import LetterRef
from holdfast.dlq.replay.survey import OrderExtremes, by_key
from holdfast.dlq.store.overtaking import is_newer
from holdfast.dlq.store.rows import key_hash


def row(seq: int, lane: int | None, position: str | None, key: bytes = b"k") -> Any:
    return SimpleNamespace(seq=seq, topic="orders", consumer_group="billing", lane=lane,
                           position=position, key_hash=key_hash(key))  # fmt: skip


def letter(seq: int, lane: int, position: str, key: bytes | None = b"k") -> LetterRef:
    return LetterRef(dlq_id=f"d-{seq}", topic="orders", group="billing", partition=lane,
                     position=position, key=key, seq=seq)  # fmt: skip


def one_by_one(rows: list[Any], found: LetterRef, *, newest: bool) -> bool:
    """Compare each row with *found*, as slow as it is plain."""

    def beyond(one: Any) -> bool:
        same = found.partition == (-1 if one.lane is None else one.lane)
        newer = is_newer(one.position, found.position) if same else None
        if newer is None:
            return bool(one.seq > found.seq) if newest else bool(one.seq < found.seq)
        return newer if newest else bool(is_newer(found.position, one.position))

    return any(beyond(one) for one in rows)


@pytest.mark.parametrize("newest", [True, False])
def test_the_outermost_decide_as_all_would(newest: bool) -> None:
    """Over lanes, positions that are numbers, that are only names, and that are missing."""
    rng = random.Random(7)

    def place() -> str:
        return rng.choice([str(rng.randrange(9)), f"{rng.randrange(3)}-{rng.randrange(3)}", "uuid"])

    for _ in range(2000):
        rows = [
            row(rng.randrange(20), rng.choice([None, 0, 1]), rng.choice([None, place()]))
            for _ in range(rng.randrange(5))
        ]
        found = letter(rng.randrange(20), rng.choice([-1, 0, 1]), rng.choice(["", place()]))
        outermost = OrderExtremes.newest() if newest else OrderExtremes.earliest()
        for one in rows:
            outermost.add(one)
        beyond = outermost.beyond(by_key([found]))
        assert bool(beyond) is one_by_one(rows, found, newest=newest), (rows, found)
        assert not beyond or one_by_one([beyond["d-" + str(found.seq)]], found, newest=newest)


def test_a_key_with_many_messages_is_compared_once_for_each() -> None:
    """Not each with each: a thousand times a thousand took ten seconds."""
    compared = 0

    def further(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return bool(operator.gt(one, other))

    outermost = OrderExtremes(further)
    for n in range(1000):
        outermost.add(row(n, 0, str(n)))
    assert len(outermost.beyond(by_key(letter(n, 0, str(n)) for n in range(1000)))) == 999
    assert compared <= 4 * 1000


def test_another_key_and_no_key_are_nobodys_business() -> None:
    """Order counts within a key."""
    outermost = OrderExtremes.newest()
    outermost.add(row(9, 0, "9", key=b"other"))
    assert outermost.beyond(by_key([letter(1, 0, "1"), letter(2, 0, "2", key=None)])) == {}
