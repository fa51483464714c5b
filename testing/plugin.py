"""The pytest plugin: fixtures for tests of what is built with Holdfast."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.testing.clock import VirtualClock
    from holdfast.testing.handlers import ConsumerTest
    from holdfast.testing.scripted import ScriptedBroker

pytest.register_assert_rewrite("holdfast.testing.conformance")


@pytest.fixture
def virtual_clock() -> VirtualClock:
    """Return a clock that moves when the test advances it."""
    from holdfast.testing.clock import VirtualClock

    return VirtualClock()


@pytest.fixture
def scripted_broker(virtual_clock: VirtualClock) -> Iterator[ScriptedBroker]:
    """Yield a broker in memory, on the virtual clock, that takes faults by `inject`."""
    from holdfast.testing.scripted import ScriptedBroker

    broker = ScriptedBroker(clock=virtual_clock)
    yield broker
    broker.close()


@pytest.fixture
def for_test() -> Iterator[Callable[..., ConsumerTest]]:
    """Yield `ConsumerTest`: `for_test(consumer, …)` does what `consumer.for_test(…)` does.

    What it makes is closed after the test.
    """
    from holdfast.testing.handlers import ConsumerTest

    with ExitStack() as closing:
        yield lambda consumer, **options: closing.enter_context(ConsumerTest(consumer, **options))
