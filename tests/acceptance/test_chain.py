"""The whole chain under faults: each order once, in order, at both stages, and in time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.chain.run import Run
from tests.servers import Kafka, Postgres, RabbitMQ

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Fleet

# kafka-python reads its own schemas in a way that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

Servers = tuple[Postgres, Kafka, RabbitMQ]
DRIVERS = ["kafka", "kafka+confluent"]


@pytest.fixture(scope="module")
def trio(servers: Fleet) -> Iterator[Servers]:
    """Hold the servers of the chain, which are for its runs alone."""
    with ThreadPoolExecutor() as pool:
        opened = [pool.submit(servers.open, kind) for kind in (Postgres, Kafka, RabbitMQ)]
        started = tuple(one.result() for one in opened)
    yield started  # type: ignore[misc]
    for server in started:
        servers.close(server)


@pytest.mark.timeout(900)  # a busy machine takes its time to start, and to settle
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_chain_holds(
    driver: str, trio: Servers, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Half a minute of kills, freezes and restarts, then the fix, the replay and the verdict."""
    postgres, kafka, rabbitmq = trio
    run = Run(
        postgres=postgres, kafka=kafka, rabbitmq=rabbitmq, driver=driver, folder=tmp_path,
        seconds=27, bound=180,
    )  # fmt: skip
    record_property("verdict", run.go())


@pytest.mark.chaos
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_chain_holds_for_four_minutes(
    driver: str, trio: Servers, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The same for long, with every server down three times."""
    postgres, kafka, rabbitmq = trio
    run = Run(
        postgres=postgres, kafka=kafka, rabbitmq=rabbitmq, driver=driver, folder=tmp_path,
        seconds=240, bound=150, rounds=3, customers=150, seed=2,
    )  # fmt: skip
    record_property("verdict", run.go())
