"""One story in a tracing backend: request → outbox → Kafka → consumer → RabbitMQ → consumer.

Every part is a process of its own that exports by OTLP to a small collector on loopback. The
story goes on after a retry, a dead letter and its replay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from holdfast import new_id
from holdfast.brokers import connect
from holdfast.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Kafka, Postgres, RabbitMQ

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
SHOP = """
import os
from wsgiref.simple_server import make_server

from sqlalchemy.orm import Session

from holdfast import Outbox, open_database
from holdfast.tracing import WsgiCorrelationMiddleware, setup
from opentelemetry import trace

setup(service="shop")
engine = open_database(os.environ["SHOP"])
outbox = Outbox(source="shop")

def app(environ, start_response):
    number = int(environ["PATH_INFO"].strip("/"))
    with trace.get_tracer("web").start_as_current_span("POST /orders"):
        with Session(engine) as session, session.begin():
            outbox.add(session, {"order": number}, topic=os.environ["ORDERS"], key=str(number),
                       type="OrderPlaced")
    start_response("202 Accepted", [])
    return [b""]

server = make_server("127.0.0.1", 0, WsgiCorrelationMiddleware(app))
print(server.server_port, flush=True)
server.serve_forever()
"""
BILLING = """
import os

from sqlalchemy.orm import Session

from holdfast import Backoff, Consumer, Outbox, PoisonMessage, dead_letter, idempotent, retry

consumer = Consumer(os.environ["KAFKA"], group="billing", database=os.environ["BILLING"])
outbox = Outbox(source="billing")
tried = set()

@consumer.on(os.environ["ORDERS"])
@dead_letter()
@retry(Backoff(first=0.01, ceiling=0.02, attempts=3))
@idempotent
def bill(order: dict, session: Session) -> None:
    number = order["order"]
    if number == 1 and number not in tried:
        tried.add(number)
        raise TimeoutError("the bank is slow")
    if number == 2 and not os.path.exists("fixed"):
        raise PoisonMessage("no card")
    outbox.add(session, {"paid": number}, topic=os.environ["PAYMENTS"], key=str(number),
               type="PaymentProcessed")
"""
MAIL = """
import os

from holdfast import Consumer

consumer = Consumer(os.environ["RABBIT"], group="mail", database=os.environ["MAIL"])

@consumer.on(os.environ["PAYMENTS"])
def send(payment: dict) -> None:
    with open("mails.txt", "a") as file:
        file.write(f"{payment['paid']}\\n")
"""


@dataclass(frozen=True)
class Span:
    """One span as the collector got it."""

    service: str
    name: str
    kind: int
    id: bytes
    trace: bytes
    parent: bytes
    links: frozenset[bytes]
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """A tracing backend that keeps what is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        keep = self.keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    keep(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def keep(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            named = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(named["service.name"], one) for one in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def find(self, service: str, name: str, **attributes: Any) -> list[Span]:
        """Return the spans of *service* whose name begins with *name*."""
        wanted = attributes.items()
        return [
            span
            for span in [*self.spans]
            if span.service == service
            and span.name.startswith(name)
            and all(span.attributes.get(key.replace("__", ".")) == value for key, value in wanted)
        ]


def _span(service: str, one: Any) -> Span:
    return Span(
        service=service,
        name=one.name,
        kind=one.kind,
        id=one.span_id,
        trace=one.trace_id,
        parent=one.parent_span_id,
        links=frozenset(link.span_id for link in one.links),
        attributes={a.key: a.value.string_value or a.value.int_value for a in one.attributes},
        failed=one.status.code == 2,
    )


class Story:
    """The processes of the story, and what their collector has heard."""

    def __init__(self, folder: Path, postgres: Postgres, kafka: Kafka, rabbitmq: RabbitMQ) -> None:
        self.folder = folder
        self.collector = Collector()
        name = new_id()[-12:]
        databases = {
            one: postgres.database(f"story_{one.lower()}") for one in ("SHOP", "BILLING", "MAIL")
        }
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
            **databases,
            "KAFKA": kafka.url,
            "RABBIT": rabbitmq.url,
            "ORDERS": f"orders-{name}",
            "PAYMENTS": f"payments-{name}",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        self.processes: list[subprocess.Popen[str]] = []
        for topic, url, group in (
            ("ORDERS", kafka.url, "billing"),
            ("PAYMENTS", rabbitmq.url, "mail"),
        ):
            broker = connect(url)
            broker.create_topic(self.environment[topic], partitions=2)
            broker.create_group(self.environment[topic], group)
            broker.close()
        for database in databases.values():
            self.command("db", "upgrade", "--database", database)
        for file, text in (("shop.py", SHOP), ("billing.py", BILLING), ("mail.py", MAIL)):
            (folder / file).write_text(text)

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            [HOLDFAST, *argv], cwd=self.folder, env=self.environment, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def start(self, *argv: str, service: str | None = None) -> subprocess.Popen[str]:
        named = {} if service is None else {"OTEL_SERVICE_NAME": service}
        process = subprocess.Popen(
            argv, cwd=self.folder, env=self.environment | named, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def begin(self) -> str:
        """Start everything; return the address of the shop."""
        quiet = ("--log-level", "warning")
        env = self.environment
        self.start(HOLDFAST, "relay", "--database", env["SHOP"], "--broker", env["KAFKA"], *quiet,
                   service="shop-relay")  # fmt: skip
        self.start(HOLDFAST, "consume", "billing:consumer", *quiet, service="billing")
        self.start(HOLDFAST, "relay", "--database", env["BILLING"], "--broker", env["RABBIT"],
                   *quiet, service="billing-relay")  # fmt: skip
        self.start(HOLDFAST, "consume", "mail:consumer", *quiet, service="mail")
        shop = self.start(sys.executable, "shop.py")
        assert shop.stdout is not None
        return f"http://127.0.0.1:{int(shop.stdout.readline())}"

    def mails(self) -> list[str]:
        file = self.folder / "mails.txt"
        return sorted(file.read_text().split()) if file.exists() else []

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.collector.close()


@pytest.fixture
def story(tmp_path: Path, postgres: Postgres, kafka: Kafka, rabbitmq: RabbitMQ) -> Iterator[Story]:
    """Make ready what the story needs."""
    made = Story(tmp_path, postgres, kafka, rabbitmq)
    yield made
    made.close()


def order(address: str, number: int) -> None:
    asked = Request(f"{address}/{number}", headers={"X-Correlation-ID": f"corr-{number}"})  # noqa: S310
    with urlopen(asked, timeout=90) as response:  # noqa: S310
        assert response.status == 202


def test_the_whole_way_of_an_order_is_one_story(story: Story) -> None:
    """By links from span to span, also after a retry, a dead letter and its replay."""
    address = story.begin()
    for number in (1, 2):
        order(address, number)
    wait_until(lambda: story.mails() == ["1"], deadline=120, what="the first order is through")

    def letters() -> list[dict[str, Any]]:
        listed = story.command("dlq", "list", "--database", story.environment["BILLING"], "--json")
        found: list[dict[str, Any]] = msgspec.json.decode(listed)
        return found

    wait_until(lambda: len(letters()) == 1, deadline=120, what="the second is a dead letter")
    (story.folder / "fixed").touch()
    story.command(
        "dlq", "replay", "--group", "billing", "--database", story.environment["BILLING"],
        "--broker", story.environment["KAFKA"], "--reason", "card added", "--yes",
    )  # fmt: skip
    wait_until(lambda: story.mails() == ["1", "2"], deadline=120, what="the second is through")
    find = story.collector.find
    for number in (1, 2):
        corr = {"messaging__message__conversation_id": f"corr-{number}"}
        wait_until(lambda corr=corr: find("mail", "ack", **corr), deadline=120, what="all exported")  # type: ignore[misc]
    tell(story, 1, attempts=[True, False])
    creation = tell(story, 2, attempts=[True, False])
    assert [span.kind for span in find("holdfast-replay", "send") if creation in span.links] == [3]


def tell(story: Story, number: int, *, attempts: list[bool]) -> bytes:
    """Follow one order from span to span; return the span that created it.

    *attempts* are those of billing, True where it failed.
    """
    find = story.collector.find
    corr = {"messaging__message__conversation_id": f"corr-{number}"}
    processed = find("billing", "process", **corr)
    (creation,) = set().union(*(span.links for span in processed))
    (create,) = [span for span in find("shop", "create") if span.id == creation]
    (request,) = [span for span in find("shop", "POST /orders") if span.id == create.parent]
    assert create.trace == request.trace
    assert [span.kind for span in (create, *processed)] == [4, *[5 for _ in processed]]
    sent = [span for span in find("shop-relay", "send") if creation in span.links]
    assert [span.kind for span in sent] == [3]
    inside = {span.id for span in processed}
    tried = [span for span in find("billing", "attempt") if span.parent in inside]
    assert sorted((span.failed for span in tried), reverse=True) == attempts
    (good,) = [span for span in tried if not span.failed]
    (second,) = [span for span in find("billing", "create") if span.parent == good.id]
    assert second.trace == good.trace
    assert [span.kind for span in find("billing-relay", "send") if second.id in span.links] == [3]
    (mailed,) = find("mail", "process", **corr)
    assert mailed.links == {second.id}
    for name in ("receive", "ack"):
        assert any(second.id in span.links for span in find("mail", name)), name
    systems = [span.attributes["messaging.system"] for span in (processed[0], mailed)]
    assert systems == ["kafka", "rabbitmq"]
    groups = [span.attributes["messaging.consumer.group.name"] for span in (processed[0], mailed)]
    assert groups == ["billing", "mail"]
    return creation
