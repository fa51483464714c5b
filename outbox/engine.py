"""What an engine of the relay is: something that moves rows, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did."""

    published: int = 0
    """Messages that the broker took; their rows are gone or being deleted."""
    parked: int = 0
    """Messages set aside because the broker refused them, or one of their key before."""
    idle: bool = False
    """Nothing was there to do; wait before the next step, unless this one has waited itself."""
    rested: bool = False
    """It has waited by itself, and would have ended with the first thing to do."""
    standby: bool = False
    """Another relay is at work; this one waits to take over."""
    hindered: str | None = None
    """What keeps the relay from its work, though nothing is down and no other relay does it."""
    missing: tuple[str, ...] = ()
    """Topics that do not exist: their events wait in the outbox, those of others go on."""
    slots_lost: int = 0
    """Replication slots that were found lost, with events that were nowhere else."""

    def plus(self, other: Step) -> Step:
        """Return what both steps moved."""
        return Step(published=self.published + other.published, parked=self.parked + other.parked)


class RelayEngine(Protocol):
    """Moves committed events to the broker, at least once and in order per key."""

    name: str

    def step(self) -> Step:
        """Do one bounded piece of work.

        `BrokerDown` or a database outage raises, with nothing lost and no attempt counted:
        the caller waits and calls again.
        """
        ...

    def close(self) -> None:
        """Finish what is in flight, delete what was acknowledged, give up the leases."""
        ...
