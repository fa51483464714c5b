"""The dashboards that are shipped: Grafana takes them, and what they ask for is really exported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.testing import wait_until
from tests.servers.install import program
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "deploy").glob("grafana-*.json"))
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
SHOP = """
from holdfast.circuit import circuit
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter
from holdfast.sagas import Sagas
from tests.orchestrating import order_saga

consumer = Consumer("sqlite:///broker.db", group="billing", database="sqlite:///app.db")
sagas = Sagas("sqlite:///app.db", order_saga())

@consumer.on("orders")
@dead_letter()
@circuit("payments")
def bill(order: str) -> None: ...
"""
WINDOWS = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1d"}
ADDED = {"job", "instance", "worker", "le"}
"""Labels that Prometheus, the supervisor of workers and histograms add."""
GLANCE = {
    "Pending", "Pending by topic", "Oldest", "In, last hour", "Out, last hour",
    "By error type, last 24 h", "By class, last 24 h", "Closed an hour, by kind",
    "In and out an hour, 24 h", "Pending, 24 h",
}  # fmt: skip


def panels(board: Path) -> list[dict[str, Any]]:
    """Return the panels of a dashboard."""
    found: list[dict[str, Any]] = json.loads(board.read_text())["panels"]
    return found


def queries(board: Path) -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries, as Grafana sends them."""
    for panel in panels(board):
        for target in panel["targets"]:
            text = target["expr"].replace("$job", "shop")
            for name, value in WINDOWS.items():
                text = text.replace(name, value)
            assert "$" not in text, panel["title"]
            yield panel["title"], text


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[int]:
    """Run a command with an endpoint; yield the port."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    process = subprocess.Popen(
        [HOLDFAST, *words, "--http", f"127.0.0.1:{port}", "--log-level", "warning"],
        cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        yield port
        process.send_signal(signal.SIGTERM)
        process.wait(90)
    finally:
        process.kill()
        process.wait()


def page(port: int, path: str) -> str:
    """Return a page, nothing while it is not served or not ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def families(text: str) -> dict[str, set[str]]:
    """Return the series that a page offers, each with the labels that are seen on it."""
    found: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (holdfast_\w+) (\w+)", text, re.MULTILINE):
        for end in ("_bucket", "_count", "_sum") if kind == "histogram" else ("",):
            found[name + end] = set()
    for name, labels in re.findall(r"^(holdfast_\w+)(?:\{(.*?)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Return what a consumer with two workers exports, and what a process of sagas does."""
    folder = tmp_path_factory.mktemp("boards")
    engine = open_database(f"sqlite:///{folder}/app.db")
    Migrations(engine).upgrade()
    engine.dispose()
    broker = connect(f"sqlite:///{folder}/broker.db")
    broker.create_topic("orders")
    broker.close()
    (folder / "shop.py").write_text(SHOP)
    with serving(folder, "consume", "shop:consumer", "--workers", "2") as port:
        wait_until(
            lambda: len(re.findall("consumes", page(port, "/readyz"))) == 2,
            deadline=120,
            what="both workers consume",
        )
        consumer = families(page(port, "/metrics"))
    with serving(folder, "saga", "run", "shop:sagas", "--broker", "sqlite:///broker.db") as port:
        wait_until(lambda: page(port, "/readyz") != "", deadline=120, what="sagas run")
        sagas = families(page(port, "/metrics"))
    return {"grafana-consumer": consumer, "grafana-dead-letters": consumer, "grafana-sagas": sagas}


@pytest.mark.parametrize("name", ["grafana-consumer", "grafana-dead-letters", "grafana-sagas"])
def test_a_dashboard_asks_only_for_series_and_labels_that_are_exported(
    offered: dict[str, dict[str, set[str]]], name: str
) -> None:
    """A renamed series or label would leave a panel empty without anybody noticing."""
    there = offered[name]
    board = ROOT / "deploy" / f"{name}.json"
    asked = set(re.findall(r"\bholdfast_\w+", board.read_text()))
    assert asked - set(there) == set()
    for title, text in queries(board):
        used = re.findall(r"\b(holdfast_\w+)\{([^}]*)\}", text)
        assert used, title
        for series, matchers in used:
            labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
            if there[series]:  # one without a sample yet tells no labels
                assert labels <= there[series] | ADDED, title
        known = ADDED.union(*(there[series] for series, _ in used))
        if all(there[series] for series, _ in used):
            by = re.findall(r"\bby \(([\w, ]+)\)", text)
            assert {one.strip() for names in by for one in names.split(",")} <= known, title


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """Each as a recording rule, which promtool checks."""
    found = [text for board in BOARDS for _, text in queries(board)]
    assert len(found) > 50
    rules = [{"record": f"query:{number}", "expr": text} for number, text in enumerate(found)]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "boards", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(
        [program("promtool"), "check", "rules", file], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(found)} rules found" in done.stdout


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_grafana_takes_a_dashboard_as_it_is(board: Path) -> None:
    """No two panels share an id or a place, each has a unit, and every query an own letter."""
    whole = json.loads(board.read_text())
    assert {one["name"] for one in whole["templating"]["list"]} == {"datasource", "job"}
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
    ids = [panel["id"] for panel in whole["panels"]]
    titles = [panel["title"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


def test_every_part_has_a_dashboard() -> None:
    """Producer, consumer, dead letters, sagas; no two of the same name."""
    uids = {json.loads(board.read_text())["uid"] for board in BOARDS}
    assert uids == {
        "holdfast-relay", "holdfast-consumer", "holdfast-dead-letters", "holdfast-sagas",
    }  # fmt: skip


def test_the_page_of_dead_letters_answers_at_a_glance() -> None:
    """How many, of what, since when, what comes and goes, and the last 24 hours."""
    board = ROOT / "deploy" / "grafana-dead-letters.json"
    assert {panel["title"] for panel in panels(board)} >= GLANCE
    assert json.loads(board.read_text())["time"]["from"] == "now-24h"
