"""What a delivery means to this consumer, whatever it says, before anything is done about it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.consumer.intake.retry_topics import RetryHeaders
from holdfast.consumer.scheduling.work import NEW, History, LaneKey, Work
from holdfast.consumer.settings import Order
from holdfast.errors import HoldfastError
from holdfast.headers import REPLAY_GROUP, Headers, ReplayHeaders
from holdfast.message import Message, counted
from holdfast.scrubbing import type_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.intake.retry_topics import RetryTopics
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.headers import Pair
    from holdfast.ports import Delivery, Source

log = logging.getLogger("holdfast.consumer")


class MessageDecoder:
    """Turns deliveries into works: whose handler, which key, which attempt. One thread uses it."""

    def __init__(
        self,
        context: ConsumerContext,
        routes: Mapping[str, Route],
        delays: RetryTopics | None,
        reader: BodyReader,
    ) -> None:
        self._has_database = context.store is not None
        self._group = context.group
        self.routes = routes
        self._delays = delays
        self._reader = reader
        self._settings = context.settings
        self._clock = context.clock

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
        return works, skipped

    def _work(self, delivery: Delivery) -> Work | None:
        message, attempt, left, since = self._ticketed(delivery)
        # By the topic that it came by, alone: a header chooses no handler.
        route = self._route(delivery)
        if REPLAY_GROUP in message.headers:
            if self._has_database:  # which is asked before it runs
                marks = ReplayHeaders.of(message.headers)
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
            history=(
                NEW
                if attempt == 1 and since is None
                else History(attempt=attempt, failing_since=since)
            ),
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
        return self.routes.get(topic) or self.routes[topic.removesuffix(f".{self._group}.replay")]

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
        ticket, message = RetryHeaders.taken_from(message)
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


class BodyReader:
    """Gives a message its correlation, where it has none. The same one each time it is read."""

    def __init__(self, context: ConsumerContext) -> None:
        self._settings = context.settings
        self._counters = context.counters
        self._marked: set[str] = set()
        self._uncorrelated: set[str] = set()

    def correlated(self, message: Message) -> Message:
        """Start a correlation where there is none, and say so."""
        if message.correlation_id is not None or self._settings.strict:
            return message
        self._counters.add(message.topic, "uncorrelated")
        if message.topic not in self._uncorrelated:
            self._uncorrelated.add(message.topic)
            log.warning("messages of %s come without a correlation id: their own id serves as one "
                        "(strict=True refuses them)", message.topic)  # fmt: skip
        return message.with_(correlation_id=message.id)

    def ordinary(self, message: Message, topic: str) -> Message:
        """Return *message* without marks of a replay that do not count, and say so."""
        self._counters.add(topic, "unmarked")
        if topic not in self._marked:
            self._marked.add(topic)
            log.warning("message %s of %s has marks of a replay that sent no such message, and so "
                        "may others: they are handled as ordinary ones. Does a service copy the "
                        "headers of what it reads?", message.id, topic)  # fmt: skip
        return message.ordinary()

    def parked(self, origin: Delivery, topic: str) -> tuple[Message, Exception | None]:
        """Return the message of a parked *origin*, and why it cannot be handled, if so."""
        try:
            message = origin.message.ordinary()  # no replay is ever parked
            if message.correlation_id is None and not self._settings.strict:
                message = message.with_(correlation_id=message.id)  # counted when it came
        except Exception as error:  # noqa: BLE001 - whatever it is, others go on
            return bare(origin, topic), error
        return message, None


def bare(delivery: Delivery, topic: str) -> Message:
    """Return what can be kept of a *delivery* that cannot be read: a dead letter is a message.

    Its bytes are kept as they are, and those headers that are any.
    """
    try:
        return delivery.message
    except Exception:  # noqa: BLE001 - an adapter's mistake is no reason to lose it
        delivery.decoded = Message(
            id=delivery.coordinates_id(),
            topic=topic,
            payload=delivery.body,
            key=delivery.key,
            headers=_sound(delivery.headers),
            time=delivery.stored_at(),
        )
        return delivery.decoded


def _sound(pairs: Iterable[Any]) -> Headers:
    kept: list[Pair] = []
    for pair in pairs:
        with suppress(TypeError, ValueError):
            name, value = pair
            kept += Headers([(name, value)])
    return Headers.received(kept)
