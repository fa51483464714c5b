"""What a WAL relay repeats after a kill is bounded by what it had finished before."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text

from holdfast.errors import BrokerDown
from holdfast.outbox import Relay
from holdfast.outbox.wal import WalEngine
from holdfast.outbox.wal.cleanup import FIRST_ROWS
from tests.wal.shop import Recorder, Shop, steps_until, terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Postgres

EVENTS = [(f"k{n % 7}", str(n)) for n in range(1000)]


@pytest.fixture
def shop(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Yield a shop in a database of its own; its slot goes with it."""
    shop = Shop(postgres.database(f"walr_{zlib.crc32(request.node.name.encode())}"))
    yield shop
    shop.drop()


@pytest.mark.parametrize("way", ["table", "stream"])
def test_no_more_is_published_than_may_be_repeated_until_something_is_deleted(
    shop: Shop, way: str
) -> None:
    """A kill at any moment repeats what was published and not deleted: that is kept small."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()  # makes the slot
    relay = WalEngine(shop.engine, sink, terms=terms(600))
    if way == "stream":
        steps_until(relay, lambda: relay.step().idle, "it streams")
    shop.add(*EVENTS)
    with shop.engine.connect() as db:
        db.execute(text("LOCK TABLE holdfast_outbox IN SHARE MODE"))  # read, but not deleted
        steps_until(relay, lambda: sink.seen, "something is published")
        for _ in range(20):
            assert len(sink.seen) <= FIRST_ROWS  # before a step that would wait for the lock
            relay.step()
        assert len(sink.seen) <= FIRST_ROWS
    steps_until(relay, lambda: shop.left == 0, "everything is published and deleted")
    relay.close()
    assert sink.bodies == [body for _, body in EVENTS]


def test_after_an_outage_a_relay_begins_with_few_again(shop: Shop) -> None:
    """A batch that the broker did not answer for may be stored: little is risked the next time."""
    sink = Recorder()
    relay = WalEngine(shop.engine, sink, terms=terms(600))
    shop.add(*EVENTS)
    steps_until(relay, lambda: shop.left == 0, "everything is published")
    sink.down = True
    shop.add(*EVENTS)
    with pytest.raises(BrokerDown):
        _step_on(relay)
    sink.down = False
    sink.batches.clear()
    steps_until(relay, lambda: shop.left == 0, "everything is published")
    relay.close()
    assert sink.batches[0] <= FIRST_ROWS < max(sink.batches)
    assert sink.bodies == [body for _, body in EVENTS] * 2


def _step_on(relay: WalEngine) -> None:
    for _ in range(1000):
        relay.step()
