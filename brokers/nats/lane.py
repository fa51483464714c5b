"""What one member knows of one lane it owns: decisions only, no I/O.

JetStream keeps no order for what is handed out again, and tells nobody where a message went.
Three rules keep the order of a lane all the same:

- the server numbers the deliveries of a consumer. Whoever owns the lane sees every number;
  a missing one means that a message went elsewhere (to a dead connection, to a former owner)
  and will come again. Then nothing more is taken in until its lease has run out;
- after that, and after every change of owner, all that comes again is gathered and sorted
  before anything else is handed out. The server says how many messages are out, so it is known
  when all have come; only what a former owner released with a delay is not waited for long;
- what comes again although it is held here under a valid lease is not handed out twice. What
  comes again because its lease is over takes back what was handed out behind it of its key.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from holdfast.brokers.nats.ack_tokens import ACK, NAK, PROGRESS, Answer, nak_after, tokens
from holdfast.brokers.nats.fetch import PullFlight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.brokers.nats.fetch import Arrival, Pull
    from holdfast.ports import Lane

GATHER = 256
"""Messages asked for at once while gathering what comes again."""
AGAIN = 0.02
"""Seconds between looks for what has not come yet."""
_LATE = 1.0  # seconds that the server may be late, beside half a lease
_POSITION, _TIME = 1, 3  # among the tokens of a reply subject
_REMEMBERED = 8192  # settled messages; a server that crashed hands out its last 100 ms again


class LanePhase(Enum):
    """Where the lane stands."""

    HOLDING = "holding"
    """Something may still be out elsewhere."""
    GATHERING = "gathering"
    """What comes again is being collected."""
    OPEN = "open"


@dataclass(slots=True, eq=False)
class NatsLane:
    """The owner's view of a lane."""

    lane: Lane
    epoch: int
    stream: str
    consumer: str
    lease: float
    last: int
    """The number of the last delivery that came."""
    phase: LanePhase = LanePhase.OPEN
    wait_until: float = float("-inf")
    """Until when to hold, or to wait for what is owed."""
    look_at: float = float("-inf")
    """When to look again for what is owed."""
    owed: int = 0
    """How many messages are out elsewhere."""
    pull: Pull | None = None
    more: int = 0
    revoked: bool = False
    """Whether the listener was told that the lane leaves."""
    left_in: int = 0
    """The connection by which everything was given back."""
    gone: bool = False
    """Whether somebody else owns the lane by now."""
    trouble: str = ""
    """Why the server hands out nothing here; the lane must be entered again."""
    ready: deque[Arrival] = field(default_factory=deque)
    gathered: list[Arrival] = field(default_factory=list)
    flying: dict[int, PullFlight] = field(default_factory=dict)
    delayed: dict[int, float] = field(default_factory=dict)
    """When released messages fall due: a restarted server may forget up to a second."""
    settled: dict[int, str] = field(default_factory=dict)
    """The last positions settled here, oldest first, with the subjects it was said to."""
    forgotten: set[int] = field(default_factory=set)
    """Positions settled here which a restarted server will hand out again."""
    adrift: set[int] = field(default_factory=set)
    """Positions held here which a restarted server does not know to be out."""

    def hold(self, now: float) -> None:
        """Take nothing in for a lease; what was gathered comes again after it."""
        self.gathered.clear()
        self.phase, self.wait_until = LanePhase.HOLDING, now + self.lease

    def is_held_until(self, now: float) -> bool:
        """Whether the time to hold is over, and what is owed should be gathered."""
        return self.phase is LanePhase.HOLDING and now >= self.wait_until and self.pull is None

    def gather(self, out: int, position: int, now: float, *, patiently: bool) -> None:
        """Collect what comes again, of *out* messages that are out up to *position*.

        What is held here is not owed. *patiently*, the rest is waited for: it comes at the
        latest when its lease is over, but a server may be late.
        """
        here = {*self.flying, *(a.position for a in self.ready)}
        here |= {place for place, due in self.delayed.items() if due > now}
        self.owed = out - sum(place <= position for place in here)
        self.phase = LanePhase.GATHERING
        self.wait_until = now + self.lease / 2 + _LATE if patiently else now
        self.look_at = now
        if self.owed <= 0:
            self.gathering_done()

    def resume(self, number: int, position: int, now: float) -> None:
        """Go on over a new connection to a consumer that is at *number* and *position*.

        A server that crashed may be behind us: what it has forgotten it hands out as new.
        """
        self.pull = None
        self.more = 0
        self.ready = deque(a for a in self.ready if a.position <= position)
        self.gathered = [a for a in self.gathered if a.position <= position]
        self.forgotten = {p for p in self.settled if p > position}
        self.adrift = {p for p in self.flying if p > position}
        # A server that restarted has forgotten what was given back to it, too.
        if number > self.last or self.phase is LanePhase.GATHERING:
            self.hold(now)
        self.last = number

    def arrive(self, arrival: Arrival, now: float) -> Answer | None:
        """Take *arrival* in; return what to tell the server at once, if anything."""
        pull, position = self.pull, arrival.position
        if pull is not None:
            pull.left -= 1
            if pull.left <= 0:
                self.pull = None
        self.more = arrival.more
        self.adrift.discard(position)
        is_next = arrival.number == self.last + 1
        self.last = arrival.number
        if not is_next or self.phase is LanePhase.HOLDING:
            self.hold(now)  # it comes again when its lease has run out, as the missing ones do
        elif position in self.settled and self._is_settled(arrival):
            self.forgotten.discard(position)
            self._pay()
            return arrival.reply, ACK
        elif self.delayed and (early := self.delayed.get(position, now) - now) > 0:
            return arrival.reply, nak_after(early)
        elif position in self.flying and self._is_held(arrival, now):
            pass
        elif self.phase is LanePhase.OPEN:
            self._append(arrival)
        else:
            self._collect(arrival, now)
        return None

    def _is_settled(self, arrival: Arrival) -> bool:
        """Whether it is the message that was settled, and not one in the place of that.

        A server whose machine lost power may have lost its last messages; it gives their
        positions to the next ones.
        """
        if tokens(self.settled[arrival.position])[_TIME] == tokens(arrival.reply)[_TIME]:
            return True
        del self.settled[arrival.position]
        self.forgotten.discard(arrival.position)
        return False

    def all_came(self) -> None:
        """Note that the server has nothing more: what it forgot and has not sent is gone."""
        if self.phase is LanePhase.OPEN:
            self.forgotten.clear()

    def is_of(self, subject: str, after: int = 0) -> bool:
        """Whether *subject* is where to speak of a delivery of this lane, behind *after*."""
        own = f".{self.stream}.{self.consumer}." in subject
        return own and int(tokens(subject)[_POSITION]) > after

    def _is_held(self, arrival: Arrival, now: float) -> bool:
        flight = self.flying[arrival.position]
        # Near its end the lease counts as over: the server's clock may be ahead of ours.
        if flight.lease_until - now < self.lease / 8:
            return False
        flight.reply, flight.lease_until = arrival.reply, arrival.lease_until
        return True

    def _collect(self, arrival: Arrival, now: float) -> None:
        self.gathered.append(arrival)
        if arrival.count > 1:
            self._pay()
        else:  # new: nothing comes again at the moment
            self.nothing_comes(now)

    def _pay(self) -> None:
        """Note that one message came that was owed."""
        if self.phase is LanePhase.GATHERING:
            self.owed -= 1
            if self.owed <= 0:
                self.gathering_done()

    def nothing_comes(self, now: float) -> None:
        """Note that the server has nothing to hand out again: look later, or give it up."""
        if now >= self.wait_until:
            self.gathering_done()
        self.look_at = now + AGAIN

    def gathering_done(self) -> None:
        """Note that all has come; it is ready, in order."""
        if self.phase is LanePhase.GATHERING:
            self.ready.extend(sorted(self.gathered, key=_position))
            self.gathered.clear()
            self.phase = LanePhase.OPEN

    def wants(self, credit: int, now: float) -> int:
        """Return how many messages to ask the server for, to have *credit* of them ready."""
        if self.pull is not None and now > self.pull.until:
            self.pull = None  # its end was lost on the way
        if self.pull is not None or self.revoked or self.gone:
            return 0
        match self.phase:
            case LanePhase.HOLDING:
                return 0
            case LanePhase.GATHERING:
                return min(GATHER, self.owed) if now >= self.look_at else 0
        return max(0, credit - len(self.ready))

    @property
    def gathers(self) -> bool:
        """Whether it collects what comes again, and must know when that is all."""
        return self.phase is LanePhase.GATHERING

    @property
    def is_filling(self) -> bool:
        """Whether messages that the server has are on their way here."""
        return self.pull is not None and (self.more > 0 or self.phase is LanePhase.GATHERING)

    def take(self, limit: int, now: float) -> Iterator[tuple[Arrival, PullFlight]]:
        """Yield at most *limit* messages to hand out now, in order."""
        if self.revoked or self.gone:
            return
        while limit > 0 and self.ready:
            arrival = self.ready.popleft()
            if arrival.position in self.flying and self._is_held(arrival, now):
                continue  # it came twice
            if arrival.position in self.flying:
                self._recall(arrival.position)
            flight = PullFlight(arrival.reply, arrival.lease_until, arrival)
            self.flying[arrival.position] = flight
            self.delayed.pop(arrival.position, None)
            limit -= 1
            yield arrival, flight

    def _append(self, arrival: Arrival) -> None:
        """Keep *arrival* ready, one that comes again before all that follows it."""
        is_late = bool(self.ready) and arrival.position < self.ready[-1].position
        self.ready.append(arrival)
        if is_late:
            self.ready = deque(sorted(self.ready, key=_position))

    def _recall(self, position: int) -> None:
        """Take back what was handed out behind *position* of its key: it comes behind it again."""
        key = self.flying[position].key
        if key is None:
            return
        behind = [p for p, flight in self.flying.items() if p > position and flight.key == key]
        for place in behind:
            flight = self.flying.pop(place)
            arrival = flight.arrival
            arrival.reply, arrival.lease_until = flight.reply, flight.lease_until
            self._append(arrival)

    def settle(self, position: int) -> str | None:
        """Note that *position* is done; return the subject to say it to.

        None if the server would not listen: it will hand the message out as a new one, and
        is told then.
        """
        flight = self.flying.pop(position)
        self.settled[position] = flight.reply
        if len(self.settled) > _REMEMBERED:
            self.forgotten.discard(gone := next(iter(self.settled)))
            del self.settled[gone]
        if position in self.adrift:
            self.adrift.discard(position)
            self.forgotten.add(position)
            return None
        return flight.reply

    def release(self, position: int, due: float | None) -> str:
        """Note that *position* is given back; return the subject to say it to."""
        if due is not None:
            self.delayed[position] = due
        self.adrift.discard(position)
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
