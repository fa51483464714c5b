"""The replication protocol around pgoutput: positions, keepalives and our confirmations.

Pure functions over bytes. The server sends `w` (a pgoutput message behind a header of 25
bytes) and `k` (a keepalive); the client sends `r`, how far it got.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError

DATA: Final = 0x77  # w
KEEPALIVE: Final = 0x6B  # k
HEADER: Final = 25
"""Bytes ahead of the pgoutput message in `w`: kind, start, end, time."""

EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""PostgreSQL counts time in microseconds from here."""

_MICROSECOND: Final = timedelta(microseconds=1)
_keepalive = struct.Struct(">cQqB")
_status = struct.Struct(">cQQQqB")


class Malformed(HoldfastError):
    """The server sent something that the protocol does not allow."""


class Keepalive(NamedTuple):
    """How far the server has decoded, and whether it wants an answer at once."""

    end: int
    reply: bool


def keepalive(frame: bytes) -> Keepalive:
    """Return the keepalive in *frame*."""
    try:
        _, end, _, reply = _keepalive.unpack(frame)
    except struct.error as error:
        raise Malformed(f"a keepalive of {len(frame)} bytes") from error
    return Keepalive(end, bool(reply))


def status(confirmed: int, moment: datetime) -> bytes:
    """Return the frame which says that everything before *confirmed* may be forgotten."""
    clock = (moment - EPOCH) // _MICROSECOND
    return _status.pack(b"r", confirmed, confirmed, confirmed, clock, 0)


def position(text: str) -> int:
    """Return a log position written like `16/B374D848` as a number."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def position_text(number: int) -> str:
    """Return a log position as PostgreSQL writes it."""
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"
