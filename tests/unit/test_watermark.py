"""The watermark: nothing unfinished is ever committed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.watermark import Watermark

offsets = st.integers(0, 30)
moves = st.lists(st.tuples(st.sampled_from(["start", "finish"]), offsets), max_size=80)


def run(steps: list[tuple[str, int]]) -> Watermark:
    watermark = Watermark()
    for name, offset in steps:
        getattr(watermark, name)(offset)
    return watermark


@given(moves)
def test_the_position_is_that_of_the_brute_force_model(steps: list[tuple[str, int]]) -> None:
    """At each step it is the lowest unfinished offset, or one past the highest."""
    watermark, unfinished, highest = Watermark(), set[int](), -1
    for name, offset in steps:
        getattr(watermark, name)(offset)
        if name == "start":
            unfinished.add(offset)
            highest = max(highest, offset)
        else:
            unfinished.discard(offset)
        model = min(unfinished) if unfinished else (highest + 1 if highest >= 0 else None)
        assert watermark.position() == model
        assert watermark.unfinished == len(unfinished)


@given(st.sets(offsets, min_size=1), st.data())
def test_the_position_never_passes_an_unfinished_offset(
    handed_out: set[int], data: st.DataObject
) -> None:
    """Whatever finishes in whatever order, a crash reads the unfinished ones again."""
    finished = data.draw(st.permutations(sorted(handed_out)))
    finished = finished[: data.draw(st.integers(0, len(finished)))]
    watermark = run([("start", offset) for offset in sorted(handed_out)])
    for offset in finished:
        watermark.finish(offset)
    position = watermark.position()
    assert position is not None
    assert all(position <= offset for offset in handed_out - set(finished))


def test_a_later_offset_does_not_cover_an_earlier_one() -> None:
    """Finishing 1 and 2 commits nothing while 0 is being handled."""
    watermark = run([("start", 0), ("start", 1), ("start", 2), ("finish", 1), ("finish", 2)])
    assert watermark.position() == 0


def test_gaps_do_not_hold_the_position_back() -> None:
    """Compacted records and transaction markers are never handed out."""
    watermark = run([("start", 3), ("start", 9), ("finish", 3)])
    assert watermark.position() == 9
    watermark.finish(9)
    assert watermark.position() == 10


def test_nothing_is_committed_before_anything_was_handed_out() -> None:
    """A new lane has no position of its own."""
    assert Watermark().position() is None


def test_finishing_twice_or_out_of_the_blue_changes_nothing() -> None:
    """A late acknowledgement neither leaks memory nor moves the position."""
    watermark = run([("start", 0), ("finish", 0)])
    assert watermark.position() == 1
    watermark.finish(0)
    watermark.finish(7)
    assert (watermark.position(), watermark.unfinished) == (1, 0)


def test_an_offset_handed_out_again_after_a_rewind_holds_the_position() -> None:
    """After a seek backwards, a crash must read the rewound messages again."""
    watermark = run([("start", 0), ("start", 1), ("finish", 0), ("finish", 1), ("start", 0)])
    assert watermark.position() == 0
