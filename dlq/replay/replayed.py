"""A message of a plan on its way to a broker, its headers made when they are sent."""

from __future__ import annotations

import math
from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from holdfast.cloudevents import rfc3339, wire_list
from holdfast.dlq.replay.marks import NAMES, Stamp
from holdfast.dlq.rows import headers_of, moment
from holdfast.headers import Headers, Pair
from holdfast.message import Message
from holdfast.staged import Staged
from holdfast.structured import is_text

REST = (
    "event_at", "source", "schema_ref", "correlation_id", "causation_id", "traceparent",
    "content_type", "replay_count",
)  # fmt: skip
"""Columns of a dead letter that only the headers of its message tell."""
NO_TIME = datetime.fromtimestamp(0, UTC)
"""In place of the time of a message: its headers carry the real one."""
_NO_HEADERS = "[]"
_VERSION = ("ce_specversion", "1.0")
_texts = msgspec.json.Decoder(list[tuple[str, str]]).decode
_NAMES = frozenset(NAMES)


class Replayed(Staged, frozen=True, kw_only=True, gc=False):
    """A message of which a sink needs the wire form only, as of one from an outbox.

    `packed` are its own headers as the store keeps them; `rest` are its columns `REST`.
    """

    dlq_id: str
    rest: tuple[float, str, str | None, str | None, str | None, str | None, str | None, int]
    stamp: Stamp
    in_bytes: bool = False
    """Whether an attribute may hold a zero character, which ends a text on some wires."""

    @property
    def whole(self) -> Message:
        """The message with its marks."""
        at, source, schema, correlation, causation, trace, content_type, replays = self.rest
        own = () if self.packed == _NO_HEADERS else headers_of(self.packed).pairs
        return Message(
            id=self.id,
            topic=self.topic,
            payload=self.payload,
            type=self.type,
            source=source,
            key=self.key,
            headers=Headers.received(self.stamp.on(own, self.dlq_id, replays + 1)),
            time=moment(at),
            correlation_id=correlation,
            causation_id=causation,
            content_type=content_type,
            schema=schema,
            traceparent=trace,
            replayed=True,
        )

    @property
    def wire(self) -> tuple[Pair, ...]:
        """All headers that the message travels with."""
        if (texts := self.texts) is not None:
            return tuple([(name, text.encode()) for name, text in texts])
        return tuple(wire_list(self.whole))

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """What `wire` holds with its values as text, or None where they are not all text."""
        at, source, schema, correlation, causation, trace, content_type, replays = self.rest
        key, packed = self.key, self.packed
        if self.in_bytes or "\\u0000" in packed or (key is not None and b"\0" in key):
            return None
        pairs = [
            _VERSION,
            ("ce_id", self.id),
            ("ce_type", self.type),
            ("ce_source", source),
            ("ce_time", _written(at)),
        ]
        if schema is not None:
            pairs.append(("ce_dataschema", schema))
        if correlation is not None:
            pairs.append(("ce_correlationid", correlation))
        if causation is not None:
            pairs.append(("ce_causationid", causation))
        if trace is not None:
            pairs.append(("ce_traceparent", trace))
        if key is not None:
            if key and is_text(key):
                pairs.append(("ce_partitionkey", key.decode()))
            else:
                pairs.append(("ce_partitionkeybase64", b64encode(key).decode()))
        if content_type is not None:
            pairs.append(("content-type", content_type))
        if packed != _NO_HEADERS:
            try:
                pairs += [pair for pair in _texts(packed) if pair[0] not in _NAMES]
            except msgspec.MsgspecError:
                return None
        pairs += self.stamp.texts(self.dlq_id, replays + 1)
        return pairs


def _written(at: float) -> str:
    """Return `rfc3339(moment(at))` as text, at a third of its cost: seconds are shared by many."""
    fraction, second = math.modf(at)
    micros = round(fraction * 1e6)  # as `datetime.fromtimestamp` does
    if 0.0 <= at < _LATE and micros < _MICROS:
        return f"{_second(second)}{micros:06d}Z"
    return rfc3339(moment(at)).decode()


@lru_cache(maxsize=4096)
def _second(second: float) -> str:
    return rfc3339(moment(second))[:20].decode()


_LATE = 253_402_300_799.0  # the last second of the year 9999
_MICROS = 1_000_000
