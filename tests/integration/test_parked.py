"""Operators see, edit, release and skip what the broker refused; each act is audited."""

from __future__ import annotations

import hashlib
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from holdfast.brokers import connect
from holdfast.db.audit import OUTBOX, Audit, AuditEntry, Operator, entries
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError, InvalidMessage
from holdfast.outbox import Event, LeaseEngine, Outbox, Relay
from holdfast.outbox.parked import EventEdit, EventNotParked, ParkedKeys, ParkedSelection
from holdfast.testing import VirtualClock
from tests.migrated import migrated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


BIG = "x" * 3000
OPERATOR = Operator(actor="ada", reason="OPS-12: payload too large")


class Shop:
    """An outbox, and a broker that takes no message above 2000 bytes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.engine = open_database(url)
        migrated(self.engine)
        self.parked = ParkedKeys(self.engine)
        self._broker = connect(f"sqlite:///{folder}/broker.db?max_message=2000")

    def audited(self) -> list[AuditEntry]:
        """Return what was done to the outbox, newest first."""
        with self.engine.connect() as db:
            return entries(db, area=OUTBOX)

    def add(self, *events: tuple[str | None, Any], topic: str = "orders") -> None:
        """Commit *events*, each a key and a body."""
        with Session(self.engine) as session, session.begin():
            Outbox().add_all(
                session, [Event(body=body, topic=topic, key=key) for key, body in events]
            )

    def relay(self) -> int:
        """Run a relay until nothing is left to do; return how many it published."""
        sink = self._broker.sink()
        try:
            return Relay(LeaseEngine(self.engine, sink)).run_once()
        finally:
            sink.close()

    def published(self) -> list[tuple[str | None, Any]]:
        """Return key and body of all that the broker has, in order per key."""
        source = self._broker.source(["orders"], group="observer")
        found = []
        while batch := source.poll(1000, 0.5 if not found else 0.0):
            found += [(d.message.key_text, d.message.payload) for d in batch]
            source.accept(batch)
        source.close()
        return found

    def close(self) -> None:
        """Let go of database and broker."""
        self._broker.close()
        self.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Open a shop on each kind of database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("parked")
    made = Shop(url, tmp_path)
    yield made
    made.close()


def test_a_parked_key_shows_what_holds_it(shop: Shop) -> None:
    """The list names the refused event, its error and how many wait behind; others flow."""
    shop.add(("a", {"n": 1}), ("a", BIG), ("a", {"n": 2}), ("b", {"n": 3}), (None, BIG))
    shop.relay()
    assert sorted(shop.published()) == [("a", b'{"n":1}'), ("b", b'{"n":3}')]
    held, keyless = shop.parked.waiting()
    assert (held.topic, held.key, held.refused, held.behind) == ("orders", "a", 1, 1)
    assert held.error is not None
    assert "exceeds the limit of 2000" in held.error
    assert (keyless.key, keyless.refused, keyless.behind) == (None, 1, 0)
    refused, behind = shop.parked.events(ParkedSelection(topic="orders", key="a"))
    assert refused.seq == held.first
    assert (refused.state, behind.state, behind.payload) == ("refused", "behind", b'{"n":2}')
    assert dict(refused.headers)["ce_id"] == refused.id.encode()
    assert shop.parked.events(ParkedSelection(events=(refused.id,))) == [refused]


def test_an_edited_and_released_event_goes_first_of_its_key(shop: Shop) -> None:
    """Order per key holds through park, edit and release, also with events added meanwhile."""
    shop.add(("a", {"n": 1, "note": BIG}), ("a", {"n": 2}))
    shop.relay()
    first = str(shop.parked.waiting()[0].first)
    edited = shop.parked.edit(first, EventEdit(payload=b'{"n":1,"note":"short"}'), OPERATOR)
    assert edited.state == "refused"
    assert shop.relay() == 0
    shop.parked.release(ParkedSelection(events=(first,)), OPERATOR)
    shop.add(("a", {"n": 3}))
    assert shop.relay() == 3
    assert shop.published() == [
        ("a", b'{"n":1,"note":"short"}'), ("a", b'{"n":2}'), ("a", b'{"n":3}'),
    ]  # fmt: skip
    assert shop.parked.waiting() == []


def test_a_release_without_a_cure_parks_again(shop: Shop) -> None:
    """The key waits on, in order, and nothing is lost."""
    shop.add(("a", BIG), ("a", {"n": 2}))
    shop.relay()
    assert shop.parked.release(ParkedSelection(topic="orders", key="a"), OPERATOR) == 1
    assert shop.relay() == 0
    key = shop.parked.waiting()[0]
    assert (key.refused, key.behind, key.released) == (1, 1, 0)
    assert shop.published() == []


def test_a_skip_lets_the_rest_of_the_key_flow(shop: Shop) -> None:
    """The skipped event is gone for good, and what waited behind it goes by itself."""
    shop.add(("a", BIG), ("a", {"n": 2}), ("a", {"n": 3}))
    shop.relay()
    shop.parked.skip(str(shop.parked.waiting()[0].first), OPERATOR)
    assert shop.relay() == 2
    assert shop.published() == [("a", b'{"n":2}'), ("a", b'{"n":3}')]
    assert shop.parked.waiting() == []


def test_a_whole_topic_is_released_at_once(shop: Shop) -> None:
    """After a mistake on the broker's side one command is enough, even for thousands."""
    shop.add(*((f"k{n}", BIG) for n in range(1100)), *((f"k{n}", {"n": n}) for n in range(100)))
    shop.add(("other", BIG), topic="else")
    shop.relay()
    with shop.engine.begin() as db:
        db.execute(text("UPDATE holdfast_outbox_parked SET payload = NULL"))
    assert shop.parked.release(ParkedSelection(topic="orders"), OPERATOR) == 1100
    assert shop.relay() == 1200
    assert [key.topic for key in shop.parked.waiting()] == ["else"]
    entry = shop.audited()[0]
    assert (entry.subject, entry.detail["events"]) == ("orders", 1100)


def test_only_refused_events_can_be_changed(shop: Shop) -> None:
    """An event that the relay may be publishing right now is left alone."""
    shop.add(("a", BIG), ("a", {"n": 2}))
    shop.relay()
    refused, behind = (
        str(e.seq) for e in shop.parked.events(ParkedSelection(topic="orders", key="a"))
    )
    with pytest.raises(EventNotParked, match="waits behind"):
        shop.parked.skip(behind, OPERATOR)
    with pytest.raises(EventNotParked, match="waits behind"):
        shop.parked.edit(behind, EventEdit(payload=b"{}"), OPERATOR)
    shop.parked.release(ParkedSelection(events=(refused,)), OPERATOR)
    with pytest.raises(EventNotParked, match="released already"):
        shop.parked.skip(refused, OPERATOR)
    with pytest.raises(EventNotParked, match="nothing refused"):
        shop.parked.release(ParkedSelection(events=(refused,)), OPERATOR)
    with pytest.raises(EventNotParked, match="no event 99999"):
        shop.parked.skip("99999", OPERATOR)
    assert [entry.action for entry in shop.audited()] == ["release"]


def test_every_act_is_audited_without_payloads(shop: Shop) -> None:
    """Actor, reason and changed paths are kept; what customers wrote is not, nor a digest of it.

    The trail outlives the event: whoever reads it must not be able to try values out.
    """
    before = {"card": "4111-secret", "lines": [1, 2], "gone": 1, "note": BIG}
    after = b'{"card":"4222-secret","lines":[1,2,3],"new":true,"note":"y"}'
    shop.add(("a", before))
    shop.relay()
    event = shop.parked.events(ParkedSelection(topic="orders", key="a"))[0]
    shop.parked.edit(
        str(event.seq), EventEdit(payload=after, headers=(("x-fixed", "yes"),)), OPERATOR
    )
    shop.parked.skip(event.id, Operator(actor="bob", reason="test data"))
    skip, edit = shop.audited()
    assert (edit.actor, edit.action, edit.reason) == ("ada", "edit", OPERATOR.reason)
    assert edit.subject == f"orders/a#{event.seq}"
    assert edit.detail["payload_bytes"] == {
        "before": len(event.payload or b""),
        "after": len(after),
    }
    assert edit.detail["payload_changes"] == [
        {"path": "$.card", "change": "changed"},
        {"path": "$.gone", "change": "removed"},
        {"path": "$.lines[2]", "change": "added"},
        {"path": "$.new", "change": "added"},
        {"path": "$.note", "change": "changed"},
    ]
    assert edit.detail["headers_changed"] == ["x-fixed"]
    assert (skip.actor, skip.detail["payload_bytes"]) == ("bob", len(after))
    assert "secret" not in str([skip, edit])
    for payload in (event.payload or b"", after):
        for kind in (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b):
            assert kind(payload).hexdigest()[:8] not in str([skip.detail, edit.detail])


def test_an_act_whose_audit_cannot_be_written_does_not_happen(shop: Shop) -> None:
    """Deed and entry commit together."""
    shop.add(("a", BIG))
    shop.relay()
    first = str(shop.parked.waiting()[0].first)
    with shop.engine.begin() as db:
        db.execute(text("DROP TABLE holdfast_audit"))
    with pytest.raises(Exception, match="holdfast_audit"):
        shop.parked.skip(first, OPERATOR)
    assert shop.parked.waiting()[0].refused == 1


def test_two_operators_do_not_act_twice(shop: Shop) -> None:
    """Of several skips of one event at once, one wins and the others are told."""
    shop.add(("a", BIG))
    shop.relay()
    first = str(shop.parked.waiting()[0].first)
    results: list[str] = []
    start = threading.Barrier(4)

    def skip() -> None:
        start.wait()
        try:
            shop.parked.skip(first, OPERATOR)
            results.append("skipped")
        except EventNotParked:
            results.append("told")

    threads = [threading.Thread(target=skip) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["skipped", "told", "told", "told"]
    assert len(shop.audited()) == 1


def test_an_edit_keeps_identity_and_kind(shop: Shop) -> None:
    """Id and key cannot be edited, and JSON stays JSON unless forced."""
    with pytest.raises(InvalidMessage, match="identity"):
        EventEdit(headers=(("ce_id", "other"),))
    with pytest.raises(InvalidMessage, match="identity"):
        EventEdit(without=("ce_partitionkey",))
    with pytest.raises(InvalidMessage, match="nothing to edit"):
        EventEdit()
    with pytest.raises(InvalidMessage, match="header name"):
        EventEdit(headers=(("bad name", "x"),))
    shop.add(("a", {"note": BIG}))
    shop.relay()
    first = str(shop.parked.waiting()[0].first)
    with pytest.raises(InvalidMessage, match="not JSON"):
        shop.parked.edit(first, EventEdit(payload=b"{oops"), OPERATOR)
    forced = shop.parked.edit(first, EventEdit(payload=b"\xff\x00", force=True), OPERATOR)
    assert forced.payload == b"\xff\x00"


def test_a_key_of_another_case_is_another_key(shop: Shop) -> None:
    """Releasing one key leaves its look-alikes parked, and nothing of them overtakes."""
    shop.add(("Ada", BIG), ("ada", BIG), ("ada ", BIG))
    shop.relay()
    shop.add(("Ada", {"n": 1}), ("ada", {"n": 2}), ("ada ", {"n": 3}))
    assert shop.relay() == 0
    assert shop.parked.release(ParkedSelection(topic="orders", key="ada"), OPERATOR) == 1


@pytest.mark.parametrize("operator", [{"actor": " ", "reason": "x"}, {"actor": "a", "reason": ""}])
def test_nothing_is_done_without_a_name_and_a_reason(operator: dict[str, str]) -> None:
    """Blank ones are refused before anything happens."""
    with pytest.raises(ConfigurationError, match="is empty"):
        Operator(**operator)


@pytest.mark.parametrize("selection", [{}, {"key": "a"}, {"events": ("1",), "topic": "t"}])
def test_a_selection_must_say_what_is_meant(selection: dict[str, Any]) -> None:
    """An empty or double selection never means everything."""
    with pytest.raises(ConfigurationError):
        ParkedSelection(**selection)


def test_old_entries_of_the_audit_trail_are_pruned_and_that_is_audited(shop: Shop) -> None:
    """What is younger stays; nothing below a day can be asked for."""
    old = Audit(OUTBOX, clock=VirtualClock(datetime(2020, 1, 1, tzinfo=UTC)))
    with shop.engine.begin() as db:
        old.append(db, OPERATOR, "skip", "orders/1", {})
        Audit(OUTBOX).append(db, OPERATOR, "release", "orders/2", {})
    assert Audit(OUTBOX).prune(shop.engine, 365, Operator(actor="ada", reason="yearly")) == 1
    assert [entry.action for entry in shop.audited()] == ["release"]
    with shop.engine.connect() as db:
        assert entries(db, limit=1)[0].action == "audit.prune"
    assert Audit(OUTBOX).prune(shop.engine, 365, OPERATOR) == 0
    with pytest.raises(ConfigurationError, match="at least 1"):
        Audit(OUTBOX).prune(shop.engine, 0, OPERATOR)
