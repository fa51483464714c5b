"""A sender finds every letter of its plan, and reads it once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, event, insert, select, update

from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.replay import EndingKind, ReplayOptions, Sender, StopPolicy, reading
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.sender import Pace
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.store.schema import revision
from holdfast.message import Message
from holdfast.testing import wait_until
from tests.integration.test_replay import FAST, Shop, shop, small

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from holdfast.ports import Broker

__all__ = ["shop", "small"]

AT_ONCE = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.01))


def test_items_that_do_not_know_the_numbers_of_their_letters_are_sent(shop: Shop) -> None:
    """A sender of an older version may have frozen the plan."""
    shop.fail(12, keys=3)
    plan = shop.freeze()
    with shop.engine.begin() as db:
        db.execute(update(item).where(item.c.position != 5).values(seq=None))
        db.execute(update(item).where(item.c.position == 5).values(seq=10**9))
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id).kind is EndingKind.CONFIRMED
    assert shop.effects() == {f"k{key}": [key, key + 3, key + 6, key + 9] for key in range(3)}


def test_a_letter_that_left_the_store_is_set_aside_with_the_reason(shop: Shop) -> None:
    """Nothing can be sent of it, and nobody would ever confirm it."""
    shop.fail(6, keys=2)
    plan = shop.freeze()
    with shop.engine.begin() as db:
        db.execute(delete(letters).where(letters.c.message_id == "m-00002"))
    with shop.billing.running("orders.billing.replay"):
        assert shop.send(plan.id).kind is EndingKind.PARTLY
    with shop.engine.connect() as db:
        notes = db.execute(select(item.c.note).where(item.c.state == "skipped")).scalars().all()
    assert len(notes) == 1
    assert "no longer in the store" in notes[0]
    assert shop.effects() == {"k0": [0, 4], "k1": [1, 3, 5]}


def test_each_letter_is_read_once_however_their_sizes_differ(
    small: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many make a batch changes with their size while the next ones are being read."""
    monkeypatch.setattr(reading, "_MOST_BYTES", 2000)
    DeadLetterStore(small.engine).put_all(
        [
            capture(Message.new("orders", b"x" * (10 + n % 50 * 20), key=f"k{n}"),
                    ValueError("bad"), group="billing", handler="shop.bill")
            for n in range(500)
        ]
    )  # fmt: skip
    plan = small.freeze(AT_ONCE)
    read: list[int] = []

    @event.listens_for(small.engine, "before_cursor_execute")
    def _note(_c: Any, _cursor: Any, text: str, values: Sequence[Any], _x: Any, _m: bool) -> None:
        if "is_odd" in text:
            read.extend(range(*values[-3:-1]))

    sender = Sender(small.engine, small.broker, pace=Pace(batch=60, poll_seconds=0.01))
    assert sender.run(plan.id).kind is EndingKind.UNCONFIRMED
    assert sorted(read) == list(range(500))


def test_what_was_edited_or_closed_is_found_among_the_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most letters are read without a look at their revisions; here some have one."""
    monkeypatch.setattr(reading, "_PIECE", 3)
    shop.fail(12, keys=1)
    plan = shop.freeze(AT_ONCE)
    with shop.engine.begin() as db:
        own = select(letters.c.dlq_id).where(letters.c.message_id == "m-00004")
        edit = {"dlq_id": db.execute(own).scalar_one(), "revision": 1, "payload": b"edited",
                "headers": '[["x-own","new"]]', "difference": "", "transform": "", "actor": "ada",
                "reason": "", "made_at": 1.0}  # fmt: skip
        db.execute(insert(revision), edit)
        for name, values in (("m-00004", {"revision": 1}), ("m-00010", {"state": "discarded"})):
            db.execute(update(letters).where(letters.c.message_id == name).values(**values))
    broker: Any = Meanwhile(shop.broker, lambda: None)
    ending = Sender(shop.engine, broker, pace=FAST).run(plan.id)
    assert ending.kind is EndingKind.UNCONFIRMED
    assert broker.published == [f"m-{n:05}" for n in range(12) if n != 10]
    found = {message.id: message for message in broker.messages}
    assert [name for name, one in found.items() if one.payload == b"edited"] == ["m-00004"]
    own_headers = {name: one.whole.headers.get("x-own") for name, one in found.items()}
    assert own_headers.pop("m-00004") == b"new"
    assert set(own_headers.values()) == {None}


class Meanwhile:
    """A broker during whose first batch something else happens."""

    def __init__(self, broker: Broker, happens: Callable[[], None]) -> None:
        self._broker = broker
        self._happens = [happens]
        self.published: list[str] = []
        self.messages: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        """Return a sink that notes what it publishes."""
        sink = self._broker.sink()

        class Noting:
            caps, close = sink.caps, sink.close

            def publish(_, messages: Sequence[Message]) -> Any:  # noqa: N805 - ours is outside
                if self._happens:
                    self._happens.pop()()
                self.published += [message.id for message in messages]
                self.messages += messages
                return sink.publish(messages)

        return Noting()


def test_what_was_held_since_it_was_read_ahead_is_not_sent(small: Shop) -> None:
    """Letters are read two batches before they are sent."""
    small.fail(40, keys=40)
    plan = small.freeze(AT_ONCE)
    read: list[int] = []

    @event.listens_for(small.engine, "after_cursor_execute")
    def _note(_c: Any, _cursor: Any, text: str, values: Sequence[Any], _x: Any, _m: bool) -> None:
        if "is_odd" in text:
            read.append(values[-3])

    def hold() -> None:
        wait_until(lambda: 20 in read)
        with small.engine.begin() as db:
            held = {"state": "held", "live": None}
            db.execute(update(item).where(item.c.position == 25).values(**held))

    with small.engine.connect() as db:
        own = select(letters.c.message_id).join(item, item.c.dlq_id == letters.c.dlq_id)
        one = db.execute(own.where(item.c.position == 25)).scalar_one()
    broker: Any = Meanwhile(small.broker, hold)
    ending = Sender(small.engine, broker, pace=FAST).run(plan.id)
    assert ending.kind is EndingKind.UNCONFIRMED
    assert len(broker.published) == 39
    assert one not in broker.published
