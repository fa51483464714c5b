"""A member of a consumer group on Kafka."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from holdfast.brokers.groups.member import OwnedLanes
from holdfast.brokers.groups.source import GroupSource
from holdfast.brokers.kafka.driver import Rebalancing
from holdfast.brokers.kafka.offsets import DRAINED, KafkaLane, OffsetTracker
from holdfast.brokers.kafka.standstill import StandstillDetector
from holdfast.clock import seconds_since_epoch
from holdfast.errors import BrokerDown, ConfigurationError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.cluster import Cluster
    from holdfast.brokers.kafka.driver import GroupClient, OffsetRange, Rebalance
    from holdfast.clock import Clock
    from holdfast.ports import Caps, Delivery, Lane, Listener, Position

_log = logging.getLogger("holdfast.brokers.kafka")
_SLICE = 0.1  # how long one wait in the client may last: neither client can be woken
_SHORT_SLICE = 0.01  # while a lane is paused: it is to go on as soon as enough of it is done


class ListenerGuard:
    """Keeps what a listener raises, for `check`: client libraries log or wrap what callbacks raise.

    The hand-over goes on meanwhile, for the client takes no refusal.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._failure: BaseException | None = None

    def assigned(self, lanes: Iterable[Lane]) -> None:
        """Pass on that *lanes* are ours."""
        self._tell(self._listener.assigned, lanes)

    def revoked(self, lanes: Iterable[Lane]) -> None:
        """Pass on that *lanes* are about to leave."""
        self._tell(self._listener.revoked, lanes)

    def lost(self, lanes: Iterable[Lane]) -> None:
        """Pass on that *lanes* have gone."""
        self._tell(self._listener.lost, lanes)

    def failure(self) -> BaseException | None:
        """Return what the listener raised since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def _tell(self, tell: Callable[[Iterable[Lane]], None], lanes: Iterable[Lane]) -> None:
        try:
            tell(lanes)
        except BaseException as error:  # noqa: BLE001 - raised again outside the client
            self._failure = error


class KafkaSource(GroupSource[KafkaLane]):
    """Hands out the records of the partitions it owns.

    A released message goes into a local backlog, ahead of everything newer of its lane, so
    no later message of its key overtakes it; after a crash or a rebalance the broker hands
    out everything from the committed offset on.

    What comes of a paused lane waits in its backlog, and only one that is full is paused in the
    client: that throws away what it has fetched, and after a resume nothing comes until its
    question about the other partitions is answered, half a second later.
    """

    def __init__(
        self,
        join: Callable[[Rebalance], GroupClient],
        cluster: Cluster,
        group: str,
        caps: Caps,
        clock: Clock,
        settings: KafkaSettings,
        listener: Listener | None,
        topic: str = "",
    ) -> None:
        self._listener = None if listener is None else ListenerGuard(listener)
        super().__init__(OwnedLanes(self._listener))
        self.caps = caps
        self._cluster = cluster
        self._group = group
        self._clock = clock
        self._books = OffsetTracker(self._lanes, clock, settings)
        self._came = False  # whether lanes came that the client does not know to be paused
        self._wake_asked = False
        self._timeout = settings.timeout
        self._topic = topic
        self._join = join
        self._standstill = StandstillDetector(cluster, clock, settings.renew_after)
        self._member = join(self)

    # -- handing out -----------------------------------------------------------------

    def poll(self, limit: int, timeout: float) -> list[Delivery]:
        """Return at most *limit* deliveries, released ones first, each lane in order."""
        self._open()
        until = self._clock.monotonic() + timeout
        while True:
            self._books.commit_if_due(self._member)
            left = max(until - self._clock.monotonic(), 0.0)
            going = [state for lane, state in self._lanes.items() if lane not in self._paused]
            ready = sum([len(state.backlog) for state in going])
            is_held = bool(self._lanes) and not going
            slice_ = min(left, _SLICE if len(going) == len(self._lanes) else _SHORT_SLICE)
            # Asked even when the backlog fills the batch: it keeps the membership alive.
            room = 1 if is_held else max(limit - ready, 1)
            fetched = self._fetched(room, 0.0 if is_held or ready or self._wake_asked else slice_)
            self._after_rebalance(fetched)
            batch = self._from_backlog(limit)
            self._admit(fetched, limit, batch)
            if batch or left <= 0 or self._wake_asked:
                self._wake_asked = False
                return batch
            if is_held:
                self._clock.sleep(slice_)

    def _fetched(self, limit: int, wait: float) -> list[list[Delivery]]:
        """Return what the client has; one that stands still is replaced."""
        try:
            fetched = self._member.fetch(limit, wait, self._lanes)
        except BrokerDown as error:
            if self._standstill.is_deaf(self._topic):
                self._renew(f"{error}; others reach it")
            raise
        reason = self._standstill.reason(self._member, self._lanes, self._paused)
        if reason is None:
            return fetched
        self._renew(reason)
        return []

    def _renew(self, why: str) -> None:
        """Join the group by a new client; what the old one had is not ours any more."""
        _log.error("the Kafka client stands still and is made anew: %s", why)
        old, self._member = self._member, self._join(self)
        old.abandon()
        self._standstill.reset()
        self.lost(list(self._lanes))

    def wake(self) -> None:
        """Make a waiting `poll` return, within a tenth of a second."""
        self._wake_asked = True

    def _from_backlog(self, limit: int) -> list[Delivery]:
        batch: list[Delivery] = []
        for state in self._lanes.values():
            if state.backlog and state.lane not in self._paused:
                batch += state.relaunch(limit - len(batch))
                if state.choked and len(state.backlog) <= DRAINED:
                    self._member.resume([state.lane])
                    state.choked = False
        return batch

    def _admit(self, runs: list[list[Delivery]], limit: int, batch: list[Delivery]) -> None:
        """Hand out what was fetched, or keep it where its lane is paused or the batch is full.

        The backlog went first: where some of it is left, the batch is full.
        """
        now = self._clock.monotonic() if runs else 0.0
        for run in runs:
            lane = run[0].lane
            state = self._lanes.get(lane)
            if state is None or state.epoch != run[0].epoch:
                continue  # revoked while it was fetched; it comes again
            state.moved_at = now
            if lane in self._paused or len(batch) + len(run) > limit:
                state.backlog += run
                if not state.choked and state.is_full:
                    self._member.pause([lane])
                    state.choked = True
            else:
                state.launch(run)
                batch += run

    def _after_rebalance(self, fetched: list[list[Delivery]]) -> None:
        """Set the pauses of what came, and raise what the listener raised inside the client."""
        if self._came:
            # Both ways: librdkafka keeps a pause while the lane is away, kafka-python may not.
            shut = {lane for lane, state in self._lanes.items() if state.choked}
            self._member.resume(self._lanes.keys() - shut)
            self._member.pause(shut)
            self._came = False
        if (failure := self._raised()) is not None:
            self._admit(fetched, 0, [])  # kept for the next poll
            raise failure

    def _raised(self) -> BaseException | None:
        return None if self._listener is None else self._listener.failure()

    # -- settling --------------------------------------------------------------------

    def accept(self, deliveries: Sequence[Delivery]) -> None:
        """Settle *deliveries*; a commit follows within `commit_every`, at `flush` or `close`."""
        self._open()
        self._books.settle(deliveries)

    def reject(self, delivery: Delivery) -> None:
        """Settle *delivery* as refused: Kafka keeps no dead letters of its own."""
        self.accept([delivery])

    def release(self, delivery: Delivery, *, blame: bool, delay: float | None = None) -> None:
        """Hand *delivery* out again, ahead of everything newer of its lane."""
        self._open()
        if delay is not None and delay > 0:
            raise Unsupported("delay a release", "Kafka", "park the message and release it later")
        self._books.put_back(delivery)

    def extend(self, delivery: Delivery, seconds: float) -> None:
        """Refused: a delivery stays with its owner for as long as the owner polls."""
        raise Unsupported("extend a lease", "Kafka", "deliveries stay while their member polls")

    def flush(self) -> None:
        """Commit the watermark of every lane and return once the broker has it."""
        self._open()
        try:
            self._books.commit(self._member, self._lanes.values())
        except Rebalancing:
            raise
        except BrokerDown as error:
            self._member.doubt(str(error))
            raise

    # -- the group, heard of inside the client's calls ---------------------------------

    def assigned(self, lanes: Collection[Lane]) -> None:
        """Start to keep the books of *lanes*, under a new epoch each."""
        new = sorted(lane for lane in lanes if lane not in self._lanes)
        for lane in new:
            self._books.open(lane)
        self._came = True
        self._owned.announce()

    def revoked(self, lanes: Collection[Lane]) -> None:
        """Let the listener settle, commit the watermarks, and forget *lanes*."""
        ours = sorted(lane for lane in lanes if lane in self._lanes)
        self._owned.revoke(ours)
        try:
            self._books.commit(self._member, [self._lanes[lane] for lane in ours])
        except BrokerDown as error:
            # The lanes leave anyway: whoever gets them starts at the last commit.
            _log.warning("no commit before %s left, their messages come again: %s", ours, error)
        self._owned.remove(ours)

    def lost(self, lanes: Collection[Lane]) -> None:
        """Forget *lanes* without a commit: they belong to somebody else already."""
        self._owned.lose(lanes)

    def lag(self) -> Mapping[Lane, int]:
        """Return what each owned lane holds and this member has not settled.

        Gaps that no message fills (compacted records, markers) count until passed.
        """
        try:
            extents = self._cluster.extents(self._group, self._lanes)
        except BrokerDown as error:
            self._member.doubt(str(error))  # or the next poll would look like an answer
            raise
        return {lane: self._left(state, extents[lane]) for lane, state in self._lanes.items()}

    def _left(self, state: KafkaLane, extent: OffsetRange) -> int:
        """Return what is not settled of a lane that reaches as far as *extent*."""
        reached = None if state.backlog else self._member.reached(state.lane)
        if reached is None and state.next is None:
            return extent.lag
        return max(extent.end - max(reached or 0, state.next or 0), 0) + len(state.open)

    def seek(
        self, lane: Lane, *, offset: Position | None = None, time: datetime | None = None
    ) -> None:
        """Move the group in *lane*; what is handed out now becomes stale."""
        self._open()
        choked = self._sought(lane, offset, time).choked
        extent = self._cluster.extents(self._group, [lane])[lane]
        if time is not None:
            found = self._cluster.at_time(lane, int(seconds_since_epoch(time) * 1000))
            offset = extent.end if found is None else found
        if not isinstance(offset, int) or not 0 <= offset <= extent.end:
            raise ConfigurationError(
                f"cannot seek to offset {offset!r}: {lane} ends at {extent.end}"
            )
        offset = max(offset, extent.first)
        self._member.commit({lane: offset}, self._timeout)
        self._member.seek(lane, offset)
        self._books.open(lane, at=offset)
        if choked:
            self._member.resume([lane])

    def close(self) -> None:
        """Leave the group at once; what is settled is committed when this returns."""
        if self._is_closed:
            return
        try:
            self._owned.revoke(self._lanes)
            if (failure := self._raised()) is not None:
                raise failure
            self._commit_at_last()
        finally:
            self._is_closed = True
            self._owned.remove(
                list(self._lanes)
            )  # so that the client's own farewell tells nobody again
            self._member.close()

    def _commit_at_last(self) -> None:
        """Commit, if need be after a rebalance that is under way; what is fetched is dropped."""
        until = self._clock.monotonic() + self._timeout
        while True:
            try:
                self._books.commit(self._member, self._lanes.values())
            except Rebalancing:
                if self._clock.monotonic() > until:
                    raise
                self._member.fetch(1, _SLICE, self._lanes)
            else:
                return
