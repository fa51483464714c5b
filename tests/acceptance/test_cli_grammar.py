"""One grammar for all commands: the same flags, JSON, durations, exit codes, help that teaches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from holdfast.cli.app import app
from holdfast.cli.config import SHARED
from holdfast.cli.exits import MEANINGS
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
WHY = ("--reason", "x")
NOBODY = "abcdef"
ARCHIVE = ("--to", "letters", "--conf", "wrong")  # refused before a JVM starts
ASKED = ("--from", "sqlite:///shop.db", "--conf", "wrong")
RUNS: dict[str, tuple[tuple[str, ...], int]] = {
    "db upgrade": ((), 0),
    "db current": ((), 0),
    "db sql": (("--dialect", "sqlite"), 0),
    "relay": (("--once",), 0),
    "consume": (("nowhere:consumer",), 2),
    "dlq stats": ((), 0),
    "dlq groups": ((), 0),
    "dlq triage": ((), 0),
    "dlq trends": ((), 0),
    "dlq blast-radius": ((), 0),
    "dlq show": ((NOBODY,), 1),
    "dlq list": ((), 0),
    "dlq explain": ((NOBODY,), 1),
    "dlq simulate": ((NOBODY, "--handler", "json:loads"), 1),
    "dlq replay": ((NOBODY, *WHY), 1),
    "dlq plans list": ((), 0),
    "dlq plans show": ((NOBODY,), 1),
    "dlq plans pause": ((NOBODY, *WHY), 1),
    "dlq plans resume": ((NOBODY, *WHY), 1),
    "dlq plans rate": ((NOBODY, "5/s", *WHY), 1),
    "dlq plans abort": ((NOBODY, *WHY), 1),
    "dlq plans approve": ((NOBODY, *WHY), 1),
    "dlq verify": ((NOBODY,), 1),
    "dlq discard": ((NOBODY, *WHY), 1),
    "dlq reopen": ((NOBODY, *WHY), 1),
    "dlq ack": ((NOBODY, *WHY), 1),
    "dlq mute": ((NOBODY, "--for", "4h", *WHY), 1),
    "dlq note": ((NOBODY, "words"), 1),
    "dlq resolve": ((NOBODY, *WHY), 1),
    "dlq alerts": (("--run", "true"), 0),
    "dlq regroup": (("--yes", *WHY), 0),
    "dlq edit": ((NOBODY, "--payload-file", "none", *WHY), 1),
    "dlq export": (("--to", "letters.jsonl"), 0),
    "dlq collect": (("orders.billing.dlq", "--once"), 1),
    "dlq prune": (("--yes",), 0),
    "dlq audit": ((), 0),
    "dlq forget": (("ada", "--yes", *WHY), 1),
    "doctor": ((), 1),  # a relay was here, and is gone
    "status": ((), 0),
    "outbox prune": (("--yes", *WHY), 0),
    "outbox audit": ((), 0),
    "outbox parked list": ((), 0),
    "outbox parked show": (("17",), 1),
    "outbox parked edit": (("17", "--payload", "{}", *WHY), 1),
    "outbox parked release": (("17", *WHY), 1),
    "outbox parked skip": (("17", "--yes", *WHY), 1),
    "keys list": ((), 0),
    "keys show": (("billing", "orders", "ada"), 1),
    "keys release": (("billing", "orders", "ada", *WHY), 1),
    "keys skip": (("billing", "orders", "ada", "--yes", *WHY), 1),
    "keys audit": ((), 0),
    "circuits list": ((), 0),
    "circuits open": (("bank", *WHY), 1),
    "circuits close": (("bank", *WHY), 1),
    "saga list": ((), 0),
    "saga show": ((NOBODY,), 1),
    "saga retry": ((NOBODY, *WHY), 1),
    "saga skip": ((NOBODY, *WHY), 1),
    "saga mark-done": ((NOBODY, *WHY), 1),
    "saga cancel": ((NOBODY, *WHY), 1),
    "saga signal": ((NOBODY, "approved", *WHY), 1),
    "saga diagram": (("nowhere:saga",), 2),
    "saga trace": ((NOBODY,), 1),
    "lineage show": ((NOBODY,), 1),
    "lineage map": ((), 0),
    "saga check": (("nowhere:sagas",), 2),
    "saga run": (("nowhere:sagas",), 2),
    "inbox stats": ((), 0),
    "inbox prune": (("--yes",), 0),
    "inbox forget": (("billing/orders", "1", "--yes", *WHY), 1),
    "inbox rename": (("billing/orders", "billing/new", "--yes", *WHY), 1),
    "lag": (("--topic", "orders", "--group", "shipping"), 0),
    "audit": ((), 0),
    "topics create": (("refunds",), 0),
    "topics list": ((), 0),
    "topics show": (("orders",), 0),
    "group create": (("--group", "billing", "--topic", "orders"), 0),
    "brokers": ((), 0),
    "brokers prune": (("--yes",), 0),
    "cdc": (("--table", "t", "--server", "s", "--once"), 2),
    "version": ((), 0),
    "spark archive add": (("--from", "sqlite:///shop.db", *ARCHIVE), 2),
    "spark archive compact": (ARCHIVE, 2),
    "spark archive expire": (("--older-than", "9d", *ARCHIVE), 2),
    "spark archive erase": (("ada", *WHY, *ARCHIVE), 2),
    "spark archive show": (("--to", "letters"), 0),
    "spark plan": (("--group", "billing", "--staging", "s", *WHY, "--conf", "wrong"), 2),
    "spark replay": ((NOBODY, *WHY), 1),
    "spark verify": ((NOBODY,), 1),
    "spark stream": (
        ("--from", "kafka://localhost:1?topic=x.dlq", "--checkpoint", "c", "--conf", "wrong"),
        2,
    ),
    "spark transform": (
        (
            "--from",
            "archive:letters",
            "--to",
            "archive:others",
            "--with",
            "json:loads@1",
            "--checkpoint",
            "c",
            "--conf",
            "wrong",
        ),
        2,
    ),
    "spark triage": (ASKED, 2),
    "spark trends": (ASKED, 2),
    "spark blast-radius": (ASKED, 2),
    "spark poison-patterns": (("--healthy", "healthy", *ASKED), 2),
    "spark schema-usage": (ASKED, 2),
}
"""How each command is run on an empty database, and how it ends."""


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        late = getattr(command.callback, "late", None)
        found = command if late is None else late.load()
        words = (*path, name)
        if hasattr(found, "commands"):
            yield from _commands(found, words)
        if not hasattr(found, "commands") or (
            found.invoke_without_command and len(found.params) > 1
        ):
            yield " ".join(words), found


ALL = dict(_commands(typer.main.get_group(app)))


def _options(command: Any) -> Iterator[tuple[str, Any]]:
    for option in command.params:
        for name in option.opts:
            if name.startswith("--"):
                yield name.removeprefix("--"), option


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an empty database that had a relay, and a broker that has a topic."""
    folder = tmp_path_factory.mktemp("shop")
    group = ("group", "create", "--group", "shipping", "--topic", "orders")
    relay = ("relay", "--once")
    for words in (("db", "upgrade"), ("topics", "create", "orders"), group, relay):
        done = _run(folder, *words)
        assert done.returncode == 0, done.stderr
    return folder


def _run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    urls = {
        "HOLDFAST_DATABASE": f"sqlite:///{folder}/shop.db",
        "HOLDFAST_BROKER": f"sqlite:///{folder}/broker.db",
        "HOLDFAST_WITHIN": "60s",
    }
    return shell(*words, cwd=folder, **(urls | environment))


def test_every_command_is_walked() -> None:
    """A new command is added to the table above, and so held to the grammar."""
    assert set(RUNS) == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_help_teaches_by_an_example_of_that_command(name: str) -> None:
    """Somebody who reads --help at night can copy a line that works."""
    done = shell(*name.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"Example: holdfast {name} " in f"{' '.join(done.stdout.split())} "


def test_the_shared_flags_are_the_same_everywhere() -> None:
    """A flag that was learned once means the same in every command, and has its variable."""
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for command in ALL.values():
        for name, option in _options(command):
            if name in (*SHARED, "config"):
                kept = (option.help or "").replace("; may repeat.", ".")
                seen.setdefault(name, set()).add((option.envvar, option.is_flag, kept))
    assert set(seen) == {*SHARED, "config"}
    for name, forms in seen.items():
        assert len(forms) == 1, (name, forms)
        assert {form[0] for form in forms} == {f"HOLDFAST_{name.upper()}"}


@pytest.mark.parametrize("name", ALL)
def test_every_command_takes_the_file_and_json(name: str) -> None:
    """Neither a service nor a small command is an exception."""
    assert {"config", "json"} <= {option for option, _ in _options(ALL[name])}


def test_durations_are_written_one_way() -> None:
    """No flag counts in a unit of its own: a length is written with its unit, 30s or 14d."""
    units = re.compile(r"(seconds|minutes|hours|days)$")
    found = [(name, one) for name in ALL for one, _ in _options(ALL[name]) if units.search(one)]
    assert found == []


@pytest.mark.parametrize("name", RUNS)
def test_json_is_valid_and_the_exit_code_is_the_documented_one(name: str, shop: Path) -> None:
    """Standard output is JSON alone, whatever is told on the side; failures say it on stderr."""
    words, code = RUNS[name]
    done = _run(shop, *name.split(), *words, "--json")
    assert done.returncode == code, done.stderr
    assert code in MEANINGS
    assert "Traceback" not in done.stderr
    if code == 0 or done.stdout:
        told = json.loads(done.stdout)
        if isinstance(told, dict):
            assert set(told) <= _documented(name), "docs/cli.md"
    else:
        assert done.stderr.startswith("holdfast: ") or '"level"' in done.stderr


def _documented(name: str) -> set[str]:
    """Return the members that docs/cli.md names for the JSON of a command."""
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    return set(re.findall(r"`(\w+)`", row.split("|")[2]))


def test_every_json_shape_is_documented() -> None:
    """Scripts are written from the page, not by trial."""
    for name in ALL:
        _documented(name)


def test_moments_in_json_are_rfc_3339(shop: Path) -> None:
    """A script parses one form of time, whatever the tables hold."""
    from holdfast.cli.display import rfc3339

    assert rfc3339(0.0) == "1970-01-01T00:00:00Z"
    assert rfc3339(1e300).startswith("9999-")
    (entry, *_) = json.loads(_run(shop, "audit", "--json").stdout)
    assert datetime.fromisoformat(entry["at"]).tzinfo is not None


def test_the_exit_codes_are_one_table() -> None:
    """The page, `holdfast --help` and the code say the same."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    assert {int(code): words for code, words in rows} == MEANINGS
    for words in ((), ("dlq",)):
        shown = " ".join(shell(*words, "--help").stdout.split())
        for code, meaning in MEANINGS.items():
            assert f"{code} {meaning}" in shown


def test_alone_it_shows_what_matters_first() -> None:
    """Five commands, then the rest, then where to go next."""
    shown = shell("--help").stdout
    places = [re.search(rf"^│ {name} ", shown, re.MULTILINE) for name in
              ("status", "db", "relay", "consume", "dlq", "doctor", "outbox")]  # fmt: skip
    starts = [place.start() for place in places if place is not None]
    assert len(starts) == 7
    assert starts == sorted(starts)
    assert "Start with these" in shown
    assert "--install-completion" in shown


def test_the_version_is_a_flag_and_a_command() -> None:
    """People try both."""
    assert shell("--version").stdout == shell("version").stdout


def test_a_shell_completes_commands_that_are_not_imported_yet() -> None:
    """Completion looks through the late commands as a call does."""
    words = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast dlq rep",
             "COMP_CWORD": "2"}  # fmt: skip
    holdfast = Path(sys.executable).parent / "holdfast"
    done = subprocess.run([holdfast], env=words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["replay"]


def test_flag_variable_and_file_set_the_same(shop: Path) -> None:
    """What a flag sets, a variable and the file set as well; the flag wins, the file comes last."""
    file = shop / "all.toml"
    file.write_text(
        'json = true\nactor = "filed"\nreason = "from the file"\nyes = true\n'
        '[outbox.prune]\nolder-than = "400d"\n'
    )
    done = _run(shop, "outbox", "prune", "--config", str(file))
    assert json.loads(done.stdout) == {"pruned": 0}, done.stderr
    again = _run(shop, "outbox", "prune", HOLDFAST_REASON="x", HOLDFAST_YES="1", HOLDFAST_JSON="1")
    assert json.loads(again.stdout) == {"pruned": 0}, again.stderr
    wrong = _run(shop, "outbox", "prune", "--config", str(file), "--older-than", "soon")
    assert (wrong.returncode, "--older-than 'soon'" in wrong.stderr) == (2, True)
    file.write_text("[outbox.prun]\nolder-than = '1d'\n")
    typo = _run(shop, "outbox", "prune", "--config", str(file), *WHY)
    assert (typo.returncode, "[outbox] prun is unknown" in typo.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("dlq", "forget", "ada", *WHY),
        ("dlq", "regroup", *WHY),
        ("inbox", "forget", "billing/orders", "1", *WHY),
        ("inbox", "rename", "billing/orders", "billing/new", *WHY),
    ],
)
def test_what_cannot_be_undone_asks(words: tuple[str, ...], shop: Path) -> None:
    """Nobody at the terminal means no, unless --yes says otherwise."""
    done = _run(shop, *words)
    assert done.returncode == 2
    assert "nobody is here to ask; add --yes" in " ".join(done.stderr.split())
