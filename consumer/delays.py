"""Long waits of a consumer without a database: the broker keeps the message until its retry."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.caps import Counts
from holdfast.consumer.tiers import TIERS, Ticket, retry_topic, tier_of
from holdfast.consumer.work import Delayed, Settled, Verdict, Work
from holdfast.errors import DependencyDown, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.clock import Clock
    from holdfast.consumer.route import Route
    from holdfast.message import Message
    from holdfast.ports import Broker, Delivery, Sink

log = logging.getLogger("holdfast.consumer")
_REMEMBERED = 10_000


class Delays:
    """Finds the place for a long wait: the broker's own delay, a tier, or none.

    The broker's own delay, where it counts failures and keeps the later messages of the key
    behind the one that waits. A tier, where the handler is declared `ordered=False` or the
    message has no key: later messages of its key may pass. Otherwise the message waits in
    memory, and its key behind it.
    """

    def __init__(
        self, broker: Broker, group: str, routes: Mapping[str, Route], clock: Clock
    ) -> None:
        self._broker, self._group, self._clock = broker, group, clock
        caps = broker.caps
        self._is_native = (
            caps.delay is not None and caps.release_keeps_order and caps.counts is Counts.FAILURE
        )
        self._lock = threading.Lock()  # threads do not share a sink
        self._sink: Sink | None = None
        self._attempts: dict[str, tuple[int, float | None]] = {}
        self.tiers: dict[str, str] = (
            {}
            if self._is_native
            else {retry_topic(topic, group, tier): topic for topic in routes for tier in TIERS}
        )
        """The topics to read beside those of the handlers, and whose retries wait there."""

    def prepare(self) -> None:
        """See that the tiers exist."""
        for topic in self.tiers:
            with suppress(HoldfastError):
                self._broker.create_topic(topic)

    def postpone(self, work: Work, delay: float) -> Verdict | None:
        """Have *work* wait on the broker; None if it can only wait here.

        Returns once the broker has it for certain, so that it may be acknowledged.
        """
        if work.delivery is None:
            return None
        if self._is_native and delay <= (self._broker.caps.delay or 0.0):
            self._remember(work)
            return Delayed(delay)
        tier = retry_topic(work.route.topic, self._group, tier_of(delay))
        if tier not in self.tiers or work.key is not None:
            return None
        now, since = self._clock.now().timestamp(), work.failing_since
        if since is not None:
            since = now - (self._clock.monotonic() - since)
        self._publish(Ticket(now + delay, work.attempt, since).stamped(work.message, tier))
        return Settled()

    def attempt_of(self, delivery: Delivery, message: Message) -> tuple[int, float | None]:
        """Return which attempt at *message* comes, and its first failure, as far as is known.

        A broker that counts failures counts one for each long wait, and for a crash.
        """
        if not self._is_native:
            return 1, None
        known = self._attempts.pop(message.identity, None)
        return (delivery.count or 1, None) if known is None else known

    def close(self) -> None:
        """Let go of the sink."""
        with self._lock:
            sink, self._sink = self._sink, None
            if sink is not None:
                try:
                    sink.close()
                except HoldfastError as error:
                    log.warning("the sink of retries did not close: %s", error)

    def _remember(self, work: Work) -> None:
        if len(self._attempts) >= _REMEMBERED:
            self._attempts.pop(next(iter(self._attempts)), None)
        self._attempts[work.message.identity] = work.attempt, work.failing_since

    def _publish(self, message: Message) -> None:
        try:
            with self._lock:
                if self._sink is None:
                    self._sink = self._broker.sink()
                (result,) = self._sink.publish([message])
            if result.error is not None:
                raise result.error
        except HoldfastError as error:  # also a topic that is missing: it keeps its turn here
            raise DependencyDown(
                f"message {message.id} cannot wait in {message.topic}, it stays unacknowledged: "
                f"{error}"
            ) from error
