"""What a newcomer does: install into an empty environment, import, ask for help, follow the README.

The environment holds Holdfast's own wheel and what the base install depends on, nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDS_A_DRIVER = {
    "holdfast.brokers.kafka.confluent",
    "holdfast.brokers.kafka.kafka_python",
    "holdfast.testing.conformance",
}
"""Private halves that their package loads once the driver, or pytest, is there."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an empty virtual environment, install our wheel, and return its folder of programs."""
    folder = tmp_path_factory.mktemp("newcomer")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = folder.glob("venv/lib/python*/site-packages")
    for name in base_dependencies():
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
    wheel = built_wheel(folder, pip)
    python = folder / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    return python.parent


def built_wheel(folder: Path, pip: list[str]) -> Path:
    """Build from a copy: a build in the checkout would use, and disturb, its `build` folder."""
    source = folder / "source"
    for name in SETTINGS["tool"]["setuptools"]["package-dir"].values():
        if "/" not in name:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(build, check=True)
    [wheel] = folder.glob("holdfast-*.whl")
    return wheel


def base_dependencies() -> Iterator[str]:
    """Yield what `pip install holdfast` brings along, and what that brings along."""
    seen, waiting = set(), list(SETTINGS["project"]["dependencies"])
    while waiting:
        needed = Requirement(waiting.pop())
        if needed.name in seen:
            continue
        seen.add(needed.name)
        yield needed.name
        for text in distribution(needed.name).requires or ():
            inner = Requirement(text)
            extras = needed.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(text)


def run(
    environment: Path, *command: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run *command* as somebody who has activated the environment."""
    inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return subprocess.run(
        [environment / command[0], *command[1:]],
        env={**inherited, "PATH": f"{environment}{os.pathsep}{os.environ['PATH']}"},
        cwd=environment if cwd is None else cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_imports_without_any_extra(environment: Path) -> None:
    """Drivers are not there, and nobody asks for them."""
    names = [p for p in SETTINGS["tool"]["setuptools"]["packages"] if p not in NEEDS_A_DRIVER]
    done = run(
        environment, "python", "-c", f"import importlib\nfor name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    print(name)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


def test_every_file_of_a_package_is_installed(environment: Path) -> None:
    """SQL, type marks and data as well as modules, also those added since."""
    [packages] = environment.parent.glob("lib/python*/site-packages")
    lacking = []
    for name, folder in SETTINGS["tool"]["setuptools"]["package-dir"].items():
        there = packages / name.replace(".", "/")
        files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).glob("**/*.*")]
        kept = [path for path in files if "__pycache__" not in path.parts and path.suffix]
        lacking += [f"{folder}/{path}" for path in kept if not (there / path).exists()]
    assert lacking == []


MISSING = """
import holdfast
from holdfast.brokers import connect
from holdfast.db.engine import open_database

def tried(way, url):
    try:
        way(url)
    except holdfast.MissingExtra as missing:
        print(url, str(missing))
    else:
        print(url, "works")

for scheme in ("kafka", "kafka+confluent", "amqp", "redis", "nats"):
    tried(connect, f"{scheme}://localhost")
for scheme in ("postgresql+psycopg", "mysql+pymysql"):
    tried(open_database, f"{scheme}://localhost/x")
"""


def test_a_missing_driver_is_told_with_the_extra_that_brings_it(environment: Path) -> None:
    """The error comes when the driver is needed, and its text is the cure."""
    done = run(environment, "python", "-c", MISSING)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    extras = ("kafka", "confluent", "rabbitmq", "redis", "nats", "postgres", "mysql")
    assert len(told) == len(extras)
    for extra, text in zip(extras, told.values(), strict=True):
        assert f"pip install 'holdfast[{extra}]'" in text


HELP = """
from holdfast.cli.app import COMMANDS, main

def walk(command, path):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, [*path, name])

for late in COMMANDS:
    for path in walk(late.load(), [late.name]):
        try:
            main([*path, "--help"])
        except SystemExit as end:
            assert not end.code, (path, end.code)
"""


def test_the_command_and_all_its_commands_teach_without_any_extra(environment: Path) -> None:
    """`holdfast --help` and every --help below it."""
    overview = run(environment, "holdfast", "--help")
    assert overview.returncode == 0, overview.stderr
    assert "relay" in overview.stdout
    done = run(environment, "python", "-c", HELP)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of *language*."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )


def test_the_quickstart_runs_as_printed(environment: Path, tmp_path: Path) -> None:
    """A newcomer who copies files and commands sees the printed output."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, "each Python block starts with its file name"
        (tmp_path / name[1]).write_text(code)
    (session,) = blocks("console")
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
        done = run(environment, *command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected


def test_the_two_commands_of_the_readme_exist() -> None:
    """`make demo` and `make test` are targets."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert f"make {target}" in (ROOT / "README.md").read_text()
