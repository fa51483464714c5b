"""The WAL engine: what committed is published in order, and confirmed only then."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.outbox import LeaseEngine, LeaseTerms, Outbox, Relay
from holdfast.outbox.leases import LeaseLost, Leases
from holdfast.outbox.measured_engine import MeasuredEngine
from holdfast.outbox.probes import Probes, Verdict
from holdfast.outbox.schema import outbox
from holdfast.outbox.wal import WalEngine, WalOutbox, drop_slot
from holdfast.outbox.wal.cleaner import Cleaner
from holdfast.outbox.wal.stream import arguments
from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from tests.wal.shop import Recorder, Shop, running, steps_until, terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Postgres

PAGE = Path(__file__).parents[2] / "docs" / "outbox.md"


@pytest.fixture
def shop(postgres: Postgres, request: pytest.FixtureRequest) -> Iterator[Shop]:
    """Yield a shop in a database of its own; its slot goes with it."""
    shop = Shop(postgres.database(f"wal_{zlib.crc32(request.node.name.encode())}"))
    yield shop
    shop.drop()


def test_what_committed_is_published_in_order_and_what_rolled_back_is_not(shop: Shop) -> None:
    """From the table before the start, from the stream after it; then the rows are gone."""
    sink = Recorder()
    shop.add(("a", "1"), ("b", "1"))
    with running(WalEngine(shop.engine, sink, terms=terms())):
        wait_until(lambda: len(sink.seen) == 2, what="the table is published")
        with Session(shop.engine) as session:
            Outbox().add(session, "never", topic="orders", key="a")
            session.flush()
            session.rollback()
        shop.add(("a", "2"), ("b", "2"))
        shop.add(("a", "3"), (None, "no key"))
        wait_until(lambda: len(sink.seen) == 6, what="the stream is published")
        wait_until(lambda: shop.left == 0, what="the rows are deleted")
    assert sink.seen == [
        ("a", "1"), ("b", "1"), ("a", "2"), ("b", "2"), ("a", "3"), ("", "no key"),
    ]  # fmt: skip
    assert shop.confirmed >= 0


def test_a_url_of_several_hosts_finds_the_one_that_answers(shop: Shop) -> None:
    """Also for the replication connection, after a failover say."""
    url, sink = shop.engine.url, Recorder()
    shop.add(("k", "1"))
    hosts = f"host={url.host}:1&host={url.host}:{url.port}"
    Relay(WalEngine(f"postgresql+psycopg://postgres@/{url.database}?{hosts}", sink)).run_once()
    assert (sink.bodies, shop.left) == (["1"], 0)


def test_once_ends_when_everything_is_published(shop: Shop) -> None:
    """For cron: what is there goes out, then the relay ends and leaves slot and leases free."""
    sink = Recorder()
    for number in range(3):
        shop.add(("k", str(number)))
        assert Relay(WalEngine(shop.engine, sink)).run_once() == 1
    assert sink.bodies == ["0", "1", "2"]
    assert shop.left == 0


def test_nothing_is_confirmed_before_the_broker_has_it(shop: Shop) -> None:
    """While the broker holds a batch back the slot stays before it, keepalives or not."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        shop.add(("k", "0"))
        wait_until(lambda: sink.seen, what="the first is published")
        sink.gate.clear()
        sink.entered.clear()
        shop.add(("k", "1"))
        wait_until(sink.entered.is_set, what="the broker holds the batch")
        before = shop.confirmed
        shop.add(("k", "2"))
        after = shop.log_end
        beats = "SELECT reply_time FROM pg_stat_replication WHERE application_name LIKE 'holdfast%'"
        for _ in range(3):  # the server hears of us, and nothing of what the broker holds
            last = shop.ask(beats)
            shop.ask("SELECT pg_logical_emit_message(false, 'noise', 'x')")
            wait_until(lambda last=last: shop.ask(beats) != last, what="a beat")
            assert before <= shop.confirmed < after
        sink.gate.set()
        wait_until(lambda: shop.confirmed >= after, what="the confirmation")
    assert sink.bodies == ["0", "1", "2"]


def test_an_idle_relay_lets_the_log_go(shop: Shop) -> None:
    """Other tables write, the outbox does not: the slot follows all the same."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        shop.add(("k", "1"))
        wait_until(lambda: sink.seen, what="the stream runs")
        shop.ask("CREATE TABLE other (t text)")
        for _ in range(5):
            shop.ask("INSERT INTO other SELECT repeat('x', 500) FROM generate_series(1, 2000)")
        end = shop.log_end
        wait_until(lambda: shop.confirmed >= end, what="the slot follows the log")


def test_a_large_transaction_goes_out_in_parts_and_is_confirmed_as_a_whole(shop: Shop) -> None:
    """Memory is bounded by the batch; nothing of it is confirmed before its end."""
    sink = Recorder()
    count, batch = 20_000, 500
    engine = WalEngine(shop.engine, sink, terms=terms(10), batch=batch)
    with running(engine):
        wait_until(lambda: engine._reading is not None, what="the stream runs")
        before = shop.log_end
        sink.gate.clear()
        shop.ask(
            "INSERT INTO holdfast_outbox"
            " (id, aggregatetype, aggregateid, type, payload, headers, shard)"
            " SELECT gen_random_uuid(), 'orders', 'k' || n % 10, 't', convert_to(n::text, 'UTF8'),"
            " '[]', 0 FROM generate_series(1, :n) AS n",
            n=count,
        )
        after = shop.log_end
        sink.gate.set()
        wait_until(lambda: len(sink.seen) > batch, what="the first parts are published")
        assert len(sink.seen) < count
        assert before <= shop.confirmed + 100_000 or shop.confirmed < after
        wait_until(lambda: shop.left == 0, deadline=40, what="all is published and deleted")
    assert max(sink.batches) <= batch
    assert sink.bodies == [str(n) for n in range(1, count + 1)]


def test_a_broker_outage_loses_nothing_and_parks_nothing(shop: Shop) -> None:
    """The stream stays; what was hit goes out first when the broker is back."""
    sink = Recorder()
    engine = WalEngine(shop.engine, sink, terms=terms(10))
    with running(engine) as relay:
        shop.add(("k", "0"))
        wait_until(lambda: engine._reading is not None and sink.seen, what="the stream runs")
        reading = engine._reading
        sink.down = True
        for number in range(1, 30):
            shop.add((f"k{number % 3}", str(number)))
        wait_until(lambda: relay.health.failures >= 3, what="the relay noticed")
        sink.down = False
        wait_until(lambda: shop.left == 0, what="all is published and deleted")
        assert engine._reading is reading
    assert sink.bodies == [str(number) for number in range(30)]
    assert shop.ask("SELECT count(*) FROM holdfast_outbox_parked") == 0


def test_a_refused_message_parks_its_key_and_the_rest_flows(shop: Shop) -> None:
    """Later messages of the key go behind it; released, they go out in order."""
    sink = Recorder()
    sink.refused = {"a2"}
    with running(WalEngine(shop.engine, sink, terms=terms())):
        shop.add(("a", "a1"), ("a", "a2"), ("b", "b1"))
        wait_until(lambda: "b1" in sink.bodies, what="the other key flows")
        shop.add(("a", "a3"), ("b", "b2"))
        shop.add(("a", "a4"))
        wait_until(lambda: "b2" in sink.bodies, what="it still flows")
        parked = "SELECT string_agg(state, ',' ORDER BY seq) FROM holdfast_outbox_parked"
        wait_until(lambda: shop.ask(parked) == "refused,behind,behind", what="the key is parked")
        assert [body for key, body in sink.seen if key == "a"] == ["a1"]
        sink.refused = set()
        shop.ask("UPDATE holdfast_outbox_parked SET state = 'released'")
        wait_until(lambda: "a4" in sink.bodies, what="the released key flows")
        shop.add(("a", "a5"))
        wait_until(lambda: "a5" in sink.bodies, what="the key is free again")
    assert [body for key, body in sink.seen if key == "a"] == ["a1", "a2", "a3", "a4", "a5"]
    assert shop.ask("SELECT count(*) FROM holdfast_outbox_parked") == 0


def test_somebody_elses_row_is_published_and_stops_nobody(shop: Shop) -> None:
    """Headers that are not ours travel as they are."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        shop.ask(
            "INSERT INTO holdfast_outbox"
            " (id, aggregatetype, aggregateid, type, payload, headers, shard)"
            " VALUES (gen_random_uuid(), 'orders', 'x', 't', 'theirs', '{\"a\": 1}', 0)"
        )
        shop.add(("k", "ours"))
        wait_until(lambda: sink.bodies == ["theirs", "ours"], what="both are published")


def test_delayed_events_come_when_they_are_due(shop: Shop) -> None:
    """They are moved into the outbox and arrive by the stream."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        with Session(shop.engine) as session, session.begin():
            Outbox().add(session, "later", topic="orders", key="k", delay=0.3)
        shop.add(("k", "now"))
        wait_until(lambda: sink.bodies == ["now", "later"], what="both are published")


def test_a_dropped_slot_is_made_anew_and_the_table_is_read(shop: Shop) -> None:
    """What committed while there was no slot is published, in order, and then the stream."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    assert drop_slot(shop.engine)
    for number in range(10):
        shop.add(("k", str(number)))
    with running(WalEngine(shop.engine, sink, terms=terms())):
        wait_until(lambda: len(sink.seen) == 10, what="the table is published")
        for number in range(10, 20):
            shop.add(("k", str(number)))
        wait_until(lambda: shop.left == 0, what="the stream is published")
    assert sink.bodies == [str(number) for number in range(20)]


def test_a_slot_dropped_under_a_running_relay_is_made_anew(shop: Shop) -> None:
    """The relay notices by itself, and nothing is lost or overtaken."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms(10))):
        shop.add(("k", "0"))
        wait_until(lambda: sink.seen, what="the stream runs")
        wait_until(lambda: shop.reader, what="the slot is in use")
        wait_until(shop.cut, what="the slot is dropped", every=0)
        for number in range(1, 20):
            shop.add(("k", str(number)))
        wait_until(lambda: shop.left == 0, what="all is published")
    assert sink.bodies == [str(number) for number in range(20)]


def test_a_publication_dropped_and_made_again_costs_nothing(shop: Shop) -> None:
    """From before its birth the slot cannot be read any more; the table is read instead."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms(10))):
        shop.add(("k", "0"))
        wait_until(lambda: sink.seen, what="the stream runs")
        shop.ask("DROP PUBLICATION holdfast_outbox")
        for number in range(1, 10):
            shop.add(("k", str(number)))
        wait_until(lambda: shop.left == 0, what="all is published")
    assert sink.bodies == [str(number) for number in range(10)]


def test_rows_that_never_came_by_the_stream_are_found(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody took the table out of the publication for a while."""
    monkeypatch.setattr("holdfast.outbox.wal.leftovers._LOOK_SECONDS", 0.2)
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms(10))):
        shop.add(("k", "0"))
        wait_until(lambda: sink.seen, what="the stream runs")
        shop.ask("ALTER PUBLICATION holdfast_outbox DROP TABLE holdfast_outbox")
        shop.add(("k", "1"))
        shop.ask("ALTER PUBLICATION holdfast_outbox ADD TABLE holdfast_outbox")
        wait_until(lambda: shop.left == 0, what="the row is found")
        for number in range(2, 30):
            shop.add(("k", str(number)))
        wait_until(lambda: len(sink.seen) >= 30, what="the stream goes on")
    assert sink.bodies == [str(number) for number in range(30)]
    assert "never came by the stream" in caplog.text


def test_a_second_relay_stands_by_and_takes_over_from_a_dead_one(shop: Shop) -> None:
    """The dead one's connection is still open; its lease runs out and its reader is ended."""
    dead, alive = Recorder(), Recorder()
    first = WalEngine(shop.engine, dead, terms=terms(1.0))
    steps_until(first, lambda: first._reading is not None, "the first one streams")
    second = WalEngine(shop.engine, alive, terms=terms(1.0))
    assert second.step().standby
    for number in range(5):
        shop.add(("k", str(number)))
    with running(second):  # the first one does not move any more
        wait_until(lambda: len(alive.seen) == 5, what="the second one took over")
        wait_until(lambda: first.step().standby, what="the first one notices")
    assert dead.seen == []
    first.close()


def test_a_relay_that_lost_its_lease_deletes_nothing(shop: Shop) -> None:
    """Its published rows stay for the relay that took over."""
    lease = LeaseTerms(seconds=0.2, engine="wal", exclusive=True)
    lost, taken = Leases(shop.engine, lease), Leases(shop.engine, lease)
    lost.renew()
    assert lost.owned
    shop.add(("k", "1"))
    cleaner = Cleaner(shop.engine, lost, lambda: None, clock=SYSTEM_CLOCK)
    cleaner.add([shop.ask("SELECT seq FROM holdfast_outbox")], [])

    def took_over() -> bool:
        taken.renew()
        return bool(taken.owned)

    wait_until(took_over, what="another relay took over")
    with pytest.raises(LeaseLost):
        cleaner.flush(0)
    cleaner.close()
    assert shop.left == 1


def test_a_relay_whose_lease_is_over_by_its_own_clock_publishes_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets the stream go, asks for the lease again, and only then sends."""
    sink = Recorder()
    engine = WalEngine(shop.engine, sink, terms=terms(30))
    shop.add(("a", "1"), ("a", "2"))
    monkeypatch.setattr(Leases, "publishable", property(lambda _: 0.0))
    with pytest.raises(LeaseLost):
        _step_on(engine)
    assert (sink.seen, shop.left) == ([], 2)
    monkeypatch.undo()
    steps_until(engine, lambda: shop.left == 0, "everything is published", deadline=60)
    engine.close()
    assert sink.bodies == ["1", "2"]


def _step_on(engine: WalEngine) -> None:
    for _ in range(2000):
        engine.step()


def test_a_relay_that_ends_hands_over_at_once(shop: Shop) -> None:
    """Nobody waits for a lease that was given back."""
    one, two = Recorder(), Recorder()
    second = WalEngine(shop.engine, two, terms=terms(60))
    with running(WalEngine(shop.engine, one, terms=terms(60))):
        shop.add(("k", "1"))
        wait_until(lambda: one.seen, what="the first one works")
        assert second.step().standby
    second._leases._renewed = float("-inf")  # a renewal is due
    with running(second):
        shop.add(("k", "2"))
        wait_until(lambda: two.bodies == ["2"], what="the second one works")


def test_lease_and_wal_relays_never_publish_at_the_same_time(shop: Shop) -> None:
    """Whichever holds the shards works; the other engine waits."""
    lease_sink, wal_sink = Recorder(), Recorder()
    lease = LeaseEngine(shop.engine, lease_sink, terms=terms(60))
    lease.step()
    wal = WalEngine(shop.engine, wal_sink, terms=terms(60))
    assert wal.step().standby
    lease.close()
    wal._leases._renewed = float("-inf")
    steps_until(wal, lambda: wal._reading is not None, "the WAL engine streams")
    late = LeaseEngine(shop.engine, lease_sink, terms=terms(60))
    assert late.step().standby
    shop.add(("k", "1"))
    steps_until(wal, lambda: wal_sink.seen, "it is published")
    late.close()
    wal.close()
    assert lease_sink.seen == []


def test_switching_engines_on_a_live_system_loses_nothing(shop: Shop) -> None:
    """Lease, WAL, lease, WAL under concurrent writers: 0 lost, 0 out of order, no duplicates."""
    sink = Recorder()
    sent: list[tuple[str, str]] = []
    stop = threading.Event()

    def write(key: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            shop.add((key, f"{key}:{number}"))
            sent.append((key, f"{key}:{number}"))

    writers = [threading.Thread(target=write, args=(f"w{n}",)) for n in range(4)]
    for writer in writers:
        writer.start()
    try:
        for make in (LeaseEngine, WalEngine, LeaseEngine, WalEngine):
            goal = len(sink.seen) + 150
            with running(make(shop.engine, sink, terms=terms())):
                wait_until(lambda goal=goal: len(sink.seen) >= goal, what=f"{make} works")
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        wait_until(lambda: shop.left == 0, what="the rest is published")
    check_nothing_lost(sent, sink.seen)
    check_order_per_key(sent, sink.seen)
    assert len(sink.seen) == len(set(sink.seen))


def test_a_slot_in_a_strangers_hands_makes_the_relay_stand_by(shop: Shop) -> None:
    """The stranger is not thrown out; when it leaves, the relay goes on."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    stranger = psycopg.connect(
        **arguments(shop.engine.url), replication="database", autocommit=True
    )
    stranger.execute(
        f"START_REPLICATION SLOT {shop.slot} LOGICAL 0/0"
        " (proto_version '1', publication_names 'holdfast_outbox')"
    )
    engine = WalEngine(shop.engine, sink, terms=terms())
    wait_until(lambda: engine.step().standby, what="it stands by")
    with running(engine):
        shop.add(("k", "1"))
        stranger.close()
        wait_until(lambda: sink.bodies == ["1"], what="the relay goes on")


def test_a_stranger_who_stays_on_the_slot_makes_the_relay_unready(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named by its pid until it leaves; for cron it is a reason to try again later."""
    monkeypatch.setattr("holdfast.outbox.wal.stranger._PATIENCE_SECONDS", 0.3)
    Relay(WalEngine(shop.engine, Recorder())).run_once()
    stranger = psycopg.connect(
        **arguments(shop.engine.url), replication="database", autocommit=True
    )
    stranger.execute(
        f"START_REPLICATION SLOT {shop.slot} LOGICAL 0/0"
        " (proto_version '1', publication_names 'holdfast_outbox')"
    )
    pid = f"PID {stranger.info.backend_pid}"
    with pytest.raises(DependencyDown, match=pid):
        Relay(WalEngine(shop.engine, Recorder())).run_once()
    engine = MeasuredEngine(WalEngine(shop.engine, Recorder(), terms=terms()))
    with running(engine) as relay:
        probes = Probes(relay.health, engine)
        wait_until(lambda: pid in probes.ready().why, what="the stranger is named")
        assert not probes.ready().good
        stranger.close()
        wait_until(lambda: probes.ready() == Verdict(True, "publishing"), what="it is ready")


def test_a_relay_that_loses_its_lease_while_it_opens_lets_its_snapshot_go(shop: Shop) -> None:
    """It pins no vacuum as a standby, and publishes nothing of it when the lease is back."""
    early, late = Recorder(), Recorder()
    Relay(WalEngine(shop.engine, Recorder())).run_once()
    shop.add(("k", "1"))
    mine = create_engine(shop.url, connect_args={"application_name": "frozen"})
    frozen = WalEngine(mine, early, terms=terms(0.5))
    frozen.step()
    wait_until(lambda: frozen._opening._future and frozen._opening._future.done(), what="opened")
    other = WalEngine(shop.engine, late, terms=terms())
    steps_until(other, lambda: late.seen and shop.left == 0, "another relay publishes")
    assert frozen.step().standby
    held = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'frozen'"
    assert shop.ask(f"{held} AND state LIKE 'idle in transaction%'") == 0
    other.close()
    frozen._leases._renewed = float("-inf")
    steps_until(frozen, lambda: frozen._reading is not None, "it has the lease again")
    frozen.close()
    mine.dispose()
    assert early.seen == []


class TestWithoutTable:
    """Events that live in the log only."""

    def test_emitted_events_are_published_and_rolled_back_ones_are_not(self, shop: Shop) -> None:
        """No row is written; order is that of the commits."""
        sink = Recorder()
        outbox = WalOutbox()
        with running(WalEngine(shop.engine, sink, messages=True, terms=terms())):
            wait_until(lambda: shop.has_slot, what="slot")
            shop.add(("a", "1"), ("a", "2"), outbox=outbox)
            with Session(shop.engine) as session:
                outbox.add(session, "never", topic="orders", key="a")
                session.rollback()
            shop.add(("a", "3"), outbox=outbox)
            shop.add(("b", "row"))
            wait_until(lambda: len(sink.seen) == 4, what="all are published")
        assert sink.seen == [("a", "1"), ("a", "2"), ("a", "3"), ("b", "row")]

    def test_what_was_not_published_comes_again(self, shop: Shop) -> None:
        """A relay that ends in an outage has confirmed nothing of it."""
        sink, later = Recorder(), Recorder()
        outbox = WalOutbox()
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        shop.add(("a", "1"), outbox=outbox)
        sink.down = True
        with running(WalEngine(shop.engine, sink, messages=True, terms=terms())) as relay:
            wait_until(lambda: relay.health.failures, what="the relay noticed")
            shop.add(("a", "2"), outbox=outbox)
        assert Relay(WalEngine(shop.engine, later, messages=True)).run_once() == 2
        assert later.bodies == ["1", "2"]

    def test_refused_events_are_parked_in_the_table(self, shop: Shop) -> None:
        """With what follows of their key; released, they go out in order."""
        sink = Recorder()
        sink.refused = {"1"}
        outbox = WalOutbox()
        with running(WalEngine(shop.engine, sink, messages=True, terms=terms())):
            wait_until(lambda: shop.has_slot, what="slot")
            shop.add(("a", "1"), ("b", "3"), outbox=outbox)
            wait_until(lambda: "3" in sink.bodies, what="the other key flows")
            shop.add(("a", "2"), outbox=outbox)
            parked = "SELECT string_agg(state, ',' ORDER BY seq) FROM holdfast_outbox_parked"
            wait_until(lambda: shop.ask(parked) == "refused,behind", what="the key is parked")
            sink.refused = set()
            shop.ask("UPDATE holdfast_outbox_parked SET state = 'released'")
            wait_until(lambda: sink.bodies == ["3", "1", "2"], what="it is released")

    def test_without_the_flag_an_event_ends_the_relay_and_is_not_confirmed(
        self, shop: Shop
    ) -> None:
        """A redeploy that forgets it must not confirm events away."""
        sink = Recorder()
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        shop.add(("a", "row before"))
        shop.add(("a", "1"), outbox=WalOutbox())
        shop.add(("a", "row after"))
        with pytest.raises(ConfigurationError, match="--messages"):
            Relay(WalEngine(shop.engine, sink)).run_once()
        assert Relay(WalEngine(shop.engine, sink, messages=True)).run_once() == 1
        assert sink.bodies == ["row before", "row after", "1"]

    def test_an_event_that_no_slot_would_keep_is_refused(self, shop: Shop) -> None:
        """Before a relay made the slot, and when the slot has another name."""
        outbox = WalOutbox()
        for _ in range(2):  # a refusal is not remembered as success
            with pytest.raises(ConfigurationError, match="holdfast relay --engine wal --messages"):
                shop.add(("a", "0"), outbox=outbox)
        sink = Recorder()
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        shop.add(("a", "1"), outbox=outbox)
        with pytest.raises(ConfigurationError, match="slot another is not there"):
            shop.add(("a", "2"), outbox=WalOutbox(slot="another"))
        assert Relay(WalEngine(shop.engine, sink, messages=True)).run_once() == 1
        assert sink.bodies == ["1"]

    def test_an_async_session_emits_as_well(self, shop: Shop) -> None:
        """The slot is looked for there, too."""
        sink, outbox = Recorder(), WalOutbox()

        async def emit() -> None:
            engine = create_async_engine(shop.url)
            try:
                async with AsyncSession(engine) as session, session.begin():
                    await outbox.add(session, "1", topic="orders", key="a")
            finally:
                await engine.dispose()

        with pytest.raises(ConfigurationError, match="is not there"):
            asyncio.run(emit())
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        asyncio.run(emit())
        assert Relay(WalEngine(shop.engine, sink, messages=True)).run_once() == 1

    def test_a_session_with_several_databases_emits_where_the_outbox_is(self, shop: Shop) -> None:
        """And what is no session is refused with the fix."""
        Relay(WalEngine(shop.engine, Recorder(), messages=True)).run_once()
        with Session(binds={outbox: shop.engine}) as session, session.begin():
            WalOutbox().add(session, "1", topic="orders")
        outside: Any = shop.engine
        with pytest.raises(ConfigurationError, match="pass the Session or Connection"):
            WalOutbox().add(outside, "2", topic="orders")
        sink = Recorder()
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        assert sink.bodies == ["1"]

    def test_the_slot_is_looked_for_once(self, shop: Shop) -> None:
        """Later events cost one statement, as before."""
        Relay(WalEngine(shop.engine, Recorder(), messages=True)).run_once()
        outbox = WalOutbox()
        shop.add(("a", "1"), outbox=outbox)
        said: list[str] = []
        event.listen(shop.engine, "before_cursor_execute", lambda *all_: said.append(all_[2]))
        shop.add(("a", "2"), outbox=outbox)
        assert len(said) == 1

    def test_a_slot_that_waits_for_our_own_transaction_does_not_keep_its_event(
        self, shop: Shop
    ) -> None:
        """It begins after our commit, so what we emit would be before it."""
        engine = WalEngine(shop.engine, Recorder(), messages=True, terms=terms(60))
        half = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = :s"
        with shop.engine.begin() as db:
            db.exec_driver_sql("SELECT pg_current_xact_id()")
            steps_until(engine, lambda: shop.ask(half, s=shop.slot), "the slot is being made")
            with pytest.raises(ConfigurationError, match="is not there"):
                WalOutbox().add(db, "too early", topic="orders", key="a")
        engine.close()

    def test_a_slot_that_was_dropped_is_told_as_a_loss(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With the positions of the log between which events are gone; the first slot is not."""
        first = Relay(WalEngine(shop.engine, Recorder(), messages=True))
        first.run_once()
        assert (first.health.slots_lost, caplog.text.count("LOST")) == (0, 0)
        assert drop_slot(shop.engine)
        again = Relay(WalEngine(shop.engine, Recorder(), messages=True))
        again.run_once()
        assert again.health.slots_lost == 1
        assert "EVENTS MAY BE LOST" in caplog.text
        caplog.clear()
        with running(WalEngine(shop.engine, Recorder(), messages=True)) as relay:
            wait_until(lambda: shop.reader, what="the slot is read")
            wait_until(shop.cut, what="the slot is dropped", every=0)
            wait_until(lambda: relay.health.slots_lost == 1, what="the loss is counted")
        said = next(r.getMessage() for r in caplog.records if "EVENTS ARE LOST" in r.getMessage())
        assert re.search(r"between \w+/\w+ and \w+/\w+ of the log", said)

    def test_without_the_flag_a_new_slot_loses_nothing_and_says_so(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The table has everything."""
        Relay(WalEngine(shop.engine, Recorder())).run_once()
        assert drop_slot(shop.engine)
        relay = Relay(WalEngine(shop.engine, Recorder()))
        relay.run_once()
        assert relay.health.slots_lost == 0
        assert "LOST" not in caplog.text

    def test_the_page_shows_code_that_runs(self, shop: Shop) -> None:
        """The block of its section, as a reader would paste it."""
        sink = Recorder()
        Relay(WalEngine(shop.engine, sink, messages=True)).run_once()
        section = PAGE.read_text().partition("\n## Events without a table\n")[2]
        block = section.partition("```python\n")[2].partition("```")[0]
        exec(block, {"engine": shop.engine})  # noqa: S102 - our own page
        assert Relay(WalEngine(shop.engine, sink, messages=True)).run_once() == 1
        assert shop.left == 0

    def test_a_strangers_message_with_our_prefix_stops_nobody(
        self, shop: Shop, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is left out, loudly."""
        sink = Recorder()
        with running(WalEngine(shop.engine, sink, messages=True, terms=terms())):
            wait_until(lambda: shop.has_slot, what="slot")
            shop.ask("SELECT pg_logical_emit_message(true, 'holdfast', 'garbage')")
            shop.add(("a", "1"), outbox=WalOutbox())
            wait_until(lambda: sink.bodies == ["1"], what="ours is published")
        assert "stranger" in caplog.text


def test_nonsense_is_refused_when_the_engine_is_made(shop: Shop) -> None:
    """The message names the field and the fix."""
    sink = Recorder()
    with pytest.raises(ConfigurationError, match="PostgreSQL only"):
        WalEngine("sqlite://", sink)
    with pytest.raises(ConfigurationError, match="batch=0"):
        WalEngine(shop.engine, sink, batch=0)
    with pytest.raises(ConfigurationError, match="a-z, 0-9"):
        WalEngine(shop.engine, sink, slot="Nope!")
