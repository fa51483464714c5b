"""Staging events in the caller's own transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from holdfast.cloudevents import to_wire
from holdfast.codec import JsonCodec
from holdfast.message import Message
from holdfast.outbox.schema import outbox

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

    from holdfast.codec import Codec
    from holdfast.headers import HeaderInput


class Outbox:
    """Writes events next to the caller's own rows; a relay publishes them after the commit."""

    def __init__(self, *, source: str = "holdfast", codec: Codec | None = None) -> None:
        self._source = source
        self._codec = JsonCodec() if codec is None else codec

    def add(
        self,
        session: Session | Connection,
        event: Any,
        *,
        topic: str,
        key: str | None = None,
        type: str | None = None,  # noqa: A002 - the name CloudEvents gives it
        headers: HeaderInput = (),
    ) -> Message:
        """Stage *event*; it is published if and only if the caller's transaction commits.

        An event that cannot be encoded fails here, in the caller, before the commit.
        """
        payload, content_type = self._codec.encode(event)
        message = Message.new(
            topic,
            payload,
            key=None if key is None else str(key),
            type=_type_of(event) if type is None else type,
            source=self._source,
            headers=headers,
            content_type=content_type,
        )
        session.execute(insert(outbox), row(message))
        return message


def row(message: Message) -> dict[str, Any]:
    """Return the outbox row of *message*."""
    return {
        "id": message.id,
        "aggregatetype": message.topic,
        "aggregateid": message.key_text,
        "type": message.type,
        "payload": message.payload,
        "headers": [
            [name, None if value is None else value.decode("latin-1")]
            for name, value in to_wire(message)
        ],
    }


def _type_of(event: Any) -> str:
    return "message" if isinstance(event, dict | bytes | str) else type(event).__name__
