"""What one member knows of one lane it owns: decisions only, no I/O.

JetStream keeps no order for what is handed out again, and tells nobody where a message went.
Three rules keep the order of a lane all the same:

- the server numbers the deliveries of a consumer. Whoever owns the lane sees every number;
  a missing one means that a message went elsewhere (to a dead connection, to a former owner)
  and may come back later. Then nothing more is handed out until its lease has run out;
- after that, and after every change of owner, all that comes again is gathered and sorted
  before anything is handed out: the server hands out again before it hands out new messages;
- what comes again although it is held here under a valid lease is not handed out twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.brokers.nats.words import ACK, NAK, PROGRESS, Answer, nak_after

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.ports import Lane

GATHER = 256
"""Messages asked for at once while gathering what comes again."""
_REMEMBERED = 8192  # settled messages; a server that crashed hands out its last 100 ms again


class Phase(Enum):
    """Where the lane stands."""

    HOLDING = "holding"
    """Something may still be out elsewhere."""
    GATHERING = "gathering"
    """What comes again is being collected."""
    OPEN = "open"


class Arrival(msgspec.Struct, eq=False, gc=False):
    """A message that came, and is not yet handed out."""

    position: int
    number: int
    """The consumer's own number of this delivery."""
    count: int
    more: int
    """How many messages the server still has for this lane."""
    reply: str
    stored: float
    lease_until: float
    content: Any
    """The client library's message."""


class Flight(msgspec.Struct, eq=False, gc=False):
    """A message handed out and not yet settled."""

    reply: str
    lease_until: float
    keep_until: float = float("-inf")
    """Until when the lease is to be renewed."""


@dataclass(slots=True)
class Pull:
    """A request for messages that the server has not yet fulfilled."""

    id: int
    left: int
    until: float


@dataclass(slots=True, eq=False)
class LaneState:
    """The owner's view of a lane."""

    lane: Lane
    epoch: int
    stream: str
    consumer: str
    lease: float
    last: int
    """The number of the last delivery that came."""
    phase: Phase = Phase.GATHERING
    hold_until: float = float("-inf")
    pull: Pull | None = None
    more: int = 0
    revoked: bool = False
    """Whether the listener was told that the lane leaves."""
    gone: bool = False
    """Whether somebody else owns the lane by now."""
    trouble: str = ""
    """Why the server hands out nothing here; the lane must be entered again."""
    ready: deque[Arrival] = field(default_factory=deque)
    gathered: list[Arrival] = field(default_factory=list)
    flying: dict[int, Flight] = field(default_factory=dict)
    delayed: dict[int, float] = field(default_factory=dict)
    """When released messages fall due: a restarted server may forget up to a second."""
    settled: dict[int, str] = field(default_factory=dict)
    """The last positions settled here, oldest first, with the subjects it was said to."""
    forgotten: set[int] = field(default_factory=set)
    """Positions settled here which a restarted server will hand out again."""

    def hold(self, now: float) -> None:
        """Hand out nothing new for a lease; what was gathered comes again after it."""
        self.gathered.clear()
        self.phase, self.hold_until = Phase.HOLDING, now + self.lease

    def resume(self, number: int, position: int, now: float) -> None:
        """Go on over a new connection to a consumer that is at *number* and *position*.

        A server that crashed may be behind us: what it has forgotten it hands out as new.
        """
        self.pull = None
        self.more = 0
        self.ready = deque(a for a in self.ready if a.position <= position)
        self.gathered = [a for a in self.gathered if a.position <= position]
        self.forgotten = {p for p in self.settled if p > position}
        if number > self.last:
            self.hold(now)
        self.last = number

    def arrive(self, arrival: Arrival, now: float) -> Answer | None:
        """Take *arrival* in; return what to tell the server at once, if anything."""
        if self.pull is not None:
            self.pull.left -= 1
            if self.pull.left <= 0:
                self.pull = None
        self.more = arrival.more
        position = arrival.position
        if arrival.number != self.last + 1 or self.phase is Phase.HOLDING:
            self.hold(now)
        self.last = arrival.number
        if self.phase is Phase.HOLDING:
            return None  # it comes again when its lease has run out, as the missing ones do
        if position in self.settled:
            self.forgotten.discard(position)
            return arrival.reply, ACK
        if self.delayed and (early := self.delayed.get(position, now) - now) > 0:
            return arrival.reply, nak_after(early)
        if position not in self.flying or not self._is_held(arrival, now):
            self._keep(arrival)
        return None

    def _is_held(self, arrival: Arrival, now: float) -> bool:
        flight = self.flying[arrival.position]
        # Near its end the lease counts as over: the server's clock may be ahead of ours.
        if flight.lease_until - now < self.lease / 8:
            return False
        flight.reply, flight.lease_until = arrival.reply, arrival.lease_until
        return True

    def _keep(self, arrival: Arrival) -> None:
        if self.phase is Phase.OPEN:
            self.ready.append(arrival)
            return
        self.gathered.append(arrival)
        if arrival.count == 1:  # new: all that comes again came before it
            self.gathering_done()

    def gathering_done(self) -> None:
        """Note that nothing more comes again; what came is ready, in order."""
        if self.phase is Phase.GATHERING:
            self.ready.extend(sorted(self.gathered, key=_position))
            self.gathered.clear()
            self.phase = Phase.OPEN

    def wants(self, credit: int, now: float) -> int:
        """Return how many messages to ask the server for, to have *credit* of them ready."""
        if self.pull is not None and now > self.pull.until:
            self.pull = None  # its end was lost on the way
        if self.pull is not None or self.revoked or self.gone:
            return 0
        if self.phase is Phase.HOLDING:
            if now < self.hold_until:
                return 0
            self.phase = Phase.GATHERING
        if self.phase is Phase.GATHERING:
            return GATHER
        return max(0, credit - len(self.ready))

    @property
    def gathers(self) -> bool:
        """Whether it collects what comes again, and must know when that is all."""
        return self.phase is Phase.GATHERING

    @property
    def is_filling(self) -> bool:
        """Whether messages that the server has are on their way here."""
        return self.pull is not None and (self.more > 0 or self.phase is Phase.GATHERING)

    def take(self, limit: int, now: float) -> Iterator[tuple[Arrival, Flight]]:
        """Yield at most *limit* messages to hand out now, in order."""
        if self.revoked or self.gone:
            return
        while limit > 0 and self.ready:
            arrival = self.ready.popleft()
            if arrival.position in self.flying and self._is_held(arrival, now):
                continue  # it came twice
            flight = Flight(arrival.reply, arrival.lease_until)
            self.flying[arrival.position] = flight
            self.delayed.pop(arrival.position, None)
            limit -= 1
            yield arrival, flight

    def settle(self, position: int) -> str:
        """Note that *position* is done; return the subject to say it to."""
        flight = self.flying.pop(position)
        self.settled[position] = flight.reply
        if len(self.settled) > _REMEMBERED:
            del self.settled[next(iter(self.settled))]
        return flight.reply

    def release(self, position: int, due: float | None) -> str:
        """Note that *position* is given back; return the subject to say it to."""
        if due is not None:
            self.delayed[position] = due
        return self.flying.pop(position).reply

    def renewals(self, now: float) -> list[Answer]:
        """Return how to keep what waits here, and what the holders asked to keep."""
        soon = now + self.lease / 2
        answers: list[Answer] = []
        for arrival in (*self.ready, *self.gathered):
            # Even when its lease is over: it comes again, but to us, and is known then.
            if arrival.lease_until < soon:
                arrival.lease_until = now + self.lease
                answers.append((arrival.reply, PROGRESS))
        for flight in self.flying.values():
            if flight.keep_until > now and flight.lease_until < soon:
                flight.lease_until = now + self.lease
                answers.append((flight.reply, PROGRESS))
        return answers

    def back(self) -> list[Answer]:
        """Return how to give everything back, in order, and forget it."""
        held = {arrival.position: arrival.reply for arrival in (*self.ready, *self.gathered)}
        held |= {position: flight.reply for position, flight in self.flying.items()}
        self.ready.clear()
        self.gathered.clear()
        self.flying.clear()
        return [(held[position], NAK) for position in sorted(held)]


def _position(arrival: Arrival) -> int:
    return arrival.position
