"""`holdfast saga trace` and `diagram`: what happened, what is missing, and pictures of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from holdfast.tracing.schema import lineage
from tests.choreographing import Dance
from tests.shell import shell

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = """
from holdfast.sagas import StateMachine
from tests.choreographing import flow

machine = StateMachine("order", start="placed", transitions={
    "placed": {"paid", "cancelled"}, "paid": {"shipped", "cancelled"},
    "shipped": {"delivered"}, "delivered": set(), "cancelled": set(),
})
"""


class TracePlace:
    """Services in a folder, and the command line beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dance = Dance(f"sqlite:///{folder}/dance.db")
        (folder / "dance_program.py").write_text(PROGRAM)

    def run(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `holdfast saga` with *args*."""
        known = {"HOLDFAST_DATABASE": "sqlite:///dance.db"}
        return shell("saga", *args, cwd=self.folder, **(known | environment))

    def trace(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Trace with the flow of the program."""
        return self.run("trace", *args, "--flow", "dance_program:flow")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[TracePlace]:
    """Open the services in a folder."""
    place = TracePlace(tmp_path)
    yield place
    place.dance.close()


def test_the_chain_is_a_tree_with_times_and_who_handled_what(place: TracePlace) -> None:
    """By the correlation, or by any event of it."""
    place.dance.unknown.add("bob")
    placed = place.dance.place("bob")
    place.dance.settle()
    done = place.trace(placed.id)
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"[0-9a-f]{8}-\S+|\d+\.\d{3}", "#", line) for line in done.stdout.splitlines()]
    assert re.fullmatch(r"# 4 events in # s, from \S+", lines[0])
    assert lines[1:] == [
        "OrderPlaced  +# s  shop  #  [payment after # s]",
        "└─ PaymentProcessed  +# s  payment  #  [shipping after # s]",
        "   └─ ShippingFailed  +# s  shipping  #  [payment after # s]",
        "      └─ PaymentRefunded  +# s  payment  #  [shipping after # s]",
        "nothing of flow order is missing",
    ]


def test_what_is_missing_is_named_and_ends_with_1_once_it_is_overdue(place: TracePlace) -> None:
    """Since when, and why as far as it is known."""
    placed = place.dance.place("ann")
    waiting = place.trace(placed.id)
    assert waiting.returncode == 0
    assert "expected: PaymentProcessed or PaymentFailed after OrderPlaced" in waiting.stdout
    with place.dance.engine.begin() as db:
        db.execute(update(lineage).values(time=lineage.c.time - 7800))
    late = place.trace(placed.id)
    assert late.returncode == 1
    assert re.search(
        r"^missing: PaymentProcessed or PaymentFailed after OrderPlaced \S+, overdue since \S+Z "
        r"\(2h[^)]*\): no service has handled OrderPlaced yet$",
        late.stdout,
        re.MULTILINE,
    )
    told = json.loads(place.trace(placed.id, "--json").stdout)
    assert told["is_overdue"]
    assert told["missing"][0]["after"] == placed.id
    assert told["events"][0]["type"] == "OrderPlaced"


def test_the_database_of_another_service_is_read_as_well(place: TracePlace, tmp_path: Path) -> None:
    """What one does not know another may."""
    placed = place.dance.place("ann")
    (tmp_path / "bare").mkdir()
    bare = TracePlace(tmp_path / "bare")
    found = bare.run("trace", placed.id, "--also", f"sqlite:///{tmp_path}/dance.db")
    assert found.returncode == 0, found.stderr
    assert "OrderPlaced" in found.stdout
    assert bare.run("trace", placed.id).returncode == 1
    bare.dance.close()


def test_flows_and_state_machines_are_drawn_as_well(place: TracePlace) -> None:
    """As Mermaid."""
    assert place.run("diagram", "dance_program:flow").stdout.startswith("flowchart TD\n")
    drawn = place.run("diagram", "dance_program:machine").stdout
    assert drawn.startswith("stateDiagram-v2\n    s0: placed\n")
    told = json.loads(place.run("diagram", "dance_program:machine", "--json").stdout)
    assert told == [{"state_machine": "order", "diagram": drawn}]
    wrong = place.run("trace", "x", "--flow", "dance_program:machine")
    assert "is a StateMachine, not a Flow" in " ".join(wrong.stderr.split())


def test_a_picture_is_drawn_by_mermaid_cli_where_it_is_installed(place: TracePlace) -> None:
    """And what to install is named where it is not, or why it could not draw."""
    folder = place.folder / "bin"
    folder.mkdir()
    path = f"{folder}:/usr/bin:/bin"
    absent = place.run("diagram", "dance_program:flow", "--svg", PATH=str(folder))
    assert absent.returncode == 2
    assert "npm install -g @mermaid-js/mermaid-cli" in " ".join(absent.stderr.split())
    program = folder / "mmdc"
    program.write_text(
        '#!/bin/sh\n[ "$2" = --input ] && grep -q OrderPlaced "$3" && echo "<svg/>" > "$5"\n'
    )
    program.chmod(0o755)
    drawn = place.run("diagram", "dance_program:flow", "--svg", PATH=path)
    assert (drawn.returncode, drawn.stdout) == (0, "<svg/>\n")
    program.write_text("#!/bin/sh\necho no browser here >&2; exit 1\n")
    failed = place.run("diagram", "dance_program:flow", "--svg", PATH=path)
    assert failed.returncode == 2
    assert "mmdc could not draw the diagram: no browser here" in " ".join(failed.stderr.split())
