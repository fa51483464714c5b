"""The identity of messages that came without a `message_id`.

AMQP 0-9-1 gives a message in a queue no coordinates: a delivery tag is new each time. What
stays the same over redeliveries is what the publisher said, so the identity follows from that:
body, headers and properties, without what brokers add on the way. The price is that two
messages which are alike in everything, the `timestamp` property included, are one and the same
to whoever remembers ids.
"""

from __future__ import annotations

import hashlib
from typing import Any

from holdfast.brokers.rabbitmq.wire import BROKERS_OWN, DEATH

_SAID = (
    "content_type", "content_encoding", "priority", "correlation_id", "reply_to", "timestamp",
    "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip


def content_identity(properties: Any, body: bytes) -> str:
    """Return the same text for the same message, however often and in whatever form it comes."""
    headers = {
        name: value
        for name, value in (properties.headers or {}).items()
        if name not in BROKERS_OWN and not str(name).startswith(DEATH)
    }
    said = [getattr(properties, name) for name in _SAID]
    digest = hashlib.sha256(_canonical([headers, said]))
    digest.update(body)
    return f"content-{digest.hexdigest()[:40]}"


def _canonical(value: Any) -> bytes:
    """Return *value* as bytes: RabbitMQ sorts tables when it delivers a message again."""
    match value:
        case dict():
            items = sorted((_canonical(str(name)), _canonical(one)) for name, one in value.items())
            return b"{%s}" % b"".join(name + one for name, one in items)
        case list() | tuple():
            return b"[%s]" % b"".join(map(_canonical, value))
        case bytes():
            return b"%d:%s" % (len(value), value)
        case str():
            return _canonical(value.encode("utf-8", "surrogateescape"))
        case None:
            return b"~"
        case bool():
            return b"?%d" % value
        case int():  # also pika's own, which prints an L
            return b"#%d;" % value
        case _:
            return b"=" + _canonical(repr(value))
