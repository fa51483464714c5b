"""No text that comes from elsewhere keeps a database from storing what it is about.

Columns have lengths and databases refuse some characters. Whatever names, ids, keys, errors and
reasons say, the row is written; a message whose dead letter is refused would come for ever.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.consumer import create_tables
from holdfast.consumer.parking.admin import ParkingAdmin
from holdfast.consumer.parking.store import ParkedKey, ParkedMessages, hash_of
from holdfast.consumer.schema import metadata as consumer_tables
from holdfast.db.audit import OUTBOX, Audit, Operator, entries, verify
from holdfast.db.engine import open_database
from holdfast.dlq import CaptureSettings, DeadLetterStore, capture, close, dead_letter
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, StopPolicy, freeze
from holdfast.dlq.replay.edits import Edits, LetterEdit
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.overtaking import overtake
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.store.schema import metadata as dlq_tables
from holdfast.headers import Headers
from holdfast.idempotency import AttemptLog, Inbox
from holdfast.idempotency.schema import metadata as inbox_tables
from holdfast.ids import new_id
from holdfast.outbox.schema import create_tables as create_outbox
from holdfast.ports import Delivery, Lane
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until
from tests.dead_letters import KINDS, failed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from tests.servers import Postgres

NUL, LONE, ASTRAL = "\x00", "\ud800", "\U0001f4a3"
MOST = settings(max_examples=25)

hostile = st.one_of(
    st.text(st.sampled_from(["a", NUL, LONE, "\udfff", ASTRAL, "ß", "'", "\\", "\n"]), min_size=1),
    st.builds(
        lambda fill, size, last: fill * size + last,
        st.sampled_from(["a", "ß", ASTRAL, NUL, LONE]),
        st.sampled_from([15, 31, 62, 63, 64, 253, 254, 255, 256, 599, 600, 1023, 1999, 2000]),
        st.sampled_from(["", NUL, LONE, NUL * 3]),
    ),
)
"""Text around the lengths of columns, of characters that some database refuses."""


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind, with every table that takes foreign text."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('hostile')}/app.db"
    else:
        url = request.getfixturevalue(request.param).database("hostile")
    made = open_database(url)
    for tables in (consumer_tables, dlq_tables, inbox_tables):
        tables.create_all(made)
    create_outbox(made)
    yield made
    made.dispose()


def message_of(text: str, **more: Any) -> Message:
    """Return a message that says *text* wherever a message can."""
    made = Message.new("orders", b'{"n": 1}', key=b"\x00\xff", **more)
    return made.with_(
        id=f"{new_id()}{text}", type=text, source=text, correlation_id=text, causation_id=text,
        content_type=text, schema=text, traceparent=text,
        headers=Headers.received([("t", text.encode("utf-8", "surrogatepass")), (text, b"x")]),
    )  # fmt: skip


@MOST
@given(text=hostile)
@example(text="t" * 254 + NUL)
@example(text="t" * 254 + LONE)
def test_every_message_can_be_dead_lettered_and_comes_back_as_it_was(
    engine: Engine, text: str
) -> None:
    """Whatever its attributes say; also what the error, the handler and the tenant say."""
    home, message = DeadLetterStore(engine), message_of(text)
    kind = type("Failed", (Exception,), {"__qualname__": text, "__module__": text})
    origin = CaptureSettings(service_version=text, git_sha=text, host=text, tenant="t", broker=text)
    delivery = Delivery(lane=Lane("orders", 2**40), position=text, key=b"k", body=b"", headers=[])
    letter = capture(
        message, failed(kind(text)), group=text, handler=text, delivery=delivery, origin=origin
    )
    home.put(letter)
    with engine.begin() as db:
        home.put(letter, db)
    kept = home.get(letter.dlq_id)
    assert kept is not None
    assert kept.message.with_(headers=message.headers) == message
    assert kept.message.headers.get("t") == message.headers.get("t")
    with engine.begin() as db:
        overtake(db, [], message, delivery)
        assert close(db, [letter.dlq_id], "discarded", actor=text + "x", reason=text + "x")


@MOST
@given(text=hostile)
def test_every_act_on_dead_letters_can_be_written_down(engine: Engine, text: str) -> None:
    """By whoever, for whatever reason; and the trail of it stays whole."""
    name, operator = new_id(), Operator(actor=f"x{text}", reason=f"x{text}", ticket=text)
    letter = capture(message_of("plain"), failed(ValueError(name)), group=name, handler="h")
    DeadLetterStore(engine).put(letter)
    with engine.begin() as db:
        Audit().append(db, operator, text, text, {text: text})
        assert verify(db).is_whole
        (row,) = db.execute(select(letters).where(letters.c.dlq_id == letter.dlq_id))
    FailureGroups(engine).annotate(row.group_id, operator, note=text)
    FailureGroups(engine).acknowledge(row.group_id, operator, owner=text)
    Edits(engine).edit(letter.dlq_id, LetterEdit(payload=b"{}"), operator)
    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=()))
    plan = freeze(engine, Selection(consumer_group=name), terms, operator).plan
    assert Plans(engine).abort(plan, operator).state == "aborted"


@MOST
@given(text=hostile)
def test_every_attempt_can_be_counted(engine: Engine, text: str) -> None:
    """Of every message by every consumer, whatever its error says."""
    ledger, consumer, owner = AttemptLog(engine), f"g/{text}", new_id()
    message_id = f"{text}{new_id()}"
    ledger.starting(consumer, [message_id], owner)
    assert ledger.failed(consumer, message_id, ValueError(text)).failed == 1
    assert ledger.standing(consumer, [message_id])[message_id].failed == 1
    ledger.finished(consumer, [message_id], owner)
    ledger.forget(consumer, [message_id])
    with Session(engine) as session, session.begin():
        Inbox().enter(session, consumer)


@MOST
@given(text=hostile)
def test_every_key_can_be_held_and_every_message_parked(engine: Engine, text: str) -> None:
    """Behind a dead letter or for a retry, and let go by an operator who says anything."""
    held, bare = ParkedMessages("g"), text.encode("utf-8", "surrogatepass")
    key = ParkedKey("orders", hash_of(bare, ""), bare)
    origin = Delivery(
        lane=Lane("orders", 1), position=text, key=bare, body=bare, headers=[("h", bare)],
        known_id=f"x{text}",
    )  # fmt: skip
    with engine.begin() as db:
        held.hold(db, key, dlq_id=new_id(), note=text)
        assert held.park(db, key, origin, 1) is not None
        held.postpone(db, key, origin, attempt=2, delay=0.0, note=text)
        assert [row.origin.body for row in held.rows(db, key, 1)] == [bare]
    operator = Operator(actor=f"x{text}", reason=f"x{text}")
    desk = ParkingAdmin(engine)
    assert desk.release("g", "orders", f"id:{key.key_hash}", operator) >= 1
    assert desk.audited()[0].action == "release"
    with engine.begin() as db:
        Audit(OUTBOX).append(db, operator, "skip", text, {"key": text})
        assert entries(db, limit=1, area=OUTBOX)[0].action == "skip"


@pytest.mark.parametrize("bad", [NUL, LONE])
def test_a_poison_message_with_a_long_hostile_attribute_blocks_nobody(
    tmp_path: Path, postgres: Postgres, bad: str
) -> None:
    """It becomes a dead letter at the first try; its key is held and the lane goes on."""
    bench = Bench(tmp_path, postgres.database("hostile_consumer"))
    consumer = bench.consumer(quarantine=True)

    @consumer.on("orders")
    @dead_letter()
    def handle(order: bytes, session: Session) -> None:
        if order == b"poison":
            raise ValueError(f"{'e' * 300}{bad}")
        bench.note(session, order.decode())

    poison = Message.new("orders", b"poison", key="k").with_(type="t" * 254 + bad)
    if bad == LONE:  # no wire carries it; the handler of a loop of one's own may get it
        outcome = consumer.handler("orders").handle(poison)
        assert outcome.acknowledge
    else:
        bench.send(poison)
        bench.publish(b"good", key="other")
        with running(consumer):
            until(lambda: bench.letters and bench.effects == ["good"], "both are done with")
    (row,) = bench.letters
    assert row.message_id == poison.id
    assert bench.lag == 0
    bench.close()


def test_what_the_encoding_of_the_database_lacks_is_stored_in_plain_characters(
    postgres: Postgres,
) -> None:
    """A database in LATIN1 has no emoji: the letter is there all the same, and sent as it came."""
    with latin(postgres) as engine:
        message = message_of(ASTRAL)
        letter = capture(message, failed(ValueError(ASTRAL)), group="g", handler="h")
        home = DeadLetterStore(engine)
        home.put(letter)
        with engine.begin() as db:
            home.put(capture(message, failed(ValueError(ASTRAL)), group="g2", handler="h"), db)
        kept = home.get(letter.dlq_id)
        assert kept is not None
        assert kept.message == message
        assert kept.failure.root.text == ASTRAL


def test_a_failed_attempt_is_counted_whatever_the_encoding_of_the_database(
    tmp_path: Path, postgres: Postgres
) -> None:
    """What an error says is no reason to think that the database is down."""
    with latin(postgres) as engine:
        bench = Bench(tmp_path, engine.url.render_as_string(hide_password=False))
        consumer = bench.consumer(patience=0.1)

        @consumer.on("orders")
        @retry(Backoff(first=300, ceiling=300, attempts=5))
        def handle(order: bytes) -> None:
            raise ValueError(ASTRAL)

        bench.publish(b"x")
        with running(consumer):
            until(lambda: bench.held_keys, "it is parked for its retry")
        (attempt,) = bench.attempts
        assert (attempt.failed, "1f4a3" in attempt.last_error) == (1, True)
        bench.close()


def test_a_letter_that_a_constraint_refuses_is_stored_with_what_it_allows(
    engine: Engine,
) -> None:
    """A refusal that is about the row is no outage: the same would be refused for ever."""
    with engine.begin() as db:
        if engine.dialect.name == "sqlite":
            db.exec_driver_sql(
                "CREATE TRIGGER strict BEFORE INSERT ON holdfast_dlq_message WHEN "
                "NEW.error_text LIKE '%forbidden%' BEGIN SELECT RAISE(ABORT, 'strict'); END"
            )
        else:
            db.exec_driver_sql(
                "ALTER TABLE holdfast_dlq_message ADD CONSTRAINT strict "
                "CHECK (error_text NOT LIKE '%%forbidden%%')"
            )
    letter = capture(message_of("x"), failed(ValueError("forbidden")), group="g", handler="h")
    DeadLetterStore(engine).put(letter)
    kept = DeadLetterStore(engine).get(letter.dlq_id)
    assert kept is not None
    assert (kept.message.id, kept.message.payload) == (letter.message.id, letter.message.payload)
    assert "refused" in kept.failure.root.text


@contextmanager
def latin(postgres: Postgres) -> Iterator[Engine]:
    """Open a database that keeps its text in LATIN1."""
    url = postgres.database("latin")
    postgres.execute('DROP DATABASE "latin"')
    postgres.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
    engine = open_database(url)
    create_tables(engine)
    yield engine
    engine.dispose()
