"""The JetStream API: requests and answers as the server spells them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.brokers.nats.faults import Refusal, no_jetstream
from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from nats.aio.client import Client

    from holdfast.brokers.nats.connection import Connection

Answer = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class JetStream:
    """Asks one server. A refusal raises `Refusal`, silence `BrokerDown`."""

    def __init__(self, connection: Connection, *, domain: str, timeout: float) -> None:
        self.connection = connection
        self.prefix = f"$JS.{domain}.API" if domain else "$JS.API"
        self.timeout = timeout

    def ask(self, operation: str, body: object = None) -> Answer:
        """Return the answer to an API request, e.g. `STREAM.INFO.orders`."""
        payload = b"" if body is None else _encode(body)
        answer = self._request(f"{self.prefix}.{operation}", payload, None)
        if "error" in answer:
            raise Refusal(operation, answer["error"])
        return answer

    def check(self) -> None:
        """Raise `ConfigurationError` unless the server stores messages for us."""
        try:
            self.ask("INFO")
        except Refusal as refusal:
            raise refusal.translated() from refusal

    def store(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Return the sequence under which *data* was stored on *subject*."""
        answer = self._request(subject, data, headers)
        if "error" in answer:
            raise Refusal(f"publish to {subject}", answer["error"])
        return int(answer["seq"])

    def consumer(self, stream: str, name: str) -> Answer | None:
        """Return what the server knows of a consumer; None if there is none."""
        try:
            return self.ask(f"CONSUMER.INFO.{stream}.{name}")
        except Refusal as refusal:
            if refusal.code == 404:  # the stream or the consumer
                return None
            raise refusal.translated() from refusal

    def _request(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> Answer:
        async def request(client: Client) -> bytes:
            message = await client.request(subject, payload, timeout=self.timeout, headers=headers)
            data: bytes = message.data
            return data

        try:
            return _decode(self.connection.run(request))
        except BrokerDown as down:
            if type(down.__cause__).__name__ != "NoRespondersError":
                raise
            if not self.connection.has_jetstream:
                raise no_jetstream("nobody answers its API") from down
            raise BrokerDown(f"JetStream is not ready: nobody answers {subject}") from down


def moment(text: str) -> float:
    """Return the server's *text* for a time as POSIX seconds."""
    return datetime.fromisoformat(text).timestamp()
