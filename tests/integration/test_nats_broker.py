"""The NATS JetStream adapter against a real server: the kit, and promises of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.testing.conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Broker
    from tests.servers.nats import Nats

SETTINGS = "?session=1&lease=1&dedup=60"


class TestNatsConformance(BrokerConformance):
    session = 1.0

    @pytest.fixture
    def url(self, nats: Nats) -> str:
        return nats.url + SETTINGS

    @pytest.fixture
    def broker(self, url: str) -> Iterator[Broker]:
        broker = connect(url)
        yield broker
        broker.close()
