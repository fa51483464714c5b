"""The SQLite broker keeps every promise of the port, between processes too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.brokers import connect
from holdfast.testing.conformance import BrokerConformance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from holdfast.ports import Broker


class TestSqliteBroker(BrokerConformance):
    """The kit against `sqlite:`."""

    session = 2.0

    @pytest.fixture
    def url(self, tmp_path: Path, expires: bool) -> str:
        """Return the URL of a fresh file, for other processes too."""
        terms = f"session={self.session}&lease=1.2" if expires else "session=90&lease=90"
        return f"sqlite:///{tmp_path}/broker.db?{terms}"

    @pytest.fixture
    def broker(self, url: str) -> Iterator[Broker]:
        """Return a broker on the fresh file."""
        broker = connect(url)
        yield broker
        broker.close()
