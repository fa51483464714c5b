"""Bad input, as a list: each is refused by an error of the right kind and a sentence with the fix.

Whoever finds another input that ends in a traceback, in silence, or is taken though it is
nonsense, adds a line here first.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.brokers import connect
from holdfast.circuit import circuit
from holdfast.consumer import Batches, Consumer, create_tables
from holdfast.db import engine as database
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, dead_letter
from holdfast.errors import (
    ConfigurationError,
    HoldfastError,
    InvalidMessage,
    InvalidUrl,
    MessageTooLarge,
    NotFound,
)
from holdfast.headers import Headers
from holdfast.idempotency import AttemptLog, Inbox, RedisInbox, VersionGate, idempotent, prune
from holdfast.idempotency.renaming import rename
from holdfast.outbox import LeaseTerms, Outbox
from holdfast.outbox import create_tables as create_outbox
from holdfast.retry import Backoff, retry
from tests.servers.waiting import wait_until
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers import MariaDB

HOLDFAST = Path(sys.executable).with_name("holdfast")
NAN, INF = math.nan, math.inf
ENGINE = open_database("sqlite://")
ANY: Any = None  # what no type checker would let pass


def new(topic: Any = "orders", payload: Any = b"", **more: Any) -> Message:
    return Message.new(topic, payload, **more)


def consumer(broker: Any = "memory:", group: Any = "g", **more: Any) -> Consumer:
    return Consumer(broker, group=group, **more)


def add(event: Any = None, session: Any = None, **more: Any) -> Any:
    place = ENGINE.connect() if session is None else session
    return Outbox().add(place, {} if event is None else event, **{"topic": "orders", **more})


API: list[tuple[str, Callable[[], Any], type[HoldfastError], str]] = [
    # messages
    ("topic=5", lambda: new(5), InvalidMessage, "topic is a int: pass a text"),
    ("topic=None", lambda: new(None), InvalidMessage, "topic is a NoneType"),
    ("topic=''", lambda: new(""), InvalidMessage, "name the topic"),
    ("payload=str", lambda: new(payload="x"), InvalidMessage, "encode it to bytes"),
    ("payload={}", lambda: new(payload={}), InvalidMessage, "payload is a dict"),
    ("key=5", lambda: new(key=5), InvalidMessage, "pass str or bytes"),
    ("key no UTF-8", lambda: new(key="\ud800"), InvalidMessage, "lone surrogate"),
    ("headers='abc'", lambda: new(headers="abc"), InvalidMessage, "headers={'name': 'value'}"),
    ("headers=b'abc'", lambda: new(headers=b"abc"), InvalidMessage, "headers are a bytes"),
    ("headers=5", lambda: new(headers=5), InvalidMessage, "headers are a int"),
    ("headers=[1]", lambda: new(headers=[1]), InvalidMessage, "no list of pairs"),
    ("headers of three", lambda: new(headers=[("a", "b", "c")]), InvalidMessage, "list of pairs"),
    ("headers={'a': 1}", lambda: new(headers={"a": 1}), InvalidMessage, "pass str, bytes or None"),
    ("headers={5: 'a'}", lambda: new(headers={5: "a"}), InvalidMessage, "use a non-empty string"),
    ("headers={'': 'a'}", lambda: new(headers={"": "a"}), InvalidMessage, "non-empty string"),
    ("header name long", lambda: new(headers={"x" * 256: "a"}), InvalidMessage, "at most 255"),
    ("header name a:b", lambda: new(headers={"a:b": "a"}), InvalidMessage, "printable ASCII"),
    ("Headers(None)", lambda: Headers(ANY), InvalidMessage, "headers are a NoneType"),
    ("time naive", lambda: new(time=datetime(2026, 1, 1)), InvalidMessage, "attach a timezone"),  # noqa: DTZ001
    ("time=5", lambda: new(time=5), InvalidMessage, "pass a datetime"),
    ("time='now'", lambda: new(time="now"), InvalidMessage, "time is a str"),
    ("type=5", lambda: new(type=5), InvalidMessage, "type is a int"),
    ("source=None", lambda: new(source=None), InvalidMessage, "source is a NoneType"),
    ("content_type=5", lambda: new(content_type=5), InvalidMessage, "content_type is a int"),
    ("schema=5", lambda: new(schema=5), InvalidMessage, "schema is a int"),
    ("id=''", lambda: new(ids=lambda: ""), InvalidMessage, "id is empty"),
    # consumers
    ("Consumer(None)", lambda: consumer(None), ConfigurationError, "give it a broker's URL"),
    ("Consumer(5)", lambda: consumer(5), ConfigurationError, "Consumer(5)"),
    ("Consumer('')", lambda: consumer(""), InvalidUrl, "write scheme://host:port"),
    ("Consumer('x')", lambda: consumer("x"), InvalidUrl, "is not a broker URL"),
    ("unknown broker", lambda: consumer("pigeon://x"), ConfigurationError, "known: amqp"),
    ("group=None", lambda: consumer(group=None), ConfigurationError, "name the consumer group"),
    ("group=''", lambda: consumer(group=""), ConfigurationError, "name the consumer group"),
    ("group=5", lambda: consumer(group=5), ConfigurationError, "group=5"),
    ("group of 500", lambda: consumer(group="g" * 500), ConfigurationError, "use at most 255"),
    ("group with NUL", lambda: consumer(group="a\0b"), ConfigurationError, "cannot be shown"),
    ("group, 2 lines", lambda: consumer(group="a\nb"), ConfigurationError, "use letters, digits"),
    ("database=5", lambda: consumer(database=5), ConfigurationError, "is not a database URL"),
    ("database='x'", lambda: consumer(database="x"), ConfigurationError, "sqlite:///file.db"),
    ("database port", lambda: consumer(database="postgresql+psycopg://u@h:abc/x"),
     ConfigurationError, "a port that is no number"),
    ("settings=5", lambda: consumer(settings=5), ConfigurationError, "pass a holdfast.consumer"),
    ("unknown setting", lambda: consumer(wrokers=4), ConfigurationError, "it has workers"),
    ("workers=0", lambda: consumer(workers=0), ConfigurationError, "workers=0: use more than 0"),
    ("workers='4'", lambda: consumer(workers="4"), ConfigurationError, "use more than 0"),
    ("workers=1.5", lambda: consumer(workers=1.5), ConfigurationError, "use a whole number"),
    ("patience=-1", lambda: consumer(patience=-1), ConfigurationError, "patience=-1"),
    ("patience=nan", lambda: consumer(patience=NAN), ConfigurationError, "patience=nan"),
    ("drain_seconds=inf", lambda: consumer(drain_seconds=INF), ConfigurationError, "and finite"),
    ("order='x'", lambda: consumer(order="x"), ConfigurationError, "use one of"),
    ("async_database=5", lambda: consumer(database=ENGINE, async_database=5),
     ConfigurationError, "create_async_engine(url)"),
    ("version=5", lambda: consumer(version=5), ConfigurationError, "as a text"),
    ("origin=5", lambda: consumer(origin=5), ConfigurationError, "holdfast.CaptureSettings"),
    ("triage=5", lambda: consumer(database=ENGINE, triage=5), ConfigurationError, "Triage"),
    ("on(5)", lambda: consumer().on(ANY or 5), ConfigurationError, "name the topic"),
    ("on('')", lambda: consumer().on(""), ConfigurationError, "name the topic"),
    ("on(['a'])", lambda: consumer().on(ANY or ["a"]), ConfigurationError, "write it several"),
    ("on with NUL", lambda: consumer().on("a\0b"), ConfigurationError, "cannot be shown"),
    ("on(name=5)", lambda: consumer().on("t", name=ANY or 5), ConfigurationError, "by a text"),
    ("on(name long)", lambda: consumer().on("t", name="n" * 256), ConfigurationError, "most 255"),
    ("on(batch=0)", lambda: consumer().on("t", batch=0), ConfigurationError, "from 1 up"),
    ("on(batch='x')", lambda: consumer().on("t", batch=ANY or "x"), ConfigurationError, "batch"),
    ("Batches(wait=-1)", lambda: Batches(size=5, wait=-1), ConfigurationError, "wait"),
    ("handler None", lambda: consumer().on("t")(ANY), ConfigurationError, "put @consumer.on"),
    ("handler class", lambda: consumer().on("t")(dict), ConfigurationError, "is a function"),
    ("handler()", lambda: consumer().on("t")(lambda: None), ConfigurationError, "no payload"),
    ("run()", lambda: consumer().run(), ConfigurationError, "consumer.on()"),
    ("handler('x')", lambda: consumer().handler("x"), ConfigurationError, "there are: none"),
    # idempotency
    ("window=-1", lambda: idempotent(window=-1), ConfigurationError, "window"),
    ("window=0", lambda: idempotent(window=0), ConfigurationError, "window"),
    ("window='x'", lambda: idempotent(window="x"), ConfigurationError, "window"),
    ("window=nan", lambda: idempotent(window=NAN), ConfigurationError, "window"),
    ("window=inf", lambda: idempotent(window=INF), ConfigurationError, "window"),
    ("window=[]", lambda: idempotent(window=ANY or []), ConfigurationError, "window"),
    ("Inbox window", lambda: Inbox(window="soon"), ConfigurationError, "window"),
    ("key=5", lambda: idempotent(key=ANY or 5), ConfigurationError, "pass a function"),
    ("idempotent(5)", lambda: idempotent(ANY or 5), ConfigurationError, "settings have names"),
    ("lease=0", lambda: idempotent(lease=0), ConfigurationError, "lease"),
    ("lease='soon'", lambda: idempotent(lease="soon"), ConfigurationError, "lease"),
    ("store=5", lambda: idempotent(store=ANY or 5), ConfigurationError, "DatabaseLeases(engine)"),
    ("scope=''", lambda: idempotent(scope=""), ConfigurationError, "by a text"),
    ("RedisInbox(5)", lambda: RedisInbox(ANY or 5), ConfigurationError, "redis://host:6379/0"),
    ("RedisInbox('x')", lambda: RedisInbox("x"), ConfigurationError, "redis://host:6379/0"),
    ("Ledger 0 s", lambda: AttemptLog(ENGINE, owner_seconds=0), ConfigurationError, "more than 0"),
    ("VersionGate('')", lambda: VersionGate(""), ConfigurationError, "name the projection"),
    ("most_ahead=0", lambda: VersionGate("v", most_ahead=0), ConfigurationError, "use 1 or more"),
    ("prune(step=0)", lambda: prune(ENGINE, step=0), ConfigurationError, "use 1 or more"),
    ("rename itself", lambda: rename(ENGINE, "a", "a"), ConfigurationError, "name another one"),
    ("rename to ''", lambda: rename(ENGINE, "a", ""), ConfigurationError, "by a text"),
    # retry, circuit, dead letters
    ("first=-1", lambda: Backoff(first=-1), ConfigurationError, "0 < first <= ceiling"),
    ("first=nan", lambda: Backoff(first=NAN), ConfigurationError, "finite seconds"),
    ("first='x'", lambda: Backoff(first=ANY or "x"), ConfigurationError, "use a number"),
    ("ceiling<first", lambda: Backoff(first=5, ceiling=1), ConfigurationError, "first <= ceiling"),
    ("attempts=0", lambda: Backoff(attempts=0), ConfigurationError, "use 1 or more, or None"),
    ("retry(5)", lambda: retry(ANY or 5), ConfigurationError, "retry"),
    ("circuit(5)", lambda: circuit(ANY or 5), ConfigurationError, "circuit"),
    ("circuit('')", lambda: circuit(""), ConfigurationError, "circuit"),
    ("dead_letter(5)", lambda: dead_letter(ANY or 5), ConfigurationError, "pass a DeadLetterStore"),
    ("a store of 5", lambda: DeadLetterStore(ANY or 5), ConfigurationError, "open_database(url)"),
    # outbox
    ("add topic=5", lambda: add(topic=5), InvalidMessage, "topic is a int"),
    ("add headers", lambda: add(headers="abc"), InvalidMessage, "headers={'name': 'value'}"),
    ("add key=[1]", lambda: add(key=[1]), InvalidMessage, "pass str, bytes, int or UUID"),
    ("add delay=-1", lambda: add(delay=-1), InvalidMessage, "0 to a century"),
    ("add delay='x'", lambda: add(delay="x"), InvalidMessage, "use a timedelta"),
    ("add type=5", lambda: add(type=5), InvalidMessage, "type is a int"),
    ("add kee=1", lambda: add(kee=1), ConfigurationError, "unknown option kee"),
    ("add to an engine", lambda: add(session=ENGINE), ConfigurationError, "with engine.begin()"),
    ("add to 5", lambda: add(session=5), ConfigurationError, "pass the Session"),
    ("add NaN", lambda: add(event=NAN), HoldfastError, "nan"),
    ("add an object", lambda: add(event=object()), HoldfastError, "object"),
    ("source=5", lambda: Outbox(source=ANY or 5), ConfigurationError, "name the service"),
    ("source=''", lambda: Outbox(source=""), ConfigurationError, "name the service"),
    ("lease inf", lambda: LeaseTerms(seconds=INF), ConfigurationError, "use 0.01 to 86400"),
    ("lease 1e-9", lambda: LeaseTerms(seconds=1e-9), ConfigurationError, "use 0.01 to 86400"),
    ("lease 1e300", lambda: LeaseTerms(seconds=1e300), ConfigurationError, "use 0.01 to 86400"),
    ("lease nan", lambda: LeaseTerms(seconds=NAN), ConfigurationError, "use 0.01 to 86400"),
    ("lease 'x'", lambda: LeaseTerms(seconds=ANY or "x"), ConfigurationError, "use 0.01 to"),
    # addresses
    ("connect(5)", lambda: connect(ANY or 5), InvalidUrl, "is not a broker URL"),
    ("connect('')", lambda: connect(""), InvalidUrl, "is not a broker URL"),
    ("connect port", lambda: connect("kafka://h:abc"), InvalidUrl, "a port that is no number"),
    ("open(None)", lambda: open_database(ANY), ConfigurationError, "is not a database URL"),
    ("open('')", lambda: open_database(""), ConfigurationError, "is not a database URL"),
    ("open(5)", lambda: open_database(ANY or 5), ConfigurationError, "is not a database URL"),
    ("open mysql port", lambda: open_database("mysql+pymysql://u:secret@h:1x/d"),
     ConfigurationError, "u:***@h:1x/d' has a port that is no number"),
    ("prepare_threshold", lambda: open_database("postgresql+psycopg://u@h/d?prepare_threshold=x"),
     ConfigurationError, "use a number, or none"),
]  # fmt: skip

SHOP = ("--database", "sqlite:///shop.db")
RELAY = ("relay", "--once", *SHOP, "--broker", "sqlite:///broker.db")
BROKER = ("--broker", "sqlite:///broker.db")
GROUP = ("group", "create", *BROKER)
WHY = ("--reason", "seen")
NO_URL = "is not a database URL: write postgresql+psycopg://user@host/db"
CLI: list[tuple[tuple[str, ...], int, str]] = [
    ((*RELAY, "--lease", "inf"), 2, "--lease 'inf': write a number and its unit"),
    ((*RELAY, "--lease", "10"), 2, "--lease '10': write a number and its unit"),
    ((*RELAY, "--lease", "1e-9s"), 2, "--lease '1e-9s': write a number and its unit"),
    ((*RELAY, "--lease", "1e300s"), 2, "--lease '1e300s': write a number and its unit"),
    ((*RELAY, "--lease", "1ms"), 2, "use 0.01 to 86400"),
    ((*RELAY, "--lease", "99999999999w"), 2, "use 0.01 to 86400"),
    ((*RELAY, "--lease", "0s"), 2, "use more than 0"),
    ((*RELAY, "--lease", "-1s"), 2, "write a number and its unit"),
    ((*RELAY, "--lease", "soon"), 2, "write a number and its unit"),
    ((*RELAY, "--batch", "0"), 2, "batch 0: use 1 or more"),
    ((*RELAY, "--batch", "x"), 2, "integer"),
    ((*RELAY, "--drain", "nan"), 2, "--drain 'nan': write a number and its unit"),
    ((*RELAY, "--drain", "-1s"), 2, "write a number and its unit"),
    ((*RELAY, "--stall", "0s"), 2, "use more than 0"),
    ((*RELAY, "--http", "nowhere"), 2, "write host:port"),
    ((*RELAY, "--http", "127.0.0.1:99999"), 2, "write host:port"),
    ((*RELAY, "--engine", "magic"), 2, "'lease', 'wal'"),
    ((*RELAY, "--engine", "wal"), 2, "use --engine lease"),
    ((*RELAY, "--config", "missing.toml"), 2, "missing.toml: No such file"),
    (("relay", *SHOP), 2, "Missing option '--broker'"),
    (("relay", *SHOP, "--broker", "x"), 2, "is not a broker URL"),
    (("relay", *SHOP, "--broker", "pigeon://x"), 2, "known: amqp"),
    (("relay", "--database", "", "--broker", "memory:"), 2, NO_URL),
    (("relay", "--database", "x", "--broker", "memory:"), 2, NO_URL),
    (("relay", "--database", "postgresql+psycopg://u:s3@h:abc/x", "--broker", "memory:"), 2,
     "'postgresql+psycopg://u:***@h:abc/x' has a port that is no number"),
    (("relay", "--database", "sqlite:///no.db", "--broker", "memory:"), 2, "no file no.db"),
    (("inbox", "stats"), 2, "Missing option '--database'"),
    (("inbox", "stats", "--database", "x"), 2, NO_URL),
    (("inbox", "stats", "--database", "mysql+pymysql://u@h:abc/x"), 2, "port that is no number"),
    (("inbox", "stats", "--database", "sqlite:///no.db"), 2, "holdfast db upgrade"),
    (("inbox", "prune", *SHOP, "--step", "0"), 2, "greater than or equal to 1"),
    (("inbox", "prune", *SHOP, "--consumer", "nobody"), 1, "holdfast inbox stats lists them"),
    (("inbox", "forget", "nobody", "m", *SHOP, *WHY, "--yes"), 1, "inbox stats lists them"),
    (("inbox", "forget", "nobody", "m", *SHOP, *WHY), 2, "add --yes"),
    (("inbox", "forget", "nobody", "m", *SHOP, "--reason", " ", "--yes"), 2, "reason is empty"),
    (("inbox", "rename", "a", "b", *SHOP, *WHY, "--yes"), 1, "holdfast inbox stats lists them"),
    (("inbox", "rename", "a", "b", *SHOP, *WHY), 2, "add --yes"),
    (("inbox", "rename", "a", "a", *SHOP, *WHY, "--yes"), 2, "name another one"),
    (("inbox", "rename", "a", "", *SHOP, *WHY, "--yes"), 2, "name it by a text"),
    (("inbox", "rename", "a", "b" * 300, *SHOP, *WHY, "--yes"), 2, "use at most 255"),
    (("inbox", "rename", "a", *SHOP, *WHY, "--yes"), 2, "Missing argument"),
    (("keys", "show", "g", "orders", "ada", *SHOP), 1, "see holdfast keys list"),
    (("keys", "release", "g", "orders", "ada", *SHOP), 2, "Missing option '--reason'"),
    (("keys", "release", "g", "orders", "ada", *SHOP, *WHY), 1, "see holdfast keys list"),
    (("keys", "skip", "g", "orders", "ada", *SHOP, *WHY), 1, "see holdfast keys list"),
    (("keys", "skip", "g", "orders", "ada", *SHOP, "--reason", "", "--yes"), 2, "reason is empty"),
    (("keys", "list", *SHOP, "--limit", "0"), 2, "greater than or equal to 1"),
    (("dlq", "show", "nothing", *SHOP), 1, "see holdfast dlq list"),
    (("dlq", "discard", "nothing", *SHOP, *WHY, "--yes"), 1, "see holdfast dlq groups"),
    (("dlq", "reopen", *SHOP, *WHY), 2, "name groups, or single letters with --id"),
    (("dlq", "reopen", "--id", "nothing", *SHOP, *WHY), 1, "see holdfast dlq list"),
    (("outbox", "parked", "skip", "5", *SHOP, *WHY, "--yes"), 1, "holdfast outbox parked list"),
    (("outbox", "parked", "release", *SHOP, *WHY), 2, "give --topic and perhaps --key"),
    (("outbox", "parked", "edit", "5", *SHOP, *WHY, "--header", "x"), 2, "write NAME=VALUE"),
    (("consume", "nothing"), 2, "write module:variable"),
    (("consume", "nothing:x"), 2, "run it where the module is"),
    (("consume", "os:path"), 2, "is a module, not a Consumer"),
    (("consume", "os:nothing"), 2, "'os' has no 'nothing'"),
    (("lag", "--broker", "x", "--group", "g"), 2, "is not a broker URL"),
    (("lag", "--broker", "sqlite:///broker.db"), 2, "Missing option '--group'"),
    ((*GROUP, "--group", "g" * 500, "--topic", "orders"), 2, "use at most 255"),
    ((*GROUP, "--group", "a\nb", "--topic", "orders"), 2, "has characters that cannot be shown"),
    ((*GROUP, "--group", "", "--topic", "orders"), 2, "name it by a text"),
    ((*GROUP, "--group", "g", "--topic", "t" * 500), 2, "use at most 255"),
    (("topics", "create", "t" * 500, *BROKER), 2, "use at most 255"),
    (("topics", "create", "a\nb", *BROKER), 2, "has characters that cannot be shown"),
    (("topics", "show", "", *BROKER), 2, "name it by a text"),
    (("db", "upgrade", "--database", "x"), 2, NO_URL),
    (("doctor", "--database", "sqlite:///no.db"), 2, "no file no.db"),
    (("circuits", "open", "x", *SHOP, *WHY, "--for", "0s"), 2, "more than 0 seconds"),
    (("circuits", "close", "x", *SHOP, *WHY), 1, "see holdfast circuits list"),
    (("nonsense",), 2, "No such command 'nonsense'"),
    (("relay", "--nonsense"), 2, "No such option"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind", "words"), [row[1:] for row in API], ids=[row[0] for row in API]
)
def test_bad_input_of_a_program_is_an_error_that_names_the_fix(
    call: Callable[[], Any], kind: type[HoldfastError], words: str
) -> None:
    with pytest.raises(HoldfastError) as raised:
        call()
    assert isinstance(raised.value, kind)
    assert words in str(raised.value)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a database in which nothing has happened."""
    folder = tmp_path_factory.mktemp("shop")
    engine = open_database(f"sqlite:///{folder}/shop.db")
    create_tables(engine)
    create_outbox(engine)
    engine.dispose()
    return folder


@pytest.mark.parametrize(
    ("args", "code", "words"), CLI, ids=[" ".join(row[0])[:80] or "nothing" for row in CLI]
)
def test_bad_input_of_a_command_is_one_sentence_that_names_the_fix(
    shop: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    done = shell(*args, cwd=shop)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert words in said
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_an_unknown_consumer_cannot_be_renamed(tmp_path: Path) -> None:
    create_tables(engine := open_database(f"sqlite:///{tmp_path}/db.db"))
    with pytest.raises(NotFound, match="holdfast inbox stats"):
        rename(engine, "nobody", "somebody")


@contextmanager
def mute_server() -> Iterator[int]:
    """Offer a port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
    for one in taken:
        one.close()


@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_database_that_does_not_answer_is_named_while_it_is_waited_for(
    tmp_path: Path, kind: str
) -> None:
    """The command says what it waits for, and SIGTERM ends it."""
    with mute_server() as port, (tmp_path / "said").open("w+") as said:
        url = f"{kind}://u@127.0.0.1:{port}/db"
        process = subprocess.Popen(
            [HOLDFAST, "inbox", "stats", "--database", url],
            stderr=said, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        try:
            words = f"waiting for the database at 127.0.0.1:{port}"
            wait_until(lambda: words in (tmp_path / "said").read_text(), "what it waits for")
            process.send_signal(signal.SIGTERM)
            assert process.wait(90) != 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("kind", ["postgresql+psycopg", "mysql+pymysql"])
def test_a_database_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not after the kernel's minutes, and not never."""
    monkeypatch.setattr(database, "CONNECT_SECONDS", 1)
    monkeypatch.setitem(database._NOTICED, "connect_timeout", 2)  # libpq's least
    with mute_server() as port:
        engine = open_database(f"{kind}://u@127.0.0.1:{port}/db")
        with pytest.raises(OperationalError, match=r"(?i)timeout|timed out|lost connection"):
            engine.connect()


def test_an_event_that_no_packet_takes_is_called_too_large(mariadb: MariaDB) -> None:
    """MariaDB itself only says that it has gone away."""
    engine = open_database(mariadb.database("large"))
    create_outbox(engine)
    with Session(engine) as session, pytest.raises(MessageTooLarge, match="max_allowed_packet"):
        Outbox().add(session, b"x" * 100_000_000, topic="orders")
    with Session(engine) as session, session.begin():
        Outbox().add(session, b"x" * 1_000_000, topic="orders")
    engine.dispose()
