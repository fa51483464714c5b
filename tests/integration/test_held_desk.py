"""The operator's desk: every held key can be named, whatever its bytes."""

from __future__ import annotations

import json
import os
import pwd
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.orm import Session  # noqa: TC002 - handlers are read at run time

from holdfast import Message, Transient
from holdfast.consumer.parking.admin import NotParked, ParkingAdmin
from holdfast.consumer.schema import held
from holdfast.db.audit import Operator, verify
from holdfast.dlq import CaptureSettings, Redaction, dead_letter
from holdfast.dlq.letter import dead_letter_id
from holdfast.dlq.store.closing import reopen
from holdfast.errors import ConfigurationError, NotFound, PoisonMessage
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, effects, running, until
from tests.shell import shell

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.consumer import Consumer

WHY = Operator(actor="ada", reason="seen to")


def test_keys_that_are_no_text_are_shown_released_and_skipped_by_their_id(tmp_path: Path) -> None:
    """Messages without a key and with a binary one wait for a retry; an operator acts on each."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders")
    @retry(Backoff(first=500, ceiling=500, attempts=3))
    def handle(order: bytes) -> None:
        raise Transient("later")

    keys = [None, None, b"\xff\x00\x01", b"text"]
    bench.send(*(Message.new("orders", b"x%d" % n, key=key) for n, key in enumerate(keys)))
    with running(consumer):
        until(lambda: len(bench.held) == 4, "all are parked")
    desk = ParkingAdmin(bench.engine)
    waiting = desk.waiting()
    assert sorted(one.key for one in waiting) == ["(no key)", "(no key)", "0xff0001", "text"]
    assert len({one.id for one in waiting}) == 4
    for one in waiting:
        (row,) = desk.messages("g", "orders", one.id)
        [gone] = desk.skip("g", "orders", one.id, WHY)
        assert gone.message_id == row.origin.message.id
        assert desk.release("g", "orders", one.id, WHY) == 0
        assert row.origin.body is not None
    assert desk.messages("g", "orders", "text") == []
    assert len(desk.audited()) == 8
    for wrong in ("id:", "id:zz", "id:ffffffffffff0000", "eve"):
        with pytest.raises(NotParked, match="named by its id"):
            desk.release("g", "orders", wrong, WHY)
    bench.close()


def test_a_reason_is_needed() -> None:
    """An act without one is refused."""
    with pytest.raises(ConfigurationError, match="reason is empty"):
        Operator(actor="ada", reason=" ")


def test_skip_discards_what_holds_the_key_and_never_what_waits_behind_it(tmp_path: Path) -> None:
    """The dead letter goes; the healthy messages behind it run, in order."""
    bench, consumer = poisoned(tmp_path)
    bench.publish("bad", 1, 2, 3)
    consumer.run(until_idle=True)
    desk = ParkingAdmin(bench.engine)
    [letter] = bench.letters
    going, parked = desk.skippable("g", "orders", "k")
    assert ([one.dlq_id for one in going], parked) == ([letter.dlq_id], 3)
    [gone] = desk.skip("g", "orders", "k", WHY)
    assert gone.message_id == letter.message_id
    [letter] = bench.letters
    assert (letter.state, letter.closed_by, letter.closed_reason) == ("discarded", "ada", "seen to")
    _, again = poisoned(tmp_path)
    with running(again):
        until(lambda: bench.effects == ["1", "2", "3"], "all that waited ran")
    bench.close()


def test_what_was_skipped_can_be_reopened_and_replayed(tmp_path: Path) -> None:
    """Also a parked message, named by its number; the key waits as before."""
    bench, consumer = poisoned(tmp_path)
    bench.publish("bad", 1, 2, 3)
    consumer.run(until_idle=True)
    desk = ParkingAdmin(bench.engine)
    _, second, _ = desk.messages("g", "orders", "k")
    [gone] = desk.skip("g", "orders", "k", WHY, numbers=[second.seq])
    assert [row.origin.body for row in desk.messages("g", "orders", "k")] == [b"1", b"3"]
    assert [(row.state, row.payload) for row in bench.letters] == [
        ("pending", b"bad"),
        ("discarded", b"2"),
    ]
    with bench.engine.begin() as db:
        assert reopen(db, [str(gone.dlq_id)]) == [gone.dlq_id]
    assert [row.state for row in bench.letters] == ["pending", "pending"]
    with pytest.raises(NotFound, match="holdfast keys show"):
        desk.skip("g", "orders", "k", WHY, numbers=[second.seq])
    with bench.engine.connect() as db:
        assert verify(db).is_whole
    bench.close()


@pytest.mark.parametrize("way", ["behind a dead letter", "before its retry"])
def test_the_letter_of_a_skipped_message_hides_what_its_consumer_hides(
    tmp_path: Path, way: str
) -> None:
    """The desk does not know the handler: what to hide is kept with the parked message."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)
    origin = CaptureSettings(
        redaction=Redaction(paths=("card.number",)), tenant="$.shop", subject="$.who", entity="$.no"
    )

    @consumer.on("orders")
    @dead_letter(origin=origin)
    @retry(Backoff(first=3600, ceiling=3600, attempts=3))
    def handle(order: dict[str, Any]) -> None:
        raise Transient("not yet") if way == "before its retry" else PoisonMessage("bad")

    orders = [{"no": n, "who": "ada", "shop": "s", "card": {"number": f"4111 {n}"}} for n in (1, 2)]
    bench.publish(*orders, key="k")
    with running(consumer):
        until(lambda: bench.held and bench.lag == 0, "one is parked")
    desk = ParkingAdmin(bench.engine)
    row = desk.messages("g", "orders", "k")[-1]
    [gone] = desk.skip("g", "orders", "k", WHY, numbers=[row.seq])
    letter = next(one for one in bench.letters if one.dlq_id == gone.dlq_id)
    assert json.loads(letter.payload)["card"] == {"number": "***"}
    assert (letter.tenant, letter.entity_ref, letter.subject) == ("s", "2", "ada")
    assert not letter.replayable
    own = dead_letter_id("g", "orders", row.origin.message, origin.hidden)
    assert gone.dlq_id == own, "the consumer would know it by another id"
    bench.close()


def test_what_an_older_version_parked_is_skipped_only_if_it_may_be_kept_as_it_is(
    tmp_path: Path,
) -> None:
    """It did not say what the handler hides; nothing goes, and nothing is stored, by mistake."""
    bench, consumer = poisoned(tmp_path)
    bench.publish("bad", 1)
    consumer.run(until_idle=True)
    with bench.engine.begin() as db:
        db.execute(update(held).values(rules=None))
    desk = ParkingAdmin(bench.engine)
    [row] = desk.messages("g", "orders", "k")
    with pytest.raises(ConfigurationError, match="--unredacted"):
        desk.skip("g", "orders", "k", WHY, numbers=[row.seq])
    assert len(bench.letters) == 1
    assert len(desk.messages("g", "orders", "k")) == 1
    [gone] = desk.skip("g", "orders", "k", WHY, numbers=[row.seq], unredacted=True)
    assert [one.payload for one in bench.letters if one.dlq_id == gone.dlq_id] == [b"1"]
    bench.close()


@pytest.mark.parametrize("way", ["behind a dead letter", "before its retry"])
def test_a_skipped_message_is_the_dead_letter_of_its_handler_whatever_its_name(
    tmp_path: Path, way: str
) -> None:
    """A handler with a name of its own knows its dead letters by it, not by the topic."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders", name="books")
    @dead_letter
    @retry(Backoff(first=3600, ceiling=3600, attempts=3))
    def handle(order: bytes) -> None:
        raise Transient("not yet") if way == "before its retry" else PoisonMessage("bad")

    bench.publish(1, 2)
    with running(consumer):
        until(lambda: bench.held and bench.lag == 0, "one is parked")
    admin = ParkingAdmin(bench.engine)
    row = admin.messages("g", "orders", "k")[-1]
    [gone] = admin.skip("g", "orders", "k", WHY, numbers=[row.seq])
    assert gone.dlq_id == dead_letter_id("g", "books", row.origin.message, ())
    letter = next(one for one in bench.letters if one.dlq_id == gone.dlq_id)
    assert letter.handler == "books"
    bench.close()


def test_the_message_whose_retry_is_waited_for_is_what_a_skip_discards(tmp_path: Path) -> None:
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders")
    @retry(Backoff(first=500, ceiling=500, attempts=3))
    @idempotent
    def handle(order: int, session: Session) -> None:
        if order == 0:
            raise Transient("later")
        session.execute(insert(effects).values(what=str(order)))

    bench.publish(0, 1, 2)
    desk = ParkingAdmin(bench.engine)
    with running(consumer):
        until(lambda: len(bench.held) == 3, "all are parked")
        [gone] = desk.skip("g", "orders", "k", WHY)
        until(lambda: bench.effects == ["1", "2"], "the others run")
    [letter] = bench.letters
    assert (letter.dlq_id, letter.state, letter.payload) == (gone.dlq_id, "discarded", b"0")
    bench.close()


def poisoned(folder: Path) -> tuple[Bench, Consumer]:
    """Return a consumer to which `bad` is poison."""
    bench = Bench(folder, f"sqlite:///{folder}/app.db")
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter()
    @idempotent
    def handle(order: bytes, session: Session) -> None:
        if order == b"bad":
            raise PoisonMessage("bad")
        session.execute(insert(effects).values(what=order.decode()))

    return bench, consumer


def test_who_released_a_held_key_is_the_systems_word(tmp_path: Path) -> None:
    """The trail names the account of the operating system, whatever $LOGNAME says."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders")
    @retry(Backoff(first=500, ceiling=500, attempts=3))
    def handle(order: str) -> None:
        raise Transient("later")

    bench.publish("o1", key="ada")
    with running(consumer):
        until(lambda: bench.held, "it is parked")
    bench.close()
    where = ("--database", f"sqlite:///{tmp_path}/app.db")
    pretended = {"LOGNAME": "mallory", "USER": "mallory", "LNAME": "mallory", "USERNAME": "mallory"}
    done = shell("keys", "release", "g", "orders", "ada", "--reason", "x", *where, **pretended)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(shell("keys", "audit", "--json", *where).stdout)
    own = pwd.getpwuid(os.getuid()).pw_name
    assert entry["actor"] == own
    assert entry["detail"]["account"].startswith(f"{own} ({os.getuid()})@")
