"""The WAL engine: what committed is published in order, and confirmed only then."""

from __future__ import annotations

import threading
import zlib
from typing import TYPE_CHECKING

import msgspec
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import ConfigurationError, DependencyDown
from holdfast.health import ProbeResult
from holdfast.outbox import LeaseEngine, LeaseTerms, Outbox, Relay
from holdfast.outbox.relay.leases import Leases, ShardLeaseLost
from holdfast.outbox.relay.monitoring import Probes
from holdfast.outbox.wal import WalEngine, drop_slot
from holdfast.outbox.wal.cleanup import Cleaner
from holdfast.outbox.wal.protocol import arguments
from holdfast.testing import check_nothing_lost, check_order_per_key, wait_until
from tests.wal.shop import Recorder, Shop, running, steps_until, terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Postgres


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
        sink.gate.clear()
        shop.ask(
            "INSERT INTO holdfast_outbox"
            " (id, aggregatetype, aggregateid, type, payload, headers, shard)"
            " SELECT gen_random_uuid(), 'orders', 'k' || n % 10, 't', convert_to(n::text, 'UTF8'),"
            " '[]', 0 FROM generate_series(1, :n) AS n",
            n=count,
        )
        after = shop.log_end
        sink.pause_after = 2 * batch
        sink.gate.set()
        wait_until(lambda: len(sink.seen) > batch, what="the first parts are published")
        wait_until(lambda: not sink.gate.is_set(), what="the broker holds the next part")
        assert len(sink.seen) < count
        assert shop.confirmed < after
        sink.gate.set()
        wait_until(lambda: shop.left == 0, deadline=90, what="all is published and deleted")
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


def test_a_relay_looks_for_delayed_events_after_its_connections_were_cut(shop: Shop) -> None:
    """What it keeps open for its looks is replaced, like the stream and all the others."""
    sink = Recorder()
    with running(WalEngine(shop.engine, sink, terms=terms())):
        shop.add(("k", "before"))
        wait_until(lambda: sink.bodies == ["before"], what="the relay is at work")
        with Session(shop.engine) as session, session.begin():
            Outbox().add(session, "later", topic="orders", key="k", delay=2)
        shop.ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        wait_until(lambda: sink.bodies[-1] == "later", what="the delayed event is published")
    assert set(sink.bodies) == {"before", "later"}


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
    monkeypatch.setattr("holdfast.outbox.wal.catchup._LOOK_SECONDS", 0.2)
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
    first = WalEngine(shop.engine, dead, terms=terms(600))
    steps_until(first, lambda: first._reading is not None, "the first one streams")
    second = WalEngine(shop.engine, alive, terms=terms(3.0))
    assert second.step().standby
    for number in range(5):
        shop.add(("k", str(number)))
    for table in ("shard", "relay"):  # its lease is over, and it does not move any more
        shop.ask(f"UPDATE holdfast_outbox_{table} SET until = 0")  # noqa: S608 - our own names
    with running(second):
        wait_until(lambda: len(alive.seen) == 5, what="the second one took over")
        first._leases._renewed = float("-inf")  # a renewal is due
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
    with pytest.raises(ShardLeaseLost):
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
    with pytest.raises(ShardLeaseLost):
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
    monkeypatch.setattr("holdfast.outbox.wal.slot._PATIENCE_SECONDS", 0.3)
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
    engine = WalEngine(shop.engine, Recorder(), terms=terms())
    with running(engine) as relay:
        probes = Probes(relay.health)
        wait_until(lambda: pid in probes.ready().why, what="the stranger is named")
        assert not probes.ready().good
        stranger.close()
        wait_until(lambda: probes.ready() == ProbeResult(True, "publishing"), what="it is ready")


def test_a_relay_that_loses_its_lease_while_it_opens_lets_its_snapshot_go(shop: Shop) -> None:
    """It pins no vacuum as a standby, and publishes nothing of it when the lease is back."""
    early, late = Recorder(), Recorder()
    Relay(WalEngine(shop.engine, Recorder())).run_once()
    shop.add(("k", "1"))
    mine = create_engine(shop.url, connect_args={"application_name": "frozen"})
    frozen = WalEngine(mine, early, terms=terms(0.5))  # over before anybody asks
    frozen.step()
    wait_until(lambda: frozen._opening._future and frozen._opening._future.done(), what="opened")
    other = WalEngine(shop.engine, late, terms=terms(5.0))
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


def test_an_event_of_the_removed_outbox_ends_the_relay_and_is_not_confirmed(shop: Shop) -> None:
    """A former version wrote it without a row: the log alone holds it."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    shop.add(("a", "row before"))
    body = msgspec.msgpack.encode(("id", "orders", "a", "type", b"1", "[]", 0))
    emit = "SELECT CAST(pg_logical_emit_message(true, 'holdfast', CAST(:body AS bytea)) AS text)"
    shop.ask(emit, body=body)
    end = shop.log_end
    for _ in range(2):  # nor is it passed by the second time
        with pytest.raises(ConfigurationError, match="--messages  of the version that wrote it"):
            Relay(WalEngine(shop.engine, sink)).run_once()
    assert shop.confirmed < end
    assert sink.bodies == ["row before"]


def test_a_strangers_message_with_our_prefix_stops_nobody(shop: Shop) -> None:
    """It is no event of ours."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    shop.ask("SELECT CAST(pg_logical_emit_message(true, 'holdfast', 'garbage') AS text)")
    shop.add(("a", "1"))
    assert Relay(WalEngine(shop.engine, sink)).run_once() == 1


def test_a_slot_that_was_dropped_costs_nothing(shop: Shop) -> None:
    """The table has everything."""
    sink = Recorder()
    Relay(WalEngine(shop.engine, sink)).run_once()
    shop.add(("a", "1"))
    assert drop_slot(shop.engine)
    assert Relay(WalEngine(shop.engine, sink)).run_once() == 1
    assert sink.bodies == ["1"]


def test_nonsense_is_refused_when_the_engine_is_made(shop: Shop) -> None:
    """The message names the field and the fix."""
    sink = Recorder()
    with pytest.raises(ConfigurationError, match="PostgreSQL only"):
        WalEngine("sqlite://", sink)
    with pytest.raises(ConfigurationError, match="batch=0"):
        WalEngine(shop.engine, sink, batch=0)
    with pytest.raises(ConfigurationError, match="a-z, 0-9"):
        WalEngine(shop.engine, sink, slot="Nope!")
