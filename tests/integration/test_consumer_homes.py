"""What a consumer's dead letters say, and where they go: a home of one's own loses no promise."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session  # noqa: TC002 - the handler's annotation is read at run time

from holdfast.backoff import Backoff, Jitter
from holdfast.consumer import Consumer
from holdfast.db.engine import open_database
from holdfast.dlq import CaptureSettings, DeadLetterStore, DeadLetterTopic, dead_letter
from holdfast.dlq.protection.vault import Vault
from holdfast.dlq.replay.plan import ReplayOptions
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.survey import survey
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.triage import Rule, Triage, TriageVerdict
from holdfast.errors import ConfigurationError, PoisonMessage, Transient
from holdfast.idempotency import idempotent
from holdfast.retry import retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DATA = Triage(rules=[Rule("mine", lambda case: True, TriageVerdict.DATA)])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


class Doom(BaseException):
    """What ends the process."""


def registered(bench: Bench, consumer: Consumer, layer: Any) -> Consumer:
    """Return *consumer* with a handler that fails for "bad", "late" and "doom"."""

    @consumer.on("orders")
    @layer
    @retry(Backoff(first=0.2, ceiling=0.3, attempts=2, jitter=Jitter.EQUAL))
    @idempotent
    def handle(order: str, session: Session) -> None:
        if "doom" in order:
            raise Doom(order)
        if order == "bad":
            raise PoisonMessage("bad for ever")
        if order == "late":
            raise Transient("not yet")
        bench.note(session, order)

    return consumer


@pytest.mark.parametrize("same", [True, False], ids=["the engine", "another engine of it"])
def test_a_store_of_ones_own_keeps_the_quarantine(bench: Bench, same: bool) -> None:
    """Later messages of the key wait, with the rules that the home brings."""
    engine = bench.engine if same else open_database(bench.engine.url)
    home = DeadLetterStore(engine, triage=DATA)
    consumer = registered(bench, bench.consumer(), dead_letter(home))
    bench.publish("bad", "after", "later", key="sick")
    bench.publish("fine", key="well")
    with running(consumer):
        until(lambda: bench.lag == 0, "everything acknowledged")
    engine.dispose()
    assert bench.effects == ["fine"]
    assert len(bench.held_keys) == 1
    assert len(bench.held) == 2
    assert [row.verdict for row in bench.letters] == ["hold for data"]


@pytest.mark.parametrize("kind", ["topic", "another database", "memory"])
def test_a_home_that_cannot_hold_keys_is_refused_while_keys_are_held(
    bench: Bench, tmp_path: Path, kind: str
) -> None:
    """Nothing would hold the later ones back, and nobody would notice."""
    url = "sqlite://" if kind == "memory" else f"sqlite:///{tmp_path}/other.db"
    engine = open_database(url)
    home: Any = DeadLetterTopic.on(bench.broker) if kind == "topic" else DeadLetterStore(engine)
    with pytest.raises(ConfigurationError, match="quarantine=False"):
        registered(bench, bench.consumer(), dead_letter(home))
    registered(bench, bench.consumer(quarantine=False), dead_letter(home))
    registered(bench, bench.consumer(order="lane"), dead_letter(home))
    bench.consumer().on("orders", ordered=False)(dead_letter(home)(lambda order: None))
    engine.dispose()


def test_a_letter_that_goes_elsewhere_ends_a_parked_retry(bench: Bench) -> None:
    """The row in the database goes when the letter is out, or it would be retried for ever."""
    consumer = bench.consumer(quarantine=False, patience=0.05)
    registered(bench, consumer, dead_letter(DeadLetterTopic.on(bench.broker)))
    bench.publish("late")
    with running(consumer):
        until(lambda: consumer.tally.dead_lettered == 1, "its retries are spent")
        until(lambda: not bench.held and not bench.held_keys, "nothing is parked any more")
    assert consumer.tally.parked == 1
    assert bench.attempts == []
    assert sum(bench.broker.lag("holdfast-dlq-collector", ["orders.g.dlq"]).values()) == 1


def test_the_consumer_takes_rules_for_its_letters(bench: Bench) -> None:
    """No home of one's own is needed for them."""
    consumer = registered(bench, bench.consumer(triage=DATA), dead_letter())
    bench.publish("bad")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    assert [row.verdict for row in bench.letters] == ["hold for data"]
    assert len(bench.held_keys) == 1
    with pytest.raises(ConfigurationError, match="holdfast dlq collect --triage"):
        Consumer(bench.broker, group="g", triage=DATA)


def test_the_letter_of_a_message_that_kills_the_process_is_sealed_as_any_other(
    bench: Bench,
) -> None:
    """Origin and home are the handler's, whatever ended the message."""
    vault = Vault(bench.engine, os.urandom(32))
    origin = CaptureSettings(
        vault=vault, fields=("name",), subject="$.customer", tenant="$.shop", service_version="1.4"
    )
    layer = dead_letter(DeadLetterStore(bench.engine, triage=DATA), origin=origin, commutative=True)
    bench.publish('{"name": "Ada", "customer": "c-9", "shop": "acme", "doom": 1}', key="k")
    with pytest.raises(Doom):
        registered(bench, bench.consumer(crash_limit=1), layer).run()
    again = registered(bench, bench.consumer(crash_limit=1), layer)
    with running(again):
        until(lambda: bench.lag == 0, "acknowledged")
    (row,) = bench.letters
    assert (row.stage, row.verdict) == ("crash", "hold for data")
    assert b"Ada" not in row.payload
    assert (row.subject, row.tenant, row.service_version) == ("c-9", "acme", "1.4")
    assert msgspec.json.decode(row.envelope)["culprit"]["commutative"] is True
    assert len(bench.held_keys) == 1


def test_letters_say_version_and_broker(bench: Bench) -> None:
    """So groups show versions, and a canary has messages of each."""
    for version, key in (("1.4.1", "a"), ("1.4.2", "b")):
        consumer = registered(bench, bench.consumer(version=version), dead_letter())
        bench.publish("bad", key=key)
        with running(consumer):
            until(lambda: bench.lag == 0, "acknowledged")
    (problem,) = FailureGroups(bench.engine).listed()
    assert problem.versions == ("1.4.1", "1.4.2")
    assert {row.broker for row in bench.letters} == {bench.broker.name[:64]}
    with bench.engine.connect() as db:
        found = survey(db, Selection(consumer_group="g"), ReplayOptions())
    assert {letter.version for letter in found.letters} == {"1.4.1", "1.4.2"}


def test_what_a_handler_says_of_itself_goes_first(bench: Bench) -> None:
    """The consumer fills in the rest; so does the command line, after both."""
    consumer = bench.consumer(
        origin=CaptureSettings(service_version="2", tenant="tenant", git_sha="abc")
    )
    registered(bench, consumer, dead_letter(origin=CaptureSettings(service_version="3")))
    consumer.identify("4")
    bench.publish("bad")
    with running(consumer):
        until(lambda: bench.lag == 0, "acknowledged")
    (row,) = bench.letters
    assert row.service_version == "3"
    assert msgspec.json.decode(row.envelope)["culprit"]["git_sha"] == "abc"
    other = bench.consumer()
    registered(bench, other, dead_letter())
    other.identify("4")
    bench.publish("bad", key="other")
    with running(other):
        until(lambda: bench.lag == 0, "acknowledged")
    with bench.engine.connect() as db:
        said = db.execute(select(letters.c.service_version).order_by(letters.c.seq)).scalars()
        assert list(said) == ["3", "4"]
