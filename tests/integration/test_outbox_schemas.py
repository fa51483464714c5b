"""Outboxes in schemas of their own: each relay minds the tables that its search_path names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text

from holdfast.outbox import LeaseEngine
from holdfast.outbox.doctor import Doctor, Severity
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.testing import wait_until
from tests.wal.shop import Recorder, Shop, running, terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers import Postgres


@pytest.fixture
def tenant(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Shop]]:
    """Offer to make a shop whose tables live in a schema of one database."""
    url = postgres.database(f"schemas_{abs(hash(request.node.name)) % 10**9}")
    shops: list[Shop] = []

    def make(schema: str) -> Shop:
        engine = create_engine(url)
        with engine.begin() as db:
            db.execute(text(f"CREATE SCHEMA {schema}"))
        engine.dispose()
        shop = Shop(f"{url}?options=-csearch_path%3D{schema}")
        shop.slot = f"holdfast_{schema}_{abs(hash(request.node.name)) % 10**9}"
        shops.append(shop)
        return shop

    yield make
    for shop in shops:
        drop_slot(shop.engine, shop.slot)
        shop.engine.dispose()


@pytest.mark.parametrize("kind", ["lease", "wal"])
def test_the_tables_may_live_in_a_schema_of_the_search_path(
    kind: str, tenant: Callable[[str], Shop]
) -> None:
    """Both engines find them there, and the doctor too."""
    shop, sink = tenant("east"), Recorder()
    assert shop.ask("SELECT to_regclass('public.holdfast_outbox')") is None
    shop.add(("a", "1"))
    wal = WalEngine(shop.engine, sink, slot=shop.slot, terms=terms())
    with running(wal if kind == "wal" else LeaseEngine(shop.engine, sink)):
        wait_until(lambda: sink.bodies == ["1"], what="the table is published")
        shop.add(("a", "2"))
        wait_until(lambda: shop.left == 0, what="the rows are deleted")
        found = Doctor(shop.engine, slot=shop.slot).examine()
    assert sink.bodies == ["1", "2"]
    assert not [f for f in found if f.severity is Severity.CRITICAL], found


def test_a_publication_of_two_outboxes_tells_each_relay_its_own(
    tenant: Callable[[str], Shop],
) -> None:
    """The other's rows have the same numbers: to publish them would delete ours unpublished."""
    east, west, sink = tenant("east"), tenant("west"), Recorder()
    east.ask("CREATE PUBLICATION holdfast_outbox FOR TABLE east.holdfast_outbox, "
             "west.holdfast_outbox WITH (publish = 'insert')")  # fmt: skip
    with running(WalEngine(east.engine, sink, slot=east.slot, terms=terms())):
        wait_until(lambda: east.reader, what="the stream has begun")
        west.add(("a", "of the west"))
        east.add(("a", "of the east"))
        wait_until(lambda: east.left == 0, what="the rows are deleted")
    assert sink.bodies == ["of the east"]
    assert west.left == 1
