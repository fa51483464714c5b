"""The replication protocol around pgoutput: frames in, confirmations out, the wait between them.

The server sends `w` (a pgoutput message behind a header of 25 bytes) and `k` (a keepalive); the
client sends `r`, how far it got. The functions over bytes are pure.
"""

from __future__ import annotations

import os
import select
import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from holdfast.db.engine import noticed
from holdfast.errors import HoldfastError
from holdfast.outbox.wal.errors import ReplicationDown, translated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.engine import URL

    from holdfast.clock import Clock
    from holdfast.outbox.wal.reading import Taking


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


_BEAT_SECONDS = 1.0  # the server hears from us at least this often, whatever else we do


def arguments(url: URL) -> dict[str, Any]:
    """Return what psycopg needs to connect to the database of *url*, be it of several hosts."""
    dialect: Any = PGDialect_psycopg
    _, settings = dialect().create_connect_args(url)
    return {**noticed(url), **settings}


def replication_connection(url: URL, name: str, options: str = "") -> psycopg.Connection[Any]:
    """Return a connection that can replicate, called *name* in the server's views."""
    settings = {**arguments(url), "application_name": name, "replication": "database"}
    if options:
        settings["options"] = f"{settings.get('options', '')} {options}".strip()
    with translated("connecting for replication", url.username or "…"):
        return psycopg.connect(**settings, autocommit=True, cursor_factory=psycopg.ClientCursor)


class ReplicationStream:
    """A slot being read. Nothing is confirmed to the server unless `confirm` was told so.

    A server ends a stream whose reader is silent, and another may read the slot then. With
    *patience* a stream that was silent for so many seconds, frozen say, is not used again.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        slot: str,
        options: Mapping[str, str],
        *,
        clock: Clock,
        waker: Waker,
        patience: float = float("inf"),
    ) -> None:
        self.confirmed = 0
        self._patience = patience
        self._connection = connection
        self._pgconn = connection.pgconn
        self._clock = clock
        self._waker = waker
        self._sent = clock.monotonic()
        self._unsent = False
        listed = ", ".join(f"{name} '{value}'" for name, value in options.items())
        command = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 ({listed})"
        try:
            with translated(f"reading the replication slot {slot}"):
                # The grammar takes no parameters; the names were checked by the caller.
                connection.execute(command)
        except BaseException:
            connection.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self._poll.register(waker.descriptor, select.POLLIN)

    def receive(self, taking: Taking[object]) -> int:
        """Pass on what has arrived, until *taking* is full; return how many messages."""
        get, feed, count = self._pgconn.get_copy_data, taking.feed, 0
        with translated("receiving from the replication slot"):
            while not taking.full:
                size, view = get(1)
                if size == 0:
                    self._pgconn.consume_input()
                    size, view = get(1)
                if size <= 0:
                    if size < 0:
                        self._ended()
                    break
                kind = view[0]
                if kind == DATA:
                    feed(bytes(view[HEADER:]))
                    count += 1
                elif kind == KEEPALIVE:
                    end, reply = keepalive(bytes(view))
                    taking.keepalive(end)
                    self._unsent = self._unsent or reply
        return count

    def _ended(self) -> None:
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise error_from_result(result)
        raise psycopg.OperationalError("the server ended the stream")

    @property
    def left(self) -> float:
        """Seconds for which the slot is surely ours, by our own clock."""
        return self._patience - (self._clock.monotonic() - self._sent)

    def confirm(self, position: int) -> None:
        """Let the server forget what lies before *position*; sent by the next `beat`."""
        if position > self.confirmed:
            self.confirmed = position

    def beat(self, *, now: bool = False) -> None:
        """Tell the server how far we are: *now*, when it asked, or when it is time."""
        if self.left <= 0:
            raise ReplicationDown("too long silent: the server may have given the slot to another")
        moment = self._clock.monotonic()
        if not (now or self._unsent or moment - self._sent >= _BEAT_SECONDS):
            return
        with translated("confirming to the replication slot"):
            self._pgconn.put_copy_data(status(self.confirmed, self._clock.now()))
            self._pgconn.flush()
        self._sent, self._unsent = moment, False

    def wait(self, seconds: float) -> bool:
        """Return as soon as something arrives or the waker is called; False after *seconds*."""
        ready = self._poll.poll(seconds * 1000)
        if ready and any(descriptor == self._waker.descriptor for descriptor, _ in ready):
            self._waker.clear()
        return bool(ready)

    def close(self) -> None:
        """End the stream; the slot stays where it was confirmed."""
        self._connection.close()


def options(publication: str, *, messages: bool, binary: bool) -> dict[str, str]:
    """Return the options of pgoutput."""
    quoted = '"' + publication.replace('"', '""') + '"'
    chosen = {"proto_version": "1", "publication_names": quoted.replace("'", "''")}
    if binary:
        chosen["binary"] = "true"
    if messages:
        chosen["messages"] = "true"
    return chosen


class Waker:
    """Wakes the one thread that waits; a wake before the wait counts, too."""

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def wake(self) -> None:
        """End the wait. Any thread may call this."""
        if not self._closed:
            with suppress(BlockingIOError):  # full: it wakes anyway
                os.write(self._write, b"!")

    def wait(self, seconds: float) -> None:
        """Return when woken, at the latest after *seconds*."""
        self._poll.poll(seconds * 1000)
        self.clear()

    def clear(self) -> None:
        """Forget the wakes so far."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def close(self) -> None:
        """Release the pipe; the threads that wake have ended."""
        self._closed = True
        os.close(self._write)
        os.close(self.descriptor)
