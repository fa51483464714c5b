"""One life of the stream: what came, what may be confirmed, and when that is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.outbox.wal.intake import Batch, Covered, Intake
from holdfast.outbox.wal.stream import Stream, options, replication_connection

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.clock import Clock
    from holdfast.outbox.wal.slot import Slot
    from holdfast.outbox.wal.waker import Waker

_CONFIRM_SECONDS, _CONFIRM_ROWS = 0.1, 1000


class Reading:
    """Streams from the slot, skips what the table already told, confirms what is finished."""

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        covered: Covered,
        waker: Waker,
        *,
        batch: int,
        messages: bool,
        clock: Clock,
    ) -> None:
        self._intake = Intake(batch, covered, messages=messages)
        self._target = covered.until
        self._waker = waker
        self._clock = clock
        self._told, self._rows = clock.monotonic(), 0
        names = slot.names
        self._stream = Stream(
            replication_connection(engine.url, slot.reader),
            names.slot,
            options(names.publication, messages=messages, binary=True),
            clock=clock,
            waker=waker,
        )

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be taken."""
        return self._intake.waiting

    @property
    def caught_up(self) -> bool:
        """Whether everything is finished that was in the log when this began."""
        return self._intake.finished and self._intake.received >= self._target

    def receive(self) -> int:
        """Take in what has arrived, as far as there is room; return how many messages."""
        intake = self._intake
        return self._stream.receive(intake.feed, intake.keepalive, lambda: intake.full)

    def take(self) -> Batch:
        """Return the rows that wait."""
        return self._intake.take()

    def wait(self, seconds: float) -> None:
        """Return when something arrives that there is room for, or when woken."""
        if self._intake.full:
            self._waker.wait(seconds)
        else:
            self._stream.wait(seconds)

    def confirm(self, finished: int, *, now: bool = False) -> None:
        """Note that the first *finished* rows are published; tell the server now and then."""
        self._intake.finish(finished)
        moment = self._clock.monotonic()
        late = moment - self._told >= _CONFIRM_SECONDS
        if now or late or finished - self._rows >= _CONFIRM_ROWS:
            self._told, self._rows = moment, finished
            if (end := self._intake.confirmed()) is not None:
                self._stream.confirm(end)
                now = True
        self._stream.beat(now=now)

    def close(self) -> None:
        """End the stream; the slot stays where it was confirmed."""
        self._stream.close()
