"""A member of a group, through confluent-kafka."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from holdfast.brokers.kafka.client_log import log_in
from holdfast.brokers.kafka.confluent.errors import translated, translation
from holdfast.brokers.kafka.driver import NULLS, Nobody, restored
from holdfast.errors import BrokerDown, ConfigurationError, UnknownTopic
from holdfast.ports import Delivery, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import Offsets, Rebalance
    from holdfast.brokers.kafka.offsets import KafkaLane
    from holdfast.clock import Clock
    from holdfast.errors import HoldfastError

_log = logging.getLogger("holdfast.brokers.kafka")
_RETRY_SECONDS = 0.05
_DRAIN = 10_000
_PASSING = frozenset((
    KafkaError.REBALANCE_IN_PROGRESS, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR, KafkaError._WAIT_COORD,
    KafkaError._IN_PROGRESS, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT,
))  # fmt: skip


class ConfluentMember:
    """A thin layer over `Consumer`."""

    def __init__(
        self,
        configs: dict[str, Any],
        topics: Sequence[str],
        rebalance: Rebalance,
        settings: KafkaSettings,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._seconds = settings.timeout
        self._rebalance = rebalance
        self._ends: dict[Lane, int] = {}
        self._commits: list[tuple[Offsets, Callable[[Offsets, HoldfastError | None], None]]] = []
        self._down: str | None = None
        self._fault: HoldfastError | None = None
        self._checked_at = clock.monotonic()
        self._log = log_in(configs, clock)
        with translated("making a Kafka consumer"):
            self._client = Consumer(
                {**configs, "error_cb": self._hear, "on_commit": self._committed}
            )
            self._client.subscribe(
                list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )

    # -- fetching --------------------------------------------------------------------

    def fetch(
        self, limit: int, timeout: float, lanes: Mapping[Lane, KafkaLane]
    ) -> list[list[Delivery]]:
        """Return what librdkafka has fetched; only for the first record does it wait."""
        client = self._client
        with translated("polling"):
            records = client.consume(limit, 0)
            if not records and timeout > 0 and (first := client.poll(timeout)) is not None:
                # One by itself: `consume` would wait until the batch is full.
                records = [first]
        runs = self._runs(records, lanes) if records else []
        if self._fault is not None and not runs:
            fault, self._fault = self._fault, None
            raise fault
        if self._down is not None and not runs:  # those may have been fetched before it fell
            self._check_connection()
        return runs

    def _runs(self, records: list[Any], lanes: Mapping[Lane, KafkaLane]) -> list[list[Delivery]]:
        runs: list[list[Delivery]] = []
        topic, partition = None, None
        add: Callable[[Delivery], None] | None = None
        for record in records:
            if (error := record.error()) is not None:
                self._note(error, record)
                continue
            if record.partition() != partition or record.topic() != topic:
                topic, partition = record.topic(), record.partition()
                state = lanes.get(Lane(topic, partition))
                if state is None:  # revoked meanwhile
                    add = None
                    continue
                run: list[Delivery] = []
                runs.append(run)
                add, lane, epoch = run.append, state.lane, state.epoch
            if add is None:
                continue
            headers = record.headers() or ()
            if headers and headers[-1][0] == NULLS:
                headers = restored(headers)
            kind, stored = record.timestamp()
            add(
                Delivery(
                    lane=lane,
                    position=record.offset(),
                    key=record.key(),
                    body=record.value(),
                    headers=headers,
                    timestamp=None if kind == TIMESTAMP_NOT_AVAILABLE else stored / 1000,
                    epoch=epoch,
                    receipt=0,
                )
            )
        return runs

    def _note(self, error: KafkaError, record: Any) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            self._ends[Lane(record.topic(), record.partition())] = record.offset()
            return
        fault = translation(error, "consuming")
        if isinstance(fault, UnknownTopic):
            fault = UnknownTopic(str(record.topic()), "it was deleted; create it again")
        if isinstance(fault, ConfigurationError):
            self._fault = fault
        else:
            _log.warning("%s", fault)

    def _hear(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.doubt(str(error))
        elif isinstance(fault := translation(error, "consuming"), ConfigurationError):
            self._fault = fault

    def doubt(self, why: str) -> None:
        """Take the servers for out of reach until one answers."""
        self._down = why
        self._log.fell()

    def _check_connection(self) -> None:
        """Ask: librdkafka says when all brokers are down, and not when one is up again."""
        now = self._clock.monotonic()
        fault = BrokerDown(f"no connection to Kafka: {self._down}")
        if now - self._checked_at <= self._seconds / 10:
            raise fault
        self._checked_at = now
        try:
            self._client.list_topics(timeout=self._seconds / 10)
        except KafkaException as error:
            raise fault from error
        self._down = None
        self._log.answered()

    # -- committing --------------------------------------------------------------------

    def commit(self, offsets: Offsets, seconds: float) -> None:
        """Commit and wait; what passes by itself is waited for, too."""
        until = self._clock.monotonic() + seconds
        while True:
            error = self._commit_once(offsets)
            if error is None:
                return
            late = self._clock.monotonic() + _RETRY_SECONDS > until
            if late or error.code() not in _PASSING:
                raise translation(error, "committing")
            self._clock.sleep(_RETRY_SECONDS)

    def _commit_once(self, offsets: Offsets) -> KafkaError | None:
        try:
            answers = self._client.commit(offsets=_parts(offsets), asynchronous=False)
        except KafkaException as error:
            fault: KafkaError = error.args[0]
            return fault
        return next((answer.error for answer in answers if answer.error is not None), None)

    def commit_soon(
        self, offsets: Offsets, done: Callable[[Offsets, HoldfastError | None], None]
    ) -> None:
        """Start a commit; librdkafka calls back from a later `consume`."""
        with translated("committing"):
            self._client.commit(offsets=_parts(offsets), asynchronous=True)
        self._commits.append((offsets, done))

    def _committed(self, error: KafkaError | None, parts: list[TopicPartition]) -> None:
        answered = {(part.topic, part.partition): part for part in parts}
        for number, (offsets, done) in enumerate(self._commits):
            if offsets.keys() == answered.keys() and all(
                answered[lane].offset == offset for lane, offset in offsets.items()
            ):
                del self._commits[number]
                fault = error or next((p.error for p in parts if p.error is not None), None)
                done(offsets, None if fault is None else translation(fault, "committing"))
                return

    # -- the group ---------------------------------------------------------------------

    def _assigned(self, _: Consumer, parts: list[TopicPartition]) -> None:
        self._rebalance.assigned(_lanes(parts))

    def _revoked(self, _: Consumer, parts: list[TopicPartition]) -> None:
        self._rebalance.revoked(self._forget(parts))

    def _lost(self, _: Consumer, parts: list[TopicPartition]) -> None:
        self._rebalance.lost(self._forget(parts))

    def _forget(self, parts: list[TopicPartition]) -> list[Lane]:
        lanes = _lanes(parts)
        for lane in lanes:
            self._ends.pop(lane, None)
        return lanes

    def pause(self, lanes: Collection[Lane]) -> None:
        """Pause natively."""
        if lanes:
            with translated("pausing"):
                self._client.pause([TopicPartition(*lane) for lane in lanes])

    def resume(self, lanes: Collection[Lane]) -> None:
        """Resume natively."""
        if lanes:
            with translated("resuming"):
                self._client.resume([TopicPartition(*lane) for lane in lanes])

    def seek(self, lane: Lane, offset: int) -> None:
        """Seek natively, once the fetcher of a fresh assignment has started."""
        until = self._clock.monotonic() + self._seconds
        self._ends.pop(lane, None)
        while True:
            try:
                self._client.seek(TopicPartition(*lane, offset))
            except KafkaException as error:
                starting = error.args[0].code() == KafkaError._STATE
                if not starting or self._clock.monotonic() > until:
                    raise translation(error.args[0], "seeking") from error
                self._clock.sleep(_RETRY_SECONDS)
            else:
                return

    def reached(self, lane: Lane) -> int | None:
        """Return where the end of the lane was last seen."""
        return self._ends.get(lane)

    def is_joined(self) -> bool:
        """Whether the coordinator has given this member its name."""
        return bool(self._client.memberid())

    def abandon(self) -> None:
        """Close the client in a thread of its own: it may hang there."""
        self._rebalance = Nobody()
        self._commits.clear()
        threading.Thread(target=self.close, name="holdfast-kafka-abandon", daemon=True).start()

    def close(self) -> None:
        """Leave the group and close the client, within the bound.

        librdkafka waits for ever when it closes with a rebalance unheard, so what is there
        is heard first; should one come in between, the client is left to itself.
        """
        with suppress(KafkaException):
            self._client.pause(self._client.assignment())
            while self._client.consume(_DRAIN, 0):
                pass
        closing = threading.Thread(
            target=self._client.close, name="holdfast-kafka-close", daemon=True
        )
        closing.start()
        closing.join(self._seconds)
        if closing.is_alive():
            _log.error("the Kafka client does not close within %g s and is left", self._seconds)


def _lanes(parts: list[TopicPartition]) -> list[Lane]:
    return [Lane(part.topic, part.partition) for part in parts]


def _parts(offsets: Offsets) -> list[TopicPartition]:
    return [TopicPartition(*lane, offset) for lane, offset in offsets.items()]
