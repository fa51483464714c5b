"""Nothing that is kept of a message lets its hidden fields be guessed, neither id nor digest."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import column, select, table, update

from holdfast import Message
from holdfast.cli.migrations import Migrations
from holdfast.cli.migrations.history import VERSION_TABLE
from holdfast.db.audit import Operator, entries
from holdfast.dlq import CaptureSettings, DeadLetterStore, Redaction, capture, dead_letter
from holdfast.dlq.letter import DeadLetter, renamed
from holdfast.dlq.protection.vault import Vault
from holdfast.dlq.store.schema import message as letters
from holdfast.idempotency import Inbox, idempotent
from holdfast.idempotency.identity import UNCOMPARED, content_digest
from holdfast.idempotency.schema import inbox
from holdfast.ids import derived_id
from tests.consuming import Bench, running, until
from tests.dead_letters import KINDS, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

PHONE = "0170 1234567"
HIDING = CaptureSettings(redaction=Redaction(paths=("phone",)))
OPERATOR = Operator(actor="dpo", reason="erasure request 7")
SEEN = content_digest(json.dumps({"customer": "c-1", "n": 1, "phone": "***"}).encode())
"""The digest of an order without what is hidden of it."""


@pytest.fixture(scope="module", params=KINDS)
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Open a database of each kind, with the tables of all packages."""
    made = opened(request, tmp_path_factory.mktemp("identity"))
    Migrations(made).upgrade()
    yield made
    made.dispose()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def order(phone: str = PHONE, *, number: int = 1) -> Message:
    """Return a message with a phone number."""
    body = json.dumps({"customer": "c-1", "n": number, "phone": phone}).encode()
    return Message.new("orders", body, key="k", ids=lambda: f"id-{number}")


def dead(message: Message, origin: CaptureSettings = HIDING) -> DeadLetter:
    """Return the dead letter of *message*."""
    return capture(message, ValueError("bad"), group="g", handler="h", origin=origin)


def old_id(message: Message) -> str:
    """Return the id of older versions: a digest over the whole payload."""
    digest = hashlib.sha256(message.payload or b"").hexdigest()
    return derived_id("dead-letter", "g", "h", message.id, digest)


def as_before(message: Message, origin: CaptureSettings = HIDING) -> DeadLetter:
    """Return the letter that an older version made of *message*."""
    return renamed(dead(message, origin), old_id(message))


def guessed(letter_id: str) -> list[str]:
    """Return the phone numbers that an id gives away to somebody who tries them all."""
    tried = (f"0170 {number:07}" for number in range(1_234_000, 1_235_000))
    return [
        phone
        for phone in tried
        if letter_id in (old_id(order(phone)), dead(order(phone), CaptureSettings()).dlq_id)
    ]


def test_a_redacted_field_cannot_be_guessed_from_the_letters_id() -> None:
    """The id is the same whatever the field holds; other content is another letter."""
    made = dead(order())
    assert guessed(made.dlq_id) == []
    assert guessed(old_id(order())) == [PHONE]
    assert dead(order("0171 5")).dlq_id == made.dlq_id
    assert dead(order(number=2)).dlq_id != made.dlq_id
    visible = order().with_(payload=b'{"customer": "c-2", "n": 1, "phone": "0170 1234567"}')
    assert dead(visible).dlq_id != made.dlq_id
    opaque = order().with_(payload=b"phone=0170 1234567")
    assert dead(opaque).dlq_id == dead(opaque.with_(payload=b"phone=1")).dlq_id


def test_where_nothing_is_hidden_the_id_is_that_of_older_versions() -> None:
    """An upgrade changes no identity that it need not change."""
    assert dead(order(), CaptureSettings()).dlq_id == old_id(order())


def test_forgetting_a_subject_leaves_nothing_to_guess_from(database: Engine) -> None:
    """Neither the letter's id nor the audit entry depends on what was forgotten."""
    vault = Vault(database, bytes(range(32)))
    origin = CaptureSettings(vault=vault, fields=("phone",), subject="$.customer")
    made = dead(order(number=3), origin)
    DeadLetterStore(database).put(made)
    vault.forget("c-1", OPERATOR)
    assert dead(order("0171 5", number=3), origin).dlq_id == made.dlq_id
    with database.connect() as db:
        entry = entries(db, limit=1)[0]
        whole = str(db.execute(select(letters).where(letters.c.dlq_id == made.dlq_id)).all())
    assert PHONE not in whole
    assert hashlib.sha256(b"c-1").hexdigest() not in str(entry)
    assert "c-1" not in entry.subject


def test_a_letter_of_an_older_version_gets_an_id_that_tells_nothing(database: Engine) -> None:
    """The upgrade renames it wherever it is named; the same message again is no second letter."""
    home = DeadLetterStore(database)
    before, plain = as_before(order(number=4)), dead(order(number=5), CaptureSettings())
    vault = Vault(database, bytes(range(32)))
    sealing = CaptureSettings(vault=vault, fields=("phone",), subject="$.customer")
    sealed = as_before(order(number=6), sealing)
    with database.begin() as db:
        home.put(plain, db)
    for one in (before, sealed):
        _store_as_before(database, one)
    _rewind(database, "dlq", "dlq_0005")
    Migrations(database).upgrade()
    with database.connect() as db:
        ids = set(db.execute(select(letters.c.dlq_id)).scalars())
        history = str(db.execute(select(letters.c.history)).all())
    assert {dead(order(number=4)).dlq_id, plain.dlq_id} <= ids
    assert dead(order(number=6), sealing).dlq_id in ids
    for one in (before, sealed):
        assert one.dlq_id not in ids
        assert one.history.failures[0].id not in history
    home.put(dead(order(number=4)))
    home.put(as_before(order(number=4)))  # from a topic, where an older version left it
    home.put(dead(order(number=6), sealing))
    with database.connect() as db:
        assert len(set(db.execute(select(letters.c.dlq_id)).scalars())) == len(ids)
        count = select(letters.c.occurrences).where(letters.c.message_id == "id-4")
        assert db.execute(count).scalars().all() == [3]


def test_a_letter_that_kept_its_old_id_is_known_all_the_same(database: Engine) -> None:
    """Two versions at work side by side make one letter of one message."""
    before = as_before(order(number=7))
    _store_as_before(database, before)
    DeadLetterStore(database).put(dead(order(number=7)))
    with database.connect() as db:
        query = select(letters.c.dlq_id).where(letters.c.message_id == "id-7")
        assert db.execute(query).scalars().all() == [before.dlq_id]


def _store_as_before(database: Engine, letter: DeadLetter) -> None:
    """Put *letter* and give it the id that an older version would have stored it by."""
    DeadLetterStore(database).put(letter)
    with database.begin() as db:
        row = letters.c.message_id == letter.message.id
        history = json.dumps([{"id": letter.history.failures[0].id, "error": "x",
                               "at": letter.history.first_failed_at}])  # fmt: skip
        db.execute(update(letters).where(row).values(dlq_id=letter.dlq_id, history=history))


def _rewind(database: Engine, branch: str, to: str) -> None:
    versions = table(VERSION_TABLE, column("version_num"))
    with database.begin() as db:
        ours = versions.c.version_num.startswith(f"{branch}_")
        assert db.execute(update(versions).where(ours).values(version_num=to)).rowcount == 1


@pytest.mark.parametrize("way", ["handler", "consumer", "batch"])
def test_the_digest_in_the_inbox_covers_no_hidden_field(bench: Bench, way: str) -> None:
    """Nothing can be tried out; other content under a known id is noticed by what may be seen."""
    done: list[Any] = []
    consumer = bench.consumer(**({"origin": HIDING} if way == "consumer" else {}))

    @consumer.on("orders", **({"batch": 10} if way == "batch" else {}))
    @dead_letter(origin=CaptureSettings() if way == "consumer" else HIDING)
    @idempotent()
    def handle(order: dict[str, Any]) -> None:
        done.append(order)

    bench.send(order(), order())
    with running(consumer):
        until(lambda: bench.lag == 0, "handled once")
        with bench.engine.connect() as db:
            assert db.execute(select(inbox.c.digest)).scalars().all() == [SEEN]
            assert not db.execute(select(letters.c.dlq_id)).all()
        bench.send(order().with_(payload=b'{"customer": "c-2", "phone": "1"}'))
        until(lambda: bench.lag == 0, "the conflict is noticed")
    with bench.engine.connect() as db:
        errors = db.execute(select(letters.c.error_type)).scalars().all()
    assert [error.rpartition(".")[2] for error in errors] == ["IdempotencyConflict"]
    assert len(done) == 1


def test_a_duplicate_is_known_by_the_digest_that_an_older_version_stored(bench: Bench) -> None:
    """Tables that were never migrated hold digests of all the content."""
    done: list[Any] = []
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter(origin=HIDING)
    @idempotent()
    def handle(order: dict[str, Any]) -> None:
        done.append(order)

    message = order()
    with bench.engine.begin() as db:
        Inbox().claim_many(db, "g/orders", [message])
        assert db.execute(select(inbox.c.digest)).scalars().all() == [
            content_digest(message.payload)
        ]
    bench.send(message)
    with running(consumer):
        until(lambda: bench.lag == 0, "known")
    with bench.engine.connect() as db:
        assert not db.execute(select(letters.c.dlq_id)).all()
    assert not done


def test_a_function_in_ones_own_loop_leaves_no_digest_either(bench: Bench) -> None:
    """The layers of one plan know of each other."""

    @dead_letter(DeadLetterStore(bench.engine), group="g", origin=HIDING)
    @idempotent()
    def handle(message: Message, session: Any) -> None:
        pass

    with bench.engine.begin() as db:
        handle(order(), db)
        assert db.execute(select(inbox.c.digest)).scalars().all() == [SEEN]


def test_digests_of_before_are_cleared_and_their_messages_still_known(database: Engine) -> None:
    """After the upgrade nothing can be guessed from the inbox, and nothing runs twice."""
    known = order(number=8)
    with database.begin() as db:
        assert Inbox().claim_many(db, "g/h", [known])[0].is_new
        kept = db.execute(select(inbox.c.digest)).scalars().all()
    assert content_digest(known.payload) in map(bytes, kept)
    _rewind(database, "idempotency", "idempotency_0001")
    Migrations(database).upgrade()
    with database.begin() as db:
        assert {bytes(one) for one in db.execute(select(inbox.c.digest)).scalars()} == {UNCOMPARED}
        answer = Inbox().claim_many(db, "g/h", [known])[0]
    assert not answer.is_new
    assert answer.conflict is None
