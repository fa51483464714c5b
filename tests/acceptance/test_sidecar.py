"""The sidecar: configured three ways, watched over HTTP, stopped in good order."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.outbox import Event, Outbox
from holdfast.testing import wait_until
from tests.servers import Postgres, Redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.fixtures import PrivateServer

HOLDFAST = Path(sys.executable).with_name("holdfast")
QUIET = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


class Running:
    """A sidecar process and what it says."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def records(self) -> list[dict[str, Any]]:
        """Return the log so far; every whole line must be JSON."""
        lines = self._log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def log(self) -> str:
        """Return the log so far as it was written."""
        return self._log.read_text()

    def address(self) -> str:
        """Return where it serves HTTP, once it has said so."""

        def said() -> str | None:
            if self.process.poll() is not None:
                raise AssertionError(self.log())
            found = [r["message"] for r in self.records() if "http://" in r["message"]]
            return found[0].rpartition("http://")[2] if found else None

        return str(wait_until(said, deadline=90, what="the startup line"))

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of *path*."""
        try:
            with urllib.request.urlopen(f"http://{self.address()}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """Return one series of /metrics."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no {name}")

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(timeout=90)


@contextmanager
def sidecar(folder: Path, *args: str, **environment: str) -> Iterator[Running]:
    """Run `holdfast relay` in *folder*."""
    log = folder / f"relay-{len(list(folder.glob('relay-*')))}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [HOLDFAST, "relay", "--http", "127.0.0.1:0", *args],
            stderr=stderr, stdout=subprocess.DEVNULL, text=True, cwd=folder,
            env={**QUIET, **environment},
        )  # fmt: skip
    try:
        yield Running(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def shop(url: str, count: int = 3) -> None:
    """Make the outbox at *url* and commit some events."""
    engine = open_database(url)
    Migrations(engine).upgrade()
    add(engine, count)
    engine.dispose()


def add(engine: Any, count: int) -> None:
    """Commit some events."""
    with Session(engine) as session, session.begin():
        Outbox().add_all(
            session, [Event(body={"n": n}, topic="orders", key=f"k{n}") for n in range(count)]
        )


def waiting(url: str) -> int:
    """Return how many events the outbox holds."""
    engine = open_database(url)
    with engine.connect() as db:
        count: int = db.execute(text("SELECT count(*) FROM holdfast_outbox")).scalar_one()
    engine.dispose()
    return count


def test_the_sidecar_publishes_and_is_watched_over_http(tmp_path: Path) -> None:
    """Events flow, probes answer, counters count, and SIGTERM ends it with 0."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 25)
    with sidecar(tmp_path, "--database", url, "--broker", "sqlite:///b.db") as running:
        wait_until(lambda: running.metric("holdfast_relay_published_total") == 25, deadline=90)
        assert running.get("/healthz") == (200, "stepping\n")
        assert running.get("/readyz") == (200, "publishing\n")
        assert running.metric("holdfast_relay_parked_total") == 0
        assert running.metric("holdfast_relay_outage") == 0
        assert running.metric("holdfast_relay_leases_owned") == 64
        wait_until(lambda: running.metric("holdfast_relay_step_seconds_count") > 0, deadline=90)
        wait_until(lambda: running.metric("holdfast_outbox_backlog") == 0, deadline=90)
        assert running.metric("holdfast_outbox_oldest_age_seconds") == 0
        assert running.get("/nothing")[0] == 404
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
        said = [record["message"] for record in running.records()]
    assert "engine lease" in said[0]
    assert said[-1] == "relay ended: published 25, parked 0"
    assert waiting(url) == 0
    engine = open_database(url)
    with engine.connect() as db:
        held = "SELECT count(*) FROM holdfast_outbox_shard WHERE owner IS NOT NULL"
        assert db.execute(text(held)).scalar_one() == 0
    engine.dispose()


def test_two_sidecars_share_the_shards(tmp_path: Path) -> None:
    """The second one gets its half; when the first is killed it takes over all."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 0)
    args = ("--database", url, "--broker", "sqlite:///b.db", "--lease", "1.5s")
    with sidecar(tmp_path, *args) as first, sidecar(tmp_path, *args) as second:
        for each in (first, second):
            wait_until(
                lambda each=each: each.metric("holdfast_relay_leases_owned") == 32,  # type: ignore[misc]
                deadline=90,
            )
        first.process.kill()
        wait_until(lambda: second.metric("holdfast_relay_leases_owned") == 64, deadline=90)


def test_a_broker_that_is_down_at_the_start_is_waited_for(
    tmp_path: Path, private_server: PrivateServer
) -> None:
    """The relay is alive but not ready, parks nothing, and goes on by itself."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url)
    redis = private_server(Redis)
    redis.stop()
    with sidecar(tmp_path, "--database", url, "--broker", redis.url) as running:
        wait_until(lambda: running.get("/readyz")[0] == 503, deadline=90)
        wait_until(lambda: running.metric("holdfast_relay_outage") == 1, deadline=90)
        assert "outage" in running.get("/readyz")[1]
        assert running.get("/healthz")[0] == 200
        redis.start()
        wait_until(lambda: running.get("/readyz")[0] == 200, deadline=90)
        wait_until(lambda: running.metric("holdfast_relay_published_total") == 3, deadline=90)
        assert running.metric("holdfast_relay_parked_total") == 0


def test_a_database_that_is_down_at_the_start_is_waited_for(
    tmp_path: Path, private_server: PrivateServer
) -> None:
    """The same for the database; metrics answer meanwhile."""
    postgres = private_server(Postgres)
    url = postgres.database("shop")
    shop(url)
    postgres.kill()
    with sidecar(tmp_path, "--database", url, "--broker", "sqlite:///b.db") as running:
        wait_until(lambda: running.metric("holdfast_relay_outage") == 1, deadline=90)
        assert running.metric("holdfast_outbox_sampled") == 0
        assert running.get("/healthz")[0] == 200
        postgres.start()
        wait_until(lambda: running.metric("holdfast_relay_published_total") == 3, deadline=90)
        wait_until(lambda: running.metric("holdfast_outbox_sampled") == 1, deadline=90)
        postgres.kill()
        wait_until(lambda: running.get("/readyz")[0] == 503, deadline=90)
        postgres.start()
        wait_until(lambda: running.get("/readyz")[0] == 200, deadline=90)


def test_a_drain_that_takes_too_long_is_cut_off(
    tmp_path: Path, private_server: PrivateServer
) -> None:
    """A broker that hangs cannot hold up the end of the pod; the events stay in the outbox."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 1)
    redis = private_server(Redis)
    args = ("--database", url, "--broker", redis.url, "--drain", "0.3s")
    with sidecar(tmp_path, *args) as running:
        wait_until(lambda: running.metric("holdfast_relay_published_total") == 1, deadline=90)
        redis.pause()
        engine = open_database(url)
        add(engine, 5)
        engine.dispose()
        counts: list[float] = []

        def hangs() -> bool:
            counts.append(running.metric("holdfast_relay_step_seconds_count"))
            return counts[-3:] == [counts[-1]] * 3

        wait_until(hangs, every=0.7, deadline=90, what="a step that does not end")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 4
        assert "nothing is lost" in running.log()
        redis.resume()
    assert waiting(url) == 5


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    """All three may be mixed; passwords of none of them are logged."""
    shop(f"sqlite:///{tmp_path}/flag.db", 1)
    (tmp_path / "holdfast.toml").write_text(
        'database = "postgresql+psycopg://u:hunter2@127.0.0.1:1/file"\n'
        'broker = "sqlite:///file.db"\n[relay]\nlease = "7s"\nlog-format = "json"\n'
    )
    with sidecar(
        tmp_path, "--config", "holdfast.toml", "--database", "sqlite:///flag.db",
        HOLDFAST_BROKER="sqlite:///environment.db", HOLDFAST_DATABASE="sqlite:///environment.db",
    ) as running:  # fmt: skip
        wait_until(lambda: running.metric("holdfast_relay_published_total") == 1, deadline=90)
        said = running.records()[0]["message"]
    assert "sqlite:///flag.db → sqlite:///environment.db" in said
    with sidecar(tmp_path, "--config", "holdfast.toml") as running:
        wait_until(lambda: running.metric("holdfast_relay_outage") == 1, deadline=90)
        assert "u:***@127.0.0.1:1/file → sqlite:///file.db" in running.records()[0]["message"]
        assert "hunter2" not in running.log()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[relay]\nlease-second = 1\n", "[relay] lease_second is unknown"),
        ("databse = 'x'\n", "databse is unknown"),
        ("relay = 1\n", "relay is not a table"),
        ("[relay\n", "is not TOML"),
        ("[relay]\nlease = '0s'\n", "lease_seconds 0.0: use more than 0"),
        ("[relay]\nbatch = 0\n", "batch 0: use 1 or more"),
        ("[relay]\nhttp = 'nowhere'\n", "write host:port"),
        ("[relay]\nengine = 'wal'\n", "--engine lease"),
        ("[relay]\nmessages = true\n", "write events with holdfast.outbox.Outbox"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    """Exit code 2, the fix in the sentence, no traceback."""
    (tmp_path / "holdfast.toml").write_text(content)
    done = subprocess.run(
        [HOLDFAST, "relay", "--config", "holdfast.toml", "--database", "sqlite:///shop.db",
         "--broker", "memory:"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=QUIET,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    """The second sidecar on one address says so and ends."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 0)
    with sidecar(tmp_path, "--database", url, "--broker", "memory:") as running:
        taken = running.address()
        with sidecar(tmp_path, "--database", url, "--broker", "memory:", "--http", taken) as other:
            assert other.wait() == 2
            assert f"cannot listen on {taken}" in other.log()


def test_a_refused_login_ends_the_sidecar_at_the_start(tmp_path: Path, postgres: Postgres) -> None:
    """A wrong name is a mistake to fix, not an outage to wait for."""
    wrong = postgres.url.replace("postgres@", "nobody-here:hunter2@")
    with sidecar(tmp_path, "--database", wrong, "--broker", "memory:") as running:
        assert running.wait() == 2
        assert 'role "nobody-here" does not exist' in running.log()
        assert "hunter2" not in running.log()


def test_a_drain_on_a_terminal_shows_progress(tmp_path: Path) -> None:
    """A bar with rate and remaining time on stderr; the result on stdout stays clean."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 4000)
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [HOLDFAST, "relay", "--once", "--batch", "200", "--database", url, "--broker",
         "sqlite:///b.db"],
        stderr=theirs, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**QUIET, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux ends a terminal with an error
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.strip() == "published 4,000 events"
    assert b"publishing" in shown
    assert b"/4000" in shown.replace(b",", b"")
    assert b"/s" in shown


def test_a_relay_that_misses_a_topic_says_so_on_its_probe_and_comes_back(tmp_path: Path) -> None:
    """/readyz names the topic while /healthz is good; both are good once it is made."""
    url, to = f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/b.db?auto_create=false"
    shop(url)
    with sidecar(tmp_path, "--database", url, "--broker", to) as running:
        wait_until(
            lambda: "no such topic: orders" in running.get("/readyz")[1],
            deadline=90, what="it says so",
        )  # fmt: skip
        assert running.get("/healthz")[0] == 200
        assert running.metric("holdfast_relay_missing_topics") == 1
        with closing(connect(to)) as broker:
            broker.create_topic("orders")
        wait_until(lambda: running.get("/readyz")[0] == 200, deadline=90, what="it is ready")
        wait_until(lambda: waiting(url) == 0, deadline=90, what="all is published and deleted")


def test_once_says_when_the_broker_is_down(tmp_path: Path) -> None:
    """For cron: exit code 3 means try again later, and the events stay."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url)
    done = subprocess.run(
        [HOLDFAST, "relay", "--once", "--database", url, "--broker", "redis://127.0.0.1:1"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=QUIET,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert waiting(url) == 3


def test_a_signal_during_once_is_told_when_events_are_left(tmp_path: Path) -> None:
    """For cron: exit code 4, how many still wait, and the next run goes on with them."""
    url = f"sqlite:///{tmp_path}/shop.db"
    shop(url, 5000)
    command = [HOLDFAST, "relay", "--once", "--batch", "1", "--database", url, "--broker",
               "sqlite:///b.db"]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=QUIET
    )
    wait_until(lambda: waiting(url) < 5000, deadline=90)
    process.send_signal(signal.SIGTERM)
    output, said = process.communicate(timeout=120)
    assert process.returncode == 4, said
    assert output == ""
    assert f"{waiting(url):,} still wait" in said


def test_the_wal_engine_is_chosen_by_a_flag(tmp_path: Path, postgres: Postgres) -> None:
    """The same outbox, read from PostgreSQL's log."""
    url = postgres.database("sidecar_wal")
    shop(url)
    args = ("--engine", "wal", "--slot", "sidecar_wal", "--database", url, "--broker",
            "sqlite:///b.db")  # fmt: skip
    try:
        with sidecar(tmp_path, *args) as running:
            wait_until(lambda: running.metric("holdfast_relay_published_total") == 3, deadline=90)
            engine = open_database(url)
            add(engine, 4)
            engine.dispose()
            wait_until(lambda: running.metric("holdfast_relay_published_total") == 7, deadline=90)
            assert running.metric("holdfast_relay_leases_owned") == 64
            wait_until(lambda: running.metric("holdfast_outbox_sampled") == 1, deadline=90)
            for name in ("lost", "retained_bytes", "unconfirmed_bytes"):
                assert running.metric(f"holdfast_slot_{name}") >= 0
            assert running.metric("holdfast_relay_hindered") == 0
            running.process.send_signal(signal.SIGTERM)
            assert running.wait() == 0
    finally:
        engine = open_database(url)
        with engine.begin() as db:
            drop = "SELECT pg_drop_replication_slot('sidecar_wal')"
            db.execute(text(f"{drop} FROM pg_replication_slots WHERE slot_name = 'sidecar_wal'"))
        engine.dispose()
    broker = connect(f"sqlite:///{tmp_path}/b.db")
    assert sum(broker.lag("g", ["orders"]).values()) == 7
    broker.close()
