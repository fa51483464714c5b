"""Whose memory it is: the same over renamed functions, other ways to start, and upgrades."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.errors import ConfigurationError, NotFound
from holdfast.idempotency import (
    BatchRunner,
    DatabaseLeases,
    IdempotencyConflict,
    Inbox,
    InboxBatch,
    InProgress,
    RedisInbox,
    idempotent,
)
from holdfast.idempotency.former import UPGRADE_SECONDS, FormerScopes
from holdfast.idempotency.identity import consumer_key, content_digest, message_key
from holdfast.idempotency.inbox import wanted
from holdfast.idempotency.renaming import rename
from holdfast.idempotency.schema import attempt, inbox, lease, roster, scope
from holdfast.ids import name_of
from tests.integration.idempotency.conftest import effects, together

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from tests.servers import Redis

NEW, OLD, STARTED = "billing/orders", "billing/billing.charge", "billing/__main__.charge"
CHARGE = FormerScopes("billing", ("billing.charge", "__main__.charge"))


def event(id_: str, source: str = "shop", payload: bytes = b"{}") -> Message:
    return Message.new("orders", payload, source=source, ids=lambda: id_)


def earlier_version(engine: Engine, name: str, *messages: Message) -> None:
    """Write what a version before this one wrote: bare ids under the function's name."""
    with engine.begin() as db:
        number = consumer_key(name)
        db.execute(delete(roster).where(roster.c.id == number))
        db.execute(insert(roster).values(id=number, name=name, window_seconds=30 * 86400.0))
        for message in messages:
            old = {"consumer": number, "message": message_key(message.id), "handled_at": 2e9,
                   "digest": content_digest(message.payload)}  # fmt: skip
            db.execute(insert(inbox), old)


def successor() -> Inbox:
    memory = Inbox()
    memory.succeed(NEW, CHARGE)
    return memory


def is_new(engine: Engine, message: Message, memory: Inbox | None = None) -> bool:
    """Claim *message* as this version does, and commit."""
    memory = successor() if memory is None else memory
    with Session(engine) as session, session.begin():
        return memory.claim_all(session, NEW, [wanted(message)])[0].is_new


def is_new_to_earlier(engine: Engine, name: str, message: Message) -> bool:
    """Whether a process of an earlier version that runs on would handle *message*."""
    mine = (inbox.c.consumer == consumer_key(name)) & (inbox.c.message == message_key(message.id))
    with engine.connect() as db:
        return db.execute(select(inbox).where(mine)).first() is None


@pytest.mark.parametrize(
    "names", [(OLD,), (STARTED,), (OLD, STARTED), ("billing/a.b.billing.charge",)]
)
def test_what_an_earlier_version_handled_has_no_second_effect(
    database: Engine, names: tuple[str, ...]
) -> None:
    """Whether it ran as a script, by `holdfast consume`, from a package, or in both ways."""
    orders = [event(f"m{n}") for n in range(len(names))]
    for name, order in zip(names, orders, strict=True):
        earlier_version(database, name, order)
    assert [is_new(database, order) for order in orders] == [False] * len(orders)
    assert is_new(database, event("another"))
    assert not is_new(database, event("another"))


def test_the_memory_of_another_handler_is_not_taken_over(database: Engine) -> None:
    order = event("m")
    for name in ("billing/mail.charge_all", "billing/billing.refund", "mail/billing.charge",
                 "billing.charge", "billing/xbilling.charge"):  # fmt: skip
        earlier_version(database, name, order)
    assert is_new(database, order)


def test_a_process_of_an_earlier_version_that_runs_on_finds_what_this_one_handled(
    database: Engine,
) -> None:
    """Both run side by side while a deployment rolls."""
    earlier_version(database, OLD)
    order = event("m")
    assert is_new(database, order)
    assert not is_new_to_earlier(database, OLD, order)


def test_versions_that_claim_the_same_message_at_once_take_turns(database: Engine) -> None:
    earlier_version(database, OLD)
    order, new = event("m"), []

    def earlier() -> None:
        row = {"consumer": consumer_key(OLD), "message": message_key(order.id),
               "handled_at": 2e9, "digest": content_digest(order.payload)}  # fmt: skip
        try:
            with database.begin() as db:
                db.execute(insert(inbox), row)
        except (IntegrityError, OperationalError):
            return
        new.append("earlier")

    def current() -> None:
        if is_new(database, order):
            new.append("current")

    together(earlier, current)
    assert len(new) == 1


def test_after_the_upgrade_nothing_is_written_for_it_any_more(database: Engine) -> None:
    """For a day; then the old rows are only looked at, and no more once their window is over."""
    known, order, later = event("known"), event("m"), event("later")
    earlier_version(database, OLD, known)
    assert is_new(database, order)
    age(database, UPGRADE_SECONDS + 1)
    assert not is_new(database, known)
    assert is_new(database, later)
    assert is_new_to_earlier(database, OLD, later)
    age(database, 31 * 86400.0)
    with Session(database) as session, session.begin():
        assert successor().enter(session, NEW) == ()


def age(engine: Engine, seconds: float) -> None:
    with engine.begin() as db:
        old = scope.c.carried_at - seconds
        db.execute(update(scope).where(scope.c.carried_at > 0).values(carried_at=old))


def test_a_scope_that_begins_with_this_version_asks_nobody_else(database: Engine) -> None:
    assert is_new(database, event("m"))
    with Session(database) as session, session.begin():
        assert successor().enter(session, NEW) == ()


def test_a_failed_attempt_takes_its_claims_back_everywhere(database: Engine) -> None:
    """Also in a batch, where what failed is left out and the rest commits."""
    earlier_version(database, OLD)
    good, bad = event("good"), event("bad")

    def handle(session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("bad")

    runner = BatchRunner(database, inbox=successor())
    outcomes = runner.run(InboxBatch(consumer=NEW, messages=[bad, good]), handle)
    assert [outcome.is_done for outcome in outcomes] == [False, True]
    assert is_new_to_earlier(database, OLD, bad)
    assert not is_new_to_earlier(database, OLD, good)
    assert is_new(database, bad)


def test_a_batch_knows_what_an_earlier_version_handled(database: Engine) -> None:
    known, fresh = event("known"), event("fresh")
    earlier_version(database, STARTED, known)
    handled: list[str] = []
    runner = BatchRunner(database, inbox=successor())
    batch = InboxBatch(consumer=NEW, messages=[known, fresh, known])
    outcomes = runner.run(batch, lambda _, message: handled.append(message.id))
    assert handled == ["fresh"]
    assert [outcome.is_duplicate for outcome in outcomes] == [True, False, True]


def test_a_result_that_an_earlier_version_kept_is_given_on(database: Engine) -> None:
    order = event("m")
    earlier_version(database, OLD, order)
    with database.begin() as db:
        db.execute(update(inbox).values(result=b"7"))
    for _ in range(2):
        with Session(database) as session, session.begin():
            [claim] = successor().claim_all(session, NEW, [wanted(order)])
            assert (claim.is_new, claim.result) == (False, b"7")


def test_leases_know_what_an_earlier_version_handled(database: Engine) -> None:
    known, fresh = event("known"), event("fresh")
    earlier_version(database, OLD, known)
    sent: list[str] = []
    store = DatabaseLeases(database)

    @idempotent(lease="30s", store=store, scope=NEW)
    def mail(order: Message) -> None:
        sent.append(order.id)

    store.succeed(NEW, CHARGE)
    for order in (known, fresh, known, fresh):
        mail(order)
    assert sent == ["fresh"]
    assert not is_new_to_earlier(database, OLD, fresh)


def test_a_lease_that_an_earlier_version_holds_is_respected(database: Engine) -> None:
    order = event("m")
    earlier_version(database, OLD)
    store = DatabaseLeases(database)
    store.succeed(NEW, CHARGE)
    with database.begin() as db:
        row = {"consumer": consumer_key(OLD), "message": message_key("m"), "token": 1}
        db.execute(insert(lease).values(until=4e9, **row))
    with pytest.raises(InProgress):
        store.take(NEW, wanted(order), 30)


def test_redis_knows_what_an_earlier_version_handled(redis: Redis) -> None:
    store = RedisInbox(redis.url, prefix="scopes")
    order, sent = event("m"), []
    bare = wanted(order.with_(source="holdfast"))
    store.complete(store.take(OLD, bare, 30), None)  # type: ignore[arg-type]

    @idempotent(lease="30s", store=store, scope=NEW)
    def mail(order: Message) -> None:
        sent.append((order.source, order.id))

    store.succeed(NEW, CHARGE)
    for one in (order, order, event("m", payload=b"other"), event("n")):
        mail(one)
    assert sent == [("shop", "m"), ("shop", "n")]


# The identity of a message


def test_the_same_id_of_another_source_is_another_event(database: Engine) -> None:
    """CloudEvents: source and id together make the identity."""

    @idempotent
    def bill(order: Message, session: Session) -> None:
        session.execute(insert(effects).values(name=f"{order.source} {order.id}"))

    one = "0190163d-8694-739b-aea5-966c26f8ad91"
    events = [event(id_, source) for id_ in ("1", one) for source in ("shop", "mail", "holdfast")]
    events.append(event("1", "mail/1"))
    for order in [*events, *events]:
        with Session(database) as session, session.begin():
            bill(order, session)
    with database.connect() as db:
        names = list(db.execute(select(effects.c.name).order_by(effects.c.id)).scalars())
    assert names == [f"{order.source} {order.id}" for order in events]


def test_a_batch_tells_sources_apart(database: Engine) -> None:
    handled = []
    events = [event("1", "shop"), event("1", "mail"), event("1", "shop")]
    batch = InboxBatch(consumer="g/all", messages=events)
    BatchRunner(database).run(batch, lambda _, message: handled.append(message.source))
    assert handled == ["shop", "mail"]


def test_one_source_that_uses_an_id_twice_is_still_found_out(database: Engine) -> None:
    assert is_new(database, event("1", payload=b"a"))
    with Session(database) as session, session.begin():
        [claim] = Inbox().claim_all(session, NEW, [wanted(event("1", payload=b"b"))])
    assert isinstance(claim.conflict, IdempotencyConflict)


def test_an_old_row_is_of_this_message_while_its_content_agrees(database: Engine) -> None:
    """It does not say its source: other content is an event of another one."""
    earlier_version(database, NEW, event("1", payload=b"a"))
    assert is_new(database, event("1", "mail", b"b"))
    assert not is_new(database, event("1", "shop", b"a"))
    assert not is_new(database, event("1", "mail", b"b"))


def test_rows_of_one_time_lie_together_whatever_their_source() -> None:
    """The index of the inbox grows at its end."""
    ids = [f"0190163d-8694-739b-aea5-966c26f8ad{n:02x}" for n in range(5)]
    keys = [wanted(event(id_, "shop")).key for id_ in ids]
    assert len({key[:8] for key in keys}) == 1
    assert len(set(keys)) == len(ids)
    assert {len(key) for key in keys} == {16}


# Names


def test_a_program_has_one_name_however_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def charge() -> None: ...

    charge.__qualname__ = "charge"
    charge.__module__ = "__main__"
    started = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", started)
    for file, spec, name in [
        ("/srv/app/billing.py", None, "billing.charge"),
        ("/srv/app/billing.py", "billing", "billing.charge"),
        ("/srv/app/shop/__main__.py", "shop.__main__", "shop.charge"),
        ("/srv/app/shop/__main__.py", "__main__", "shop.charge"),
        (None, None, "main.charge"),
    ]:
        monkeypatch.setattr(started, "__file__", file, raising=False)
        monkeypatch.setattr(started, "__spec__", spec and ModuleSpec(spec, None), raising=False)
        assert name_of(charge) == name


def test_an_explicit_scope_goes_first_and_lets_anything_be_decorated(database: Engine) -> None:
    memory = idempotent(scope="billing/charge")(lambda order, session: sent.append(order.id))
    other = idempotent(scope="billing/charge")(lambda order, session: sent.append(order.id))
    sent: list[str] = []
    for handler in (memory, other):
        with Session(database) as session, session.begin():
            handler(event("m"), session)
    assert sent == ["m"]
    with database.connect() as db:
        assert db.execute(select(roster.c.name)).scalars().all() == ["billing/charge"]


@pytest.mark.parametrize("wrong", ["", 5, "x" * 256, "a\0b"])
def test_a_scope_that_is_no_name_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="scope"):
        idempotent(scope=wrong)


# Renaming


def test_a_renamed_scope_keeps_what_it_remembers(database: Engine) -> None:
    known, both = event("known"), event("both")
    memory = Inbox()
    with Session(database) as session, session.begin():
        memory.claim_all(session, "billing/sales", [wanted(known), wanted(both)])
    assert is_new(database, both)
    with database.begin() as db:
        db.execute(insert(attempt).values(
            consumer="billing/sales", message_id="m", failed=3, released=0, crashed=0, suspected=0,
            changed_at=1.0))  # fmt: skip
    recorded: list[str] = []
    done = rename(database, "billing/sales", NEW, record=lambda _, it: recorded.append(it.new))
    assert (done.remembered, done.attempts, recorded) == (2, 1, [NEW])
    assert not is_new(database, known)
    assert not is_new(database, both)
    with database.connect() as db:
        assert db.execute(select(roster.c.name)).scalars().all() == [NEW]
        assert db.execute(select(attempt.c.consumer, attempt.c.failed)).all() == [(NEW, 3)]
        assert db.execute(select(func.count()).select_from(inbox)).scalar_one() == 2
    with pytest.raises(NotFound, match="holdfast inbox stats"):
        rename(database, "billing/sales", NEW)


def test_a_renamed_scope_of_an_earlier_version_is_known_by_bare_ids(database: Engine) -> None:
    known = event("known")
    earlier_version(database, "billing/old.name", known)
    rename(database, "billing/old.name", NEW)
    assert not is_new(database, known)
    with Session(database) as session, session.begin():
        [former] = successor().enter(session, NEW)
    assert former == (consumer_key(NEW), True)


def test_a_name_is_not_renamed_to_itself(database: Engine) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        rename(database, NEW, NEW)
