"""Long waits of a consumer without a database: the broker keeps the message until its retry.

Retry tiers: topics in which messages wait on brokers that cannot delay them themselves.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.consumer.scheduling.work import Ack, Disposition, Redeliver, Work
from holdfast.errors import DependencyDown, HoldfastError
from holdfast.ports import Counts
from holdfast.tracing.messaging import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.headers import Pair
    from holdfast.message import Message
    from holdfast.ports import Broker, Delivery, Sink


TIERS: Final = {"5s": 5.0, "1m": 60.0, "10m": 600.0, "1h": 3600.0}
"""The tiers by name, and the longest wait of each; the last one also takes what is longer."""

_DUE, _ATTEMPT, _ID, _SINCE = _HEADERS = (
    "x-retry-due",
    "x-retry-attempt",
    "x-retry-id",
    "x-retry-since",
)


def retry_topic(topic: str, group: str, tier: str) -> str:
    """Return the name of the topic in which retries of *topic* by *group* wait."""
    return f"{topic}.{group}.retry.{tier}"


def tier_of(delay: float) -> str:
    """Return the tier for a wait of *delay* seconds."""
    return next((name for name, longest in TIERS.items() if delay <= longest), "1h")


@dataclass(frozen=True, slots=True)
class RetryHeaders:
    """What travels with a message that waits for its retry."""

    due: float
    """When it is to be tried again, in POSIX seconds."""
    attempt: int
    """Which attempt that will be: the counter goes on where it stood."""
    since: float | None = None
    """When it failed first, in POSIX seconds: a deadline bounds all its waits together."""

    def stamped(self, message: Message, topic: str) -> Message:
        """Return *message* with this ticket, on its way to *topic*.

        It travels under an id of its own for each attempt, and its id in the ticket: a broker
        that drops what was published twice would else drop the second wait, and the message.
        """
        own = [
            (_DUE, f"{self.due:.3f}".encode()),
            (_ATTEMPT, str(self.attempt).encode()),
            (_ID, message.id.encode()),
            *([] if self.since is None else [(_SINCE, f"{self.since:.3f}".encode())]),
        ]
        headers = type(message.headers)([*_bare(message), *own])
        return message.with_(topic=topic, headers=headers, id=f"{message.id}~{self.attempt}")

    @classmethod
    def taken_from(cls, message: Message) -> tuple[Self, Message]:
        """Return the ticket and *message* as it was; an unreadable one is due now."""
        found = dict(message.headers)
        try:
            since = found.get(_SINCE)
            ticket = cls(
                float(found[_DUE] or b""),
                max(1, int(found[_ATTEMPT] or b"")),
                None if since is None else float(since),
            )
            own_id = (found[_ID] or b"").decode()
        except (KeyError, ValueError):
            ticket, own_id = cls(0.0, 1), ""
        headers = type(message.headers)(_bare(message))
        return ticket, message.with_(headers=headers, id=own_id or message.id)


def _bare(message: Message) -> list[Pair]:
    return [pair for pair in message.headers if pair[0] not in _HEADERS]


log = logging.getLogger("holdfast.consumer")
_REMEMBERED = 10_000


class RetryTopics:
    """Finds the place for a long wait: the broker's own delay, a tier, or none.

    The broker's own delay, where it counts failures and keeps the later messages of the key
    behind the one that waits. A tier, where the handler is declared `ordered=False` or the
    message has no key: later messages of its key may pass. Otherwise the message waits in
    memory, and its key behind it.
    """

    def __init__(
        self, context: ConsumerContext, broker: Broker, routes: Mapping[str, Route]
    ) -> None:
        self._broker, self._group, self._clock = broker, context.group, context.clock
        self._system = context.system
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
            else {
                retry_topic(topic, context.group, tier): topic for topic in routes for tier in TIERS
            }
        )
        """The topics to read beside those of the handlers, and whose retries wait there."""

    def prepare(self) -> None:
        """See that the tiers exist."""
        for topic in self.tiers:
            with suppress(HoldfastError):
                self._broker.create_topic(topic)

    def postpone(self, work: Work, delay: float) -> Disposition | None:
        """Have *work* wait on the broker; None if it can only wait here.

        Returns once the broker has it for certain, so that it may be acknowledged.
        """
        if work.delivery is None:
            return None
        if self._is_native and delay <= (self._broker.caps.delay or 0.0):
            self._remember(work)
            return Redeliver(delay)
        tier = retry_topic(work.route.topic, self._group, tier_of(delay))
        if tier not in self.tiers or work.key is not None:
            return None
        now, history = self._clock.now().timestamp(), work.history
        since = history.failing_since
        if since is not None:
            since = now - (self._clock.monotonic() - since)
        self._publish(RetryHeaders(now + delay, history.attempt, since).stamped(work.message, tier))
        return Ack()

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
        self._attempts[work.message.identity] = work.history.attempt, work.history.failing_since

    def _publish(self, message: Message) -> None:
        try:
            with self._lock:
                if self._sink is None:
                    self._sink = self._broker.sink()
                sink = self._sink
                (result,) = counted(self._system, [message], lambda: sink.publish([message]))
            if result.error is not None:
                raise result.error
        except HoldfastError as error:  # also a topic that is missing: it keeps its turn here
            raise DependencyDown(
                f"message {message.id} cannot wait in {message.topic}, it stays unacknowledged: "
                f"{error}"
            ) from error
