"""Real servers for tests, started on demand and gone for certain when the run ends."""

from tests.servers.fleet import Fleet
from tests.servers.kafka import Kafka
from tests.servers.mariadb import MariaDB
from tests.servers.nats import Nats
from tests.servers.postgres import Postgres
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis import Redis
from tests.servers.server import Server, ServerFailed
from tests.servers.valkey import Valkey
from tests.servers.waiting import DeadlineExceeded, wait_until

__all__ = [
    "DeadlineExceeded",
    "Fleet",
    "Kafka",
    "MariaDB",
    "Nats",
    "Postgres",
    "RabbitMQ",
    "Redis",
    "Server",
    "ServerFailed",
    "Valkey",
    "wait_until",
]
