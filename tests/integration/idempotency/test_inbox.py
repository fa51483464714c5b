"""The inbox: an effect happens once, whatever fails, rivals or comes again."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import create_engine, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.call import Call
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage
from holdfast.idempotency import IdempotencyConflict, Inbox, idempotent, prune, stats
from holdfast.idempotency import claim as claims
from holdfast.idempotency.identity import consumer_key, message_key
from holdfast.idempotency.retention import forget
from holdfast.idempotency.savepoints import TransactionAborted
from holdfast.idempotency.schema import inbox, roster
from holdfast.message import handling
from tests.integration.idempotency.conftest import effects, persistently, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

BILLING = "billing/shop.bill"


class Receipt(msgspec.Struct):
    total: int


def message(payload: bytes = b"{}", **options: Any) -> Message:
    return Message.new("orders", payload, **options)


def names(engine: Engine) -> list[str]:
    with engine.connect() as db:
        return list(db.execute(select(effects.c.name).order_by(effects.c.id)).scalars())


def rows(engine: Engine) -> int:
    with engine.connect() as db:
        return db.execute(select(func.count()).select_from(inbox)).scalar_one()


@idempotent
def bill(order: Message, session: Session) -> None:
    session.execute(insert(effects).values(name=order.id))


def test_a_message_that_comes_again_has_no_second_effect(database: Engine) -> None:
    one, two = message(), message()
    for order in (one, one, two, one):
        with Session(database) as session, session.begin():
            bill(order, session)
    assert names(database) == [one.id, two.id]


def test_a_failed_delivery_is_not_remembered_as_done(database: Engine) -> None:
    """The dedup row rolls back with the handler's work, so the next delivery is handled."""
    order = message()

    @idempotent
    def fails_once(order: Message, session: Session) -> None:
        session.execute(insert(effects).values(name=order.id))
        if not tried:
            tried.append(True)
            raise RuntimeError("the handler fails after its write")

    tried: list[bool] = []
    with pytest.raises(RuntimeError), Session(database) as session, session.begin():
        fails_once(order, session)
    assert names(database) == []
    assert rows(database) == 0
    with Session(database) as session, session.begin():
        fails_once(order, session)
    assert names(database) == [order.id]


def test_of_two_rivals_with_the_same_message_one_has_the_effect(database: Engine) -> None:
    """The second waits for the first, then finds the effect there."""
    order = message()
    first_is_in, go_on = threading.Event(), threading.Event()
    duplicates: list[bool] = []

    def rival(*, waits: bool) -> None:
        with Session(database) as session, session.begin():
            call = Call((order, session), {})
            bill.plan.run(call)
            duplicates.append(call.duplicate)
            if waits:
                first_is_in.set()
                assert go_on.wait(60)

    first = threading.Thread(target=rival, kwargs={"waits": True})
    first.start()
    assert first_is_in.wait(60)
    second = threading.Thread(target=rival, kwargs={"waits": False})
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert names(database) == [order.id]
    assert sorted(duplicates) == [False, True]


def test_when_the_rival_rolls_back_the_other_proceeds(database: Engine) -> None:
    order = message()
    first_is_in, go_on = threading.Event(), threading.Event()

    def gives_up() -> None:
        with Session(database) as session:
            bill(order, session)
            first_is_in.set()
            assert go_on.wait(60)
            session.rollback()

    def proceeds() -> None:
        with Session(database) as session, session.begin():
            bill(order, session)

    first = threading.Thread(target=gives_up)
    first.start()
    assert first_is_in.wait(60)
    second = threading.Thread(target=proceeds)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert names(database) == [order.id]


def test_many_rivals_with_the_same_messages_leave_one_effect_each(database: Engine) -> None:
    orders = [message() for _ in range(12)]

    def handle(order: Message) -> None:
        with Session(database) as session, session.begin():
            bill(order, session)

    def rival(seed: int) -> None:
        for order in orders[seed:] + orders[:seed]:
            persistently(lambda order=order: handle(order))  # type: ignore[misc]

    together(*(partial(rival, seed) for seed in range(4)))
    assert sorted(names(database)) == sorted(order.id for order in orders)


def test_the_same_message_may_be_handled_by_another_consumer(database: Engine) -> None:
    order = message()
    memory = Inbox()
    with Session(database) as session, session.begin():
        assert memory.claim(session, "billing/a", order.id)
        assert memory.claim(session, "mail/a", order.id)
        assert not memory.claim(session, "billing/a", order.id)


def test_other_content_under_a_known_id_is_poison(database: Engine) -> None:
    order = message(b'{"total": 1}')
    with Session(database) as session, session.begin():
        bill(order, session)
    with Session(database) as session, session.begin():
        with pytest.raises(IdempotencyConflict, match=order.id) as caught:
            bill(order.with_(payload=b'{"total": 2}'), session)
        with pytest.raises(IdempotencyConflict):
            bill(order.with_(payload=None), session)
    assert isinstance(caught.value, PoisonMessage)
    assert len({caught.value.known, caught.value.given}) == 2
    assert names(database) == [order.id]


def test_a_tombstone_is_not_an_empty_payload(database: Engine) -> None:
    order = message(b"")
    with Session(database) as session, session.begin():
        bill(order, session)
        with pytest.raises(IdempotencyConflict):
            bill(order.with_(payload=None), session)


def test_a_key_of_the_users_own_decides_what_is_the_same(database: Engine) -> None:
    @idempotent(key=lambda order: order["id"])
    def charge(order: dict[str, Any], session: Session) -> None:
        session.execute(insert(effects).values(name=f"{order['id']}:{order['total']}"))

    with Session(database) as session, session.begin():
        for order in ({"id": 7, "total": 1}, {"id": 7, "total": 2}, {"id": 8, "total": 3}):
            charge(order, session=session)
    assert names(database) == ["7:1", "8:3"]


def test_a_key_function_may_look_at_the_message(database: Engine) -> None:
    @idempotent(key=lambda _order, message: (message.topic, message.headers.get("x-key")))
    def charge(order: str, session: Session) -> None:
        session.execute(insert(effects).values(name=order))

    with Session(database) as session, session.begin():
        for order, key in (("a", "1"), ("b", "1"), ("c", "2")):
            with handling(message(headers=[("x-key", key)])):
                charge(order, session)
    assert names(database) == ["a", "c"]


@pytest.mark.parametrize("bad", [None, "", b"", True, (), ("a", None), 1.5, object()])
def test_a_key_that_identifies_nothing_is_poison(database: Engine, bad: Any) -> None:
    @idempotent(key=lambda _order: bad)
    def charge(order: str, session: Session) -> None: ...

    with Session(database) as session, pytest.raises(PoisonMessage, match="key function"):
        charge("order", session)


def test_a_duplicate_returns_what_the_first_run_returned(database: Engine) -> None:
    @idempotent(keep_result=True)
    def receipt(order: Message, session: Session) -> Receipt:
        session.execute(insert(effects).values(name=order.id))
        return Receipt(total=17)

    order = message()
    for _ in range(2):
        with Session(database) as session, session.begin():
            assert receipt(order, session) == Receipt(total=17)
    assert names(database) == [order.id]


def test_a_result_that_cannot_be_kept_fails_the_attempt(database: Engine) -> None:
    @idempotent(keep_result=True)
    def receipt(order: Message, session: Session) -> Any:
        return object()

    with Session(database) as session, pytest.raises(ConfigurationError, match="keep_result"):
        receipt(message(), session)


def test_a_handler_that_swallows_an_error_of_the_database_loses_nothing(database: Engine) -> None:
    """PostgreSQL would answer the commit by rolling back: the attempt fails instead."""

    @idempotent
    def careless(order: Message, session: Session) -> None:
        session.execute(insert(effects).values(name=order.id))
        with suppress(DBAPIError):
            session.connection().exec_driver_sql("SELECT * FROM no_such_table")

    order = message()
    try:
        with Session(database) as session, session.begin():
            careless(order, session)
    except TransactionAborted:
        assert names(database) == []
        assert rows(database) == 0
    else:
        assert names(database) == [order.id]
        assert rows(database) == 1
    assert (rows(database) == 0) == (database.dialect.name == "postgresql")


def test_a_connection_will_do_for_a_session(database: Engine) -> None:
    @idempotent
    def charge(order: Message, connection: Any) -> None:
        connection.execute(insert(effects).values(name=order.id))

    order = message()
    with database.begin() as connection:
        charge(order, connection)
        charge(order, connection=connection)
    assert names(database) == [order.id]


def test_an_async_handler_with_a_session_of_either_colour(database: Engine) -> None:
    @idempotent(keep_result=True)
    async def charge(order: Message, session: Session) -> int:
        await asyncio.sleep(0)
        session.execute(insert(effects).values(name=order.id))
        return 5

    async def run() -> list[int]:
        with Session(database) as session, session.begin():
            return [await charge(order, session), await charge(order, session)]

    order = message()
    assert asyncio.run(run()) == [5, 5]
    assert names(database) == [order.id]


@pytest.mark.programs
def test_an_async_session_or_connection_will_do(engines: Callable[[str], Engine]) -> None:
    """Claim, effect and stored result are awaited in the caller's own transaction."""
    database = engines("postgres")

    @idempotent(keep_result=True)
    async def charge(order: Message, session: Any) -> int:
        await session.execute(insert(effects).values(name=order.id))
        return 7

    async def run() -> None:
        engine = create_async_engine(database.url)
        async with AsyncSession(engine) as session, session.begin():
            assert [await charge(one, session), await charge(one, session)] == [7, 7]
        async with engine.begin() as connection:
            assert await charge(one, connection) == 7
            assert await charge(two, session=connection) == 7
        async with AsyncSession(engine) as session:
            await charge(three, session)
            await session.rollback()
        await engine.dispose()

    one, two, three = message(), message(), message()
    asyncio.run(run())
    assert names(database) == [one.id, two.id]
    assert rows(database) == 2


def test_the_memory_is_entered_on_the_roster_with_its_window(database: Engine) -> None:
    for window, seconds in (("14d", 14 * 86400), ("2h", 7200), (None, None)):
        memory = Inbox(window=window)
        for _ in range(3):
            with Session(database) as session, session.begin():
                memory.claim(session, BILLING, message().id)
        with database.connect() as db:
            assert db.execute(select(roster.c.name, roster.c.window_seconds)).all() == [
                (BILLING, seconds)
            ]


def test_a_roster_entry_that_was_rolled_back_is_made_again(database: Engine) -> None:
    memory = Inbox()
    with Session(database) as session:
        memory.claim(session, BILLING, "one")
        memory.claim(session, BILLING, "two")
        session.rollback()
    with Session(database) as session, session.begin():
        memory.claim(session, BILLING, "three")
    with database.connect() as db:
        assert db.execute(select(roster.c.name)).scalars().all() == [BILLING]


def age(engine: Engine, seconds: float) -> None:
    """Let everything in the inbox have been handled *seconds* earlier."""
    with engine.begin() as db:
        db.execute(update(inbox).values(handled_at=inbox.c.handled_at - seconds))


def test_what_is_older_than_its_window_is_pruned(database: Engine) -> None:
    short, for_ever = Inbox(window="1h"), Inbox(window=None)
    with Session(database) as session, session.begin():
        for n in range(5):
            short.claim(session, "short", f"m{n}")
            for_ever.claim(session, "for ever", f"m{n}")
    age(database, 3700)
    with Session(database) as session, session.begin():
        short.claim(session, "short", "young")
    assert prune(database, step=2) == {"short": 5}
    assert prune(database) == {}
    assert rows(database) == 6
    with Session(database) as session, session.begin():
        assert not short.claim(session, "short", "young")
        assert short.claim(session, "short", "m0")


def test_several_pruners_share_the_work(database: Engine) -> None:
    """They never wait for each other, and handlers that claim meanwhile go on."""
    memory = Inbox(window="1h")
    with Session(database) as session, session.begin():
        for n in range(300):
            memory.claim(session, BILLING, f"m{n}")
    age(database, 7200)
    pruned: list[int] = []

    def claim(n: int) -> None:
        with Session(database) as session, session.begin():
            memory.claim(session, BILLING, f"new-{n}")

    def handle() -> None:
        for n in range(30):
            persistently(lambda n=n: claim(n))  # type: ignore[misc]

    def work() -> None:
        pruned.append(prune(database, step=7).get(BILLING, 0))

    together(work, work, work, work, handle)
    pruned.append(prune(database).get(BILLING, 0))
    assert sum(pruned) == 300
    assert rows(database) == 30


def test_pruning_an_unknown_consumer_says_so(database: Engine) -> None:
    with pytest.raises(NotFound, match="holdfast inbox stats"):
        prune(database, consumer="nobody")
    with pytest.raises(ConfigurationError, match="step"):
        prune(database, step=0)


def test_a_forgotten_message_is_handled_again(database: Engine) -> None:
    memory = Inbox()
    with Session(database) as session, session.begin():
        assert memory.claim(session, BILLING, "m")
        memory.forget(session, BILLING, ["m"])
        assert memory.claim(session, BILLING, "m")


def test_the_numbers_of_the_inbox_are_told(database: Engine) -> None:
    memory = Inbox(window="1h")
    with Session(database) as session, session.begin():
        for n in range(4):
            memory.claim(session, BILLING, f"m{n}")
    age(database, 3700)
    with Session(database) as session, session.begin():
        memory.claim(session, BILLING, "young")
    (found,) = stats(database).consumers
    assert (found.consumer, found.remembered, found.overdue, found.leased) == (BILLING, 5, 4, 0)
    assert found.oldest is not None
    assert found.newest is not None
    assert found.oldest < found.newest
    assert forget(database, BILLING, ["m1", "young", "never seen"]) == ["m1", "young"]
    assert stats(database).consumers[0].remembered == 3


@pytest.mark.parametrize("id_", ["x" * 5000, "nul\0", "surrogate\ud800", "'; DROP TABLE x", "漢"])
def test_every_id_can_be_claimed(database: Engine, id_: str) -> None:
    memory = Inbox()
    with Session(database) as session, session.begin():
        assert memory.claim(session, id_, id_)
        assert not memory.claim(session, id_, id_)
        assert memory.claim(session, id_, id_ + "other")


@pytest.mark.programs
def test_repeatable_read_is_refused_on_postgres(engines: Callable[[str], Engine]) -> None:
    """Only there a rival's commit would fail ours; the other databases are safe."""
    database = engines("postgres")
    for level in ("REPEATABLE READ", "SERIALIZABLE"):
        made = create_engine(database.url, isolation_level=level)
        for engine in (database.execution_options(isolation_level=level), made):
            with Session(engine) as session, pytest.raises(ConfigurationError, match=level):
                bill(message(), session)
        made.dispose()
    with database.connect() as db:
        db = db.execution_options(isolation_level="REPEATABLE READ")  # noqa: PLW2901
        with pytest.raises(ConfigurationError, match="READ COMMITTED"):
            bill(message(), connection=db, session=None)


@pytest.mark.programs
def test_mysql_without_returning_claims_the_same(engines: Callable[[str], Engine]) -> None:
    """MariaDB takes MySQL's way too; a rival that commits in between is noticed."""
    database = engines("mariadb")
    items = [
        claims.ClaimRequest(key=message_key(f"m{n}"), digest=b"d" * 8, id=f"m{n}") for n in range(6)
    ]
    items.sort(key=lambda item: item.key)
    number = consumer_key(BILLING)
    with Session(database) as session, session.begin():
        assert len(claims._insert_mysql(session, number, items[:2])) == 2
    with Session(database) as session, session.begin():
        fresh = claims._insert_mysql(session, number, items[:4])
        assert fresh == {item.key for item in items[2:4]}
        assert claims._insert_mysql(session, number, items[:4]) == set()
    recall = claims._recall
    claims._recall = lambda *_: {}  # as if the rival committed right after this look
    try:
        with Session(database) as session, session.begin():
            fresh = claims._insert_mysql(session, number, items)
    finally:
        claims._recall = recall
    assert fresh == {item.key for item in items[4:]}
    assert rows(database) == 6


def test_a_function_without_a_transaction_or_an_identity_says_what_it_needs() -> None:
    with pytest.raises(ConfigurationError, match="Session or Connection"):
        bill(message())
    with pytest.raises(ConfigurationError, match="identity"):
        bill("no message", Session(create_engine("sqlite://")))


@pytest.mark.programs
def test_a_row_of_the_inbox_is_small(engines: Callable[[str], Engine]) -> None:
    """With its index, a handled message takes no more than 160 bytes on PostgreSQL."""
    database = engines("postgres")
    memory = Inbox()
    with Session(database) as session, session.begin():
        session.execute(text("TRUNCATE holdfast_inbox"))
        items = [message() for _ in range(2000)]
        assert all(memory.claim_many(session, BILLING, items))
    with database.connect() as db:
        size = db.execute(text("SELECT pg_total_relation_size('holdfast_inbox')")).scalar_one()
    assert (size - 100_000) / 2000 < 160  # without the fixed pages of the indexes
