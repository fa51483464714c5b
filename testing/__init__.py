"""Tools for tests of message producers and consumers, shipped to users.

The adapter kit needs pytest and is imported by its own name:
`from holdfast.testing.conformance import BrokerConformance`.
"""

from holdfast.testing.clock import VirtualClock
from holdfast.testing.effects import (
    crash_after,
    crash_before,
    crash_midway,
    duplicate,
    every_crash,
    fail,
    fail_after,
    rebalance,
    refuse,
    reorder,
)
from holdfast.testing.faults import Crash, Fault, FaultCall, FaultStep, always, every, nth, on_key
from holdfast.testing.handlers import ConsumerTest, Sent, assert_idempotent
from holdfast.testing.history import EventHistory, HistoryEvent
from holdfast.testing.observed import (
    Violation,
    check_effects_once,
    check_nothing_invented,
    check_nothing_left,
    check_nothing_lost,
    check_order_per_key,
    settled,
)
from holdfast.testing.proxy import FaultProxy
from holdfast.testing.scripted import ScriptedBroker
from holdfast.testing.waiting import WaitTimeout, wait_until

__all__ = [
    "ConsumerTest",
    "Crash",
    "EventHistory",
    "Fault",
    "FaultCall",
    "FaultProxy",
    "FaultStep",
    "HistoryEvent",
    "ScriptedBroker",
    "Sent",
    "Violation",
    "VirtualClock",
    "WaitTimeout",
    "always",
    "assert_idempotent",
    "check_effects_once",
    "check_nothing_invented",
    "check_nothing_left",
    "check_nothing_lost",
    "check_order_per_key",
    "crash_after",
    "crash_before",
    "crash_midway",
    "duplicate",
    "every",
    "every_crash",
    "fail",
    "fail_after",
    "nth",
    "on_key",
    "rebalance",
    "refuse",
    "reorder",
    "settled",
    "wait_until",
]
