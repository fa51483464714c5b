"""One life of the stream: what came, what may be confirmed, and when that is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from holdfast.clock import Clock
    from holdfast.outbox.wal.marks import Marks
    from holdfast.outbox.wal.stream import Stream
    from holdfast.outbox.wal.waker import Waker

CONFIRM_SECONDS, _CONFIRM_ROWS = 0.1, 1000
B = TypeVar("B", covariant=True)


class Taking(Protocol[B]):
    """What makes batches out of the messages of a stream."""

    marks: Marks

    @property
    def full(self) -> bool:
        """Whether to stop receiving until a batch is taken."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether something waits to be taken."""
        ...

    def feed(self, data: bytes) -> None:
        """Take one pgoutput message."""
        ...

    def keepalive(self, end: int) -> None:
        """Note that everything before *end* was sent."""
        ...

    def take(self) -> B:
        """Return everything that waits."""
        ...


class Reading(Generic[B]):
    """Reads a stream into an intake, and confirms what of it is finished."""

    def __init__(
        self,
        stream: Stream,
        intake: Taking[B],
        *,
        target: int,
        waker: Waker,
        clock: Clock,
        every: float = CONFIRM_SECONDS,
    ) -> None:
        self._every = every
        self._stream = stream
        self._intake = intake
        self._target = target
        self._waker = waker
        self._clock = clock
        self._told, self._rows = clock.monotonic(), 0

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be taken."""
        return self._intake.waiting

    @property
    def caught_up(self) -> bool:
        """Whether everything is finished that was in the log when this began."""
        return self._intake.marks.finished and self._intake.marks.received >= self._target

    @property
    def confirmed(self) -> int:
        """The position before which everything is finished, as far as it was confirmed."""
        return self._stream.confirmed

    def receive(self) -> int:
        """Take in what has arrived, as far as there is room; return how many messages."""
        return self._stream.receive(self._intake)

    def take(self) -> B:
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
        self._intake.marks.finish(finished)
        moment = self._clock.monotonic()
        late = moment - self._told >= self._every
        if now or late or finished - self._rows >= _CONFIRM_ROWS:
            self._told, self._rows = moment, finished
            if (end := self._intake.marks.confirmed()) is not None:
                self._stream.confirm(end)
                now = True
        self._stream.beat(now=now)

    def close(self) -> None:
        """End the stream; the slot stays where it was confirmed."""
        self._stream.close()
