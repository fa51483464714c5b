"""How a plan is divided into lanes: a pure decision over counts."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from holdfast.dlq.replay.lanes import LaneMark, divided, lane_of, watermark
from holdfast.dlq.replay.plan import StopPolicy, gates

counts = st.integers(min_value=0, max_value=500)


@given(
    st.lists(st.tuples(st.integers(0, 9), counts, counts), min_size=1, max_size=12),
    st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.9]), max_size=3, unique=True),
)
def test_every_lane_gives_all_it_has_in_its_order_and_stages_end_at_the_gates(
    lanes: list[tuple[int, int, int]], ramp: list[float]
) -> None:
    """No number is left out or used twice; a gate never lies inside a stage."""
    canary, rest, aside = ([one[at] for one in lanes] for at in range(3))
    total = sum(canary) + sum(rest)
    policy = StopPolicy(canary=sum(canary), ramp=tuple(sorted(ramp)))
    ranges = divided(policy, canary, rest, aside)
    at = 0
    for one in ranges:
        assert one.start == at
        at = one.beyond
    assert at == total + sum(aside)
    by_lane: dict[int, int] = defaultdict(int)
    for one in ranges:
        by_lane[one.lane] += one.size
    assert [by_lane[n] for n in range(len(lanes))] == [sum(one) for one in lanes]
    first_of_stage = {one.start for one in ranges if one.lane == 0}
    assert set(gates(total, policy)) <= first_of_stage
    assert [one.size for one in ranges[-len(lanes) :]] == aside


def test_a_hot_lane_gives_to_every_stage_in_proportion() -> None:
    """A ramp step of a half is half of each lane, not the whole of the small ones."""
    ranges = divided(StopPolicy(canary=0, ramp=(0.5,)), [0, 0], [80, 20], [0, 0])
    assert [(one.stage, one.lane, one.size) for one in ranges] == [
        (0, 0, 40), (0, 1, 10), (1, 0, 40), (1, 1, 10), (2, 0, 0), (2, 1, 0),
    ]  # fmt: skip


def test_the_lane_of_a_key_is_the_same_everywhere() -> None:
    """Plans outlive processes: a lane must not depend on Python's hash seed."""
    keys = ["9f86d081884c7d659a2feaa0c55ad015", "60303ae22b998861bce3b28f33eec1be"]
    assert [lane_of(key, 8) for key in keys] == [2, 2]
    assert {lane_of(f"{n:032x}", 4) for n in range(100)} == {0, 1, 2, 3}


def test_the_watermark_is_where_the_first_gap_is() -> None:
    """Later lanes that are ahead do not move it."""

    def mark(start: int, beyond: int, sent: int) -> LaneMark:
        return LaneMark(stage=0, lane=0, start=start, beyond=beyond, claimed=beyond, sent=sent)

    assert watermark([mark(0, 10, 10), mark(10, 20, 15), mark(20, 30, 30)]) == 15
    assert watermark([mark(0, 10, 10), mark(10, 10, 10)]) == 10
    assert watermark([]) == 0
