"""Change events of tables, as Debezium and `holdfast cdc` publish them: the consumer's side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import DecodeFailed

if TYPE_CHECKING:
    from holdfast.message import Message

UNAVAILABLE = "__debezium_unavailable_value"
"""Stands for a large column that an update left alone and the database did not send."""


class ChangeSource(msgspec.Struct, frozen=True, kw_only=True, rename={"tx": "txId"}):
    """Where a change comes from; what another connector does not tell is None."""

    name: str
    db: str = ""
    table: str = ""
    schema: str | None = None
    version: str | None = None
    connector: str | None = None
    ts_ms: int | None = None
    snapshot: bool | str | None = None
    tx: int | str | None = None
    lsn: int | None = None


class ChangeEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one row.

    `op` is c (inserted), u (updated), d (deleted) or r (read by a snapshot); t is a
    truncated table. None marks a tombstone, which follows a delete so that compacted
    topics forget the key.
    """

    key: dict[str, Any] | None = None
    """The columns of the primary key; from the message's key."""
    op: str | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    source: ChangeSource | None = None
    ts_ms: int | None = None

    @property
    def is_tombstone(self) -> bool:
        """Whether this only tells a compacted topic to forget the key."""
        return self.op is None


_any = msgspec.json.Decoder()


def change_event(message: Message) -> ChangeEvent:
    """Return the change in *message*, written by Debezium's JsonConverter or by `holdfast cdc`.

    With schemas enabled the event is found inside `payload`. What is no change event
    raises `DecodeFailed`.
    """
    key = _key(message.key)
    if message.payload is None:
        return ChangeEvent(key=key)
    try:
        body = _any.decode(message.payload)
        if isinstance(body, dict) and "op" not in body and "payload" in body:
            body = body["payload"]
        if body is None:
            return ChangeEvent(key=key)
        if not isinstance(body, dict) or "op" not in body:
            raise DecodeFailed("no change event: there is no op", "$")
        body.pop("key", None)
        return msgspec.convert({**body, "key": key}, ChangeEvent)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        raise DecodeFailed(reason, path.replace("`", "") or "$") from error
    except msgspec.MsgspecError as error:
        raise DecodeFailed(str(error), "$") from error


def _key(key: bytes | None) -> dict[str, Any] | None:
    """Return the key's columns; a key that is no JSON object says nothing about columns."""
    if key is None:
        return None
    try:
        columns = _any.decode(key)
    except msgspec.MsgspecError:
        return None
    if isinstance(columns, dict) and set(columns) == {"schema", "payload"}:
        columns = columns["payload"]
    return columns if isinstance(columns, dict) else None
