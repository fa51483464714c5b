"""Networks, disks and servers that fail under a relay: it waits, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.ids import new_id
from holdfast.outbox import LeaseEngine, LeaseTerms
from holdfast.outbox.wal import WalEngine
from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from holdfast.testing.proxy import FaultProxy
from tests.servers import Postgres, RabbitMQ, Redis
from tests.servers.install import program
from tests.wal.shop import Recorder, Shop, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Broker
    from tests.servers.fixtures import PrivateServer

EVENTS = [(f"k{n % 3}", f"{n:04}" + "x" * 200) for n in range(60)]
TERMS = LeaseTerms(seconds=5)
WRITABLE = "-c default_transaction_read_only=off"


@pytest.fixture
def shop(postgres: Postgres) -> Iterator[Shop]:
    """Yield a shop in a database of its own, with its events committed."""
    shop = Shop(postgres.database(f"outage_{new_id().replace('-', '')}"))
    shop.add(*EVENTS)
    yield shop
    shop.drop()


def check(shop: Shop, seen: list[tuple[str, str]]) -> None:
    """All arrived, in order; nothing was parked."""
    check_nothing_lost(EVENTS, seen)
    check_order_per_key(EVENTS, seen)
    assert shop.ask("SELECT count(*) FROM holdfast_outbox_parked") == 0


def stored(broker: Broker, group: str) -> list[tuple[str, str]]:
    """Return what the broker has, read as *group* from the beginning."""
    source, found = broker.source(["orders"], group=group), []

    def all_here() -> bool:
        batch = source.poll(100, 0.2)
        found.extend((d.message.key_text or "", (d.body or b"").decode()) for d in batch)
        source.accept(batch)
        return {body for _, body in found} >= {body for _, body in EVENTS}

    wait_until(all_here, deadline=60, what="everything is in the broker")
    source.close()
    return found


def engine_of(kind: str, database: Any, sink: Any) -> Any:
    """Return the engine; batches of ten, so that a fault falls between or into them."""
    return {"lease": LeaseEngine, "wal": WalEngine}[kind](database, sink, batch=10, terms=TERMS)


@pytest.mark.parametrize("kind", ["lease", "wal"])
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_network_cut_in_the_middle_of_a_batch_loses_and_reorders_nothing(
    shop: Shop, redis: Redis, kind: str, direction: Any
) -> None:
    """Whether the events or their acknowledgement were cut off, they are sent again."""
    prefix = new_id()
    with ExitStack() as closing, FaultProxy(redis.host, redis.port) as proxy:
        far = connect(f"redis://{proxy.address}/0", prefix=prefix)
        near = connect(redis.url, prefix=prefix)
        sink = far.sink()
        for each in (far, near, sink):
            closing.callback(each.close)
        near.create_topic("orders", partitions=1)
        proxy.stop_after(12_000 if direction == "to_server" else 300, direction)
        with running(engine_of(kind, shop.engine, sink)) as relay:
            wait_until(lambda: relay.health.outage, what="the outage is noticed")
            proxy.heal()
            wait_until(lambda: shop.left == 0, deadline=60, what="the outbox drained")
        check(shop, stored(near, "reader"))


def test_a_database_that_is_cut_off_in_the_middle_of_a_batch_is_an_outage(
    shop: Shop, postgres: Postgres
) -> None:
    """The relay connects again and goes on from the lowest row."""
    sink = Recorder()
    with FaultProxy(postgres.host, postgres.port) as proxy:
        url = shop.engine.url.set(host=proxy.host, port=proxy.port)
        far = open_database(url.render_as_string(hide_password=False))
        proxy.stop_after(20_000, "to_client")
        with running(engine_of("lease", far, sink)) as relay:
            wait_until(lambda: relay.health.outage, what="the outage is noticed")
            proxy.heal()
            wait_until(lambda: shop.left == 0, deadline=60, what="the outbox drained")
        far.dispose()
    check(shop, sink.seen)


@pytest.mark.parametrize("kind", ["lease", "wal"])
def test_a_database_that_is_read_only_for_a_while_is_an_outage(shop: Shop, kind: str) -> None:
    """A failover leaves the old primary read only; the relay waits instead of ending."""
    sink, name = Recorder(), shop.engine.url.database
    shop.ask(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    shop.engine.dispose()
    with running(engine_of(kind, shop.engine, sink)) as relay:
        wait_until(lambda: relay.health.outage, what="the outage is noticed")
        assert "read-only" in str(relay.health.outage)
        writable = open_database(shop.url, connect_args={"options": WRITABLE})
        with writable.begin() as db:
            db.exec_driver_sql(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
            db.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        writable.dispose()
        wait_until(lambda: left(shop) == 0, deadline=60, what="the outbox drained")
    check(shop, sink.seen)


def left(shop: Shop) -> int | None:
    """Return how many events wait; None while connections that were cut are found out."""
    try:
        return shop.left
    except DBAPIError:
        return None


class Node(RabbitMQ):
    """A node of our own, to be told that its disk is full."""

    def ctl(self, *words: str) -> None:
        """Run rabbitmqctl."""
        tool = str(program("rabbitmq-server").with_name("rabbitmqctl"))
        argv = [tool, "--erlang-cookie", "holdfast", *words]
        env = {**os.environ, **self.command().env}
        subprocess.run(argv, check=True, capture_output=True, env=env)


def test_a_full_disk_of_the_broker_is_an_outage_that_parks_nothing(
    shop: Shop, private_server: PrivateServer
) -> None:
    """RabbitMQ blocks publishers below its free disk limit; when there is room, all flows."""
    node = private_server(Node)
    with ExitStack() as closing:
        broker, slow = connect(f"{node.url}?partitions=1"), connect(f"{node.url}?patience=5")
        sink = slow.sink()
        for each in (broker, slow, sink):
            closing.callback(each.close)
        broker.source(["orders"], group="reader").close()
        node.ctl("set_disk_free_limit", "9000000000000000")  # more than any disk has free
        with running(engine_of("lease", shop.engine, sink)) as relay:
            wait_until(lambda: relay.health.outage, deadline=60, what="the outage is noticed")
            assert "disk" in (relay.health.outage or "")
            assert shop.left == len(EVENTS)
            node.ctl("set_disk_free_limit", "1000")
            wait_until(lambda: shop.left == 0, deadline=90, what="the outbox drained")
        check(shop, stored(broker, "reader"))
