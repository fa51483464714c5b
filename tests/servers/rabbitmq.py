"""RabbitMQ, with an Erlang port mapper of its own."""

import re
from functools import cached_property

from tests.servers.install import program
from tests.servers.ports import free_port
from tests.servers.processes import Command
from tests.servers.server import Server
from tests.servers.waiting import wait_until

_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_CONNECTION_START = b"\x00\x0a\x00\x0a"
_PLUGINS = "[rabbitmq_consistent_hash_exchange]."


class RabbitMQ(Server):
    """A RabbitMQ node whose persistent messages in durable queues survive ``kill()``."""

    name = "rabbitmq"
    start_deadline = 90.0

    def __init__(self) -> None:
        super().__init__()
        self._mapper_port = free_port()
        self._cluster_port = free_port()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"amqp://guest:guest@{self.address}/"

    @cached_property
    def version(self) -> str:
        """The server's own version, as it introduces itself to clients."""
        found = re.search(rb"\x07versionS....([0-9.]+)", self._introduction(), re.DOTALL)
        return found[1].decode() if found else "unknown"

    def wait_for_quorum_queue(self, name: str) -> None:
        """Return once the quorum queue *name* would outlive a kill.

        RabbitMQ registers such a queue on disk about a second after it confirmed the declaration;
        killed before that, the node comes back with a queue that never finds its leader.
        """
        (register,) = self.folder.glob("data/*/quorum/*/names.dets")
        wait_until(lambda: name.encode() in register.read_bytes(), f"queue {name} on disk")

    def prepare(self) -> None:
        """Name the plugins."""
        (self.folder / "plugins").write_text(_PLUGINS)

    def launch(self) -> int:
        """Start the port mapper, then the node: the machine's own mapper stays out of it."""
        mapper = ("-address", self.host, "-port", str(self._mapper_port))
        self._processes.start(Command(argv=(str(program("epmd")), *mapper)))
        return super().launch()

    def command(self) -> Command:
        """Return the command of the node."""
        return Command(argv=(str(program("rabbitmq-server")),), env=self._files() | self._network())

    def answers(self) -> bool:
        """Return whether an AMQP client is greeted, which a node does last when it starts."""
        return self._introduction()[7:11] == _CONNECTION_START

    def _introduction(self) -> bytes:
        with self.connect() as connection:
            connection.sendall(_PROTOCOL_HEADER)
            return connection.recv(4096)

    def _files(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            # Else the script stays as the parent of the node instead of becoming it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _network(self) -> dict[str, str]:
        arguments = "-kernel inet_dist_use_interface {127,0,0,1} -setcookie holdfast"
        return {
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_DIST_PORT": str(self._cluster_port),
            "RABBITMQ_NODENAME": "holdfast@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": self.host,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": arguments,
        }
