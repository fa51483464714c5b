"""The lanes that a member owns, and how they come and go."""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING

from holdfast.brokers.rabbitmq.control import Control
from holdfast.brokers.rabbitmq.failures import NotFound
from holdfast.brokers.rabbitmq.inlet import Inlet, Stage
from holdfast.brokers.rabbitmq.membership import Membership
from holdfast.brokers.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.brokers.rabbitmq.link import Link
    from holdfast.brokers.rabbitmq.settings import RabbitSettings
    from holdfast.clock import Clock, Randomness
    from holdfast.ports import Lane, Listener

_log = logging.getLogger("holdfast.brokers.rabbitmq")
_epochs = itertools.count(1)


class Assignment:
    """What one connection holds in the group; it ends with the connection.

    The listener is told in the thread of whoever polls: of a lane that comes once the
    claim is granted, of one that is given up before its channel is closed.
    """

    def __init__(
        self,
        link: Link,
        group: str,
        topics: Iterable[str],
        settings: RabbitSettings,
        clock: Clock,
        randomness: Randomness,
        listener: Listener | None,
        notify: Callable[[], None],
    ) -> None:
        self.link = link
        self.topology = Topology(link, settings, clock)
        self.owned: dict[Lane, Inlet] = {}
        self.has_lost_settles = False
        """Whether lanes have gone before what was settled in them was safe."""
        self._group = group
        self._settings = settings
        self._clock = clock
        self._random = randomness
        self._listener = listener
        self._notify = notify
        self._claims: dict[Lane, Inlet] = {}
        self._membership: Membership | None = None
        # At once, not with the first poll: what is published from now on is for this group.
        self._lanes: Mapping[str, int] = self.topology.create_group(topics, group)

    def attend(self) -> float:
        """Keep up with the group; return how many seconds nothing needs to be done."""
        self._notice_losses()
        for inlet in self.owned.values():
            if inlet.deferred:
                inlet.accept_deferred(self._clock.monotonic())
        if self._claims:
            self._notice_claims()
        membership = self._membership or self._join()
        if not self._claims and (decision := membership.survey(self.owned)) is not None:
            if decision.give:
                self.give_up(decision.give)
            for lane in decision.take:
                self._claims[lane] = Inlet(
                    self.link,
                    lane,
                    self._group,
                    next(_epochs),
                    self._settings,
                    self._notify,
                )
        return membership.patience

    def _join(self) -> Membership:
        self._membership = membership = Membership(
            # A channel of its own: where others ask for what may be missing, answers get lost.
            Control(self.link, self._clock, self._settings.patience),
            self._group,
            self._lanes,
            self._clock,
            self._random,
            self._notify,
        )
        return membership

    def _notice_claims(self) -> None:
        decided = [inlet for inlet in self._claims.values() if inlet.stage is not Stage.ASKED]
        for inlet in decided:
            del self._claims[inlet.lane]
        for inlet in decided:
            if inlet.failure is not None:
                _log.warning("cannot claim %s: %s", inlet.lane, inlet.failure)
        if any(isinstance(inlet.failure, NotFound) for inlet in decided):
            self.topology.create_group(self._lanes, self._group)  # somebody has deleted a queue
        granted = {inlet.lane: inlet for inlet in decided if inlet.stage is Stage.OWNED}
        self.owned.update(granted)
        if granted and self._listener is not None:
            self._listener.assigned(sorted(granted))

    def _notice_losses(self) -> None:
        gone = [lane for lane, inlet in self.owned.items() if inlet.stage is Stage.GONE]
        for lane in gone:
            _log.warning("lost %s of group %s: %s", lane, self._group, self.owned[lane].failure)
        if gone:
            self.lose(gone)

    def lose(self, lanes: Iterable[Lane]) -> None:
        """Drop *lanes*, which have gone already."""
        lanes = sorted(lanes)
        for lane in lanes:
            self.has_lost_settles |= self.owned.pop(lane).is_unflushed
        if lanes and self._listener is not None:
            self._listener.lost(lanes)

    def give_up(self, lanes: Iterable[Lane]) -> None:
        """Let the listener settle, make that safe, and leave the rest of *lanes* to others."""
        lanes = sorted(lanes)
        try:
            if lanes and self._listener is not None:
                self._listener.revoked(lanes)
            for lane in lanes:
                self.owned[lane].accept_deferred(math.inf)
            self.flush(lanes)
        finally:
            for lane in lanes:
                self.owned.pop(lane).close()

    def flush(self, lanes: Iterable[Lane]) -> None:
        """Return once all that was settled in *lanes* is safe on the broker."""
        barriers = [
            inlet.barrier()
            for inlet in (self.owned.get(lane) for lane in lanes)
            if inlet is not None and inlet.is_unflushed
        ]
        for barrier in barriers:
            barrier.get(self._clock, self._settings.patience, "whether accepts are safe")
