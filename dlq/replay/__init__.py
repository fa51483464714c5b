"""Replay of dead letters: frozen plans, canary and ramp, confirmed by the group that failed."""

from holdfast.dlq.replay import schema as _tables  # noqa: F401 - before whatever uses them
from holdfast.dlq.replay.ending import Ending, EndingKind
from holdfast.dlq.replay.freezing import freeze
from holdfast.dlq.replay.marks import Marks, is_for, original, replay_topic
from holdfast.dlq.replay.outcomes import confirmed, confirmed_all, failed_again, held_back
from holdfast.dlq.replay.plan import Plan, Terms
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.rate import Rate
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.sender import Sender
from holdfast.dlq.replay.steps import Policy

__all__ = [
    "Ending",
    "EndingKind",
    "Marks",
    "Plan",
    "Plans",
    "Policy",
    "Rate",
    "Selection",
    "Sender",
    "Terms",
    "confirmed",
    "confirmed_all",
    "failed_again",
    "freeze",
    "held_back",
    "is_for",
    "original",
    "replay_topic",
]
