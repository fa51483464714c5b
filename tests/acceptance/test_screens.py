"""The screens that operators live by, as files: `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from rich.cells import cell_len
from sqlalchemy import insert

from holdfast.brokers import connect
from holdfast.cli.display import hour_marks
from holdfast.cli.migrations import Migrations
from holdfast.consumer.schema import circuit, held_key
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterAdmin, DeadLetterStore
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, freeze
from holdfast.outbox.schema import parked as parked_table
from holdfast.outbox.schema import relay
from holdfast.sagas.schema import saga as saga_table
from holdfast.testing import VirtualClock
from tests.dead_letters import letter
from tests.golden import NOW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from tests.golden import Screens

BILLING = """
def bill(error):
    try:
        raise error
    except Exception as raised:
        return raised
"""
_code: dict[str, Any] = {}
exec(compile(BILLING, "/srv/shop/billing.py", "exec"), _code)  # noqa: S102 - frames of one file


def _at(**ago: float) -> VirtualClock:
    return VirtualClock(NOW - timedelta(**ago))


class Shop:
    """What is in the database and on the broker of a shop that has a bad night."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def fail(self, numbers: range, error: Exception, clock: VirtualClock, **more: Any) -> list[str]:
        """Dead-letter orders by their *numbers*; return the ids of the letters."""
        raised = _code["bill"](error)
        made = [letter(one, raised, clock=clock, key=f"order-{one}", **more) for one in numbers]
        DeadLetterStore(self.engine, clock=clock).put_all(made)
        return [one.dlq_id for one in made]


@pytest.fixture
def shop(screens: Screens) -> Iterator[Shop]:
    """Open a shop whose tables are empty, and whose broker has a topic."""
    engine = open_database(f"sqlite:///{screens.folder}/shop.db")
    Migrations(engine).upgrade()
    broker = connect(f"sqlite:///{screens.folder}/broker.db")
    broker.create_topic("orders", partitions=2)
    broker.close()
    yield Shop(engine)
    engine.dispose()


def _bad_night(shop: Shop) -> None:
    """Let something go wrong everywhere."""
    shop.fail(range(1, 13), ValueError("total is negative"), _at(hours=2), topic="orders")
    shop.fail(range(20, 23), KeyError("customer"), _at(hours=9), topic="orders")
    shop.fail(
        range(30, 31), TimeoutError("the bank did not answer"), _at(minutes=7), topic="refunds"
    )


def _troubled(shop: Shop) -> None:
    """Let keys wait, at the relay and at the consumer, and a circuit and a saga be stuck."""
    now = NOW.timestamp()
    event = {"aggregatetype": "orders", "type": "OrderPlaced", "payload": b"{}", "headers": {},
             "shard": 1, "parked_at": NOW - timedelta(hours=3)}  # fmt: skip
    refused = "MessageTooLarge: the message has 2,097,152 bytes and the broker takes 1,048,576"
    parked = [
        {"seq": 4711, "id": UUID(_uuid(1)), "aggregateid": "order-1", "state": "refused",
         "error": refused},
        {"seq": 4715, "id": UUID(_uuid(2)), "aggregateid": "order-1", "state": "behind",
         "error": None},
        {"seq": 4720, "id": UUID(_uuid(3)), "aggregateid": "customer-with-a-long-name@example.com",
         "state": "refused", "error": "UnknownTopic: there is no topic 'orders'"},
    ]  # fmt: skip
    key = {"grp": "billing", "topic": "orders", "until": 0.0}
    keys = [
        {"key_hash": sha256(b"order-1").hexdigest(), "key": b"order-1", "parked": 3,
         "since": now - 7200, "dlq_id": _uuid(8), "due": None, "note": None},
        {"key_hash": sha256(b"order-7").hexdigest(), "key": b"order-7", "parked": 1,
         "since": now - 40, "dlq_id": None, "due": now + 80,
         "note": "TimeoutError: the bank did not answer"},
    ]  # fmt: skip
    relays = [
        {"id": "r1", "until": now + 8, "engine": "lease", "host": "relay-1"},
        {"id": "r2", "until": now - 900, "engine": "lease", "host": "relay-2"},
    ]
    saga = {"id": _uuid(9), "type": "order", "version": 1, "hash": "h", "business_key": "order-3",
            "active_key": "order-3", "status": "parked", "progress": b"{}", "data": b"{}",
            "start_digest": "d", "revision": 4, "started_at": now - 7000,
            "changed_at": now - 6000}  # fmt: skip
    with shop.engine.begin() as db:
        db.execute(insert(parked_table), [{**event, **one} for one in parked])
        db.execute(insert(held_key), [{**key, **one} for one in keys])
        db.execute(insert(relay), relays)
        db.execute(insert(circuit).values(name="bank", version=2, is_open=1, until=now + 25))
        db.execute(insert(saga_table).values(**saga))


def _shops_own(name: str, text: str) -> Exception:
    """Return an error of the shop's own modules."""
    made: Exception = type(name, (Exception,), {"__module__": "shop.payments.errors"})(text)
    return made


HALF = {hour: 60 * hour + 30 for hour in range(24)}
"""Minutes before now, by hours: the middle of each."""
KINDS = (
    (19, TimeoutError("the bank did not answer")), (14, _shops_own("ValidationError", "no total")),
    (9, _shops_own("SerializationError", "no JSON")), (5, _shops_own("UnknownError", "?")),
)  # fmt: skip
TOPICS = (23, "orders"), (11, "payments"), (8, "shipments"), (5, "refunds")


def _at_a_glance(shop: Shop) -> None:
    """Let 47 be pending; 12 came in the last hour, and 8 went; yesterday evening was worse."""
    topics = [name for count, name in TOPICS for _ in range(count)]
    errors = [error for count, error in KINDS for _ in range(count)]
    ages = [135, *[HALF[1]] * 34, *[HALF[0]] * 12]
    for number, (topic, error, minutes) in enumerate(zip(topics, errors, ages, strict=True)):
        shop.fail(range(number, number + 1), error, _at(minutes=minutes), topic=topic)
    done = Operator(actor="ada", reason="test data")
    for number, (minutes, count) in enumerate(((HALF[0], 8), (HALF[9], 6), (HALF[15], 16))):
        clock = _at(minutes=minutes)
        numbers = range(1000 * (number + 1), 1000 * (number + 1) + count)
        came = _at(minutes=max(minutes, HALF[1]))
        ids = shop.fail(numbers, ValueError("an old one"), came, topic="orders")
        admin = DeadLetterAdmin(shop.engine, clock=clock)
        admin.close(ids, "discarded", done, selection=Selection(dlq_ids=tuple(ids)))


def _planned(shop: Shop) -> None:
    """Make three plans: one was stopped by hand, one waits for approval, one was never begun."""
    plans = Plans(shop.engine)
    by = Operator(actor="ada", reason="fixed in 1.4.2")
    for error, most in (("KeyError", 100), ("TimeoutError", 0), ("ValueError", 100)):
        selection = Selection(error=error, state="pending")
        made = freeze(shop.engine, selection, ReplayOptions(approve_above=most), by)
        if error == "KeyError":
            plans.abort(made.plan, Operator(actor="bob", reason="wrong group"))


def _uuid(number: int) -> str:
    return f"0190163d-8694-739b-aea5-{number:012x}"


def test_the_figures_of_dead_letters(shop: Shop, screens: Screens) -> None:
    """How many wait, since when, of what; and nothing to do where nothing waits."""
    screens.check("dlq_stats_nothing", "dlq", "stats")
    _bad_night(shop)
    screens.check("dlq_stats", "dlq", "stats")


def test_the_figures_of_dead_letters_at_a_glance(shop: Shop, screens: Screens) -> None:
    """Total, by topic and by error, the oldest, in and out an hour, and the day by its hours."""
    _at_a_glance(shop)
    screens.check("dlq_stats_glance", "dlq", "stats")
    shown = screens.run("dlq", "stats")
    assert "pending 47   oldest 2h 15m " in shown
    assert re.findall(r"^(in|out) +(\d+)/h ", shown, re.MULTILINE) == [("in", "12"), ("out", "8")]
    assert "06    12    18    00" in shown
    rows = re.findall(r"│ [\w.…]*?(\w+) +│ █+ +│ +(\d+) │", shown)
    assert [(name, int(count)) for name, count in rows[:8]] == [
        ("orders", 23), ("payments", 11), ("shipments", 8), ("refunds", 5),
        ("TimeoutError", 19), ("ValidationError", 14), ("SerializationError", 9),
        ("UnknownError", 5),
    ]  # fmt: skip
    assert "shop.payments.errors.ValidationError" in screens.run("dlq", "stats", terminal=120)
    facts = json.loads(screens.run("dlq", "stats", "--json").split("\n", 1)[1])
    assert (facts["pending"], facts["inflow_per_hour"], facts["outflow_per_hour"]) == (47, 12, 8)


@pytest.mark.parametrize("hour", range(24))
def test_the_hour_marks_stand_under_their_hours(hour: int) -> None:
    """Whatever hour it is, the column above a mark is that hour."""
    now = (NOW.replace(hour=hour, minute=59)).timestamp()
    line = hour_marks(now)
    found = {match.start(): int(match[0]) for match in re.finditer(r"\d\d", line)}
    assert len(found) >= 3
    for place, mark in found.items():
        assert mark % 6 == 0
        assert (hour - 23 + place) % 24 == mark


def test_the_problems(shop: Shop, screens: Screens) -> None:
    """Problems instead of messages, those that nobody looks after first."""
    _bad_night(shop)
    screens.check("dlq_groups", "dlq", "groups")
    screens.check("dlq_show", "dlq", "show", "f5af9f23")


def test_a_replay_before_it_is_sent_and_the_plans(shop: Shop, screens: Screens) -> None:
    """What would be sent, and what became of the plans that were made."""
    _bad_night(shop)
    screens.check("dlq_replay_dry_run", "dlq", "replay", "f5af9f23", "--dry-run")
    _planned(shop)
    screens.check("dlq_plans", "dlq", "plans", "list")


def test_keys_that_wait(shop: Shop, screens: Screens) -> None:
    """Which, since when, behind what; at the consumer and at the relay."""
    _troubled(shop)
    screens.check("keys_list", "keys", "list")
    screens.check("outbox_parked", "outbox", "parked", "list")


def test_the_whole(shop: Shop, screens: Screens) -> None:
    """On one screen, the most urgent first; the doctor tells what mends it."""
    screens.check("status_nothing", "status")
    _bad_night(shop)
    _troubled(shop)
    _planned(shop)
    screens.check("status", "status")
    screens.check("doctor", "doctor")


def test_no_screen_is_wider_than_the_terminal(shop: Shop, screens: Screens) -> None:
    """At 80 and at 120 columns nothing wraps in mid-word, and no id is cut."""
    _bad_night(shop)
    _troubled(shop)
    _planned(shop)
    for words in ("status", "doctor", "dlq stats", "dlq groups", "dlq list", "dlq plans list",
                  "dlq replay f5af9f23 --dry-run", "keys list", "outbox parked list",
                  "circuits list", "saga list", "inbox stats", "topics list", "audit",
                  "db current"):  # fmt: skip
        for width in (80, 120):
            _, *lines = screens.run(*words.split(), terminal=width).splitlines()
            assert [line for line in lines if cell_len(line) > width] == [], words
    for width in (80, 120, None):
        held = screens.run("keys", "list", terminal=width)
        assert all(
            ident in held for ident in (f"id:{sha256(b'order-1').hexdigest()[:12]}", "0190163d")
        )
