"""One namespace from root folders, complete and light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
OUTSIDE = {"tests", "examples", "docs", "benchmarks", "build", "deploy"}


def test_every_package_folder_is_declared() -> None:
    """A folder with an __init__ that is not in pyproject.toml would not be installed."""
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ROOT.iterdir()
        if top.is_dir() and top.name not in OUTSIDE and not top.name.startswith(".")
        for path in top.rglob("__init__.py")
        if not OUTSIDE & set(path.relative_to(ROOT).parts)
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    tools = SETTINGS["tool"]["setuptools"]
    assert set(tools["package-dir"].values()) == folders
    assert set(tools["package-dir"]) == set(tools["packages"])


def test_the_kafka_extra_reads_whatever_others_compressed() -> None:
    """A topic with one such batch would stop a consumer that lacks the library."""
    names = {wanted.partition(">=")[0] for wanted in EXTRAS["kafka"]}
    assert names >= {"lz4", "python-snappy", "zstandard"}


def test_the_redis_extra_takes_no_client_that_skips_host_names() -> None:
    """Older ones check a certificate, and not whose it is."""
    [wanted] = EXTRAS["redis"]
    name, _, least = wanted.partition(">=")
    assert name == "redis"
    assert int(least.split(".")[0]) >= 6


def test_every_extra_installs_what_something_uses() -> None:
    """Each is named in the error of whoever misses it."""
    named = set()
    for folder in SETTINGS["tool"]["setuptools"]["package-dir"].values():
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text()
            if "extra=" not in text and "_EXTRAS" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.keyword(arg="extra", value=ast.Constant(value=name)):
                        named.add(name)
                    case ast.Assign(targets=[ast.Name(id="_EXTRAS")], value=drivers):
                        named |= set(ast.literal_eval(drivers).values())
    assert set(SETTINGS["project"]["optional-dependencies"]) - {"all", "dev"} == named


def test_all_means_all() -> None:
    """`holdfast[all]` leaves no extra out."""
    extras = SETTINGS["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    names = re.fullmatch(r"holdfast\[(.*)\]", everything)
    assert names
    assert set(names[1].split(",")) == set(extras) - {"all", "dev"}


ASYNC = """
import sys
sys.modules["greenlet"] = None  # as where it is not installed
from holdfast import Consumer, MissingExtra

consumer = Consumer("memory:", group="billing", database="sqlite://")

async def bill(order: dict, session: "AsyncSession") -> None: ...

try:
    consumer.on("orders")(bill)
except MissingExtra as missing:
    print(missing)
"""


@pytest.mark.programs
def test_an_async_session_without_its_library_names_the_extra() -> None:
    """When the handler is registered, not when its first message comes."""
    done = subprocess.run(
        [sys.executable, "-c", ASYNC], capture_output=True, text=True, check=False
    )
    assert "pip install 'holdfast[asyncio]'" in done.stdout, done.stderr
