"""The pytest plugin: a fixture per server, private servers, and what the run says about them."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.servers.fleet import Fleet, S
from tests.servers.kafka import Kafka
from tests.servers.lending import Lender
from tests.servers.mariadb import MariaDB
from tests.servers.nats import Nats
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis
from tests.servers.valkey import Valkey

_FLEET = pytest.StashKey[Fleet]()
_LENT = (RabbitMQ, Kafka)  # slow to start, and nobody stops the shared one: all workers use one
_LENDER = pytest.StashKey[Lender]()


class PrivateServer(Protocol):
    """Starts a server for one test alone, which may break it as it likes."""

    def __call__(self, kind: type[S]) -> S:
        """Return a started server of this *kind*; it is closed after the test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer `--quick`, for `make quick`."""
    parser.addoption(
        "--quick", action="store_true", help="leave out what needs a server or starts programs"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the run's fleet; no server starts before a test asks for it."""
    folder = os.environ.get("HOLDFAST_SERVER_LOGS", tempfile.gettempdir())
    given = getattr(config, "workerinput", {})
    run = given.get("run", os.getpid())
    logs = Path(folder, f"holdfast-server-logs-{run}")
    config.stash[_FLEET] = Fleet(logs, given.get("lender"), _LENT)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where it may borrow servers."""
    node.workerinput["run"] = os.getpid()
    stash = node.config.stash
    if _LENDER not in stash:
        stash[_LENDER] = Lender(_LENT, stash[_FLEET].shared)
    node.workerinput["lender"] = stash[_LENDER].address


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker tell which servers it started; close what the workers borrowed."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["servers"] = session.config.stash[_FLEET].report
    lender = session.config.stash.get(_LENDER, None)
    if lender is not None:
        lender.close()
        session.config.stash[_FLEET].close_shared()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect what a worker told."""
    node.config.stash[_FLEET].report += getattr(node, "workeroutput", {}).get("servers", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Name every server that ran and, after a failure, the folder of the logs."""
    fleet = config.stash[_FLEET]
    if exitstatus == pytest.ExitCode.OK:
        fleet.forget_logs()
    kept = [f"logs kept in {fleet.logs}"] if fleet.logs.exists() else []
    if lines := fleet.report + kept:
        terminalreporter.section("servers")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Hold the servers of this run; the shared ones close at its end."""
    fleet = request.config.stash[_FLEET]
    yield fleet
    fleet.close_shared()


@pytest.fixture
def private_server(servers: Fleet) -> Iterator[PrivateServer]:
    """Offer a function that starts servers for this test alone."""
    with ExitStack() as closing:

        def start(kind: type[S]) -> S:
            server = servers.open(kind)
            closing.callback(servers.close, server)
            return server

        yield start


@pytest.fixture(scope="session")
def postgres(servers: Fleet) -> Postgres:
    """Share the run's PostgreSQL."""
    return servers.shared(Postgres)


@pytest.fixture(scope="session")
def mariadb(servers: Fleet) -> MariaDB:
    """Share the run's MariaDB."""
    return servers.shared(MariaDB)


@pytest.fixture(scope="session")
def redis(servers: Fleet) -> Redis:
    """Share the run's Redis."""
    return servers.shared(Redis)


@pytest.fixture(scope="session")
def valkey(servers: Fleet) -> Valkey:
    """Share the run's Valkey."""
    return servers.shared(Valkey)


@pytest.fixture(scope="session")
def rabbitmq(servers: Fleet) -> RabbitMQ:
    """Share the run's RabbitMQ."""
    return servers.shared(RabbitMQ)


@pytest.fixture(scope="session")
def nats(servers: Fleet) -> Nats:
    """Share the run's NATS with JetStream."""
    return servers.shared(Nats)


@pytest.fixture(scope="session")
def kafka(servers: Fleet) -> Kafka:
    """Share the run's Kafka."""
    return servers.shared(Kafka)


@pytest.fixture(scope="module")
def own_kafka(servers: Fleet) -> Iterator[Kafka]:
    """Hold a Kafka for one module, whose tests may stop it for a while."""
    server = servers.open(Kafka)
    yield server
    servers.close(server)
