"""Kafka: a single node that is broker and controller."""

import base64
import struct
import uuid

from tests.servers.install import KAFKA_VERSION, kafka_jars, program
from tests.servers.ports import free_port
from tests.servers.processes import Command
from tests.servers.server import Server

# After kill() the controller, just restarted too, keeps the broker out until its session expires.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers={host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
"""
# Metadata (key 3), version 4, correlation 1, no client name, no topics, no creation of topics.
_METADATA_REQUEST = struct.pack(">hhih i?", 3, 4, 1, -1, 0, False)


class Kafka(Server):
    """A Kafka broker which creates no topic unasked; acknowledged records survive ``kill()``."""

    name = "kafka"
    start_deadline = 90.0

    def __init__(self) -> None:
        super().__init__()
        self._controller_port = free_port()

    @property
    def url(self) -> str:
        """Where clients connect; ``address`` is the bootstrap server by itself."""
        return f"kafka://{self.address}"

    @property
    def version(self) -> str:
        """The server's own version."""
        return KAFKA_VERSION

    def prepare(self) -> None:
        """Write the settings and format the storage."""
        ports = {"port": self.port, "controller_port": self._controller_port}
        properties = _PROPERTIES.format(host=self.host, folder=self.folder, **ports)
        (self.folder / "server.properties").write_text(properties)
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        settings = ("-c", str(self.folder / "server.properties"))
        format_storage = ("format", "--standalone", f"--cluster-id={cluster}", *settings)
        self._processes.run(self._java("kafka.tools.StorageTool", *format_storage))

    def command(self) -> Command:
        """Return the command of the broker."""
        return self._java("kafka.Kafka", str(self.folder / "server.properties"))

    def answers(self) -> bool:
        """Return whether the broker lists itself as alive: its port opens well before."""
        with self.connect() as connection, connection.makefile("rb") as stream:
            connection.sendall(struct.pack(">i", len(_METADATA_REQUEST)) + _METADATA_REQUEST)
            head = stream.read(struct.calcsize(">iiii"))
        if len(head) < struct.calcsize(">iiii"):
            return False
        _length, _correlation, _throttled, brokers = struct.unpack(">iiii", head)
        return bool(brokers == 1)

    def _java(self, main_class: str, *arguments: str) -> Command:
        machine = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{kafka_jars()}/*")
        return Command(argv=(str(program("java")), *machine, main_class, *arguments))
