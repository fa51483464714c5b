"""The top level: every name of the users, each loaded when it is asked for."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pkgutil import iter_modules
from types import ModuleType

import pytest

import holdfast
import holdfast.ports
from holdfast import circuit, retry, upcast

HEAVY = {
    "alembic", "asyncio", "confluent_kafka", "inspect", "kafka", "msgspec", "nats", "opentelemetry",
    "pika", "prometheus_client", "psycopg", "redis", "rich", "sqlalchemy", "tenacity", "typer",
}  # fmt: skip
METAPHORS = {"Desk", "Home", "Warrant", "Which", "Word"}


def fresh(code: str) -> str:
    """Run *code* in an interpreter of its own and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.programs
def test_every_public_name_resolves() -> None:
    """Here and in the ports; a star import finds them all."""
    for module in (holdfast, holdfast.ports):
        assert module.__all__ == sorted(
            module.__all__, key=lambda name: (not name[0].isupper(), name)
        )
        assert all(getattr(module, name, None) is not None for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
    assert "Consumer" in fresh("from holdfast import *\nprint(Consumer.__name__)")


def test_type_checkers_see_the_same_names() -> None:
    """What is loaded lazily is imported from the same module for them."""
    tree = ast.parse(inspect.getsource(holdfast))
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast.")
        for alias in node.names
    }
    assert seen == {name: f"holdfast.{home}" for name, home in holdfast._MODULE_OF.items()}
    assert {*seen, "__version__"} == set(holdfast.__all__)


@pytest.mark.programs
def test_importing_holdfast_imports_nothing_heavy() -> None:
    """No driver, no database, and none of our own modules before one is asked for."""
    code = "import sys\nbefore = set(sys.modules)\nimport holdfast\n"
    names = fresh(code + "print(*sorted(set(sys.modules) - before))").split()
    assert not HEAVY & {name.partition(".")[0] for name in names}
    assert [name for name in names if name.startswith("holdfast")] == ["holdfast"]


CONSUMING = """
import sys
from holdfast.circuit import circuit
from holdfast.consumer import Consumer
from holdfast.dlq import dead_letter
from holdfast.idempotency import idempotent
from holdfast.retry import retry
print(*sys.modules)
"""
NOT_TO_CONSUME = {
    "alembic", "confluent_kafka", "cryptography", "kafka", "nats", "opentelemetry", "pika",
    "psycopg", "pydantic", "pymysql", "redis", "rich", "tenacity", "typer",
    "sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql", "sqlalchemy.dialects.sqlite",
    "sqlalchemy.ext.asyncio",
    "holdfast.circuit.metrics", "holdfast.circuit.sharing", "holdfast.cli",
    "holdfast.consumer.parking.admin", "holdfast.consumer.shared_circuits",
    "holdfast.dlq.operations", "holdfast.dlq.protection.vault", "holdfast.dlq.replay.edits",
    "holdfast.dlq.replay.plan", "holdfast.dlq.replay.plan_freeze", "holdfast.dlq.replay.plans",
    "holdfast.dlq.replay.reading", "holdfast.dlq.replay.sender", "holdfast.dlq.replay.survey",
    "holdfast.dlq.store.groups", "holdfast.idempotency.operations",
    "holdfast.idempotency.redis_inbox", "holdfast.idempotency.versions", "holdfast.outbox.parked",
    "holdfast.outbox.relay", "holdfast.sagas", "holdfast.status", "holdfast.testing",
    "holdfast.tracing.chain", "holdfast.tracing.edge", "holdfast.tracing.logs",
    "holdfast.tracing.meters", "holdfast.tracing.spans",
}  # fmt: skip
LAZY = ("circuit", "consumer", "dlq", "dlq.replay", "idempotency", "outbox", "tracing")


@pytest.mark.programs
def test_a_consumer_imports_only_what_it_takes_to_consume() -> None:
    """No relay, no replay's plans, no operator's acts, and no dialect before a database."""
    assert not NOT_TO_CONSUME & set(fresh(CONSUMING).split())


@pytest.mark.parametrize("package", LAZY)
def test_no_module_hides_a_name_that_its_package_loads_when_asked(package: str) -> None:
    """Whatever was imported before: each public name is there, and is no module."""
    loaded = import_module(f"holdfast.{package}")
    for one in iter_modules(loaded.__path__, f"holdfast.{package}."):
        import_module(one.name)
    for name in loaded.__all__:
        assert not isinstance(getattr(loaded, name), ModuleType), name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        loaded.nonsense  # noqa: B018


@pytest.mark.programs
def test_help_imports_no_database_and_no_driver() -> None:
    """The overview of the command comes from its table of commands."""
    code = (
        "import sys\nfrom holdfast.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "relay" in done.stdout
    allowed = {"typer", "rich", "inspect", "asyncio", "msgspec"}
    assert not (HEAVY - allowed) & set(done.stderr.split())


def test_the_version_is_that_of_the_installed_package() -> None:
    """Without a second place that states it."""
    assert holdfast.__version__ == version("holdfast")


@pytest.mark.programs
def test_a_package_that_is_named_after_a_function_can_be_called_as_it() -> None:
    """However it was imported first: Python binds the package to the name."""
    code = "import holdfast.{0}\nfrom holdfast import {0}\nprint({0}{1}.__class__.__name__)"
    assert fresh(code.format("retry", "(stop=None)")).strip() == "Retry"
    assert fresh(code.format("circuit", "('bank')")).strip() == "Circuit"
    assert fresh(code.format("upcast", "('order', 1)")).strip() == "function"
    for package, function in (
        (retry, sys.modules["holdfast.retry"].retry),
        (circuit, sys.modules["holdfast.circuit"].circuit),
        (upcast, sys.modules["holdfast.upcast"].upcast),
    ):
        assert inspect.signature(package) == inspect.signature(function)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """So that `hasattr` and misspelt imports work as anywhere."""
    assert not hasattr(holdfast, "Consumre")


def test_no_metaphor_is_among_the_names() -> None:
    """Users meet words of the field."""
    names = {*holdfast.__all__, *holdfast.ports.__all__}
    assert not METAPHORS & names
