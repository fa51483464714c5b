"""Debezium: Kafka Connect with one PostgreSQL connector."""

import json
import urllib.request
from collections.abc import Mapping

from tests.servers.install import DEBEZIUM_VERSION, connect_jars, debezium_plugin, program
from tests.servers.kafka import Kafka
from tests.servers.postgres import Postgres
from tests.servers.processes import Command
from tests.servers.server import Server

_CONNECTOR = "debezium"
_WORKER = """\
bootstrap.servers={kafka}
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
offset.storage.file.filename={folder}/offsets
offset.flush.interval.ms=1000
plugin.path={plugin}
plugin.discovery=service_load
listeners=http://{host}:{port}
"""
_OUTBOX = {
    "transforms": "outbox",
    "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    "transforms.outbox.route.topic.replacement": "${routedByValue}",
    "transforms.outbox.table.fields.additional.placement": "headers:header:holdfast",
    "value.converter": "org.apache.kafka.connect.converters.ByteArrayConverter",
    "table.include.list": "public.holdfast_outbox",
    "tombstones.on.delete": "false",
    "snapshot.mode": "no_data",
}
_JSON = "org.apache.kafka.connect.json.JsonConverter"


def outbox_router() -> Mapping[str, str]:
    """Return the settings that publish Holdfast's outbox table with Debezium's own router."""
    return _OUTBOX


def change_events(*tables: str, prefix: str, schemas: bool) -> Mapping[str, str]:
    """Return the settings that publish the changes of *tables* as JSON."""
    with_schemas = str(schemas).lower()
    return {
        "table.include.list": ",".join(tables),
        "topic.prefix": prefix,
        "key.converter": _JSON,
        "value.converter": _JSON,
        "key.converter.schemas.enable": with_schemas,
        "value.converter.schemas.enable": with_schemas,
    }


class Debezium(Server):
    """A real Debezium between a *database* of PostgreSQL and Kafka; use it in `with`.

    With *compiled*, the JVM compiles all the way: slower to start, and as fast as it gets.
    """

    name = "debezium"
    start_deadline = 120.0

    def __init__(
        self,
        kafka: Kafka,
        postgres: Postgres,
        database: str,
        settings: Mapping[str, str],
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self._kafka = kafka
        self._compiler = () if compiled else ("-XX:TieredStopAtLevel=1",)
        self._settings = {
            "name": _CONNECTOR,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "tasks.max": "1",
            "database.hostname": postgres.host,
            "database.port": str(postgres.port),
            "database.user": "postgres",
            "database.password": "",
            "database.dbname": database,
            "plugin.name": "pgoutput",
            "slot.name": f"debezium_{database}",
            "slot.drop.on.stop": "true",
            "publication.name": "debezium",
            "publication.autocreate.mode": "filtered",
            "topic.prefix": "debezium",
            "topic.creation.default.replication.factor": "1",
            "topic.creation.default.partitions": "4",
            **settings,
        }

    @property
    def url(self) -> str:
        """The worker's own API."""
        return f"http://{self.address}"

    @property
    def version(self) -> str:
        """Debezium's version."""
        return DEBEZIUM_VERSION

    @property
    def slot(self) -> str:
        """The replication slot; it outlives `kill`, not `stop`."""
        return self._settings["slot.name"]

    def prepare(self) -> None:
        """Write the settings of worker and connector."""
        worker = _WORKER.format(
            kafka=self._kafka.address, folder=self.folder, plugin=debezium_plugin(),
            host=self.host, port=self.port,
        )  # fmt: skip
        (self.folder / "worker.properties").write_text(worker)
        lines = [f"{name}={value}\n" for name, value in self._settings.items()]
        (self.folder / "connector.properties").write_text("".join(lines))

    def command(self) -> Command:
        """Return the command of the worker."""
        machine = ("-Xmx1g", *self._compiler, "-cp", f"{connect_jars()}/*")
        settings = [str(self.folder / f"{name}.properties") for name in ("worker", "connector")]
        main = "org.apache.kafka.connect.cli.ConnectStandalone"
        return Command(argv=(str(program("java")), *machine, main, *settings))

    def answers(self) -> bool:
        """Return whether the connector's task runs; a failed one raises RuntimeError."""
        status = f"{self.url}/connectors/{_CONNECTOR}/status"
        with urllib.request.urlopen(status, timeout=5) as answer:  # noqa: S310 - our own
            tasks = json.load(answer)["tasks"]
        if failed := [task["trace"] for task in tasks if task["state"] == "FAILED"]:
            raise RuntimeError(failed[0])
        return [task["state"] for task in tasks] == ["RUNNING"]
