"""Messages that Debezium's outbox event router published from Holdfast's table.

The router turns columns into headers: `id` holds the event's id and, with
`table.fields.additional.placement=headers:header:holdfast`, the header `holdfast` holds the
column `headers`: all headers that Holdfast's own relay would have sent, as a JSON array of
`[name, value]`; a value is text, null, or `{"base64": …}` where it is not UTF-8.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.headers import Pair

HEADER: Final = "holdfast"
"""Where the router is told to put the column `headers`."""

_ID = "id"
_CONTEXT = "__debezium."  # which connector and task it was, in versions from 3 on
_UUID_LENGTH = 36
_decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode


def unrouted(headers: Iterable[Pair]) -> list[Pair] | None:
    """Return the headers as Holdfast's relay would have sent them; None for other messages.

    Of an outbox table that is not Holdfast's the id at least is known.
    """
    given = list(headers)
    packed = next((value for name, value in given if name == HEADER and value), None)
    routed = next((value for name, value in given if name == _ID and value), None)
    if packed is not None:
        try:
            wire = [(name, _bytes(value)) for name, value in _decode(packed)]
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
            return None
        known = {value for name, value in wire if name == "ce_id"}
        own = {HEADER, _ID} if routed in known else {HEADER}
        rest = (pair for pair in given if pair[0] not in own)
        return [*wire, *(pair for pair in rest if not pair[0].startswith(_CONTEXT))]
    if routed is not None and _is_uuid(routed):
        return [("ce_id", routed), *(pair for pair in given if pair[0] != _ID)]
    return None


def _bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    try:
        return base64.b64decode(value["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _is_uuid(value: bytes) -> bool:
    try:
        return len(value) == _UUID_LENGTH and bool(uuid.UUID(value.decode()))
    except ValueError:
        return False
