"""The intake: what a delivery means to this consumer, before anything is done about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.consumer.settings import Order
from holdfast.consumer.tiers import Ticket
from holdfast.consumer.work import LaneKey, Work
from holdfast.dlq.replay.marks import Marks, is_for, original

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.clock import Clock
    from holdfast.consumer.delays import Delays
    from holdfast.consumer.route import Route
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally
    from holdfast.message import Message
    from holdfast.ports import Delivery, Source

log = logging.getLogger("holdfast.consumer")


class Intake:
    """Turns deliveries into works: whose handler, which key, which attempt. One thread uses it."""

    def __init__(
        self,
        group: str,
        routes: Mapping[str, Route],
        delays: Delays | None,
        *,
        settings: Settings,
        clock: Clock,
        tally: Tally,
    ) -> None:
        self._group = group
        self._routes = routes
        self._delays = delays
        self._settings = settings
        self._clock = clock
        self._tally = tally
        self._uncorrelated: set[str] = set()

    @property
    def has_tiers(self) -> bool:
        """Whether retries may wait in topics of their own."""
        return self._delays is not None and bool(self._delays.tiers)

    def sorted_out(
        self, batch: list[Delivery], source: Source
    ) -> tuple[list[Work], list[Delivery]]:
        """Return what is to be handled, and what is meant for another group."""
        works: list[Work] = []
        skipped: list[Delivery] = []
        for delivery in batch:
            if not is_for(delivery.message, self._group):
                skipped.append(delivery)
            elif (work := self._work(delivery, source)) is not None:
                works.append(work)
        self._tally.add("skipped", len(skipped))
        return works, skipped

    def _work(self, delivery: Delivery, source: Source) -> Work | None:
        message, attempt, left, since = self._ticketed(delivery)
        if left > self._settings.patience and left <= (source.caps.delay or 0.0):
            source.release(delivery, blame=False, delay=left)  # the broker keeps it until then
            return None
        if message.is_replay and Marks.of(message.headers) is not None:
            message = original(message)
        route = self._routes.get(message.topic) or self._routes.get(delivery.lane.topic)
        if route is None:
            topic = delivery.lane.topic.removesuffix(f".{self._group}.replay")
            route = self._routes[topic]
        if message.topic != route.topic:
            message = message.with_(topic=route.topic)
        if message.correlation_id is None and not self._settings.strict:
            message = self._correlated(message)
        delivery.decoded = message
        return Work(
            route=route,
            message=message,
            lane_key=self._lane_key(delivery, route, message),
            delivery=delivery,
            attempt=attempt,
            failing_since=since,
            not_before=self._clock.monotonic() + left if left > 0 else 0.0,
        )

    def _ticketed(self, delivery: Delivery) -> tuple[Message, int, float, float | None]:
        """Return the message, which attempt comes, the seconds until then, and its first failure.

        That is on the monotonic clock, None if it has not failed or nobody knows.
        """
        message, delays = delivery.message, self._delays
        if delays is None:
            return message, 1, 0.0, None
        topic = delays.tiers.get(delivery.lane.topic)
        if topic is None:
            attempt, since = delays.attempt_of(delivery, message)
            return message, attempt, 0.0, since
        ticket, message = Ticket.taken_from(message)
        now, since = self._clock.now().timestamp(), ticket.since
        if since is not None:
            since = self._clock.monotonic() - (now - since)
        return message.with_(topic=topic), ticket.attempt, ticket.due - now, since

    def _correlated(self, message: Message) -> Message:
        """Start a correlation where there is none, and say so."""
        self._tally.add("uncorrelated")
        if message.topic not in self._uncorrelated:
            self._uncorrelated.add(message.topic)
            log.warning("messages of %s come without a correlation id: their own id serves as one "
                        "(strict=True refuses them)", message.topic)  # fmt: skip
        return message.with_(correlation_id=message.id)

    def _lane_key(self, delivery: Delivery, route: Route, message: Message) -> LaneKey:
        if self._settings.order is Order.LANE:
            return (*delivery.lane,)
        if message.key is None or not route.ordered:
            return (message.topic, None, message.id)
        return (message.topic, message.key)
