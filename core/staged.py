"""A message on its way from the outbox to a broker, its headers still packed."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.headers import Pair

_texts = msgspec.json.Decoder(list[tuple[str, str]]).decode
_values = msgspec.json.Decoder(list[tuple[str, Any]]).decode


class Staged(Message, frozen=True, kw_only=True, gc=False):
    """A message of which a relay needs the wire form only.

    `packed` is the column `headers`: all headers in binary mode with the prefix `ce_`, as
    `to_wire` returned them when the event was staged. They are unpacked when they are
    sent and not before: pairs by the ten thousand would keep the garbage collector busy.
    """

    packed: str
    shard: int = 0
    """Of the outbox: whoever leases it may publish this message."""

    def __post_init__(self) -> None:
        """Trust the row: it was checked when it was staged."""

    @property
    def wire(self) -> tuple[Pair, ...]:
        """All headers that the message travels with."""
        pairs = unpacked(self.packed)
        if pairs and pairs[0][0] == "ce_specversion":
            return pairs
        # a row of somebody else's making
        return (("ce_id", self.id.encode()), ("ce_type", self.type.encode()), *pairs)

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """All headers as text, for clients that write it as UTF-8; None where one is not text.

        Nor with a null character, at which clients in C would take the text to end.
        """
        if "\\u0000" in self.packed:
            return None
        try:
            pairs = _texts(self.packed)
        except msgspec.MsgspecError:
            return None
        return pairs if pairs and pairs[0][0] == "ce_specversion" else None


def packed(pairs: Iterable[Pair]) -> list[list[Any]]:
    """Return *pairs* as the column `headers` keeps them."""
    return [[name, _text(value)] for name, value in pairs]


def unpacked(text: str) -> tuple[Pair, ...]:
    """Return the headers in the column `headers`; of any JSON, so that no row stops a relay."""
    try:
        return tuple([(name, value.encode()) for name, value in _texts(text)])
    except msgspec.MsgspecError:
        pass
    try:
        return tuple([(name, _bytes(value)) for name, value in _values(text)])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return _foreign(text)


def _foreign(text: str) -> tuple[Pair, ...]:
    """Return headers that another program wrote: an object by its names, else the text."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return (("headers", text.encode()),)
    if found is None:
        return ()
    if not isinstance(found, dict):
        return (("headers", text.encode()),)
    return tuple(
        (name, value.encode() if isinstance(value, str) else msgspec.json.encode(value))
        for name, value in found.items()
    )


def _text(value: bytes | None) -> str | dict[str, str] | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    return base64.b64decode(value["base64"])
