"""`holdfast saga`: operators see where a saga is, and end what is parked, with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from holdfast.db.audit import entries, verify
from holdfast.sagas import Saga
from holdfast.sagas.monitoring import SagaCollector
from tests.orchestrating import OrderState, Shop, order_saga
from tests.shell import shell

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

order = order_saga()

PROGRAM = """
from holdfast.sagas import Sagas
from tests.orchestrating import order_saga

order = order_saga()
newer = order_saga(version=2)
sagas = Sagas("sqlite:///shop.db", order, newer)
only_newer = Sagas("sqlite:///shop.db", newer)
nothing = 7
"""


class Place:
    """A shop and the command line in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shop = Shop(f"sqlite:///{folder}/shop.db", order)
        (folder / "shop_program.py").write_text(PROGRAM)

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `holdfast saga` with *args*."""
        return shell("saga", *args, cwd=self.folder, HOLDFAST_DATABASE="sqlite:///shop.db",
                     HOLDFAST_ACTOR="ada")  # fmt: skip

    def json(self, *args: str) -> Any:
        """Return what the command prints for scripts."""
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Open a shop in a folder."""
    place = Place(tmp_path)
    yield place
    place.shop.close()


def parked(place: Place) -> None:
    """Let order o1 wait for a human: it cannot be shipped, and its money not be given back."""
    place.shop.failing |= {("parcel", "o1"), ("refund", "o1")}
    place.shop.start(order, OrderState("o1"), "o1")
    place.shop.settle()


def test_a_compensation_that_always_fails_is_ended_by_mark_done(place: Place) -> None:
    """The list names it, the page says all about it, and the audit verifies."""
    parked(place)
    place.shop.start(order, OrderState("fine"), "fine")
    place.shop.settle()
    listed = place.json("list", "--status", "parked")
    assert [(one["key"], one["status"]) for one in listed] == [("o1", "parked")]
    shown = place.run("show", "o1")
    for part in ("parked    charge", "no refund for o1", "because ship: no parcel", "undo"):
        assert part in shown.stdout
    done = place.run("mark-done", "o1", "--reason", "transferred by hand")
    assert done.returncode == 0, done.stderr
    assert "mark-done charge of o1" in done.stdout
    place.shop.settle()
    assert place.shop.result("o1").status == "compensated"
    with place.shop.engine.connect() as db:
        found = entries(db, limit=1)[0]
        assert verify(db).is_whole
    assert (found.actor, found.action, found.reason) == (
        "ada", "saga.mark-done", "transferred by hand"
    )  # fmt: skip
    assert place.run("list", "--status", "parked").stdout.strip() == "no sagas"


def test_a_list_is_read_page_by_page(place: Place) -> None:
    """Each saga stands on one page: the newest first, of a status the oldest first."""
    names = [f"o{number}" for number in range(5)]
    for name in names:
        place.shop.start(order, OrderState(name), name)
    for more, expected in ((), names[::-1]), (("--status", "running"), names):
        found: list[str] = []
        after: list[str] = []
        while page := place.json("list", "--limit", "2", *more, *after):
            assert len(page) <= 2
            found += [one["key"] for one in page]
            after = ["--after", page[-1]["id"]]
        assert found == expected
    first = place.run("list", "--limit", "2")
    assert f"there may be more: --after {place.json('list', '--limit', '2')[-1]['id']}" in (
        " ".join(first.stdout.split())
    )
    assert "there may be more" not in place.run("list").stdout


def test_a_parked_step_is_tried_again_once_its_cause_is_mended(place: Place) -> None:
    """And the saga goes on by itself."""
    parked(place)
    place.shop.failing.clear()
    assert place.run("retry", "o1", "--reason", "the bank is back").returncode == 0
    place.shop.settle()
    assert place.shop.result("o1").status == "compensated"
    assert ("refund", "o1", -10) in place.shop.effects()


def test_a_compensation_can_be_left_out(place: Place) -> None:
    """With a reason, which is kept."""
    parked(place)
    assert place.run("skip", "o1", "--step", "charge", "--reason", "written off").returncode == 0
    place.shop.settle()
    assert place.shop.result("o1").status == "compensated"


def test_a_running_saga_is_cancelled(place: Place) -> None:
    """What was done is undone, and the reason is the operator's."""
    place.shop.start(order, OrderState("o1"), "o1")
    commands = place.shop.published()
    place.shop.deliver(*commands)
    assert place.run("cancel", "o1", "--reason", "the customer called").returncode == 0
    assert place.shop.worker.step() == 1
    place.shop.settle()
    result = place.shop.result("o1")
    assert (result.status, result.reason) == ("compensated", "the customer called")


def test_a_signal_is_sent_by_hand_with_what_it_brings(tmp_path: Path) -> None:
    """The saga goes on with it, and the audit says who sent it and why."""
    approval: Saga[OrderState] = Saga("approval", state=OrderState)

    @approval.signal(timeout="1d")
    def approved(state: OrderState, by: str) -> OrderState:
        return msgspec.structs.replace(state, notes=(by,))

    shop = Shop(f"sqlite:///{tmp_path}/shop.db", approval)
    shop.start(approval, OrderState("o1"), "o1")
    sent = shell("saga", "signal", "o1", "approved", "--payload", '"eve"', "--reason", "she called",
                 "--actor", "ada", "--database", "sqlite:///shop.db", cwd=tmp_path)  # fmt: skip
    assert sent.returncode == 0, sent.stderr
    shop.settle()
    result = shop.result("o1")
    assert (result.status, result.state.notes) == ("completed", ("eve",))
    with shop.engine.connect() as db:
        (entry,) = entries(db, limit=10)
    assert (entry.actor, entry.action, entry.reason) == ("ada", "saga.signal", "she called")
    shop.close()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("retry", "o1", "--reason", "x"), "no step of it is parked"),
        (("show", "nobody"), "no saga with the id or key 'nobody'"),
        (("list", "--status", "odd"), "use one of running"),
        (("retry", "o1", "--reason", " "), "the reason is empty"),
        (("signal", "o1", "fly", "--reason", "x"), "no step 'fly' that waits for a signal"),
        (("signal", "o1", "ship", "--reason", "x", "--payload", "{"), "--payload is no JSON"),
        (("diagram", "shop_program"), "write module:variable"),
        (("diagram", "shop_program:nothing"), "is a int, not a Saga"),
        (("diagram", "shop_program:absent"), "has no 'absent'"),
        (("run", "shop_program:order", "--broker", "memory:"), "is a Saga, not a Sagas"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    place: Place, args: tuple[str, ...], sentence: str
) -> None:
    """It says what is wrong, and nothing was done."""
    place.shop.start(order, OrderState("o1"), "o1")
    done = place.run(*args)
    assert done.returncode != 0
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_act_is_asked_for_once(place: Place) -> None:
    """The second one hears that a worker will do it."""
    parked(place)
    assert place.run("retry", "o1", "--reason", "x").returncode == 0
    again = place.run("retry", "o1", "--reason", "x")
    assert "is asked for already" in " ".join(again.stderr.split())


def test_a_diagram_is_printed_as_mermaid(place: Place) -> None:
    """Of one saga, or of all that a program runs."""
    assert place.run("diagram", "shop_program:order").stdout.startswith("flowchart TD")
    assert place.run("diagram", "shop_program:sagas").stdout.count("flowchart TD") == 2


def test_check_says_what_becomes_of_running_sagas(place: Place) -> None:
    """Before a deployment, against what really runs."""
    place.shop.start(order, OrderState("o1"), "o1")
    fine = place.run("check", "shop_program:sagas")
    assert fine.returncode == 0
    assert "goes on as it began" in fine.stdout
    not_fine = place.run("check", "shop_program:only_newer")
    assert not_fine.returncode == 1
    assert "waits until a worker has version 1" in not_fine.stdout


def test_a_database_without_the_tables_is_told(tmp_path: Path) -> None:
    """With the command that makes them."""
    (tmp_path / "shop.db").touch()
    done = shell("saga", "list", "--database", "sqlite:///shop.db", cwd=tmp_path)
    assert "run holdfast db upgrade" in " ".join(done.stderr.split())


def test_the_alerts_ask_for_series_that_there_are(place: Place) -> None:
    """A series that is not there makes a rule that cannot fire, and nobody would notice."""
    parked(place)
    registry = CollectorRegistry()
    registry.register(SagaCollector(place.shop.engine))
    shown = generate_latest(registry).decode()
    rules = (Path(__file__).parents[2] / "deploy" / "prometheus-saga-alerts.yaml").read_text()
    for name in set(re.findall(r"\bholdfast_saga\w*", rules)):
        assert re.search(rf"^{name}\b", shown, re.MULTILINE), name
    assert 'holdfast_sagas{saga="order",status="parked"} 1.0' in shown
