"""`holdfast saga run` as a process: it ends in good order, and one that is killed is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast import Message, outbox
from holdfast.brokers import connect
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db import open_database
from holdfast.sagas import create_tables
from holdfast.sagas.schema import saga, timer
from holdfast.testing import wait_until
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from tests.servers import Postgres

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
BROKER = "sqlite:///broker.db?session=2"
DEADLINE = 90.0
PROGRAM = """
import os
import time
from pathlib import Path

import msgspec
from sqlalchemy import text
from sqlalchemy.orm import Session

from holdfast.sagas import Saga, Sagas, WorkerTerms


class Order(msgspec.Struct, frozen=True):
    order: str


class Reserve(msgspec.Struct):
    order: str


order = Saga("order", state=Order)


@order.local(compensate=None)
def note(state: Order, session: Session) -> Order:
    own = {"order": state.order, "pid": os.getpid()}
    session.execute(text("INSERT INTO noted VALUES (:order, :pid)"), own)
    Path(f"begun-{os.getpid()}").touch()
    while not Path("gate").exists():
        time.sleep(0.02)  # pacing: between two looks at the gate
    return state


@order.command("stock", compensate=None, timeout="10m")
def reserve(state: Order) -> Reserve:
    return Reserve(state.order)


sagas = Sagas(os.environ["SHOP_DATABASE"], order, terms=WorkerTerms(lease_seconds=3))
"""


@dataclass
class Place:
    """A folder with the program, its database and its broker, and the processes of it."""

    folder: Path
    url: str
    engine: Engine
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start `holdfast saga run`; return it and the port of its endpoint."""
        port = free_port()
        command = [HOLDFAST, "saga", "run", "shop:sagas", "--broker", BROKER,
                   "--http", f"127.0.0.1:{port}"]  # fmt: skip
        own = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
        with (self.folder / "run.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env={**own, "SHOP_DATABASE": self.url},
                stdout=log, stderr=log,
            )  # fmt: skip
        self.running.append(process)
        return process, port

    def ready(self) -> subprocess.Popen[bytes]:
        """Start one, and return it once it takes replies."""
        return self.serving()[0]

    def serving(self) -> tuple[subprocess.Popen[bytes], int]:
        """Start one, and return it and its port once it takes replies."""
        process, port = self.run()
        wait_until(lambda: page(port, "/readyz").startswith("200"), deadline=DEADLINE,
                   what="it is ready")  # fmt: skip
        return process, port

    def start(self, *names: str) -> list[str]:
        """Start orders; return the ids of their sagas."""
        own: dict[str, Any] = {}
        with patch.dict(os.environ, SHOP_DATABASE=self.url):
            exec(PROGRAM, own)  # noqa: S102 - the definition is the program's own
        own["sagas"].engine.dispose()
        with Session(self.engine) as session, session.begin():
            return [own["order"].start(session, own["Order"](name), key=name).id for name in names]

    def begun_by(self, process: subprocess.Popen[bytes]) -> None:
        """Return once a local step runs in *process*."""
        wait_until((self.folder / f"begun-{process.pid}").exists, deadline=DEADLINE, what="a step")

    def open_gate(self) -> None:
        """Let local steps end."""
        (self.folder / "gate").touch()

    def log(self) -> str:
        """Return what the processes have said."""
        return (self.folder / "run.log").read_text()

    def noted(self) -> list[tuple[str, int]]:
        """Return what the local steps have done, and in which process."""
        with self.engine.connect() as db:
            return [tuple(row) for row in db.execute(text("SELECT * FROM noted ORDER BY 1"))]

    def steps(self, status: str) -> int:
        """Return how many attempts at the local step have this status."""
        wanted = text("SELECT count(*) FROM holdfast_saga_step WHERE step = 'note' AND status = :s")
        with self.engine.connect() as db:
            return int(db.execute(wanted, {"s": status}).scalar_one())

    def sagas(self, status: str) -> int:
        """Return how many sagas have this status."""
        with self.engine.connect() as db:
            wanted = select(func.count()).select_from(saga).where(saga.c.status == status)
            return int(db.execute(wanted).scalar_one())

    def leased(self) -> int:
        """Return how many timers somebody holds."""
        with self.engine.connect() as db:
            held = select(func.count()).select_from(timer).where(timer.c.owner.is_not(None))
            return int(db.execute(held).scalar_one())


def page(port: int, path: str) -> str:
    """Return a page after its status; nothing while it is not served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError:
        return ""


def reply(saga_id: str) -> Message:
    """Return the answer to the command of an order."""
    headers = {
        "x-saga-id": saga_id, "x-saga-type": "order", "x-saga-step": "reserve",
        "x-saga-direction": "do", "x-saga-attempt": "1", "x-saga-answer": "done",
    }  # fmt: skip
    return Message.new("order.replies", b"null", key=saga_id, headers=headers)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres) -> Iterator[Place]:
    """Open a place of one's own."""
    url = postgres.database("saga_run")
    engine = open_database(url)
    create_consumer_tables(engine)
    outbox.create_tables(engine)
    create_tables(engine)
    with engine.begin() as db:
        db.execute(text("CREATE TABLE noted (name text, pid integer)"))
    (tmp_path / "shop.py").write_text(PROGRAM)
    broker = connect(f"sqlite:///{tmp_path}/broker.db")
    broker.create_topic("order.replies", partitions=2)
    broker.create_group("order.replies", "sagas")
    broker.close()
    place = Place(tmp_path, url, engine)
    yield place
    for process in place.running:
        process.kill()
        process.wait()
    engine.dispose()


def test_sigterm_finishes_the_step_in_hand_and_leaves_nothing_leased(place: Place) -> None:
    """What was not begun is another worker's at once, not only after the lease."""
    place.start("a", "b", "c")
    process = place.ready()
    place.begun_by(process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM" in place.log(), deadline=DEADLINE, what="the signal is heard")
    assert process.poll() is None, "it has not waited for the step"
    place.open_gate()
    assert process.wait(DEADLINE) == 0, place.log()
    assert len(place.noted()) == place.steps("done") >= 1
    assert place.leased() == 0


def test_sigterm_leaves_no_reply_unsettled(place: Place) -> None:
    """What is in the sagas is acknowledged, and what is not is still on the broker."""
    place.open_gate()
    ids = place.start(*(f"o{number}" for number in range(60)))
    first = place.ready()
    wait_until(lambda: place.steps("done") == len(ids), deadline=DEADLINE, what="commands are out")
    broker = connect(f"sqlite:///{place.folder}/broker.db")
    sink = broker.sink()
    sink.publish([reply(one) for one in ids])
    sink.close()
    wait_until(lambda: place.sagas("completed"), deadline=DEADLINE, what="the first is completed")
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE) == 0, place.log()
    left = sum(broker.lag("sagas", ["order.replies"]).values())
    broker.close()
    assert left == place.sagas("running")
    second, port = place.serving()
    shown = page(port, "/metrics")  # its own series, and those of its consumer
    assert "holdfast_saga_timer_lag_seconds" in shown
    assert "holdfast_consumer_down" in shown
    assert page(port, "/healthz").startswith("200")
    wait_until(lambda: place.sagas("completed") == len(ids), deadline=DEADLINE, what="all ended")
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE) == 0, place.log()
    assert len(place.noted()) == len(ids)


def test_the_step_of_a_process_that_is_killed_is_taken_over(place: Place) -> None:
    """Another worker runs it when the lease has passed; of the first nothing is left."""
    place.start("a")
    first = place.ready()
    place.begun_by(first)
    second = place.ready()  # beside it, and without a chance while the lease is renewed
    first.kill()
    first.wait()
    place.begun_by(second)
    place.open_gate()
    wait_until(lambda: place.steps("done") == 1, deadline=DEADLINE, what="the step is done")
    assert place.noted() == [("a", second.pid)]
    second.send_signal(signal.SIGTERM)
    assert second.wait(DEADLINE) == 0, place.log()


def test_a_signal_is_heard_as_soon_as_the_endpoint_answers(place: Place) -> None:
    """Also while it waits for the database, before it has begun to take replies."""
    with place.engine.connect() as db:
        db.execute(text("LOCK TABLE holdfast_saga IN ACCESS EXCLUSIVE MODE"))
        process, port = place.run()
        wait_until(lambda: page(port, "/readyz"), deadline=DEADLINE, what="the endpoint answers")
        process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE) == 0, place.log()
