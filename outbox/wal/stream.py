"""The replication connection: frames in, confirmations out, and the wait between them."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from holdfast.database import noticed
from holdfast.outbox.wal.faults import DatabaseDown, translated
from holdfast.outbox.wal.frames import DATA, HEADER, KEEPALIVE, keepalive, status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.engine import URL

    from holdfast.clock import Clock
    from holdfast.outbox.wal.reading import Taking
    from holdfast.outbox.wal.waker import Waker

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


class Stream:
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
            raise DatabaseDown("too long silent: the server may have given the slot to another")
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
