"""The command teaches, and fails with one sentence."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import chdir, closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session

from holdfast import Message, new_id
from holdfast.brokers import connect
from holdfast.cli.app import COMMANDS
from holdfast.clock import SYSTEM_CLOCK
from holdfast.db.engine import open_database
from holdfast.outbox import Outbox, create_tables
from holdfast.testing import VirtualClock, wait_until
from tests.shell import shell

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.cli.late import Late
    from holdfast.clock import Clock
    from tests.servers import Nats, RabbitMQ


def holdfast(
    *args: str, cwd: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command for a shop."""
    return shell(*args, cwd=cwd, given=given, HOLDFAST_DATABASE="sqlite:///shop.db")


def test_help_lists_the_commands() -> None:
    """A newcomer finds the way from --help."""
    done = holdfast("--help")
    assert done.returncode == 0
    for command in (
        "relay",
        "outbox",
        "db",
        "doctor",
        "status",
        "group",
        "lag",
        "brokers",
        "version",
    ):
        assert command in done.stdout


def test_every_command_teaches_by_an_example() -> None:
    """The --help of each command ends with a line to copy."""
    lacking = []

    def walk(group: Any, path: list[str]) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, [*path, name])
            elif "Example" not in (command.epilog or ""):
                lacking.append(" ".join([*path, name]))

    for late in COMMANDS:
        command = late.load()
        if hasattr(command, "commands"):
            walk(command, [late.name])
        elif "Example" not in (command.epilog or ""):
            lacking.append(late.name)
    assert lacking == []


@pytest.mark.parametrize("late", COMMANDS, ids=lambda late: late.name)
def test_the_overview_says_what_the_command_says(late: Late) -> None:
    """The line in `holdfast --help` is the first sentence of the command's own --help."""
    assert late.load().help.split("\n\n")[0].replace("\n", " ") == late.summary


@pytest.mark.parametrize("late", COMMANDS, ids=lambda late: late.name)
def test_the_paragraphs_of_help_flow(late: Late) -> None:
    """The terminal breaks the lines of --help: none ends where a line of the source did."""
    commands = [late.load()]
    while commands:
        command = commands.pop()
        assert "\n" not in (command.help or "").replace("\n\n", "")
        commands.extend(getattr(command, "commands", {}).values())


@pytest.mark.parametrize("args", [("--help",), ("version",), ("brokers",)])
def test_small_commands_start_without_the_slow_libraries(args: tuple[str, ...]) -> None:
    """A command imports what it needs itself: neither SQLAlchemy nor drivers for a --help."""
    heavy = ("sqlalchemy", "alembic", "prometheus_client", "psycopg", "kafka", "pika", "asyncio")
    script = (
        "import sys\nfrom holdfast.cli import main\n"
        f"try:\n    main({list(args)!r})\n"
        f"finally:\n    print(sorted(set({heavy!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_mistyped_command_is_told_the_right_one() -> None:
    """The names are known although nothing is imported."""
    done = holdfast("relai")
    assert done.returncode == 2
    assert "relay" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_broker_is_one_sentence(tmp_path: Path) -> None:
    """No traceback, and the fix is named."""
    done = holdfast("relay", "--database", "sqlite:///a.db", "--broker", "kafak://h", cwd=tmp_path)
    assert done.returncode == 2
    assert "no broker adapter for scheme 'kafak'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("broker", "says"),
    [
        ("kafka//host", "write scheme://host:port"),
        ("kafka://host:port", "a port that is no number"),
        ("sqlite://", "write sqlite:///orders.db"),
        ("sqlite:///theirs.db", "belongs to another application"),
        ("sqlite:///notes.txt", "not a database"),
        ("sqlite:///folder", "check that its folder exists"),
        ("sqlite:///b.db?sesion=1", "no setting 'sesion'"),
        ("sqlite:///b.db?session=-1", "use more than 0"),
        ("memory:", "has no topic 'orders'"),
    ],
)
def test_a_bad_broker_is_one_sentence_and_nothing_is_written(
    broker: str, says: str, tmp_path: Path
) -> None:
    """It names the value and the fix; what was there is as it was."""
    with closing(sqlite3.connect(tmp_path / "theirs.db")) as theirs:
        theirs.execute("CREATE TABLE customers (id)")
    (tmp_path / "notes.txt").write_text("notes" * 500)
    (tmp_path / "folder").mkdir()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    done = holdfast("lag", "--topic", "orders", "--group", "g", "--broker", broker, cwd=tmp_path)
    assert done.returncode in (1, 2, 3)
    assert says in done.stderr
    assert done.stderr.startswith("holdfast: ")
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.*")} == before


def test_a_group_that_is_created_gets_what_is_published_before_its_first_consumer(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """A deployment makes the queues of RabbitMQ before the first producer; twice is once."""
    url = f"{rabbitmq.url}?maturity=0"
    topic = f"orders-{new_id()}"
    args = ("--broker", url, "--group", "billing", "--topic", topic, "--json")
    answers = [json.loads(holdfast("group", "create", *args).stdout) for _ in range(2)]
    assert answers == [
        [{"group": "billing", "topic": topic, "created": True}],
        [{"group": "billing", "topic": topic, "created": False}],
    ]
    with closing(connect(url)) as broker, closing(broker.sink()) as sink:
        assert [r.error for r in sink.publish([Message.new(topic, b"1", key="k")])] == [None]
        with closing(broker.source([topic], group="billing")) as source:
            came: list[bytes | None] = []

            def has_come() -> bool:
                came.extend(delivery.body for delivery in source.poll(10, 0.1))
                return bool(came)

            wait_until(has_come, deadline=90, what="what was published before it")
    assert came == [b"1"]


def test_group_create_works_on_every_broker_and_says_so(tmp_path: Path) -> None:
    """Where a group reads from the beginning anyway, it is noted, and the sentence is the same."""
    args = ("--broker", "sqlite:///b.db", "--group", "billing", "--topic", "orders")
    done = holdfast("group", "create", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "group billing gets what is published to orders" in done.stdout
    refused = holdfast("group", "create", *args[:-1], "", cwd=tmp_path)
    assert (refused.returncode, "name it by a text" in refused.stderr) == (2, True)


def read_all(url: str, topic: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Let a group settle everything of *topic*."""
    with (
        closing(connect(url, clock=clock)) as broker,
        closing(broker.source([topic], group="billing")) as source,
    ):
        while batch := source.poll(5000, 1.0):
            source.accept(batch)


def fill(url: str, topic: str, count: int, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Publish *count* messages to *topic*."""
    with closing(connect(url, clock=clock)) as broker, closing(broker.sink()) as sink:
        results = sink.publish([Message.new(topic, b"x", key="k") for _ in range(count)])
        assert not [result.error for result in results if result.error]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_what_every_group_has_settled_can_be_pruned(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The dry run counts, the run deletes, and what no group has read stays."""
    url = "sqlite:///b.db"
    if kind == "redis":
        url = f"{request.getfixturevalue('redis').url}?prefix={new_id()}"
    args = ("brokers", "prune", "--broker", url, "--older-than", "1ms")
    with chdir(tmp_path):
        fill(url, "orders", 30)
        fill(url, "unread", 5)
        read_all(url, "orders")
        seen = []
        for more in (["--dry-run", "--json"], ["--json", "--yes"], ["--json"]):
            done = holdfast(*args, *more)
            assert done.returncode == 0, done.stderr
            seen.append({one["topic"]: one["pruned"] for one in json.loads(done.stdout)["topics"]})
        assert set(seen[0]) == {"orders"}
        # Redis keeps the newest settled message of a lane.
        assert 29 <= seen[0]["orders"] <= 30
        assert seen[1:] == [seen[0], {}]
        refused = holdfast(*args, "--topic", "nothing")
        assert "has no topic 'nothing'" in refused.stderr


def test_a_broker_that_deletes_by_itself_says_how(nats: Nats) -> None:
    """Nothing is pretended: the sentence names what does it there."""
    done = holdfast("brokers", "prune", "--broker", nats.url)
    assert done.returncode != 0
    assert "max_age" in done.stderr


def test_the_doctor_names_a_topic_that_grows_without_bound(tmp_path: Path) -> None:
    """Ten thousand messages that everybody has settled for a week are worth a word."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    engine.dispose()
    long_ago = VirtualClock(auto=True, start=datetime.now(UTC) - timedelta(days=30))
    with chdir(tmp_path):
        fill("sqlite:///b.db", "orders", 10_000, clock=long_ago)
        read_all("sqlite:///b.db", "orders", clock=long_ago)
        fill("sqlite:///b.db", "young", 10_000)
        read_all("sqlite:///b.db", "young")
        done = holdfast("doctor", "--broker", "sqlite:///b.db", "--json")
        found = [one for one in json.loads(done.stdout) if one["severity"] == "warning"]
        assert [one["facts"]["topic"] for one in found] == ["orders"]
        assert "holdfast brokers prune" in found[0]["fix"]


def test_a_bad_database_url_hides_its_password(tmp_path: Path) -> None:
    """Secrets are not printed, even in errors."""
    done = holdfast(
        "relay", "--database", "postgrsql://u:hunter2@h/d", "--broker", "memory:", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "hunter2" not in done.stderr + done.stdout
    assert "is not a database URL" in done.stderr


def test_a_missing_outbox_table_is_one_sentence(tmp_path: Path) -> None:
    """The sidecar says which table is missing and what makes it."""
    (tmp_path / "empty.db").touch()
    done = holdfast(
        "relay", "--once", "--database", "sqlite:///empty.db", "--broker", "memory:", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "holdfast_outbox" in done.stderr
    assert "holdfast db upgrade" in done.stderr
    assert "Traceback" not in done.stderr


def test_relay_once_publishes_what_was_committed(tmp_path: Path) -> None:
    """The sidecar moves committed events to the broker and says how many."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    create_tables(engine)
    with Session(engine) as session, session.begin():
        for number in range(3):
            Outbox().add(session, {"number": number}, topic="orders", key="k")
    with Session(engine) as session:
        Outbox().add(session, {"number": 99}, topic="orders", key="k")
        session.rollback()
    engine.dispose()
    done = holdfast(
        "relay", "--once", "--database", "sqlite:///shop.db", "--broker", "sqlite:///b.db",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "published 3 events" in done.stdout
    broker = connect(f"sqlite:///{tmp_path}/b.db")
    broker.create_group("orders", "g")
    shown = holdfast("lag", "--broker", "sqlite:///b.db", "--group", "g", "--json", cwd=tmp_path)
    assert sum(row["lag"] for row in json.loads(shown.stdout)) == 3
    source = broker.source(["orders"], group="g")
    bodies = [delivery.message.payload for delivery in source.poll(10, 1.0)]
    assert bodies == [b'{"number":0}', b'{"number":1}', b'{"number":2}']
    source.close()
    broker.close()


def test_topics_are_made_listed_and_shown(tmp_path: Path) -> None:
    """What a new topic is like stands in the URL; a missing one is exit code 1."""
    url = ("--broker", "sqlite:///b.db?partitions=3")
    made = holdfast("topics", "create", "orders", *url, "--json", cwd=tmp_path)
    assert json.loads(made.stdout) == [{"topic": "orders", "created": True}]
    again = holdfast("topics", "create", "orders", "logs", "--partitions", "2", *url, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "topic orders was there\ntopic logs is made\n")
    listed = json.loads(holdfast("topics", "list", *url, "--json", cwd=tmp_path).stdout)
    assert listed == [{"topic": "logs", "partitions": 2}, {"topic": "orders", "partitions": 3}]
    shown = holdfast("topics", "show", "orders", *url, cwd=tmp_path)
    assert shown.stdout == "topic orders: 3 partition(s)\n"
    missing = holdfast("topics", "show", "nothing", *url, cwd=tmp_path)
    assert (missing.returncode, "nothing" in missing.stderr) == (1, True)


def test_relay_once_fails_when_events_wait_for_a_topic_that_is_missing(tmp_path: Path) -> None:
    """Nothing is parked, the topic is named, and once it is made the same command succeeds."""
    assert holdfast("db", "upgrade", cwd=tmp_path).returncode == 0
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    with Session(engine) as session, session.begin():
        Outbox().add(session, {"n": 1}, topic="orders", key="k")
    engine.dispose()
    command = ("relay", "--once", "--broker", "sqlite:///b.db?auto_create=false")
    done = holdfast(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "no topic orders" in done.stderr
    assert json.loads(holdfast("outbox", "parked", "list", "--json", cwd=tmp_path).stdout) == []
    with closing(connect(f"sqlite:///{tmp_path}/b.db")) as broker:
        broker.create_topic("orders")
    done = holdfast(*command, cwd=tmp_path)
    assert (done.returncode, "published 1 events" in done.stdout) == (0, True), done.stderr


def test_a_relay_publishes_nothing_before_an_expected_group_is_there(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """It says which group of which topic, and what makes it; after that it publishes."""
    url, topic = f"{rabbitmq.url}?maturity=0", f"orders-{new_id()}"
    assert holdfast("db", "upgrade", cwd=tmp_path).returncode == 0
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    with Session(engine) as session, session.begin():
        Outbox().add(session, {"n": 1}, topic=topic, key="k")
    engine.dispose()
    with closing(connect(url)) as broker:  # another group is there, the expected one is not
        broker.create_group(topic, "audit")
    command = ("relay", "--once", "--broker", url, "--expect-group", f"{topic}=billing")
    done = holdfast(*command, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert f"holdfast group create --topic {topic} --group billing" in done.stderr
    made = holdfast("group", "create", "--broker", url, "--topic", topic, "--group", "billing")
    assert made.returncode == 0, made.stderr
    done = holdfast(*command, cwd=tmp_path)
    assert (done.returncode, "published 1 events" in done.stdout) == (0, True), done.stderr
    wrong = holdfast(*command[:-1], "billing", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "TOPIC=GROUP" in wrong.stderr


@pytest.fixture
def parked(tmp_path: Path) -> Path:
    """Make a shop with one key parked: a refused event with an ugly payload, and one behind."""
    assert holdfast("db", "upgrade", cwd=tmp_path).returncode == 0
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    ugly = {"n": 1, "note": "\x1b[31mred\x9b2J\u202egnp.exe [bold]x[/bold] " + "x" * 3000}
    with Session(engine) as session, session.begin():
        Outbox().add(session, ugly, topic="orders", key="k\x1b]0;owned\x07")
        Outbox().add(session, {"n": 2}, topic="orders", key="k\x1b]0;owned\x07")
        Outbox().add(session, b"\xff\xfe" + b"y" * 3000, topic="orders")
    engine.dispose()
    done = holdfast("relay", "--once", "--broker", "sqlite:///b.db?max_message=2000", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "3 were parked" in done.stderr
    return tmp_path


def first(folder: Path) -> str:
    """Return the number of the first refused event."""
    listed = json.loads(holdfast("outbox", "parked", "list", "--json", cwd=folder).stdout)
    return str(listed[0]["first"])


def test_an_operator_cures_a_parked_key(parked: Path) -> None:
    """List, show, edit, release, relay, audit: the whole way at a shell."""
    number = first(parked)
    shown = holdfast("outbox", "parked", "show", number, "--json", cwd=parked)
    assert json.loads(json.loads(shown.stdout)[0]["payload"]["text"])["n"] == 1
    acts: list[tuple[tuple[str, ...], str]] = [
        (("edit", number, "--payload-file", "-", "--reason", "shorter"), '{"n":1}'),
        (("release", number, "--reason", "it fits now", "--actor", "ada"), ""),
    ]
    for args, given in acts:
        done = holdfast("outbox", "parked", *args, cwd=parked, given=given)
        assert done.returncode == 0, done.stderr
    done = holdfast("relay", "--once", "--broker", "sqlite:///b.db?max_message=2000", cwd=parked)
    assert "published 2 events" in done.stdout
    trail = json.loads(holdfast("outbox", "audit", "--json", cwd=parked).stdout)
    assert [(entry["action"], entry["reason"]) for entry in trail] == [
        ("release", "it fits now"), ("edit", "shorter"),
    ]  # fmt: skip
    assert trail[0]["actor"] == "ada"
    assert trail[1]["actor"]
    assert "red" not in str(trail)


@pytest.mark.parametrize("args", [("list",), ("show", "--topic", "orders"), ("list", "--json"),
                                  ("show", "--topic", "orders", "--json")])  # fmt: skip
def test_nothing_that_is_shown_commands_the_terminal(parked: Path, args: tuple[str, ...]) -> None:
    """Escape sequences, control characters and direction marks come out as their codes."""
    done = holdfast("outbox", "parked", *args, cwd=parked)
    assert done.returncode == 0, done.stderr
    for char in "\x1b\x9b\x07\u202e":
        assert char not in done.stdout
    assert "owned" in done.stdout
    if "show" in args:
        assert "[bold]x[/bold]" in done.stdout
        assert "base64" in done.stdout


def test_a_skip_asks_first(parked: Path) -> None:
    """Without a terminal it needs --yes; without a reason nothing happens at all."""
    number = first(parked)
    unasked = holdfast("outbox", "parked", "skip", number, "--reason", "x", cwd=parked)
    assert unasked.returncode == 2
    assert "--yes" in unasked.stderr
    assert holdfast("outbox", "parked", "skip", number, "--yes", cwd=parked).returncode == 2
    assert first(parked) == number
    done = holdfast("outbox", "parked", "skip", number, "--reason", "x", "--yes", cwd=parked)
    assert done.returncode == 0, done.stderr
    assert first(parked) != number


def test_every_act_is_told_to_a_script(parked: Path) -> None:
    """With --json nothing but JSON is printed, and nothing is asked."""
    number = first(parked)

    def told(*args: str) -> Any:
        done = holdfast("outbox", *args, "--reason", "x", "--json", cwd=parked)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert told("parked", "edit", number, "--payload", "{}")["edited"] == int(number)
    released = told("parked", "release", number)
    assert released == {"released": 1, "of": number}
    unasked = holdfast("outbox", "parked", "skip", "3", "--reason", "x", "--json", cwd=parked)
    assert (unasked.returncode, unasked.stdout) == (2, "")
    assert told("parked", "skip", "3", "--yes")["skipped"] == 3
    assert told("prune", "--yes") == {"pruned": 0}


def test_a_user_without_a_name_may_prune(parked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user often has none; the audit names its number."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    done = holdfast("outbox", "prune", "--reason", "x", "--yes", cwd=parked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pruned 0 entries\n"


def test_what_is_not_parked_is_exit_code_1(parked: Path) -> None:
    """A script can tell a wrong number from a wrong command."""
    for args in (("show", "999"), ("show", "9" * 23), ("show", "9" * 5000),
                 ("skip", "9" * 23, "--reason", "x", "--yes"),
                 ("skip", "999", "--reason", "x", "--yes"),
                 ("release", "--topic", "none", "--reason", "x")):  # fmt: skip
        done = holdfast("outbox", "parked", *args, cwd=parked)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
    assert holdfast("outbox", "parked", "show", cwd=parked).returncode == 2


def test_the_tables_are_upgraded_and_shown(tmp_path: Path) -> None:
    """`db current` exits with 1 until `db upgrade` has run; `db sql` prints statements only."""
    assert holdfast("db", "current", cwd=tmp_path).returncode == 1
    assert "outbox_0002" in holdfast("db", "upgrade", cwd=tmp_path).stdout
    assert holdfast("db", "current", cwd=tmp_path).returncode == 0
    assert "nothing to do" in holdfast("db", "upgrade", cwd=tmp_path).stdout
    script = holdfast("db", "sql", "--dialect", "postgresql", cwd=tmp_path)
    assert "CREATE TABLE holdfast_outbox (" in script.stdout
    assert "autovacuum_vacuum_scale_factor = 0" in script.stdout
    assert holdfast("db", "sql", "--dialect", "oracle", cwd=tmp_path).returncode == 2


def test_one_file_configures_every_command(tmp_path: Path) -> None:
    """The sidecar's file serves the operator's commands as well; the environment is empty."""
    (tmp_path / "holdfast.toml").write_text(
        'database = "sqlite:///filed.db"\nbroker = "memory:"\n[relay]\nbatch = 10\n'
    )
    for command in (("db", "upgrade"), ("outbox", "parked", "list"), ("outbox", "audit"),
                    ("relay", "--once")):  # fmt: skip
        done = shell(*command, "--config", "holdfast.toml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "filed.db").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("dlq", "groups"),
        ("dlq", "stats"),
        ("keys", "list"),
        ("inbox", "stats"),
        ("doctor",),
        ("status",),
        ("outbox", "parked", "list"),
        ("relay", "--once", "--broker", "memory:"),
    ],
)
def test_a_mistyped_path_makes_no_empty_database(tmp_path: Path, words: tuple[str, ...]) -> None:
    """An empty database that says "nothing is pending" would be believed at night."""
    done = shell(*words, cwd=tmp_path, HOLDFAST_DATABASE="sqlite:///nosuch.db")
    assert done.returncode == 2
    assert "there is no file nosuch.db" in done.stderr
    assert not (tmp_path / "nosuch.db").exists()
