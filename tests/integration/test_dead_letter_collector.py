"""What lies on dead-letter topics gets into the store, once, whatever dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.exc import DataError

from holdfast.backoff import Backoff
from holdfast.brokers import connect
from holdfast.cli.display import when
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic, capture, close, create_tables
from holdfast.dlq.replay.plan import ReplayOptions
from holdfast.dlq.replay.plan_freeze import freeze
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.schema import change, message
from holdfast.dlq.topic.collector import Collector
from holdfast.dlq.topic.topic import ENVELOPE, to_topic
from holdfast.errors import DependencyDown, StaleDelivery
from holdfast.headers import Headers, ReplayHeaders
from holdfast.message import Message
from holdfast.testing import VirtualClock, wait_until
from tests.dead_letters import count, letter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter
    from holdfast.ports import Broker, Delivery, Source

TOPIC = "orders.billing.dlq"
ADA = Operator(actor="ada", reason="fixed")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Open a store."""
    made = open_database(f"sqlite:///{tmp_path}/store.db")
    create_tables(made)
    yield made
    made.dispose()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Open a broker."""
    made = connect(f"sqlite:///{tmp_path}/broker.db")
    made.create_topic(TOPIC)
    yield made
    made.close()


def published(broker: Broker, number: int, first: int = 0) -> None:
    """Put dead letters on the topic."""
    sink = broker.sink()
    home = DeadLetterTopic(sink, prepare=broker.create_topic)
    for n in range(first, first + number):
        home.put(letter(n))
    sink.close()


def collected(broker: Broker, engine: Engine, group: str = "collector") -> Collector:
    """Collect until nothing is left."""
    source = broker.source([TOPIC], group=group)
    collector = Collector(source, DeadLetterStore(engine))
    try:
        collector.run(until_idle=True)
    finally:
        source.close()
    return collector


def test_letters_move_from_the_topic_into_the_store(broker: Broker, engine: Engine) -> None:
    """Each of them, with message and failure as they were."""
    published(broker, 7)
    assert collected(broker, engine).collected.stored == 7
    assert count(engine, message) == 7
    stored = DeadLetterStore(engine).get(letter(3).dlq_id)
    assert stored is not None
    assert stored.message.topic == "orders"
    assert stored.origin == "collected"
    assert ENVELOPE not in stored.message.headers


def closed_by_hand(engine: Engine) -> None:
    """Close every letter, later than anything on the topic may have happened."""
    late = VirtualClock()
    late.advance(86400 * 400)
    with engine.begin() as db:
        ids = db.execute(select(message.c.dlq_id)).scalars().all()
        close(db, ids, "discarded", actor="ada", reason="void", clock=late)


def states(engine: Engine) -> list[tuple[str, int]]:
    """Return the state of each letter, and how often it failed."""
    with engine.connect() as db:
        found = select(message.c.state, message.c.occurrences).order_by(message.c.seq)
        return [(row.state, row.occurrences) for row in db.execute(found)]


@pytest.mark.parametrize("known", [True, False], ids=["stored before", "first of its kind"])
def test_an_envelope_of_a_newer_version_is_a_failure_like_any_other(
    broker: Broker, engine: Engine, known: bool
) -> None:
    """It opens a closed letter and stops the replay that it came by; read again, it does not."""
    first = letter(1)
    plan_id = ""
    if known:
        DeadLetterStore(engine).put(first)
        plan_id = freeze(engine, Selection(consumer_group="billing"), ReplayOptions(), ADA).plan.id

    def publish(number: int) -> None:
        newer = {"schema_version": 9, "dlq_id": first.dlq_id, "failure": {"number": number},
                 "lineage": {"replay_id": plan_id, "replay_count": 1, "why": "new"}}  # fmt: skip
        sent = to_topic(first)
        marks = [pair for pair in sent.headers if pair[0] != ENVELOPE]
        envelope = (ENVELOPE, msgspec.json.encode(newer))
        sink = broker.sink()
        sink.publish([sent.with_(headers=Headers.received([*marks, envelope]))])
        sink.close()

    publish(1)
    collected(broker, engine)
    assert states(engine) == [("pending", 1 + known)]
    if known:
        with engine.connect() as db:
            assert db.execute(select(item.c.state)).scalars().all() == ["failed_again"]
    closed_by_hand(engine)
    collected(broker, engine, group="again")
    assert states(engine) == [("discarded", 1 + known)]
    publish(2)
    collected(broker, engine)
    assert states(engine) == [("pending", 2 + known)]


def test_what_has_no_envelope_fails_again_when_it_comes_again(
    broker: Broker, engine: Engine
) -> None:
    """Each message on the topic is one failure, and reading it twice is not two."""
    odd = Message.new(TOPIC, b"what is this", key="k")
    for group in ("collector", "again"):
        sink = broker.sink()
        sink.publish([odd])
        sink.close()
        collected(broker, engine, group=group)
    assert states(engine) == [("pending", 2)]


def test_collecting_everything_again_changes_nothing(broker: Broker, engine: Engine) -> None:
    """A second collector from the beginning finds only what is known."""
    published(broker, 5)
    collected(broker, engine)
    collected(broker, engine, group="from-the-start")
    assert count(engine, message) == count(engine, change) == 5


def test_what_cannot_be_read_is_stored_as_a_problem_of_its_own(
    broker: Broker, engine: Engine
) -> None:
    """Neither dropped nor in the way of the rest."""
    sink = broker.sink()
    bad = Headers([(ENVELOPE, b"{broken")])
    sink.publish([Message.new(TOPIC, b"\xff", headers=bad), Message.new(TOPIC, b"naked")])
    sink.close()
    published(broker, 1)
    assert collected(broker, engine).collected.unreadable == 2
    titles = {one.title for one in FailureGroups(engine).listed()}
    assert any("unreadable envelope" in title for title in titles)
    assert count(engine, message) == 3


def test_nothing_is_accepted_before_it_is_stored(broker: Broker, engine: Engine) -> None:
    """While the store is down the topic keeps everything."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    bare = open_database("sqlite://")  # it has no tables
    with pytest.raises(DependencyDown):
        Collector(source, DeadLetterStore(bare)).collect(source.poll(10, 5.0))
    source.close()
    bare.dispose()
    assert collected(broker, engine).collected.stored == 3


PROGRAM = """
import sys
from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore
from holdfast.dlq.topic.collector import Collector
folder = sys.argv[1]
source = connect(f"sqlite:///{folder}/broker.db").source(["orders.billing.dlq"], group="collector")
Collector(source, DeadLetterStore(open_database(f"sqlite:///{folder}/store.db"))).run()
"""


@pytest.mark.programs
def test_a_collector_killed_in_the_middle_loses_and_doubles_nothing(
    broker: Broker, engine: Engine, tmp_path: Path
) -> None:
    """Kill -9 while letters stream in; the next one goes on."""
    published(broker, 40)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command)
    feeder = threading.Thread(target=published, args=(broker, 60, 40))
    feeder.start()
    try:
        wait_until(lambda: count(engine, message) > 0, deadline=60)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        feeder.join()

    def is_all_there() -> bool:
        collected(broker, engine)
        return count(engine, message) == 100

    wait_until(is_all_there, deadline=90)
    assert count(engine, message) == 100
    assert FailureGroups(engine).listed()[0].pending == 100


def test_a_running_collector_stops_when_told(broker: Broker, engine: Engine) -> None:
    """The batch in hand is settled."""
    source = broker.source([TOPIC], group="collector")
    collector = Collector(source, DeadLetterStore(engine))
    thread = threading.Thread(target=collector.run)
    thread.start()
    published(broker, 2)
    wait_until(lambda: count(engine, message) == 2, deadline=60)
    collector.stop()
    thread.join(60)
    assert not thread.is_alive()
    source.close()
    with engine.connect() as db:
        assert set(db.execute(select(message.c.origin)).scalars()) == {"collected"}


class Flaky(DeadLetterStore):
    """A store that is down for some calls, and refuses some letters for what is in them."""

    def __init__(self, engine: Engine, *, down: int = 0, refuses: tuple[str, ...] = ()) -> None:
        super().__init__(engine)
        self.left = down
        self.refuses = refuses

    def put_all(self, letters: Sequence[DeadLetter], connection: Any = None) -> None:
        """Fail as a database would."""
        if self.left > 0:
            self.left -= 1
            raise DependencyDown("the database is away")
        for one in letters:
            if one.message.id in self.refuses and one.culprit.group != "unknown":
                error = DataError("INSERT", {}, Exception("out of range"))
                raise DependencyDown("the dead-letter store failed") from error
        super().put_all(letters, connection)


def test_a_store_that_was_down_gets_the_same_batch_again(broker: Broker, engine: Engine) -> None:
    """Without a restart: what was in hand is not forgotten, and what came later is not ahead."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    collector = Collector(source, Flaky(engine, down=2), backoff=Backoff(first=0.01, ceiling=0.01))
    collector.run(until_idle=True)
    source.close()
    assert collector.collected.stored == 3
    assert count(engine, message) == 3


class Moved:
    """A source whose lanes went to another member while a batch was being stored."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._late = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Refuse the first time."""
        if self._late:
            self._late = False
            for delivery in deliveries:
                self._source.release(delivery, blame=False)
            raise StaleDelivery("the lane belongs to another member by now")
        self._source.accept(deliveries)


def test_a_collector_that_lost_its_lanes_goes_on(broker: Broker, engine: Engine) -> None:
    """What it stored comes again to whoever has them now, and changes nothing."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    Collector(cast("Source", Moved(source)), DeadLetterStore(engine)).run(until_idle=True)
    source.close()
    assert states(engine) == [("pending", 1)] * 3
    assert sum(broker.lag("collector", [TOPIC]).values()) == 0


def test_a_replay_that_failed_is_told_although_the_message_failed_once_more(
    broker: Broker, engine: Engine
) -> None:
    """Both failures lie in one batch; the plan hears of its own."""
    published(broker, 1)
    collected(broker, engine)
    plan = freeze(engine, Selection(consumer_group="billing"), ReplayOptions(), ADA).plan
    first = letter(0)
    marks = ReplayHeaders(group="billing", plan=plan.id, dlq_id=first.dlq_id, topic="orders")
    sent = first.message.with_(headers=marks.stamped(first.message.headers))
    home = DeadLetterTopic(broker.sink())
    home.put(capture(sent, ValueError("still"), group="billing", handler="shop.bill"))
    home.put(letter(0))
    home.close()
    assert collected(broker, engine).collected.stored == 2
    with engine.connect() as db:
        assert db.execute(select(item.c.state)).scalars().all() == ["failed_again"]
    assert states(engine) == [("pending", 3)]


def test_a_collection_that_cannot_be_stored_ends_with_the_reason(
    broker: Broker, engine: Engine
) -> None:
    """Asked to end when nothing is left, it does not ask for ever; the topic keeps all."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    short = Backoff(first=0.01, ceiling=0.01)
    with pytest.raises(DependencyDown, match="away"):
        Collector(source, Flaky(engine, down=100), backoff=short).run(until_idle=True)
    source.close()
    assert sum(broker.lag("collector", [TOPIC]).values()) == 3
    assert collected(broker, engine).collected.stored == 3


def test_one_letter_that_no_column_takes_holds_up_no_other(broker: Broker, engine: Engine) -> None:
    """It is stored as one that cannot be read, with all that it had."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    collector = Collector(source, Flaky(engine, refuses=("id-1",)))
    collector.run(until_idle=True)
    source.close()
    assert (collector.collected.stored, collector.collected.unreadable) == (3, 1)
    with engine.connect() as db:
        kept = select(message.c.headers).where(message.c.error_type == "unreadable envelope")
        assert ENVELOPE in db.execute(kept).scalar_one()
    assert count(engine, message) == 3


def test_numbers_and_moments_of_another_make_no_trouble(broker: Broker, engine: Engine) -> None:
    """A clock in the far future, a count beyond any column, an id that is none."""
    made = letter(7)
    history = msgspec.structs.replace(
        made.history, attempts=10**12, last_failed_at=1e300, first_failed_at=-1e300
    )
    lineage = msgspec.structs.replace(made.lineage, replay_count=2**40)
    made = msgspec.structs.replace(made, dlq_id="x" * 99, history=history, lineage=lineage)
    sink = broker.sink()
    sink.publish([to_topic(made)])
    sink.close()
    assert collected(broker, engine).collected.unreadable == 0
    with engine.connect() as db:
        row = db.execute(select(message)).one()
    assert len(row.dlq_id) == 36
    assert row.first_failed_at == 0
    assert f"{when(row.last_failed_at)}".startswith("9999-")
    assert when(1e300).endswith("since 1970")
