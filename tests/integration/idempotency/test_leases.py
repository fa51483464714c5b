"""Leases: one worker at a time, zombies are refused, and the memory outlives the lease."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.call import Call
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError, DependencyDown, PlanError, Remedy
from holdfast.idempotency import (
    DatabaseLeases,
    IdempotencyConflict,
    Inbox,
    InProgress,
    Lease,
    LeaseLost,
    RedisInbox,
    create_tables,
    idempotent,
    metadata,
)
from holdfast.idempotency.inbox import wanted
from holdfast.idempotency.lease import Handled, Heartbeat, LeaseStore
from holdfast.idempotency.leased import Leased, LeaseSettings
from holdfast.idempotency.schema import inbox, lease, roster
from holdfast.ids import new_id
from holdfast.pipeline import Pipeline
from holdfast.retry import retry
from holdfast.testing import VirtualClock, wait_until
from tests.integration.idempotency.conftest import effects, persistently, together
from tests.servers import Redis as RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    from tests.servers import Redis

MAIL = "mail/shop.send"


def message(payload: bytes = b"{}") -> Message:
    return Message.new("orders", payload)


class Expiring:
    """A store whose leases a test lets run out."""

    def __init__(self, store: LeaseStore, expire: Any) -> None:
        self.store = store
        self.expire = expire


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "redis"])
def expiring(
    request: pytest.FixtureRequest, engines: Callable[[str], Engine]
) -> Iterator[Expiring]:
    """Open each kind of store."""
    if request.param == "redis":
        server: Redis = request.getfixturevalue("redis")
        store = RedisInbox(server.url, prefix=new_id())

        def expire() -> None:
            for key in store._client.scan_iter(f"{store._prefix}:*"):
                store._client.hset(key, "until", 1)

        yield Expiring(store, expire)
        store.close()
    else:
        engine = engines(request.param)

        def expire_rows() -> None:
            with engine.begin() as db:
                db.execute(update(lease).values(until=1.0))

        yield Expiring(DatabaseLeases(engine), expire_rows)


@pytest.fixture
def store(expiring: Expiring) -> LeaseStore:
    return expiring.store


def taken(found: Lease | Handled) -> Lease:
    assert isinstance(found, Lease)
    return found


def test_a_message_is_leased_to_one_worker_at_a_time(store: LeaseStore) -> None:
    item = wanted(message())
    taken(store.take(MAIL, item, 30))
    with pytest.raises(InProgress) as caught:
        store.take(MAIL, item, 30)
    assert 0 < caught.value.retry_after <= 30
    assert caught.value.remedy is Remedy.RELEASE
    taken(store.take("other/consumer", item, 30))


def test_a_handled_message_is_remembered_with_its_result(store: LeaseStore) -> None:
    item = wanted(message())
    store.complete(taken(store.take(MAIL, item, 30)), b'"done"')
    assert store.take(MAIL, item, 30) == Handled(result=b'"done"')


def test_a_lease_given_back_is_free_at_once_and_its_token_grows(store: LeaseStore) -> None:
    item = wanted(message())
    first = taken(store.take(MAIL, item, 30))
    store.free(first)
    second = taken(store.take(MAIL, item, 30))
    assert second.token > first.token
    assert second.wanted == item


def test_a_heartbeat_that_comes_too_late_does_not_take_a_freed_lease_again(
    store: LeaseStore,
) -> None:
    """The next attempt would wait for the whole lease, with nobody at work."""
    item = wanted(message())
    first = taken(store.take(MAIL, item, 30))
    store.free(first)
    assert not store.renew(first)
    taken(store.take(MAIL, item, 30))


def test_the_end_of_a_zombie_is_refused(expiring: Expiring) -> None:
    """Its lease ran out and another took over: neither its end, nor its renewal, counts."""
    store, item = expiring.store, wanted(message())
    zombie = taken(store.take(MAIL, item, 30))
    expiring.expire()
    successor = taken(store.take(MAIL, item, 30))
    assert successor.token > zombie.token
    assert not store.renew(zombie)
    store.free(zombie)
    with pytest.raises(InProgress):
        store.take(MAIL, item, 30)
    with pytest.raises(LeaseLost) as caught:
        store.complete(zombie, b'"zombie"')
    assert caught.value.remedy is Remedy.RELEASE
    store.complete(successor, b'"successor"')
    with pytest.raises(LeaseLost):
        store.complete(zombie, b'"zombie"')
    assert store.take(MAIL, item, 30) == Handled(result=b'"successor"')


def test_a_lease_that_ran_out_may_still_end_if_nobody_took_over(expiring: Expiring) -> None:
    store, item = expiring.store, wanted(message())
    mine = taken(store.take(MAIL, item, 30))
    expiring.expire()
    store.complete(mine, None)
    assert store.take(MAIL, item, 30) == Handled()


def test_a_renewed_lease_lasts(expiring: Expiring) -> None:
    store, item = expiring.store, wanted(message())
    mine = taken(store.take(MAIL, item, 30))
    expiring.expire()
    assert store.renew(mine)
    with pytest.raises(InProgress):
        store.take(MAIL, item, 30)


def test_other_content_under_a_handled_id_is_poison(store: LeaseStore) -> None:
    order = message(b"one")
    store.complete(taken(store.take(MAIL, wanted(order), 30)), None)
    with pytest.raises(IdempotencyConflict):
        store.take(MAIL, wanted(order.with_(payload=b"two")), 30)


def test_of_many_that_ask_one_gets_the_lease(store: LeaseStore) -> None:
    item = wanted(message())
    got: list[Lease | Handled] = []

    def ask() -> None:
        with suppress(InProgress):
            got.append(store.take(MAIL, item, 30))

    together(*([ask] * 6))
    assert len(got) == 1


def test_a_handler_runs_once_and_its_duplicates_get_its_result(store: LeaseStore) -> None:
    sent: list[str] = []

    @idempotent(lease="30s", store=store, keep_result=True)
    def send(order: Message) -> str:
        sent.append(order.id)
        return f"receipt of {order.id}"

    order = message()
    assert send(order) == send(order) == f"receipt of {order.id}"
    assert sent == [order.id]


def test_a_failed_handler_may_run_again_at_once(store: LeaseStore) -> None:
    tried: list[str] = []

    @retry()
    @idempotent(lease="30s", store=store)
    async def send(order: Message) -> str:
        tried.append(order.id)
        if len(tried) < 3:
            raise ConnectionError("mail server")
        return "sent"

    order = message()
    assert asyncio.run(send.with_clock(VirtualClock(auto=True))(order)) == "sent"
    assert len(tried) == 3
    call = Call((order,), {})
    asyncio.run(send.plan.run_async(call))
    assert call.duplicate
    assert len(tried) == 3


def test_a_rival_is_released_while_the_handler_runs(store: LeaseStore) -> None:
    inside, go_on = threading.Event(), threading.Event()
    sent: list[str] = []

    @idempotent(lease="30s", store=store)
    def send(order: Message) -> None:
        inside.set()
        assert go_on.wait(60)
        sent.append(order.id)

    order = message()
    worker = threading.Thread(target=send, args=(order,))
    worker.start()
    assert inside.wait(60)
    with pytest.raises(InProgress):
        send(order)
    go_on.set()
    worker.join()
    send(order)
    assert sent == [order.id]


def test_the_heartbeat_keeps_a_short_lease_alive(expiring: Expiring) -> None:
    """The lease is renewed again and again although its end is always near."""
    store, item = expiring.store, wanted(message())
    mine = taken(store.take(MAIL, item, 0.2))
    renewed: list[bool] = []

    def renew(lease: Lease) -> bool:
        renewed.append(store.renew(lease))
        return renewed[-1]

    heartbeat = Heartbeat()
    heartbeat.keep(mine, renew)
    wait_until(lambda: len(renewed) >= 4, deadline=60)
    heartbeat.drop(mine)
    assert all(renewed)
    store.complete(mine, None)
    wait_until(lambda: heartbeat._thread is None, deadline=60)


def test_the_end_of_the_lease_commits_with_what_the_handler_wrote(database: Engine) -> None:
    """A zombie's writes are rolled back with its refused end."""
    store = DatabaseLeases(database)

    @idempotent(lease="30s", store=store)
    def send(order: Message, session: Session) -> None:
        if takeover:
            takeover.pop()()
        session.execute(insert(effects).values(name=order.id))

    order = message()

    def take_over() -> None:
        with database.begin() as db:
            db.execute(update(lease).values(until=1.0))
        taken(store.take(_consumer(send), wanted(order), 30))

    takeover = [take_over]
    with pytest.raises(LeaseLost), Session(database) as session, session.begin():
        send(order, session)
    with database.begin() as db:
        assert db.execute(select(func.count()).select_from(effects)).scalar_one() == 0
        db.execute(update(lease).values(until=1.0))
    with Session(database) as session, session.begin():
        send(order, session)
    with database.begin() as db:
        assert db.execute(select(func.count()).select_from(effects)).scalar_one() == 1
        assert db.execute(select(func.count()).select_from(inbox)).scalar_one() == 1
        assert db.execute(select(func.count()).select_from(lease)).scalar_one() == 0


def test_a_rolled_back_session_is_not_remembered_as_handled(database: Engine) -> None:
    """The end of the lease is part of the handler's transaction, and goes with it."""

    @idempotent(lease="30s", store=DatabaseLeases(database))
    def send(order: Message, session: Session) -> None:
        session.execute(insert(effects).values(name=order.id))

    order = message()
    with Session(database) as session:
        send(order, session)
        session.rollback()
    with database.begin() as db:
        assert db.execute(select(func.count()).select_from(inbox)).scalar_one() == 0
        db.execute(update(lease).values(until=1.0))
    with Session(database) as session, session.begin():
        send(order, session)
    with database.begin() as db:
        assert db.execute(select(func.count()).select_from(effects)).scalar_one() == 1


def _consumer(handler: Any) -> str:
    layer = handler.plan.layers[0]
    name: str = layer.subject.name
    return name


def test_a_plan_with_a_transaction_ends_the_lease_in_it(database: Engine) -> None:
    """What is to be done before the commit is left in the call; the consumer runs it."""

    @idempotent(lease="30s", keep_result=True)
    def send(order: Message) -> int:
        return 5

    layer = send.plan.layers[0].bind_database(database)  # type: ignore[attr-defined]
    plan = Pipeline([layer], send.plan.function)
    call = Call((message(),), {})
    layer.enter(call)
    call.result = 5
    with database.begin() as db:
        for work in call.before_commit:
            work(db)
    layer.leave(call)
    again = Call(call.args, {})
    assert plan.run(again) == 5
    assert again.duplicate


def test_sqlite_is_not_made_to_wait_for_itself(tmp_path: Any) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/own.db")
    create_tables(engine)

    @idempotent(lease="30s", store=DatabaseLeases(engine))
    def send(order: Message, session: Session) -> None: ...

    with Session(engine) as session:
        session.execute(select(inbox.c.message))
        with pytest.raises(ConfigurationError, match="write lock"):
            send(message(), session)
    engine.dispose()


def test_many_workers_and_many_messages_have_one_effect_each(database: Engine) -> None:
    store = DatabaseLeases(database)
    orders = [message() for _ in range(10)]
    sent: list[str] = []

    @idempotent(lease="30s", store=store)
    def send(order: Message) -> None:
        sent.append(order.id)

    def worker() -> None:
        for order in orders:
            try:
                persistently(lambda order=order: send(order))  # type: ignore[misc]
            except InProgress:
                continue

    together(worker, worker, worker)
    assert sorted(sent) == sorted(order.id for order in orders)


def test_an_attempt_cut_off_while_it_takes_its_lease_keeps_none(database: Engine) -> None:
    """The thread takes it to the end; then it is given back, and no heartbeat renews it."""
    began, go_on = threading.Event(), threading.Event()

    class Slow(DatabaseLeases):
        def take(self, *args: Any) -> Lease | Handled:
            """Take it, and answer late."""
            found = super().take(*args)
            began.set()
            go_on.wait(60)
            return found

    renewed: list[Lease] = []

    class Heart(Heartbeat):
        def keep(self, lease: Lease, renew: Any) -> None:
            """Note whose lease is kept."""
            renewed.append(lease)

        def drop(self, lease: Lease) -> None:
            """Note that it is kept no more."""
            renewed.remove(lease)

    ran: list[str] = []

    async def charge(order: Message) -> None:
        ran.append(order.id)

    settings = LeaseSettings(seconds=600, inbox=Inbox(), store=Slow(database))
    leased = Leased(settings, heartbeat=Heart())(charge)
    order = message()

    async def run() -> None:
        task = asyncio.create_task(leased(order))
        await asyncio.to_thread(began.wait)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert renewed == []
        await leased(order)

    asyncio.run(run())
    assert ran == [order.id]


def test_the_window_of_a_handler_reaches_its_store(expiring: Expiring) -> None:
    """A store may serve handlers that remember for different times."""
    store: Any = expiring.store

    @idempotent(window="90d", store=store)
    def send(order: Message) -> None: ...

    assert "remembered for 90d" in send.explain()
    send(message())
    if isinstance(store, RedisInbox):
        (key,) = store._client.keys(f"{store._prefix}:*")
        assert store._client.ttl(key) > 89 * 86400
    else:
        with store._engine.connect() as db:
            assert db.execute(select(roster.c.window_seconds)).scalar_one() == 90 * 86400
    assert store.window == 30 * 86400
    kept = idempotent(store=store.with_window(None))(lambda order: order)
    assert "remembered for ever" in kept.explain()


def test_a_window_that_a_store_cannot_keep_is_refused() -> None:
    """It would be forgotten earlier or later than the code says."""

    class Own:
        """A store of the user's own."""

        take = complete = renew = free = None

    with pytest.raises(ConfigurationError, match="leave out window"):
        idempotent(window="90d", store=Own())  # type: ignore[call-overload]
    idempotent(store=Own())  # type: ignore[call-overload]


def test_a_lease_without_a_store_says_what_it_needs() -> None:
    @idempotent(lease="30s")
    def send(order: Message) -> None: ...

    with pytest.raises(ConfigurationError, match="RedisInbox"):
        send(message())
    with pytest.raises(ConfigurationError, match="lease="):
        idempotent(lease="soon")
    with pytest.raises(PlanError):
        idempotent(lease="30s")(retry()(lambda order: order))


def test_a_redis_that_is_away_is_an_outage(private_server: Any) -> None:
    server = private_server(RedisServer)
    store = RedisInbox(server.url)
    item = wanted(message())
    mine = taken(store.take(MAIL, item, 30))
    server.kill()
    with pytest.raises(DependencyDown):
        store.complete(mine, None)
    store.close()
    with pytest.raises(ConfigurationError, match="redis://host"):
        RedisInbox("nonsense")


def test_a_redis_memory_ends_with_its_window(redis: Redis) -> None:
    store = RedisInbox(redis.url, window="2h", prefix=new_id())
    for_ever = RedisInbox(redis.url, window=None, prefix=new_id())
    item = wanted(message())
    for kept, seconds in ((store, range(7100, 7201)), (for_ever, [-1])):
        kept.complete(taken(kept.take(MAIL, item, 30)), None)
        (key,) = kept._client.keys(f"{kept._prefix}:*")
        assert kept._client.ttl(key) in seconds
        kept.close()


def test_a_redis_memory_lasts_as_long_as_its_lease_is_renewed(redis: Redis) -> None:
    """A handler longer than the window keeps its lease; a lease longer than it is refused."""
    store = RedisInbox(redis.url, window=60.0, prefix=new_id())
    with pytest.raises(ConfigurationError, match="longer window"):
        store.take(MAIL, wanted(message()), 61)
    mine = store.take(MAIL, wanted(message()), 50)
    assert isinstance(mine, Lease)
    (key,) = store._client.keys(f"{store._prefix}:*")
    store._client.pexpire(key, 600_000)
    assert store.renew(mine)
    assert 0 < store._client.pttl(key) <= 60_000  # from now on, again and again
    store.close()


class Away:
    """A store that is down, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def renew(self, _lease: Lease) -> bool:
        """Fail."""
        self.asked += 1
        raise DependencyDown("the store is away")


def test_a_store_that_is_away_is_told_and_does_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ten of its leases do not wait for ten timeouts; a lease elsewhere is renewed meanwhile."""
    away, renewed, heartbeat = Away(), threading.Event(), Heartbeat()

    def renew(_lease: Lease) -> bool:
        renewed.set()
        return True

    leases = [
        Lease(consumer=MAIL, wanted=wanted(message()), token=n, seconds=0.3) for n in range(11)
    ]
    for one in leases[:10]:
        heartbeat.keep(one, away.renew)
    heartbeat.keep(leases[10], renew)
    wait_until(lambda: renewed.is_set() and away.asked, what="both were asked")
    for one in leases:
        heartbeat.drop(one)
    assert "cannot be renewed for now" in caplog.text


def test_the_tables_of_the_leases_are_part_of_the_schema() -> None:
    assert lease.name in metadata.tables
