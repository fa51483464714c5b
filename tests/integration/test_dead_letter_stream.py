"""A stream hands the same messages out again and again; the store has each of them once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import func, select

from holdfast.clock import SYSTEM_CLOCK
from holdfast.cloudevents import wire_list
from holdfast.dlq import DeadLetterStore
from holdfast.dlq.replay import ReplayOptions, Selection, StopPolicy, freeze
from holdfast.dlq.replay.outcomes import ReplayReport
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.schema import message, stream
from holdfast.dlq.topic.stream import StreamCollector, StreamCounts
from holdfast.dlq.topic.topic import to_topic
from holdfast.errors import ConfigurationError
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from tests.dead_letters import emptied, letter, opened
from tests.integration.test_replay import ADA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter

TOPIC = "orders.billing.dlq"


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"])
def database(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    """Open each database once."""
    engine = opened(request, tmp_path_factory.mktemp("stream"))
    yield engine
    engine.dispose()


@pytest.fixture
def store(database: Engine) -> DeadLetterStore:
    """Return an empty store."""
    return DeadLetterStore(emptied(database))


def delivered(one: Message, position: int, lane: int = 0) -> Delivery:
    """Return *one* as Kafka would deliver it from the dead-letter topic."""
    return Delivery(
        lane=Lane(TOPIC, lane), position=position, key=one.key, body=one.payload,
        headers=wire_list(one), timestamp=SYSTEM_CLOCK.now().timestamp(),
    )  # fmt: skip


def on_topic(letters: list[DeadLetter], lane: int = 0) -> list[Delivery]:
    """Return *letters* as they lie on the topic."""
    return [delivered(to_topic(one, topic=TOPIC), n, lane) for n, one in enumerate(letters)]


def rows(store: DeadLetterStore) -> list[tuple[str, int]]:
    """Return the letters, with how often each was dead-lettered."""
    with store.engine.connect() as db:
        query = select(message.c.message_id, message.c.occurrences).order_by(message.c.message_id)
        return [tuple(row) for row in db.execute(query)]


def test_a_batch_that_is_handed_out_again_is_stored_once(store: DeadLetterStore) -> None:
    """Whole, in part, by another driver, or under another number after a lost checkpoint."""
    batch = [*on_topic([letter(n) for n in range(6)]),
             *on_topic([letter(n) for n in range(10, 14)], lane=1)]  # fmt: skip
    collector = StreamCollector(store=store, name="triage")
    assert collector.collect(0, batch[:3]) == StreamCounts(stored=3)
    assert collector.collect(0, batch) == StreamCounts(stored=7, passed=3)
    before = rows(store)
    assert [count for _, count in before] == [1] * 10
    for number in (0, 1, 57):
        again = StreamCollector(store=DeadLetterStore(store.engine), name="triage")
        assert again.collect(number, batch) == StreamCounts(passed=10)
    assert rows(store) == before
    groups = FailureGroups(store.engine).listed()
    assert [one.pending for one in groups] == [10]
    with store.engine.connect() as db:
        marks = db.execute(select(stream.c.lane, stream.c.position).order_by(stream.c.lane)).all()
    assert marks == [(0, 6), (1, 4)]


def test_what_fails_while_it_is_stored_is_neither_stored_nor_passed_over(
    store: DeadLetterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark and the letters are one transaction."""
    batch = on_topic([letter(n) for n in range(4)])
    collector = StreamCollector(store=store, name="triage")

    class Killed(BaseException):
        pass

    def dies(self: DeadLetterStore, letters: Any, connection: Any = None) -> None:
        original(self, letters, connection)
        raise Killed

    original = DeadLetterStore.put_all
    with monkeypatch.context() as patched:
        patched.setattr(DeadLetterStore, "put_all", dies)
        with pytest.raises(Killed):
            collector.collect(0, batch)
    with store.engine.connect() as db:
        assert db.execute(select(func.count()).select_from(message)).scalar_one() == 0
    assert collector.collect(0, batch) == StreamCounts(stored=4)


def test_an_unreadable_message_is_stored_as_one_and_holds_up_no_other(
    store: DeadLetterStore,
) -> None:
    """Nothing on the topic is dropped silently."""
    broken = Message.new(TOPIC, b"{", key="k", headers={"x-dlq-envelope": "not an envelope"})
    batch = [*on_topic([letter(1)]), delivered(broken, 1)]
    found = StreamCollector(store=store, name="triage").collect(0, batch)
    assert found == StreamCounts(stored=2, unreadable=1)
    assert len(rows(store)) == 2


def test_a_report_of_a_handled_replay_confirms_its_letter(store: DeadLetterStore) -> None:
    """Consumers without this database tell it on the same topic."""
    one = letter(1)
    store.put(one)
    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=()))
    plan = freeze(store.engine, Selection(consumer_group="billing"), terms, ADA).plan
    payload = msgspec.json.encode(ReplayReport(plan.id, one.dlq_id, "id-1"))
    report = Message.new(
        TOPIC, payload, key="k1", type="holdfast.replay.confirmed",
        headers={"x-dlq-outcome": "confirmed"}, content_type="application/json",
    )  # fmt: skip
    collector = StreamCollector(store=store, name="triage")
    assert collector.collect(0, [delivered(report, 0)]) == StreamCounts(confirmed=1)
    assert collector.collect(0, [delivered(report, 0)]) == StreamCounts(passed=1)
    with store.engine.connect() as db:
        assert db.execute(select(message.c.state)).scalar_one() == "confirmed"


def test_a_stream_has_a_name_that_the_table_holds(store: DeadLetterStore) -> None:
    """A name that is cut would be that of another stream."""
    with pytest.raises(ConfigurationError, match="1 to 64"):
        StreamCollector(store=store, name="x" * 65)
