"""Members whose doings are recorded, and the chronicle of who owned which lane when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK
from holdfast.testing.observed import Violation
from holdfast.testing.waiting import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.clock import Clock
    from holdfast.ports import Delivery, Lane, Source

STEP = 0.05
"""Seconds that one poll waits, so that several members can take turns in one thread."""


class Chronicle:
    """What the listeners of all members heard, in one order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, frozenset[Lane]]] = []

    def lanes(self, member: str, *kinds: str) -> set[Lane]:
        """Return the lanes that *member* heard of by *kinds* of news."""
        return {
            lane
            for own, kind, lanes in self.heard
            if own == member and kind in kinds
            for lane in lanes
        }

    def check_one_owner(self) -> None:
        """Raise `Violation` if a lane was assigned to a member while another one had it."""
        owners: dict[Lane, str] = {}
        for member, kind, lanes in self.heard:
            for lane in lanes:
                if kind != "assigned":
                    if owners.get(lane) == member:
                        del owners[lane]
                elif owners.setdefault(lane, member) != member:
                    raise Violation(
                        "a lane belongs to one member at a time", [(lane, owners[lane], member)]
                    )


class Recorder:
    """A listener that writes the chronicle; *on_revoked* runs before the lanes leave."""

    def __init__(
        self,
        member: str,
        chronicle: Chronicle,
        on_revoked: Callable[[set[Lane]], None] | None = None,
    ) -> None:
        self._member = member
        self._chronicle = chronicle
        self._on_revoked = on_revoked

    def assigned(self, lanes: Iterable[Lane]) -> None:
        """Record that *lanes* came."""
        self._hear("assigned", lanes)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        """Let the test settle, then record that *lanes* left."""
        lanes = set(lanes)
        if self._on_revoked is not None:
            self._on_revoked(lanes)
        self._hear("revoked", lanes)

    def lost(self, lanes: Iterable[Lane]) -> None:
        """Record that *lanes* were gone."""
        self._hear("lost", lanes)

    def _hear(self, kind: str, lanes: Iterable[Lane]) -> None:
        self._chronicle.heard.append((self._member, kind, frozenset(lanes)))


class RecordedMember:
    """A source under test, with everything it was handed."""

    def __init__(
        self, name: str, group: str, source: Source, clock: Clock, settle_in: float
    ) -> None:
        self.name = name
        self.group = group
        self.source = source
        self.inbox: list[Delivery] = []
        self.is_open = True
        self._clock = clock
        self._settle_in = settle_in

    @property
    def bodies(self) -> list[bytes | None]:
        """The bodies of everything handed out so far."""
        return [delivery.body for delivery in self.inbox]

    def poll(self, limit: int = 50, timeout: float = STEP) -> list[Delivery]:
        """Poll once; what comes is in the inbox, too."""
        got = self.source.poll(limit, timeout)
        assert len(got) <= limit, f"poll({limit}) returned {len(got)} deliveries"
        self.inbox += got
        return got

    def take(self, count: int) -> list[Delivery]:
        """Poll until *count* deliveries came, and return them."""
        got: list[Delivery] = []
        deadline = WaitDeadline(self._settle_in)
        while len(got) < count:
            deadline.check(f"{self.name} is handed {count} message(s)", [d.body for d in got])
            got += self.poll(count - len(got))
        return got

    def work(self, count: int, *, limit: int) -> None:
        """Poll and accept, *limit* at a time, until *count* messages have come in all."""
        deadline = WaitDeadline(self._settle_in)
        while len(self.inbox) < count:
            deadline.check(f"{self.name} is handed {count} message(s)", self.bodies)
            self.accept(*self.poll(limit))

    def idle(self, seconds: float) -> list[Delivery]:
        """Poll for *seconds* of the broker's clock, and return what came."""
        got: list[Delivery] = []
        deadline = WaitDeadline(self._settle_in + seconds)
        until = self._clock.monotonic() + seconds
        while (left := until - self._clock.monotonic()) > 0:
            deadline.check(f"{seconds} s pass on the broker's clock", left)
            got += self.poll(timeout=min(STEP, left))
        return got

    def accept(self, *deliveries: Delivery) -> None:
        """Accept *deliveries*."""
        self.source.accept(deliveries)

    def close(self) -> None:
        """Leave the group."""
        self.is_open = False
        self.source.close()


class WaitDeadline:
    """A bound in real time on a loop that polls."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = SYSTEM_CLOCK.monotonic() + seconds

    def check(self, what: str, last: object) -> None:
        """Raise `WaitTimeout` once the time is up."""
        if SYSTEM_CLOCK.monotonic() > self._until:
            raise WaitTimeout(what, self._seconds, last)
