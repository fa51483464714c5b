"""The verdict of the chain goes red for whatever it is there to see, and its faults are fair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chain.faults import FROZEN, drawn, groups
from tests.chain.verdict import Observed, judge

ORDERS = [("ada", "a1"), ("ada", "a2"), ("bob", "b1"), ("bob", "b2")]
GOOD = Observed(
    committed=ORDERS,
    effects={"billing": ORDERS, "shipping": [*ORDERS[2:], *ORDERS[:2]]},
    standing={"billing, lag": 0, "shipping, holdfast_held_key": 0},
)
MEMBERS = [f"{role}-{n}" for role in ("relay", "billing", "shipping", "shop") for n in range(3)]
SERVERS = ["kafka", "postgres", "rabbitmq"]


def seen(stage: str, *effects: tuple[str, str]) -> Observed:
    """Return the good run with other effects at one stage."""
    return replace(GOOD, effects={**GOOD.effects, stage: list(effects)})


def test_a_good_run_is_good() -> None:
    """Every order once at both stages, keys interleaved, nothing left."""
    assert judge(GOOD) == []


@pytest.mark.parametrize("stage", ["billing", "shipping"])
def test_a_lost_order_is_seen(stage: str) -> None:
    """The last order of a key never took effect."""
    (broken,) = judge(seen(stage, *ORDERS[:3]))
    assert broken == f"{stage}: nothing is lost, but: ('bob', 'b2')"


@pytest.mark.parametrize("stage", ["billing", "shipping"])
def test_a_double_effect_is_seen(stage: str) -> None:
    """Also long after the first one, in the right place of its key."""
    (broken,) = judge(seen(stage, *ORDERS, ("ada", "a2")))
    assert broken == f"{stage}: each effect happens once, but: ('ada', 'a2')"


@pytest.mark.parametrize("stage", ["billing", "shipping"])
def test_an_inversion_is_seen(stage: str) -> None:
    """Two orders of a key took effect the wrong way round."""
    (broken,) = judge(seen(stage, ORDERS[1], ORDERS[0], *ORDERS[2:]))
    assert broken == f"{stage}: each key's messages come in order, but: ('ada', ['a2', 'a1'])"


@pytest.mark.parametrize("stage", ["billing", "shipping"])
def test_an_effect_of_a_rollback_is_seen(stage: str) -> None:
    """The order that took its number later has another id."""
    (broken,) = judge(seen(stage, ("ada", "rolled-back"), *ORDERS))
    assert broken.startswith(f"{stage}: nothing comes of what was never committed")
    assert "rolled-back" in broken


@pytest.mark.parametrize(
    "place", ["billing, lag", "shipping, holdfast_held_key", "shop, holdfast_outbox"]
)
def test_whatever_is_left_is_seen(place: str) -> None:
    """A key that is held, lag and an outbox that is not empty, with every effect there."""
    (broken,) = judge(replace(GOOD, standing={**GOOD.standing, place: 7}))
    assert broken == f"the chain: nothing is left standing, but: '{place}: 7'"


@pytest.mark.parametrize(("seconds", "rounds"), [(27.0, 1), (240.0, 3)])
def test_everybody_is_hit_and_all_is_over_in_time(seconds: float, rounds: int) -> None:
    """Kills and freezes go round, every server falls, members join while topics are paused."""
    acts = drawn(seconds, MEMBERS, SERVERS, seed=1, rounds=rounds)
    assert acts == drawn(seconds, MEMBERS, SERVERS, seed=1, rounds=rounds)
    assert acts != drawn(seconds, MEMBERS, SERVERS, seed=2, rounds=rounds)
    assert max(act.at for act in acts) <= seconds
    for server in SERVERS:
        fallen = [act for act in acts if act.whom == server]
        assert len(fallen) == rounds
        assert {act.kind for act in fallen} <= {"crash", "restart"}
    frozen = [act for act in acts if act.kind == "freeze"]
    assert len(frozen) >= 2
    for act in frozen:
        assert any(
            one.kind == "thaw" and one.whom == act.whom and one.at == act.at + FROZEN
            for one in acts
        )
    (away, back) = (act.at for act in acts[:20] if act.whom == "gateway")
    for own in groups(MEMBERS):
        assert any(
            act.kind == "kill" and act.whom in own and away < act.at < back - 4 for act in acts
        )
