"""What type checkers say of uses of Holdfast: nothing of the right ones, why of each wrong one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from holdfast.consumer.settings import Settings, SettingsOptions

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = [str(HERE / name) for name in ("right.py", "wrong.py")]
EXPECTED = re.compile(r"  # ([a-z-]+) \| (report\w+)$")
FOLLOWS = {"untyped-decorator", "reportUntypedFunctionDecorator"}
"""What a checker adds where a decorator was called wrongly."""

Found = set[tuple[str, int, str]]


def expected(checker: int) -> Found:
    """Return what the comments of wrong.py say that *checker*, the first or second, must find."""
    lines = enumerate((HERE / "wrong.py").read_text().splitlines(), start=1)
    found = [(number, EXPECTED.search(line)) for number, line in lines]
    return {("wrong.py", number, match[1 + checker]) for number, match in found if match}


def test_mypy_finds_each_wrong_use_and_no_other() -> None:
    """In strict mode; functions keep their signature and colour through every decorator."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--output", "json", *FILES],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {(Path(one["file"]).name, one["line"], one["code"]) for one in told}
    assert {one for one in found if one[2] not in FOLLOWS} == expected(0), done.stdout


def test_pyright_finds_each_wrong_use_and_no_other() -> None:
    """In strict mode; functions keep their signature and colour through every decorator."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *FILES],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = json.loads(done.stdout)["generalDiagnostics"]
    found = {
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["rule"]) for one in told
    }
    assert {one for one in found if one[2] not in FOLLOWS} == expected(1), done.stdout


def test_many_wrong_uses_are_tried() -> None:
    """The comments are read: an empty expectation would pass with anything."""
    assert len(expected(0)) == len(expected(1)) >= 20


def test_every_setting_of_a_consumer_is_known_to_the_checkers() -> None:
    """A new one that only `Settings` has would be called wrong."""
    assert set(SettingsOptions.__annotations__) == {field.name for field in fields(Settings)}
