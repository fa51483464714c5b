"""Replay of dead letters: frozen plans, canary and ramp, confirmed by the group that failed."""

from typing import TYPE_CHECKING

from holdfast.dlq.replay import schema as _tables  # noqa: F401 - before whatever uses them
from holdfast.dlq.replay.outcomes import confirmed, confirmed_all, failed_again, held_back
from holdfast.extras import lazily
from holdfast.headers import ReplayHeaders, replay_topic
from holdfast.message import is_for, original

if TYPE_CHECKING:
    from holdfast.dlq.replay.plan import (
        EndingKind,
        Rate,
        ReplayOptions,
        ReplayPlan,
        RunResult,
        StopPolicy,
    )
    from holdfast.dlq.replay.plan_freeze import freeze
    from holdfast.dlq.replay.plans import Plans
    from holdfast.dlq.replay.selection import Selection
    from holdfast.dlq.replay.sender import Sender

__all__ = [
    "EndingKind",
    "Plans",
    "Rate",
    "ReplayHeaders",
    "ReplayOptions",
    "ReplayPlan",
    "RunResult",
    "Selection",
    "Sender",
    "StopPolicy",
    "confirmed",
    "confirmed_all",
    "failed_again",
    "freeze",
    "held_back",
    "is_for",
    "original",
    "replay_topic",
]

# A consumer confirms replays; making and sending them is for operators.
__getattr__ = lazily(
    __name__,
    {
        "plan": "EndingKind Rate ReplayOptions ReplayPlan RunResult StopPolicy",
        "plan_freeze": "freeze",
        "plans": "Plans",
        "selection": "Selection",
        "sender": "Sender",
    },
)
