"""What lies on dead-letter topics gets into the store, once, whatever dies in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select

from holdfast.brokers import connect
from holdfast.database import open_database
from holdfast.dlq import StoreHome, TopicHome, create_tables
from holdfast.dlq.collector import Collector
from holdfast.dlq.groups import Groups
from holdfast.dlq.schema import change, message
from holdfast.dlq.wire import ENVELOPE
from holdfast.errors import DependencyDown
from holdfast.headers import Headers
from holdfast.message import Message
from holdfast.testing import wait_until
from tests.dead_letters import count, letter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.ports import Broker

TOPIC = "orders.billing.dlq"


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
    home = TopicHome(sink, prepare=broker.create_topic)
    for n in range(first, first + number):
        home.put(letter(n))
    sink.close()


def collected(broker: Broker, engine: Engine, group: str = "collector") -> Collector:
    """Collect until nothing is left."""
    source = broker.source([TOPIC], group=group)
    collector = Collector(source, StoreHome(engine))
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
    stored = StoreHome(engine).get(letter(3).dlq_id)
    assert stored is not None
    assert stored.message.topic == "orders"
    assert stored.origin == "collected"
    assert ENVELOPE not in stored.message.headers


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
    titles = {one.title for one in Groups(engine).listed()}
    assert any("unreadable envelope" in title for title in titles)
    assert count(engine, message) == 3


def test_nothing_is_accepted_before_it_is_stored(broker: Broker, engine: Engine) -> None:
    """While the store is down the topic keeps everything."""
    published(broker, 3)
    source = broker.source([TOPIC], group="collector")
    bare = open_database("sqlite://")  # it has no tables
    with pytest.raises(DependencyDown):
        Collector(source, StoreHome(bare)).collect(source.poll(10, 5.0))
    source.close()
    bare.dispose()
    assert collected(broker, engine).collected.stored == 3


PROGRAM = """
import sys
from holdfast.brokers import connect
from holdfast.database import open_database
from holdfast.dlq import StoreHome
from holdfast.dlq.collector import Collector
folder = sys.argv[1]
source = connect(f"sqlite:///{folder}/broker.db").source(["orders.billing.dlq"], group="collector")
Collector(source, StoreHome(open_database(f"sqlite:///{folder}/store.db"))).run()
"""


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
    assert Groups(engine).listed()[0].pending == 100


def test_a_running_collector_stops_when_told(broker: Broker, engine: Engine) -> None:
    """The batch in hand is settled."""
    source = broker.source([TOPIC], group="collector")
    collector = Collector(source, StoreHome(engine))
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
