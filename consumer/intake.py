"""The intake: what a delivery means to this consumer, before anything is done about it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.consumer.reader import bare
from holdfast.consumer.settings import Order
from holdfast.consumer.tiers import Ticket
from holdfast.consumer.work import LaneKey, Work
from holdfast.dlq.replay.marks import Marks, counted
from holdfast.errors import HoldfastError
from holdfast.message import REPLAY_HEADER
from holdfast.scrubbing import type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.clock import Clock
    from holdfast.consumer.delays import Delays
    from holdfast.consumer.reader import Reader
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
        reader: Reader,
        *,
        settings: Settings,
        clock: Clock,
        tally: Tally,
        has_database: bool,
    ) -> None:
        self._has_database = has_database
        self._group = group
        self._routes = routes
        self._delays = delays
        self._reader = reader
        self._settings = settings
        self._clock = clock
        self._tally = tally

    @property
    def has_tiers(self) -> bool:
        """Whether retries may wait in topics of their own."""
        return self._delays is not None and bool(self._delays.tiers)

    def sorted_out(
        self, batch: list[Delivery], source: Source
    ) -> tuple[list[Work], list[Delivery]]:
        """Return what is to be handled, and what is meant for another group.

        With a database that is found out later, by asking it for the plan.
        """
        works: list[Work] = []
        skipped: list[Delivery] = []
        for delivery in batch:
            try:
                work = self._work(delivery)
            except Exception as error:  # noqa: BLE001 - one message never ends the run
                work = self._refused(delivery, error)
            if work is None:
                skipped.append(delivery)
            elif not self._sent_back(work, source):
                works.append(work)
        self._tally.add("skipped", len(skipped))
        return works, skipped

    def _work(self, delivery: Delivery) -> Work | None:
        message, attempt, left, since = self._ticketed(delivery)
        # By the topic that it came by, alone: a header chooses no handler.
        route = self._route(delivery)
        if REPLAY_HEADER in message.headers:
            if self._has_database:  # which is asked before it runs
                marks = Marks.of(message.headers)
            else:
                marks = counted(message, delivery.lane.topic)
                if marks is not None and marks.group != self._group:
                    return None
            if marks is None:
                message = self._reader.ordinary(message, route.topic)
        if message.topic != route.topic:
            message = message.with_(topic=route.topic)
        message = self._reader.correlated(message)
        delivery.decoded = message
        return Work(
            route=route,
            message=message,
            lane_key=self._lane_key(delivery, route, message),
            delivery=delivery,
            came_by=delivery.lane.topic,
            attempt=attempt,
            failing_since=since,
            not_before=self._clock.monotonic() + left if left > 0 else 0.0,
        )

    def _refused(self, delivery: Delivery, error: Exception) -> Work:
        """Return a work that becomes a dead letter when its turn comes."""
        log.error("message %s of %s cannot be read: %s",
                  delivery.position, delivery.lane, type_name(error))  # fmt: skip
        route = self._route(delivery)
        message = bare(delivery, route.topic)
        lane_key = self._lane_key(delivery, route, message)
        return Work(
            route=route, message=message, lane_key=lane_key, delivery=delivery, refused=error
        )

    def _route(self, delivery: Delivery) -> Route:
        """Return whose messages *delivery* comes among: a handler's, its tiers' or its replays'."""
        topic = delivery.lane.topic
        if self._delays is not None:
            topic = self._delays.tiers.get(topic, topic)
        return self._routes.get(topic) or self._routes[topic.removesuffix(f".{self._group}.replay")]

    def _sent_back(self, work: Work, source: Source) -> bool:
        """Whether the broker keeps *work* until it is due; else it waits here."""
        left = work.not_before - self._clock.monotonic()
        if work.delivery is None or not self._settings.patience < left <= (source.caps.delay or 0):
            return False
        with suppress(HoldfastError):
            source.release(work.delivery, blame=False, delay=left)
            return True
        return False

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

    def _lane_key(self, delivery: Delivery, route: Route, message: Message) -> LaneKey:
        if self._settings.order is Order.LANE:
            return (*delivery.lane,)
        if message.key is None or not route.ordered:
            return (message.topic, None, message.id)
        return (message.topic, message.key)
