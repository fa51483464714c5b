"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.tables import keep_tables

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

pytest_plugins = ["tests.servers.fixtures", "tests.golden"]

# A busy machine is no counterexample; in CI every run tries the same examples.
settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("holdfast")

# A parallel run hands these out first, so that no worker ends long after the others.
SLOWEST = (
    "test_soak",
    "test_chain",
    "test_kafka_broker",
    "test_kafka_adapter",
    "test_outbox_checker",
    "test_rabbitmq_broker",
    "test_nats_broker",
    "test_redis_broker",
    "test_wal_faults",
    "test_replay_story",
    "test_servers",
    "test_sabotage",
    "test_cli",
    "test_sidecar",
    "test_debezium",
    "test_demo",
)


# Parameters by which tests choose the server that they ask for.
SERVERS = re.compile("postgres|maria|mysql|kafka|redis|valkey|nats|rabbit|\\bwal\\b", re.IGNORECASE)

# Modules outside of `acceptance` whose tests run whole programs, and kill them. A single test
# is marked: `pytest.mark.programs`.
PROGRAMS = (
    "test_checkers",
    "test_effect_once",
    "test_outbox_checker",
    "test_saga_participant",
    "test_servers",
    "test_signals",
    "test_spark_cluster",
    "test_sqlite_processes",
    "test_testing_plugin",
)

# The kit's tests whose members are processes of their own, where a broker has a file for that.
KILLED = re.compile("killed|death|its_member|just_the_member")


def pytest_configure(config: pytest.Config) -> None:
    """See to it that `--quick` stays so: what starts a program there fails, and says why."""
    is_controller = not hasattr(config, "workerinput") and config.getoption("numprocesses", None)
    if config.getoption("quick") and not is_controller:
        sys.addaudithook(_refuse_programs)
        settings.register_profile("quick", settings.get_profile("holdfast"), max_examples=25)
        settings.load_profile("quick")
        keep_tables()


def _refuse_programs(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and re.match("python|holdfast", Path(str(args[0])).name):
        raise AssertionError("it starts a program: mark it with pytest.mark.programs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the programs' tests where they are left out."""
    left_out = config.getoption("quick") and _runs_programs(collection_path)
    return True if left_out else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Spare the collector of garbage what comes with the tests: nothing of it goes yet.

    In a quick run it never does: looking it all through again took a tenth of that run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        if session.config.getoption("quick"):
            gc.freeze()
            gc.set_threshold(10_000, 10, 10)
        gc.enable()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command, run within a test, does to the levels of its process."""
    loggers = [logging.getLogger(name) for name in (None, "holdfast", "kafka", "pika", "nats")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


SPARK = "tests/spark/"
WAITING = {"test_broker_outages", "test_replaying", "test_transforming"}
"""Spark tests that wait for brokers and for what is paced, half of their time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a parallel run, put the slowest modules first and the unit tests last."""
    if config.getoption("quick"):
        left_out = {item for item in items if not _is_quick(item)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item.path))


def _is_quick(item: pytest.Item) -> bool:
    """Whether *item* needs no server and starts no programs."""
    if _runs_programs(item.path):
        return False
    if item.get_closest_marker("programs") is not None:
        return False
    if {"servers", "spark"} & set(getattr(item, "fixturenames", ())):
        return False
    if item.path.stem == "test_sqlite_broker" and KILLED.search(item.name):
        return False
    return SERVERS.search(item.name.partition("[")[2]) is None


def _runs_programs(path: Path) -> bool:
    return path.parent.name == "acceptance" or path.stem in PROGRAMS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all Spark tests to two workers: they share a session, whose JVM is slow to start."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneSession(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid))
            if not scope.startswith(SPARK):
                return scope
            return f"{SPARK}waiting" if Path(scope).stem in WAITING else SPARK

    return OneSession(config, log)


def _rank(path: Path) -> tuple[bool, int]:
    if path.parent.name == "spark":
        return False, -1
    known = SLOWEST.index(path.stem) if path.stem in SLOWEST else len(SLOWEST)
    return path.parent.name == "unit", known


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what the checkers observed: the duplicates are counted, not hidden."""
    passed = terminalreporter.stats.get("passed", [])
    verdicts = [
        (report.nodeid.rpartition("::")[2], text)
        for report in passed
        for name, text in getattr(report, "user_properties", ())
        if name == "verdict" and report.when == "call"
    ]
    if verdicts:
        terminalreporter.section("what the checkers observed")
        # By the last parameter first: engines that publish to one broker stand beside each other.
        for test, text in sorted(verdicts, key=lambda found: found[0].rpartition("-")[::-1]):
            terminalreporter.write_line(f"{test}: {text}")
