"""The alert rules that are shipped can fire: what they ask for is really exported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast import Message
from holdfast.brokers import connect
from holdfast.consumer import create_tables
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, DeadLetterTopic
from holdfast.testing import WaitTimeout, wait_until
from tests.dead_letters import letter
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).parents[2] / "deploy"
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
SHOP = """
from holdfast.circuit import circuit
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter

consumer = Consumer("sqlite:///broker.db?session=2", group="billing", database="sqlite:///app.db")

@consumer.on("orders")
@dead_letter()
@circuit("payments")
def bill(order: str) -> None: ...
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Offer a consumer whose store holds one dead letter, on a broker with its topics."""
    engine = open_database(f"sqlite:///{tmp_path}/app.db")
    create_tables(engine)
    DeadLetterStore(engine).put(letter())
    engine.dispose()
    (tmp_path / "shop.py").write_text(SHOP)
    broker = connect(f"sqlite:///{tmp_path}/broker.db")
    for topic in ("orders", "orders.billing.dlq"):
        broker.create_topic(topic)
    sink = broker.sink()
    sink.publish([Message.new("orders", b"one", key="k")])
    sink.close()
    broker.close()
    return tmp_path


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[int]:
    """Run a command with an endpoint, which must end in peace; return the port."""
    port = free_port()
    command = [HOLDFAST, *words, "--http", f"127.0.0.1:{port}", "--retention", "*=1s"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    process = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def page(port: int, path: str) -> str:
    """Return a page, nothing while it is not served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def asked_for(name: str) -> set[str]:
    """Return the series that the rules in a file ask for."""
    found = set(re.findall(r"\bholdfast_\w+", (DEPLOY / name).read_text()))
    assert found, name
    return found


def series(text: str) -> set[str]:
    """Return the series that a page shows."""
    return set(re.findall(r"^(holdfast_\w+)", text, re.MULTILINE))


def check_metrics(port: int, wanted: set[str], *lines: str) -> None:
    """Wait until the page has the *wanted* series and *lines*; a busy worker may miss one page."""
    missing: set[str] = set()

    def is_whole() -> bool:
        nonlocal missing
        text = page(port, "/metrics")
        missing = (wanted - series(text)) | {line for line in lines if line not in text}
        return not missing

    with suppress(WaitTimeout):
        wait_until(is_whole, deadline=90, every=0.2)
    assert missing == set()


def test_consume_exports_every_series_of_the_alerts_on_consumers_and_dead_letters(
    shop: Path,
) -> None:
    """A series that is not there makes a rule that cannot fire, and nobody would notice."""
    wanted = asked_for("prometheus-consumer-alerts.yaml") | asked_for("prometheus-dlq-alerts.yaml")
    with serving(shop, "consume", "shop:consumer", "--workers", "2") as port:
        wait_until(
            lambda: len(re.findall("consumes", page(port, "/readyz"))) == 2,
            deadline=90,
            what="both workers consume",
        )
        lines = [
            line.format(worker=worker)
            for worker in "01"
            for line in (
                'holdfast_dlq_open{{topic="orders",worker="{worker}"}} 1.0',
                'holdfast_dlq_uncollected_seconds{{worker="{worker}"}} 0.0',
                'holdfast_consumer_down{{what="database",worker="{worker}"}} 0.0',
            )
        ]
        lines.append('holdfast_circuit_state{circuit="payments",state="open",worker="0"} 0.0')
        check_metrics(port, wanted, *lines)


def test_collect_exports_the_store_of_consumers_that_have_none(shop: Path) -> None:
    """Where consumers have no database, the collector is who knows what waits."""
    words = ("dlq", "collect", "orders.billing.dlq", "--database", "sqlite:///app.db",
             "--broker", "sqlite:///broker.db")  # fmt: skip
    with serving(shop, *words) as port:
        wait_until(lambda: "collects" in page(port, "/readyz"), deadline=90, what="it collects")
        names = {n for n in asked_for("prometheus-dlq-alerts.yaml") if "consumed" not in n}
        check_metrics(
            port,
            {name for name in names if not name.endswith("_total")},
            'holdfast_dlq_open{topic="orders"} 1.0',
            'holdfast_dlq_uncollected{topic="orders.billing.dlq"} 0.0',
        )
        wait_until(lambda: "asked the broker" in page(port, "/healthz"), deadline=90)


def test_a_consumer_without_a_database_shows_what_nobody_collects(shop: Path) -> None:
    """Its letters are on a topic, where the broker's retention eats them."""
    (shop / "bare.py").write_text(SHOP.replace(', database="sqlite:///app.db"', ""))
    broker = connect(f"sqlite:///{shop}/broker.db")
    home = DeadLetterTopic.on(broker)
    home.put(letter())
    home.close()
    broker.close()
    with serving(shop, "consume", "bare:consumer") as port:
        wait_until(lambda: "consumes" in page(port, "/readyz"), deadline=90, what="it consumes")
        check_metrics(
            port,
            set(),
            'holdfast_dlq_uncollected{topic="orders.billing.dlq"} 1.0',
            "holdfast_dlq_expiring_24h 1.0",
        )
