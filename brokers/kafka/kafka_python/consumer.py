"""A member of a group, through kafka-python."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import Fetcher
from kafka.consumer.subscription_state import (
    AsyncConsumerRebalanceListener,
    TopicPartitionState,
)
from kafka.errors import KafkaError, RebalanceInProgressError
from kafka.structs import OffsetAndMetadata

from holdfast.brokers.kafka.driver import NULLS, Nobody, Rebalancing, restored
from holdfast.brokers.kafka.kafka_python.admin import connected
from holdfast.brokers.kafka.kafka_python.errors import translated, translation
from holdfast.brokers.kafka.kafka_python.network import CallerLoop, Network
from holdfast.errors import BrokerDown
from holdfast.ports import Delivery, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.client_log import ClientLog
    from holdfast.brokers.kafka.driver import Offsets, Rebalance
    from holdfast.brokers.kafka.offsets import KafkaLane
    from holdfast.clock import Clock
    from holdfast.errors import HoldfastError

_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.005
_SILENT = 3
"""How many times the timeout the client's IO thread may be silent: all it does has a timeout."""


class KafkaPythonMember:
    """A thin layer over `KafkaConsumer`."""

    def __init__(
        self,
        configs: Mapping[str, Any],
        topics: Sequence[str],
        rebalance: Rebalance,
        settings: KafkaSettings,
        clock: Clock,
        log: ClientLog,
    ) -> None:
        self._clock = clock
        self._log = log
        self._patience = settings.timeout
        self._network = Network(log, CallerLoop, patience=_SILENT * settings.timeout)
        self._whole_at = self._fetched_at = clock.monotonic()
        self._down: str | None = None
        self._down_since = 0.0
        self._hear = _Hear(self._network, rebalance, self._forget)
        self._client: Any = connected(KafkaConsumer, configs, self._network)
        fetcher = self._client._fetcher
        fetcher.PartitionRecords = _Records
        self._heed, fetcher._handle_fetch_response = fetcher._handle_fetch_response, self._answered
        with translated("subscribing"):
            self._client.subscribe(topics, listener=self._hear)
        self._learn(topics)

    def _learn(self, topics: Sequence[str]) -> None:
        """Wait for the partitions of *topics*: a leader that knows none assigns none."""
        until = self._clock.monotonic() + self._patience
        known = self._client._cluster.partitions_for_topic
        while not all(known(topic) for topic in topics) and self._clock.monotonic() < until:
            self._clock.sleep(_LOOK_SECONDS)

    def _forget(self, parts: Iterable[Any]) -> None:
        """Make the client look up where the group is in *parts*, which just came.

        It keeps its position in those that it had before, behind what was handed out and
        not settled: those messages would be skipped, and the next commit would lose them.
        """
        known = self._client._subscription.assignment
        for part in parts:
            if part in known:
                known[part] = TopicPartitionState()

    def fetch(
        self, limit: int, timeout: float, lanes: Mapping[Lane, KafkaLane]
    ) -> list[list[Delivery]]:
        """Return what the client has, as runs of one lane each."""
        self._keep_join()
        self._unpark()
        try:
            with translated("polling"):
                records = self._client.poll(timeout_ms=int(timeout * 1000), max_records=limit)
        except BrokerDown as error:
            self.doubt(str(error))
            raise
        if not records:
            self._check_connection()
            return []
        return [
            [_delivery(record, state) for record in batch]
            for part, batch in records.items()
            if (state := lanes.get(part)) is not None
        ]

    def _keep_join(self) -> None:
        """Let a join that a short poll did not see the end of go on.

        kafka-python starts anew when the answer came between two polls, for ever if polls
        are short. It forgets the join altogether when new metadata was its reason and that
        passed, as while a server restarts: it would hold nothing, and not even beat, for good.
        """
        coordinator = self._client._coordinator
        task = coordinator._join_task
        if task is not None or coordinator.rejoining:
            coordinator.request_rejoin()
        if task is not None and not isinstance(task, _Join):
            coordinator._join_task = _Join(task)

    def _unpark(self) -> None:
        """Make room for records set aside while their partition was paused.

        kafka-python takes them up again only where it holds nothing, and takes an emptied
        batch for something: a resumed partition could stay silent for ever.
        """
        fetcher = self._client._fetcher
        if fetcher._paused_partition_records and not fetcher._next_partition_records:
            fetcher._next_partition_records = None

    def _answered(self, *answer: Any) -> None:
        """Note, in the IO thread, that a server answered a fetch; it may have had nothing."""
        self._fetched_at = self._clock.monotonic()
        self._heed(*answer)

    def _check_connection(self) -> None:
        """Say when the servers are out of reach: the client tries on and is silent about it.

        Once they are, only an answer to a fetch or a heartbeat shows that they are back: a
        `poll` also returns, without a word, while nobody listens.
        """
        now = self._clock.monotonic()
        heartbeat = self._client._coordinator.heartbeat
        heard_at = max(self._fetched_at, heartbeat.last_receive)
        if self._down is not None:
            if heard_at <= self._down_since:
                raise BrokerDown(f"no fetch and no heartbeat is answered: {self._down}")
            self._down = None
            self._log.answered()
        if not self._network.is_cut_off:
            self._whole_at = now
        elif now - self._whole_at > self._patience:
            self.doubt(f"no connection to Kafka for {self._patience:g} s")
        longest = max(self._patience, 2e-3 * heartbeat.config["heartbeat_interval_ms"])
        if self.is_joined() and now - max(heard_at, heartbeat.last_reset) > longest:
            self.doubt(f"no answer for {longest:g} s")
        if self._down is not None:
            raise BrokerDown(self._down)

    def doubt(self, why: str) -> None:
        """Take the servers for out of reach until one answers a fetch or a heartbeat."""
        if self._down is None:
            self._down, self._down_since = why, self._clock.monotonic()
            self._log.fell()

    def is_joined(self) -> bool:
        """Whether the client holds itself for a member."""
        return bool(self._client._coordinator.stable())

    def commit(self, offsets: Offsets, seconds: float) -> None:
        """Commit and wait."""
        with translated("committing"):
            try:
                self._client.commit(_native(offsets), timeout_ms=int(seconds * 1000))
            except RebalanceInProgressError as error:
                raise Rebalancing("committing: the group is rebalancing, poll first") from error

    def commit_soon(
        self, offsets: Offsets, done: Callable[[Offsets, HoldfastError | None], None]
    ) -> None:
        """Start a commit; the client calls back from its `poll`."""

        def finished(_: Any, answer: Any) -> None:
            failed = isinstance(answer, Exception)
            done(offsets, translation(answer, "committing") if failed else None)

        with translated("committing"):
            self._client.commit_async(_native(offsets), callback=finished)

    def pause(self, lanes: Collection[Lane]) -> None:
        """Pause natively."""
        self._client.pause(*_parts(lanes))

    def resume(self, lanes: Collection[Lane]) -> None:
        """Resume natively."""
        self._client.resume(*_parts(lanes))

    def seek(self, lane: Lane, offset: int) -> None:
        """Seek natively."""
        self._client.seek(TopicPartition(*lane), offset)

    def reached(self, lane: Lane) -> int | None:
        """Return the client's own position."""
        try:
            position: int | None = self._client.position(TopicPartition(*lane), timeout_ms=0)
        except KafkaError:
            return None
        return position

    def abandon(self) -> None:
        """Close the client in a thread of its own: it may hang there."""
        self._hear.rebalance = Nobody()

        def close() -> None:
            with suppress(Exception):
                self.close()

        threading.Thread(target=close, name="holdfast-kafka-abandon", daemon=True).start()

    def close(self) -> None:
        """Leave the group and close the client."""
        with translated("closing"):
            self._client.close(autocommit=False, timeout_ms=int(_CLOSE_SECONDS * 1000))


class _Records(Fetcher.PartitionRecords):  # type: ignore[misc]
    """Records of one partition, given up when one of them cannot be read.

    kafka-python would go on to ask for more of them, and as none come it would ask for ever,
    within one `poll`. What is given up is fetched again.
    """

    def take(self, n: int | None = None) -> Any:
        """Return the next *n*."""
        try:
            return super().take(n)
        except BaseException:
            self.drain()
            raise


class _Join:
    """A join under way that never looks finished, so that its answer is waited for and used."""

    is_done = False

    def __init__(self, task: Any) -> None:
        self.add_callback = task.add_callback
        self.add_errback = task.add_errback
        self._task = task

    def __await__(self) -> Any:
        return self._task.__await__()


class _Hear(AsyncConsumerRebalanceListener):  # type: ignore[misc]
    """Brings news from the IO thread to the polling one."""

    def __init__(
        self,
        network: Network,
        rebalance: Rebalance,
        forget: Callable[[Iterable[Any]], None],
    ) -> None:
        self._network = network
        self.rebalance = rebalance
        self._forget = forget

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        """Pass it on, with nothing left of what the client knew of *assigned* before."""
        self._forget(assigned)
        await self._network.loop.in_caller(lambda: self.rebalance.assigned(_lanes(assigned)))

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Pass it on; the membership stands until this returns."""
        await self._network.loop.in_caller(lambda: self.rebalance.revoked(_lanes(revoked)))

    async def on_partitions_lost(self, lost: Iterable[Any]) -> None:
        """Pass it on as what it is: by default kafka-python would say revoked."""
        await self._network.loop.in_caller(lambda: self.rebalance.lost(_lanes(lost)))


def _lanes(parts: Iterable[Any]) -> list[Lane]:
    return [Lane(*part) for part in parts]


def _parts(lanes: Collection[Lane]) -> list[Any]:
    return [TopicPartition(*lane) for lane in lanes]


def _native(offsets: Offsets) -> dict[Any, Any]:
    return {
        TopicPartition(*lane): OffsetAndMetadata(offset, "", -1) for lane, offset in offsets.items()
    }


def _delivery(record: Any, state: KafkaLane) -> Delivery:
    stored, headers = record.timestamp, record.headers
    if headers and headers[-1][0] == NULLS:
        headers = restored(headers)
    return Delivery(
        lane=state.lane,
        position=record.offset,
        key=record.key,
        body=record.value,
        headers=headers,
        timestamp=None if stored is None or stored < 0 else stored / 1000,
        epoch=state.epoch,
        receipt=0,
    )
