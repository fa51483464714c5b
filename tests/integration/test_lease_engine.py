"""The lease engine on real databases: leases, fencing, outages, delays."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast import BrokerDown, Message, MessageTooLarge, Transient
from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.cloudevents import to_wire
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.db.transactions import transact
from holdfast.outbox import Event, LeaseEngine, LeaseTerms, Outbox, Relay, create_tables
from holdfast.outbox.parked import ParkedKeys, ParkedSelection
from holdfast.outbox.relay.delayed import DUE, DelayedEvents
from holdfast.outbox.relay.leases import Leases, ShardLeaseLost
from holdfast.outbox.relay.monitoring import Backlog
from holdfast.outbox.relay.publishing import RelaySink
from holdfast.outbox.rows import shard_of, values
from holdfast.outbox.schema import SHARDS, delayed, outbox, parked, shard
from holdfast.outbox.schema import relay as relays
from holdfast.ports import Published, SinkPowers
from holdfast.testing import VirtualClock, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Connection, Engine


class NullSink:
    """Takes everything, and remembers it."""

    def __init__(self) -> None:
        self.caps = connect("memory:").caps
        self.taken: list[Message] = []
        self.down = False
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.refuse: set[bytes | None] = set()

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(120)
        if self.down:
            raise BrokerDown("nobody answers")
        self.taken += [m for m in messages if m.key not in self.refuse]
        refused = Published(MessageTooLarge(2, 1))
        return [refused if m.key in self.refuse else Published() for m in messages]

    @property
    def keys(self) -> list[str | None]:
        """The keys of what it took."""
        return [message.key_text for message in self.taken]

    def close(self) -> None: ...


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Return an engine on a fresh database with the outbox tables."""
    name = f"lease_{abs(hash(request.node.name)) % 10**9}"
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database(name)
    engine = open_database(url)
    create_tables(engine)
    yield engine
    engine.dispose()


def stage(engine: Engine, count: int, key: str = "k", **options: Any) -> None:
    """Commit *count* events of one key."""
    with Session(engine) as session, session.begin():
        Outbox().add_all(
            session, [Event(body={"n": n}, topic="t", key=key, **options) for n in range(count)]
        )


def size(engine: Engine, table: Any = outbox) -> int:
    """Return how many rows *table* has."""
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(table)).scalar_one()


def test_what_was_committed_is_published_in_order_and_deleted(engine: Engine) -> None:
    """Each key's events leave in the order of their rows."""
    stage(engine, 30, "a")
    stage(engine, 30, "b")
    sink = NullSink()
    assert Relay(LeaseEngine(engine, sink, batch=7)).run_once() == 60
    assert size(engine) == 0
    for key in (b"a", b"b"):
        assert [m.payload for m in sink.taken if m.key == key] == [
            b'{"n":%d}' % n for n in range(30)
        ]


def test_what_came_all_at_once_after_a_pause_is_published_in_order(engine: Engine) -> None:
    """A pass over a table with little in it reads one batch; the next one reads the rest."""
    sink = NullSink()
    moving = LeaseEngine(engine, sink, batch=3)
    for _ in range(3):
        while not moving.step().idle:
            pass
        stage(engine, 10)
    assert Relay(moving).run_once() == 10
    assert [m.payload for m in sink.taken] == [b'{"n":%d}' % n for n in range(10)] * 3
    assert size(engine) == 0


@pytest.mark.parametrize("engine", ["postgres", "mariadb"], indirect=True)
def test_an_event_does_not_wait_until_those_before_it_are_deleted(engine: Engine) -> None:
    """They are published once all the same, although the next pass still sees them."""
    sink, terms = NullSink(), LeaseTerms(seconds=60)
    moving = LeaseEngine(engine, sink, terms=terms)
    while not moving.step().idle:
        pass
    relay = Relay(moving)
    thread = threading.Thread(target=relay.run)
    try:
        with engine.connect() as db:
            db.execute(select(shard).with_for_update())  # no deletion passes this
            thread.start()
            for key in ("a", "b"):
                stage(engine, 1, key)
                wait_until(lambda key=key: sink.keys[-1:] == [key], what=f"{key} is published")
            assert size(engine) == 2
        wait_until(lambda: size(engine) == 0, what="both are deleted")
    finally:
        relay.stop()
        thread.join(90)
    assert sink.keys == ["a", "b"]


@contextmanager
def deletions(engine: Engine) -> Iterator[list[str]]:
    """Collect the statements that delete from the outbox inside the block."""
    seen: list[str] = []

    def note(_db: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "DELETE" in statement and "seq" in statement:
            seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def idled(moving: LeaseEngine) -> None:
    """Step until nothing is to be done, twice: the next scan is a brief one then."""
    for _ in range(2):
        while not moving.step().idle:
            pass


@pytest.mark.parametrize("engine", ["postgres", "mariadb"], indirect=True)
def test_events_that_come_one_by_one_are_deleted_together(engine: Engine) -> None:
    """Each is published at once and only once; a transaction for each would cost the most."""
    sink, clock = NullSink(), VirtualClock(auto=True)
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=clock)
    idled(moving)
    with deletions(engine) as seen:
        for key in "abcdefgh":
            stage(engine, 1, key)
            assert moving.step().published == 1
        assert (sink.keys, size(engine), len(seen)) == (list("abcdefgh"), 8, 0)
        while not moving.step().idle:  # the clock goes on while it rests
            pass
        assert (sink.keys, size(engine), len(seen)) == (list("abcdefgh"), 0, 1)
    moving.close()


@pytest.mark.parametrize("engine", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("how", ["many", "large"])
def test_few_and_small_events_wait_for_their_deletion(engine: Engine, how: str) -> None:
    """What is put off is read again by each look, and repeated after a kill: that is bounded."""
    sink, clock = NullSink(), VirtualClock(auto=True)
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=clock)
    idled(moving)
    bodies = ["x"] * 64 if how == "many" else ["x" * 70_000]
    with deletions(engine) as seen:
        for body in bodies:
            with Session(engine) as session, session.begin():
                Outbox().add(session, body, topic="t", key="k")
            while not moving.step().published:
                pass
        wait_until(lambda: bool(seen), what="a deletion has begun")
    moving.close()
    assert len(sink.taken) == len(bodies)


@pytest.mark.parametrize("engine", ["postgres", "mariadb"], indirect=True)
def test_an_outage_of_the_broker_repeats_nothing_that_it_took_before(engine: Engine) -> None:
    """Also what waits to be deleted when the broker goes down is deleted."""
    sink = NullSink()
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=VirtualClock(auto=True))
    idled(moving)
    stage(engine, 1, "a")
    assert moving.step().published == 1
    assert size(engine) == 1
    sink.down = True
    stage(engine, 1, "b")
    with pytest.raises(BrokerDown):
        moving.step()
    assert size(engine) == 1
    sink.down = False
    assert Relay(moving).run_once() == 1
    assert sink.keys == ["a", "b"]


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_quiet_relay_asks_one_small_question(engine: Engine) -> None:
    """No step goes by for nothing, and an event that comes is found by the next."""
    sink, clock = NullSink(), VirtualClock(auto=True)
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=clock)
    idled(moving)
    asked: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _db, _cursor, sql, *_: asked.append(sql))
    for _ in range(5):
        assert moving.step().idle
    assert not asked  # of SQLAlchemy
    stage(engine, 1, "a")
    asked.clear()
    assert moving.step().published == 1
    assert not asked
    moving.close()
    assert size(engine) == 0


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_look_reads_what_a_scan_reads(engine: Engine) -> None:
    """Past the driver's own reading: no key, no payload, bytes, numbers and letters of any kind."""
    moving = LeaseEngine(engine, NullSink(), clock=VirtualClock(auto=True))
    idled(moving)
    events = [
        Event(body=b"\x00\xff", topic="t", key="ü\U0001f600", headers={"n": b"\xff"}),
        Event(body=None, topic="t"),
        Event(body=b"", topic="t", key="", type="T'\""),
    ]
    with engine.begin() as db:
        Outbox().add_all(db, events)
    seen = moving._scan.look([])
    assert seen == moving._scan.read()
    assert [row[4] for row in seen] == [b"\x00\xff", None, b""]
    assert moving._scan.look([row[0] for row in seen[:2]]) == seen[2:]
    moving.close()


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_leases_are_extended_while_events_are_published(engine: Engine) -> None:
    """Nothing is settled for it, no shard changes hands; what the database keeps is later."""
    clock = VirtualClock(auto=True)
    moving = LeaseEngine(engine, NullSink(), terms=LeaseTerms(seconds=60), clock=clock)
    idled(moving)
    owned, ends = moving._leases.owned, select(func.min(shard.c.until))
    with engine.connect() as db:
        before = db.execute(ends).scalar_one()
    for _ in range(2):
        clock.advance(25)
        assert moving._leases.due
        stage(engine, 1)
        assert moving.step().published == 1
        assert moving._scan.looks  # no new snapshot was taken
        assert not moving._leases.due  # they were extended
    assert moving._leases.owned is owned
    with engine.connect() as db:
        assert db.execute(ends).scalar_one() > before
    moving.close()


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
@pytest.mark.parametrize("lost", ["to another", "by time", "one of them"])
def test_leases_that_were_lost_are_not_extended(engine: Engine, lost: str) -> None:
    """They count on as long as they did; the relay has to ask for them anew."""
    clock = VirtualClock()
    leases = Leases(engine, LeaseTerms(seconds=60), clock=clock)
    leases.renew()
    change: dict[str, Any] = {"owner": "other"} if lost == "to another" else {"until": 0}
    which = shard.c.shard == 5 if lost == "one of them" else shard.c.shard >= 0
    with engine.begin() as db:
        db.execute(shard.update().where(which).values(change))
    clock.advance(25)
    left = leases.remaining
    assert not leases.extend()
    assert leases.remaining == left


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_relay_that_extends_its_leases_makes_room_for_another(engine: Engine) -> None:
    """It hears of a newcomer as soon as by a renewal, and gives up its half."""
    clock = VirtualClock(auto=True)
    first, second = (
        LeaseEngine(engine, NullSink(), terms=LeaseTerms(seconds=60), clock=clock) for _ in range(2)
    )
    idled(first)
    second._leases.renew()
    assert (_owned(first), _owned(second)) == (SHARDS, 0)
    clock.advance(25)

    def has_given() -> bool:
        first.step()
        return _owned(first) == SHARDS // 2

    wait_until(has_given, what="the first has given up its half")
    assert first._leases.remaining > 50
    first.close()
    second.close()


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_an_event_that_commits_late_is_found_below_those_that_wait_to_be_deleted(
    engine: Engine,
) -> None:
    """Its number is lower than theirs; a look that began above them would pass it by."""
    sink, clock = NullSink(), VirtualClock(auto=True)
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=clock)
    idled(moving)
    with engine.connect() as late:
        Outbox().add(late, {}, topic="t", key="late")
        stage(engine, 1, "early")
        assert moving.step().published == 1
        assert moving.step().rested
        late.commit()
    assert moving.step().published == 1
    moving.close()
    assert (sink.keys, size(engine)) == (["early", "late"], 0)


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_quiet_relay_notices_that_its_connection_is_gone(engine: Engine) -> None:
    """It goes on with another, and loses nothing."""
    sink = NullSink()
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=600), clock=VirtualClock(auto=True))
    idled(moving)
    with engine.begin() as db:
        db.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    with pytest.raises(DBAPIError):
        moving.step()
    stage(engine, 1, "a")
    assert Relay(moving).run_once() == 1
    assert (sink.keys, size(engine)) == (["a"], 0)


def test_a_relay_whose_lease_was_taken_deletes_nothing(engine: Engine) -> None:
    """The zombie's publishes are duplicates; its deletion is refused by the epoch."""
    stage(engine, 5)
    zombie_sink, terms = NullSink(), LeaseTerms(seconds=60)
    zombie_sink.gate = threading.Event()
    zombie = LeaseEngine(engine, zombie_sink, terms=terms)
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            zombie.step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test looks at it
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert zombie_sink.entered.wait(90)
    with engine.begin() as db:  # its time is over, though it does not know
        db.execute(shard.update().values(until=0))
        db.execute(relays.update().values(until=0))
    heir = LeaseEngine(engine, NullSink(), terms=LeaseTerms(seconds=60))
    wait_until(lambda: _takes(heir), deadline=90, what="the heir owns the shards")
    zombie_sink.gate.set()
    thread.join(90)
    zombie.close()
    assert size(engine) == 5
    assert isinstance(outcome[0], ShardLeaseLost)
    assert Relay(heir).run_once() == 5
    assert size(engine) == 0


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_without_the_epoch_guard_that_test_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie that does not ask deletes what belongs to its heir."""
    monkeypatch.setattr(Leases, "holds", lambda *_: True)
    with pytest.raises(AssertionError, match="== 5"):
        test_a_relay_whose_lease_was_taken_deletes_nothing(engine)


class HurriedSink(NullSink, SinkPowers):
    """A sink that can be told how long it has."""

    keeps_deadlines = True

    def __init__(self) -> None:
        super().__init__()
        self.told: list[float] = []

    def publish_within(self, messages: Sequence[Message], seconds: float) -> list[Published]:
        self.told.append(seconds)
        return self.publish(messages)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_publish_must_end_before_the_lease_does(engine: Engine) -> None:
    """The sink is told how long it has, by the relay's own clock, less a tenth to let go."""
    clock, sink = VirtualClock(), HurriedSink()
    leases = Leases(engine, LeaseTerms(seconds=10), clock=clock)
    leases.renew()
    bounded = RelaySink(sink, leases)
    clock.advance(4)
    bounded.publish([Message.new("t", b"x")])
    assert sink.told == [pytest.approx(5)]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("sink", [NullSink(), HurriedSink()])
def test_a_relay_that_was_frozen_beyond_its_lease_publishes_nothing(
    engine: Engine, sink: NullSink
) -> None:
    """It need not hear of its heir: its own clock tells, before each batch."""
    clock = VirtualClock()
    leases = Leases(engine, LeaseTerms(seconds=10), clock=clock)
    leases.renew()
    bounded = RelaySink(sink, leases)
    clock.advance(9)
    with pytest.raises(ShardLeaseLost):
        bounded.publish([Message.new("t", b"x")])
    assert sink.taken == []


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_relay_frozen_between_reading_and_publishing_starts_afresh(engine: Engine) -> None:
    """What it had read is not sent under a lease that is over; it asks for a new one first."""
    clock, sink = VirtualClock(), NullSink()
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=10), clock=clock)
    moving.step()
    stage(engine, 3)
    read = moving._scan.read

    def frozen() -> Any:
        rows = read()
        if rows:
            clock.advance(60)
        return rows

    moving._scan.read = frozen  # type: ignore[method-assign]
    with pytest.raises(ShardLeaseLost):
        moving.step()
    assert (sink.taken, size(engine), _owned(moving)) == ([], 3, 0)
    moving._scan.read = read  # type: ignore[method-assign]
    assert Relay(moving).run_once() == 3
    assert size(engine) == 0


def _owned(engine: LeaseEngine) -> int:
    return len(engine._leases.owned)


def _takes(heir: LeaseEngine) -> bool:
    heir._leases.renew()
    return _owned(heir) == SHARDS


def test_relays_share_the_shards_and_the_last_one_gets_them_all(engine: Engine) -> None:
    """A newcomer gets its half, and a relay that leaves frees its own at once."""
    first, second = (
        LeaseEngine(engine, NullSink(), terms=LeaseTerms(seconds=30)) for _ in range(2)
    )
    first.step()
    assert _owned(first) == SHARDS
    second._leases.renew()
    first._leases.renew()
    second._leases.renew()
    assert (_owned(first), _owned(second)) == (SHARDS // 2, SHARDS // 2)
    assert not set(first._leases.owned) & set(second._leases.owned)
    first.close()
    second._leases.renew()
    assert _owned(second) == SHARDS
    second.close()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_relay_that_inherits_a_shard_knows_which_keys_are_parked(engine: Engine) -> None:
    """It looked a moment ago, before they were; after each renewal it looks again."""
    clock, refusing, taking = VirtualClock(), NullSink(), NullSink()
    terms = LeaseTerms(seconds=10)
    first = LeaseEngine(engine, refusing, terms=terms, clock=clock)
    second = LeaseEngine(engine, taking, terms=terms, clock=clock)
    first.step()
    second._leases.renew()
    clock.advance(4)
    first.step()  # gives up its half
    second.step()
    second._parking.refresh(second._leases, second._sink)
    key = next(key for key in map(str, range(100)) if shard_of("t", key, "") in first._leases.owned)
    refusing.refuse.add(key.encode())
    stage(engine, 1, key)
    first.step()
    assert size(engine, parked) == 1
    stage(engine, 1, key)
    first.close()
    clock.advance(3.4)
    second._parking._looked = clock.monotonic() - 0.1
    while not second.step().idle:
        pass
    assert _owned(second) == SHARDS
    assert (taking.taken, size(engine, parked)) == ([], 2)


def test_a_refused_row_that_somebody_deleted_is_not_said_to_be_parked(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The table alone says what exists; the relay says that the row is gone."""
    stage(engine, 1, "bad")
    sink = NullSink()
    sink.refuse.add(b"bad")
    sink.gate = threading.Event()
    moving = LeaseEngine(engine, sink, terms=LeaseTerms(seconds=60))
    worker = threading.Thread(target=Relay(moving).run_once)
    worker.start()
    assert sink.entered.wait(90)
    with engine.begin() as db:
        db.execute(outbox.delete())
    sink.gate.set()
    worker.join(90)
    assert size(engine, parked) == 0
    assert "is gone from the table: nothing is parked" in caplog.text


def test_relays_on_an_engine_of_the_users_own_move_a_delayed_event_once(tmp_path: Path) -> None:
    """SQLAlchemy begins SQLite's transactions without the write lock; ours take it."""
    url = f"sqlite:///{tmp_path}/plain.db"
    engines = [create_engine(url, connect_args={"timeout": 30}) for _ in range(2)]
    create_tables(engines[0])
    with engines[0].begin() as db:
        Outbox().add(db, {}, topic="t", delay=0)
    with engines[0].connect() as db:
        raw: Any = db.connection.driver_connection
        assert raw.in_transaction is False  # so it begins, unless told otherwise
    held: list[bool] = []

    def look(db: Connection) -> None:
        raw: Any = db.connection.driver_connection
        held.append(raw.in_transaction)

    transact(engines[0], look)
    assert held == [True]
    leases = [Leases(moving, LeaseTerms(seconds=60)) for moving in engines]
    leases[0].renew()
    moves = zip(engines, [leases[0], leases[0]], strict=True)
    assert [DelayedEvents(moving, own)._move_due() for moving, own in moves] == [1, 0]
    assert (size(engines[0]), size(engines[0], delayed)) == (1, 0)
    for moving in engines:
        moving.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_relays_that_died_long_ago_are_forgotten(engine: Engine) -> None:
    """Kept for a day, for the doctor to name; a loop of crashes fills no table."""
    with engine.begin() as db:
        for name, until in (("old", 0.0), ("new", time.time() - 60)):
            row = {"id": name, "until": until, "engine": "lease", "host": "h"}
            db.execute(insert(relays).values(**row))
    Leases(engine).renew()
    with engine.connect() as db:
        names = set(db.execute(select(relays.c.id)).scalars())
    assert "old" not in names
    assert "new" in names


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_relay_that_runs_for_months_forgets_the_others_that_died(engine: Engine) -> None:
    """It looks again every hour, so that the doctor does not complain for ever."""
    clock = VirtualClock()
    leases = Leases(engine, clock=clock)
    leases.renew()
    with engine.begin() as db:
        db.execute(insert(relays).values(id="old", until=0.0, engine="lease", host="h"))
    clock.advance(60)
    leases.renew()
    assert size(engine, relays) == 2
    clock.advance(3600)
    leases.renew()
    assert size(engine, relays) == 1


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_looking_at_very_many_parked_events_is_done_less_often(engine: Engine) -> None:
    """Ten times as long as a look takes is left for everything else."""
    clock = VirtualClock()
    sink = NullSink()
    sink.refuse.add(b"k")
    stage(engine, 1)
    moving = LeaseEngine(engine, sink, clock=clock)
    moving.step()
    assert size(engine, parked) == 1
    released, looks = moving._parking._released, []

    def slow(*args: Any) -> Any:
        looks.append(clock.monotonic())
        clock.advance(0.3)
        return released(*args)

    moving._parking._released = slow  # type: ignore[method-assign]
    clock.advance(1)
    for _ in range(12):
        moving._parking.refresh(moving._leases, moving._sink)
        clock.advance(0.5)
    assert len(looks) == 2


def test_a_broker_outage_parks_nothing_and_ends_by_itself(engine: Engine) -> None:
    """While the broker is down no row moves; when it is back everything flows."""
    stage(engine, 10)
    sink = NullSink()
    sink.down = True
    relay = Relay(LeaseEngine(engine, sink), backoff=Backoff(first=0.01, ceiling=0.05))
    thread = threading.Thread(target=relay.run)
    thread.start()
    wait_until(lambda: relay.health.failures >= 5, what="five failures in a row")
    assert relay.health.outage == "nobody answers"
    assert (size(engine), size(engine, parked)) == (10, 0)
    sink.down = False
    wait_until(lambda: size(engine) == 0, what="the outbox drained")
    wait_until(lambda: relay.health.outage is None, what="the outage is over")
    relay.stop()
    thread.join(90)
    assert len(sink.taken) == 10


class Asked(NullSink, SinkPowers):
    """A sink that asks its broker before each batch; it is down from the second one on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def room(self, _topics: object) -> int | None:
        self.asked += 1
        if self.asked == 2:
            raise BrokerDown("nobody answers")
        return None

    def refusal(self, _message: Message) -> None: ...


def test_an_outage_before_a_batch_repeats_nothing_of_the_one_before(engine: Engine) -> None:
    """What the broker took is deleted, though the next batch cannot be sent."""
    stage(engine, 20)
    sink = Asked()
    relay = LeaseEngine(engine, sink, batch=10)
    wait_until(lambda: _is_down(relay), what="the broker went down")
    assert size(engine) == 10
    Relay(relay).run_once()
    assert [m.payload for m in sink.taken] == [b'{"n":%d}' % n for n in range(20)]


def _is_down(relay: LeaseEngine) -> bool:
    try:
        relay.step()
    except BrokerDown:
        return True
    return False


def test_a_refused_message_parks_its_key_and_the_others_flow(engine: Engine) -> None:
    """Later events of the key wait behind it, in order, until it is released."""
    stage(engine, 3, "bad")
    stage(engine, 3, "good")
    sink = NullSink()
    sink.refuse = {b"bad"}
    Relay(LeaseEngine(engine, sink)).run_once()
    assert [m.key for m in sink.taken] == [b"good"] * 3
    stage(engine, 2, "bad")
    Relay(LeaseEngine(engine, sink)).run_once()
    assert (size(engine), size(engine, parked)) == (0, 5)
    sink.refuse = set()
    with engine.begin() as db:
        db.execute(parked.update().where(parked.c.state == "refused").values(state="released"))
    stage(engine, 1, "bad")
    Relay(LeaseEngine(engine, sink)).run_once()
    assert [m.payload for m in sink.taken if m.key == b"bad"] == [
        b'{"n":%d}' % n for n in (0, 1, 2, 0, 1, 0)
    ]
    assert (size(engine), size(engine, parked)) == (0, 0)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_the_log_tells_which_event_was_parked(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """In fields of their own, for whoever searches the logs."""
    stage(engine, 1, "bad")
    sink = NullSink()
    sink.refuse = {b"bad"}
    Relay(LeaseEngine(engine, sink)).run_once()
    told = vars(next(record for record in caplog.records if "is parked" in record.message))
    with engine.connect() as db:
        row = db.execute(select(parked)).mappings().one()
    assert (told["topic"], told["seq"], told["shard"]) == ("t", row["seq"], row["shard"])
    assert uuid.UUID(told["event"]) == row["id"]


def test_an_oversized_message_is_parked_before_anything_of_its_key_is_sent(engine: Engine) -> None:
    """What follows it in the same batch does not overtake it."""
    with Session(engine) as session, session.begin():
        for body in ({"n": 1}, {"n": "x" * 2_000_000}, {"n": 3}):
            Outbox().add(session, body, topic="t", key="k")
    sink = NullSink()
    Relay(LeaseEngine(engine, sink)).run_once()
    assert [m.payload for m in sink.taken] == [b'{"n":1}']
    assert size(engine, parked) == 2


def test_a_row_that_commits_late_is_seen_although_later_ones_were_published(engine: Engine) -> None:
    """A gap in the numbers is no end: the next pass starts from the bottom."""
    if engine.dialect.name == "sqlite":
        stage(engine, 1)  # one writer at a time: there are no late commits to see
        assert Relay(LeaseEngine(engine, NullSink())).run_once() == 1
        return
    sink = NullSink()
    moving = LeaseEngine(engine, sink, batch=2)
    with engine.connect() as late, late.begin():
        Outbox().add(late, {"n": "late"}, topic="t", key="late")
        stage(engine, 5, "early")
        while not moving.step().idle:
            pass
        assert len(sink.taken) == 5
    Relay(moving).run_once()
    assert sink.taken[-1].key == b"late"
    assert size(engine) == 0


def test_a_row_that_commits_late_amid_what_is_published_is_not_deleted_with_it(
    engine: Engine,
) -> None:
    """Its number lies between those of rows that are deleted together, by ranges."""
    if engine.dialect.name == "sqlite":
        return  # one writer at a time: nothing commits late
    sink = NullSink()
    moving = LeaseEngine(engine, sink)
    stage(engine, 100, "before")  # it learns that rows are small: then it reads many at once
    while not moving.step().idle:
        pass
    sink.taken.clear()
    sink.entered.clear()
    sink.gate = threading.Event()
    stage(engine, 100, "below")
    with engine.connect() as late, late.begin():
        Outbox().add(late, {"n": "late"}, topic="t", key="late")
        stage(engine, 100, "above")
        thread = threading.Thread(target=moving.step)
        thread.start()
        assert sink.entered.wait(90)
    sink.gate.set()  # committed before the others are deleted
    thread.join(90)
    assert len(sink.taken) == 200
    wait_until(lambda: size(engine) == 1, deadline=90, what="the others are deleted")
    assert Relay(moving).run_once() == 1
    assert sink.taken[-1].key == b"late"
    assert size(engine) == 0


@pytest.mark.parametrize("engine", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("after_a_pause", [False, True])
def test_a_pass_never_reads_past_an_event_that_commits_late(
    engine: Engine, *, after_a_pause: bool
) -> None:
    """The next event of its key, committed after it, is not published before it."""
    sink = NullSink()
    moving = LeaseEngine(engine, sink, batch=2)
    while after_a_pause and not moving.step().idle:
        pass
    with engine.connect() as late:
        with late.begin():
            Outbox().add(late, ["e1"], topic="t", key="K")
            stage(engine, 2, "other")
            moving.step()
        stage(engine, 1, "K")
    while not moving.step().idle:
        pass
    moving.close()
    assert [m.payload for m in sink.taken if m.key == b"K"] == [b'["e1"]', b'{"n":0}']


def test_a_delayed_event_is_published_when_due_and_not_before(engine: Engine) -> None:
    """It waits in its own table, by the database's clock."""
    stage(engine, 1, "soon", delay=0.0)
    stage(engine, 1, "later", delay=3600.0)
    sink = NullSink()
    moving = LeaseEngine(engine, sink)
    wait_until(lambda: moving.step() and sink.taken, what="the due event was published")
    assert [m.key for m in sink.taken] == [b"soon"]
    assert size(engine, delayed) == 1
    moving.close()


def make_due(engine: Engine, *ages: float) -> None:
    """Let the delayed events have been due for so many seconds, in the order of their rows."""
    with engine.begin() as db:
        for seq, age in zip(db.execute(select(delayed.c.seq)).scalars().all(), ages, strict=True):
            late = {"due": time.time() - age, "id": _uuid7(86_400 + age)}
            db.execute(delayed.update().where(delayed.c.seq == seq).values(**late))


def _uuid7(age: float) -> uuid.UUID:
    made = int((time.time() - age) * 1000)
    return uuid.UUID(int=made << 80 | 7 << 76 | 2 << 62 | secrets.randbits(62))


def test_delayed_events_of_a_key_leave_by_their_due_times(engine: Engine) -> None:
    """Not in the order in which they were added; and the header tells when each was due."""
    stage(engine, 3, delay=3600.0)
    make_due(engine, 10, 30, 20)
    sink = NullSink()
    Relay(LeaseEngine(engine, sink)).run_once()
    assert [m.payload for m in sink.taken] == [b'{"n":1}', b'{"n":2}', b'{"n":0}']
    dues = [dict(to_wire(message))[DUE] for message in sink.taken]
    assert None not in dues
    assert dues == sorted(dues, key=lambda due: due or b"")


def test_a_relay_moves_the_delayed_events_of_its_own_shards_only(engine: Engine) -> None:
    """Two that moved one key's events at once could number the later one first."""
    first, second = (
        LeaseEngine(engine, NullSink(), terms=LeaseTerms(seconds=60)) for _ in range(2)
    )
    for moving in (first, second, first, second):
        moving._leases.renew()
    keys = [str(n) for n in range(40)]
    for key in keys:
        stage(engine, 1, key, delay=0.0)
    assert second._delays._move_due() > 0
    with engine.connect() as db:
        moved = set(db.execute(select(outbox.c.shard)).scalars())
        left = set(db.execute(select(delayed.c.shard)).scalars())
    assert moved <= set(second._leases.owned)
    assert left <= set(first._leases.owned)
    with engine.begin() as db:  # the first one was frozen, and the second takes over
        db.execute(shard.update().values(until=0))
    with pytest.raises(ShardLeaseLost):
        first._delays._move_due()
    assert size(engine, delayed) > 0


def test_a_delayed_event_is_as_old_as_the_time_since_it_was_due(engine: Engine) -> None:
    """A day of delay and two minutes of outage are two minutes of waiting."""
    stage(engine, 1, delay=86_400.0)
    make_due(engine, 120)
    leases = Leases(engine)
    leases.renew()
    assert DelayedEvents(engine, leases).move() == 1
    age = Backlog(engine).measure().oldest_seconds
    assert age is not None
    assert 120 <= age < 600


class FlakySink(NullSink):
    """Fails some times with what may pass by itself."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        self.failures -= 1
        if self.failures >= 0:
            raise Transient("rolled back for a rival")
        return super().publish(messages)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_single_run_waits_out_what_passes_by_itself(engine: Engine) -> None:
    """It tries again some times, and then says what is wrong."""
    stage(engine, 3)
    assert Relay(LeaseEngine(engine, FlakySink(3)), clock=VirtualClock(auto=True)).run_once() == 3
    stage(engine, 3)
    with pytest.raises(Transient, match="rival"):
        Relay(LeaseEngine(engine, FlakySink(99)), clock=VirtualClock(auto=True)).run_once()
    assert size(engine) == 3


@pytest.mark.parametrize(
    ("headers", "own"),
    [({}, ()), ({"a": "b", "n": 1}, (("a", b"b"), ("n", b"1"))), ([1, 2], (("headers", None),))],
)
def test_a_row_of_anothers_making_is_published_too(
    engine: Engine, headers: Any, own: tuple[tuple[str, bytes | None], ...]
) -> None:
    """Only Debezium's columns are needed, and no kind of headers stops the relay."""
    row = {**values(Message.new("t", b"x", key="k")), "headers": headers}
    with engine.begin() as db:
        db.execute(insert(outbox), row)
    sink = NullSink()
    assert Relay(LeaseEngine(engine, sink)).run_once() == 1
    taken = sink.taken[0]
    assert taken.id == str(row["id"])
    wire = dict(to_wire(taken))
    assert wire["ce_id"] == str(row["id"]).encode()
    for name, value in own:
        assert value is None or wire[name] == value
        assert name in wire


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_row_whose_id_is_no_uuid_stops_nobody(engine: Engine) -> None:
    """Where the column is plain text, another program may have written anything."""
    with engine.begin() as db:
        db.execute(insert(outbox), values(Message.new("t", b"x", key="k")))
        db.execute(text("UPDATE holdfast_outbox SET id = 'mine'"))
    stage(engine, 1)
    sink = NullSink()
    assert Relay(LeaseEngine(engine, sink)).run_once() == 2
    assert sink.taken[0].id == "mine"


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_relay_that_dropped_its_leases_holds_nothing(engine: Engine) -> None:
    """A thread of it that still wants to delete is refused, though no shard is another's."""
    leases = Leases(engine)
    leases.renew()
    assert transact(engine, leases.holds)
    leases.drop()
    assert not transact(engine, leases.holds)


def test_large_events_are_read_a_few_at_a_time(engine: Engine) -> None:
    """A backlog of megabytes does not come into memory at once, delayed and released too."""
    body, sink = "x" * 1_000_000, Sizes()
    sink.refused = True
    with Session(engine) as session, session.begin():
        for n in range(40):
            Outbox().add(session, body, topic="t", key=f"{n % 4}", delay=0 if n % 2 else None)
    relay = LeaseEngine(engine, sink)
    wait_until(lambda: _parks_all(relay, 40), deadline=60, what="everything is refused")
    sink.refused = False
    ParkedKeys(engine).release(ParkedSelection(topic="t"), Operator(actor="a", reason="r"))
    assert Relay(relay).run_once(wait_more=lambda: size(engine, parked) > 0) == 40
    assert max(sink.sizes) <= 17_000_000


def _parks_all(relay: LeaseEngine, count: int) -> bool:
    relay.step()
    return relay._parking.count() == count


class Sizes(NullSink):
    """Notes the bytes of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.refused = False

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        self.sizes.append(sum(len(m.payload or b"") for m in messages))
        error = MessageTooLarge(2, 1) if self.refused else None
        return [Published(error) for _ in messages]
