"""A store of dead letters of all sorts, and a group that handles what is replayed."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    Text,
    Uuid,
    case,
    cast,
    func,
    insert,
    literal,
    literal_column,
    null,
    select,
    true,
    update,
)

from holdfast.brokers import connect
from holdfast.db.audit import Operator
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.capture.capture import CaptureSettings
from holdfast.dlq.replay import Plans, Selection
from holdfast.dlq.replay.lane_sender import LanesSender
from holdfast.dlq.store.schema import message, overtaken
from holdfast.headers import replay_topic
from holdfast.message import Message
from holdfast.ports import Delivery, Lane
from holdfast.testing import wait_until
from tests.dead_letters import failed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.sender import Pace
    from holdfast.spark_jobs.replaying import SparkLanes

ADA = Operator(actor="ada", reason="fixed in 1.4.2")
BILLING = Selection(consumer_group="billing")


def letters(
    count: int,
    *,
    key: Callable[[int], str | None],
    start: int = 0,
    group: str = "billing",
    topic: str = "orders",
    version: str = "1",
    text: str = "bad total",
) -> list[DeadLetter]:
    """Return *count* dead letters of *topic*: message n at position n, in the lane of its key."""
    error = failed(ValueError(text))
    made = []
    for n in range(start, start + count):
        name = key(n)
        one = Message.new(
            topic, msgspec.json.encode({"n": n}), key=name, ids=lambda n=n: f"{group}-{n:06}"
        )
        lane = Lane(topic, 0 if name is None else sum(name.encode()) % 3)
        delivery = Delivery(lane=lane, position=n, key=one.key, body=b"")
        made.append(
            capture(one, error, group=group, handler="shop.bill", delivery=delivery,
                    origin=CaptureSettings(service_version=version))
        )  # fmt: skip
    return made


def put(engine: Engine, some: list[DeadLetter]) -> None:
    """Store *some*, in short transactions."""
    store = DeadLetterStore(engine)
    for start in range(0, len(some), 500):
        store.put_all(some[start : start + 500])


def copied(engine: Engine, first: DeadLetter, count: int, *, group: str) -> None:
    """Store copies of *first* as messages 0 up to before *count*, made by PostgreSQL itself.

    Every second has the key `hot`, every fortieth none; the others share 997 keys.
    """
    put(engine, [first])
    number = literal_column("n")
    name = case(
        (number % 2 == 1, literal("hot")),
        (number % 40 == 0, null()),
        else_=func.concat("k", number % 997),
    )
    key = func.convert_to(name, "UTF8")
    own: dict[str, Any] = {
        "dlq_id": cast(cast(func.md5(func.concat(group, number)), Uuid), Text),
        "message_id": func.concat(group, "-", func.lpad(cast(number, Text), 6, "0")),
        "message_key": key,
        "key_hash": func.left(func.encode(func.sha256(key), "hex"), 32),
        "payload": func.convert_to(func.concat('{"n": ', number, "}"), "UTF8"),
        "lane": 0,
        "position": cast(number, Text),
    }
    columns = [column for column in message.c if column.name != "seq"]
    copies = (
        select(*(own.get(column.name, column) for column in columns))
        .select_from(message.join(func.generate_series(0, count - 1).alias("n"), true()))
        .where(message.c.dlq_id == first.dlq_id)
    )
    with engine.begin() as db:
        db.execute(insert(message).from_select([column.name for column in columns], copies))
        db.execute(message.delete().where(message.c.dlq_id == first.dlq_id))


def ids(engine: Engine, **where: Any) -> dict[str, str]:
    """Return the letters by the ids of their messages."""
    query = select(message.c.message_id, message.c.dlq_id)
    for name, value in where.items():
        query = query.where(message.c[name] == value)
    with engine.connect() as db:
        return {row.message_id: row.dlq_id for row in db.execute(query)}


def change(engine: Engine, dlq_id: str, **values: Any) -> None:
    """Change the row of one letter."""
    with engine.begin() as db:
        db.execute(update(message).where(message.c.dlq_id == dlq_id).values(**values))


def overtake(engine: Engine, dlq_id: str) -> None:
    """Let a newer event of the letter's key have been handled."""
    row = {"dlq_id": dlq_id, "message_id": "newer", "lane": 0, "position": "9999",
           "handled_at": 1.0}  # fmt: skip
    with engine.begin() as db:
        db.execute(insert(overtaken), row)


def url_of(engine: Engine, folder: Path) -> str:
    """Return the URL of *engine* as executors get it: by the name of a file that holds it."""
    file = folder / "store-url"
    file.write_text(engine.url.render_as_string(hide_password=False))
    return f"${{file:{file}}}"


def replay_topics(url: str, topic: str, group: str) -> str:
    """Make the original topic and the one by which the group gets what is replayed."""
    private = replay_topic(topic, group)
    with closing(connect(url)) as broker:
        broker.create_topic(topic, partitions=3)
        broker.create_topic(private, partitions=3)
    return private


class Leader:
    """Leads a plan in a thread, as a driver of its own would."""

    def __init__(self, store: Engine, lanes: SparkLanes, plan: ReplayPlan, pace: Pace) -> None:
        self._sender = LanesSender(store, lanes, pace=pace)
        self._plans = Plans(store)
        self._id = plan.id
        self.ended: list[Any] = []
        self._thread = threading.Thread(target=self._lead)
        self._thread.start()

    def _lead(self) -> None:
        try:
            self.ended.append(self._sender.run(self._id))
        except BaseException as error:  # noqa: BLE001 - told by `ending`
            self.ended.append(error)

    @property
    def sent(self) -> int:
        """How many messages were given to the broker so far."""
        return self._plans.tally(self._plans.find(self._id)).published

    def until_sent(self, count: int) -> None:
        """Wait until more than *count* were sent; the replay must not have ended by then."""
        wait_until(
            lambda: self.ended or self.sent > count,
            deadline=240,
            every=0.25,
            what="messages are sent",
        )
        assert not self.ended, self.ended

    def ending(self) -> Any:
        """Wait for its end, and return it."""
        self._thread.join()
        if isinstance(self.ended[0], BaseException):
            raise self.ended[0]
        return self.ended[0]
