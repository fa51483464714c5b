"""One run of the chain: shops → relays → Kafka → billing → relay → RabbitMQ → shipping."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from sqlalchemy import text

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.testing import Violation, settled, wait_until
from tests.chain.crew import HOLDFAST, PROGRAMS, Crew
from tests.chain.faults import Strain, drawn
from tests.chain.standing import Places, Stage
from tests.chain.verdict import Observed, judge

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Kafka, Postgres, RabbitMQ

LEASE = 3.0
_ORDERS = (
    "CREATE TABLE orders (order_id text PRIMARY KEY, customer text NOT NULL,"
    " number integer NOT NULL, UNIQUE (customer, number))"
)
_EFFECTS = (
    "CREATE TABLE {} (seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
    " order_id text NOT NULL, customer text NOT NULL, number integer NOT NULL)"
)
_SESSIONS = {
    "kafka": "session_timeout_ms=3000&heartbeat_interval_ms=500",
    "kafka+confluent": "session.timeout.ms=3000&heartbeat.interval.ms=500",
}


@dataclass(slots=True, kw_only=True)
class Run:
    """What is put under strain, for how long, and within what it must be done afterwards."""

    postgres: Postgres
    kafka: Kafka
    rabbitmq: RabbitMQ
    driver: str
    """The scheme of Kafka's URL."""
    folder: Path
    seconds: float
    bound: float
    """Seconds after the last fault within which nothing may stand any more."""
    seed: int = 1
    rounds: int = 1
    shops: int = 3
    customers: int = 40
    pause: float = 0.1
    story: list[str] = field(default_factory=list, init=False)
    """What was done, and when."""

    def go(self) -> str:
        """Run it; return a line about it, or raise with all that is known about what broke."""
        crew = Crew(self.folder, self._environment())
        places: Places | None = None
        try:
            self._prepare(crew)
            places = Places(self._database("shop"), self._stages())
            self._start(crew, places)
            strain = Strain(crew, self._servers(), self.folder / "gateway-is-down")
            acts = drawn(
                self.seconds, crew.names, list(self._servers()), seed=self.seed, rounds=self.rounds
            )
            strain.undergo(acts, self._note)
            crew.end(*self._shops())
            return self._finish(crew, places, strain)
        finally:
            crew.close()
            if places is not None:
                places.close()

    def _finish(self, crew: Crew, places: Places, strain: Strain) -> str:
        """Fix the handlers, replay what died, wait for the rest, and judge."""
        (self.folder / "fixed").touch()
        began = time.monotonic()
        letters = {stage.group: places.open_letters(stage) for stage in self._stages()}
        standing: dict[str, int] = {}

        def still_standing() -> dict[str, int]:
            nonlocal standing
            crew.look()
            now = {place: count for place, count in places.standing().items() if count}
            if now != standing:
                self._note(f"{time.monotonic() - began:5.1f} s after the last fault: {now}")
            standing = now
            for stage in self._stages():
                if time.monotonic() - began < self.bound and places.open_letters(stage):
                    self._replay(crew, stage)
            return standing

        try:
            settled(still_standing, within=self.bound)
        except Violation as violation:
            self._note(str(violation))
        took = time.monotonic() - began
        observed = Observed(
            committed=places.committed(),
            effects={stage.group: places.effects(stage) for stage in self._stages()},
            standing=standing,
        )
        broken = judge(observed)
        if not broken:
            crew.end(*crew.names)
        if broken or crew.ended:
            raise AssertionError(self._report(broken, crew, places, observed))
        return (
            f"{len(observed.committed)} orders, {crew.kills} processes killed, {crew.freezes} "
            f"frozen, {strain.restarts} servers restarted, dead letters replayed {letters}, "
            f"settled {took:.1f} s after the last fault"
        )

    def _report(self, broken: list[str], crew: Crew, places: Places, observed: Observed) -> str:
        ended = [f"a program: {end}" for end in crew.ended]
        return "\n".join(
            ["the chain is broken:", *broken, *ended, "", *self.story, "",
             places.where(observed), "", crew.told()]
        )  # fmt: skip

    def _replay(self, crew: Crew, stage: Stage) -> None:
        """Replay every open dead letter of *stage*, as an operator does after the fix."""
        done = crew.run(
            "dlq", "replay", "--group", stage.group, "--database", stage.database,
            "--broker", stage.broker, "--reason", "the handler is fixed", "--yes",
            "--canary", "2", "--ramp", "50%", "--patience", "20s",
        )  # fmt: skip
        end = done.stdout.strip().splitlines()[-3:]
        self._note(f"replay for {stage.group} ended with {done.returncode}: {end} {done.stderr}")

    def _prepare(self, crew: Crew) -> None:
        """Make databases, tables and topics, as a deployment does."""
        statements = {
            "shop": _ORDERS,
            "billing": _EFFECTS.format("bills"),
            "shipping": _EFFECTS.format("shipments"),
        }

        def make(name: str) -> None:
            url = self.postgres.database(self._named(name))
            done = crew.run("db", "upgrade", "--database", url)
            assert done.returncode == 0, done.stderr
            engine = open_database(url)
            with engine.begin() as db:
                db.execute(text(statements[name]))
            engine.dispose()

        _at_once(*(lambda name=name: make(name) for name in statements))  # type: ignore[misc]
        with closing(connect(self._kafka())) as broker:
            broker.create_topic(self._orders, partitions=6)
        made = crew.run("group", "create", "--topic", self._bills, "--group", "shipping",
                        "--broker", self._rabbitmq())  # fmt: skip
        assert made.returncode == 0, made.stderr

    def _start(self, crew: Crew, places: Places) -> None:
        """Start everybody, and return when both stages are at work."""
        consume = (HOLDFAST, "consume", "--log-level", "info")
        relay = (HOLDFAST, "relay", "--lease", f"{LEASE}s")
        for n in range(2):
            crew.start(f"shipping-{n}", *consume, "shipping:consumer")
        for n in range(3):
            crew.start(f"billing-{n}", *consume, "billing:consumer")
        for n in range(2):
            crew.start(f"relay-{n}", *relay, "--database", self._database("shop"),
                       "--broker", self._kafka())  # fmt: skip
        crew.start("second-relay", *relay, "--database", self._database("billing"),
                   "--broker", self._rabbitmq())  # fmt: skip
        for name in self._shops():
            crew.start(name, sys.executable, str(PROGRAMS / "shop.py"), name)
        for stage in self._stages():
            wait_until(lambda s=stage: len(places.effects(s)) > 5, deadline=180,  # type: ignore[misc]
                       what=f"{stage.group} is at work", every=0.2)  # fmt: skip

    def _stages(self) -> list[Stage]:
        return [
            Stage(group="billing", topic=self._orders, broker=self._kafka(),
                  database=self._database("billing"), effects="bills"),
            Stage(group="shipping", topic=self._bills, broker=self._rabbitmq(),
                  database=self._database("shipping"), effects="shipments"),
        ]  # fmt: skip

    def _servers(self) -> dict[str, Postgres | Kafka | RabbitMQ]:
        return {"kafka": self.kafka, "postgres": self.postgres, "rabbitmq": self.rabbitmq}

    def _shops(self) -> list[str]:
        return [f"shop-{n}" for n in range(self.shops)]

    def _environment(self) -> dict[str, str]:
        return {
            "ORDERS": self._orders,
            "BILLS": self._bills,
            "CUSTOMERS": str(self.customers),
            "PAUSE": str(self.pause),
            "SWITCHES": str(self.folder),
            "SHOP_DATABASE": self._database("shop"),
            "BILLING_DATABASE": self._database("billing"),
            "SHIPPING_DATABASE": self._database("shipping"),
            "KAFKA": f"{self._kafka()}&{_SESSIONS[self.driver]}",
            "RABBITMQ": self._rabbitmq(),
        }

    @property
    def _orders(self) -> str:
        return self._named("orders")

    @property
    def _bills(self) -> str:
        return self._named("bills")

    def _named(self, what: str) -> str:
        return f"{what}-{self.driver.replace('+', '-')}-{self.seed}"

    def _database(self, name: str) -> str:
        return self.postgres.url.rpartition("/")[0] + "/" + quote(self._named(name))

    def _kafka(self) -> str:
        return f"{self.driver}://{self.kafka.address}?timeout=5&publish_within=5"

    def _rabbitmq(self) -> str:
        return f"{self.rabbitmq.url}?heartbeat=2"

    def _note(self, line: str) -> None:
        self.story.append(line)
        with (self.folder / "story.txt").open("a") as file:
            file.write(line + "\n")


def _at_once(*works: object) -> None:
    """Do everything side by side; the first failure is raised."""
    failed: list[BaseException] = []

    def do(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=do, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
