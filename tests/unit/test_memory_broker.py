"""The in-memory broker keeps every promise of the port."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.testing.conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Broker


class TestMemoryBroker(BrokerConformance):
    """The kit against `memory:`."""

    session = 2.0

    @pytest.fixture
    def broker(self, expires: bool) -> Iterator[Broker]:
        """Return a private broker, with short leases where the test waits for their end."""
        terms = f"session={self.session}&lease=1.2" if expires else "session=90&lease=90"
        broker = connect(f"memory:?{terms}")
        yield broker
        broker.close()


def test_a_named_memory_broker_is_shared_within_the_process() -> None:
    """Two connections to one name see the same topics."""
    first, second = connect("memory:shared-name"), connect("memory:shared-name")
    first.create_topic("orders", partitions=3)
    assert len(second.lag("g", ["orders"])) == 3
