"""A transactional sink per leased shard: the broker itself turns a former owner away."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    DependencyDown,
    FencedOff,
    Transient,
    Unsupported,
)
from holdfast.outbox.leases import LeaseLost
from holdfast.ports import Published

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.outbox.leases import Leases
    from holdfast.ports import Broker
    from holdfast.staged import Staged

log = logging.getLogger("holdfast.outbox")

_LONGEST_PREFIX = 200
_AT_ONCE = 8  # transactions under way at the same time


class ShardSinks:
    """Publishes the events of each shard in transactions under `<prefix>-<shard>`.

    Opening a sink ends the transaction that a former owner of the shard left open and
    refuses all that it sends from then on. The lease is asked for once more after the
    opening: whoever takes it over later opens later, so of two owners the elder is refused.
    """

    def __init__(self, broker: Broker, prefix: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if not broker.caps.fencing:
            raise Unsupported(
                "fence relays by transactional ids", broker.name, "leave the transactional id out"
            )
        if not 0 < len(prefix) <= _LONGEST_PREFIX:
            raise ConfigurationError(
                f"transactional id {prefix[:20]!r}: use 1 to {_LONGEST_PREFIX} characters"
            )
        self.caps = broker.caps
        self._broker = broker
        self._prefix = prefix
        self._clock = clock
        self._sinks: dict[int, tuple[int, Any]] = {}
        """Shard → the epoch of the lease that it was opened under, and the sink."""
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-shard")

    def publish_under(
        self, leases: Leases, messages: Sequence[Staged], seconds: float
    ) -> list[Published]:
        """Publish *messages*, one transaction per shard; give up after *seconds*.

        A shard of which another relay is the owner by now has `LeaseLost` as its results.
        """
        until = self._clock.monotonic() + seconds
        places: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            places.setdefault(message.shard, []).append(place)
        self._open(leases, places)
        results = [Published()] * len(messages)

        def publish(shard: int) -> None:
            batch = [messages[place] for place in places[shard]]
            for place, result in zip(
                places[shard], self._publish(shard, batch, until), strict=True
            ):
                results[place] = result

        self._each(publish, places)
        return results

    def _open(self, leases: Leases, shards: Iterable[int]) -> None:
        self._retire(leases.owned)
        missing = [shard for shard in shards if shard not in self._sinks]
        if not missing:
            return

        def open_one(shard: int) -> None:
            try:
                sink: Any = self._broker.sink(transactional_id=f"{self._prefix}-{shard}")
            except FencedOff as error:
                raise LeaseLost from error
            self._sinks[shard] = leases.owned.get(shard, -1), sink

        try:
            self._each(open_one, missing)
            leases.verify()
        except BaseException:
            for shard in missing:  # opened, and not known to be ours
                self._discard(shard)
            raise

    def _each(self, work: Any, shards: Iterable[int]) -> None:
        """Do *work* for every one of *shards*; nothing is under way when this returns."""
        numbers = list(shards)
        if len(numbers) == 1:
            work(numbers[0])
            return
        futures = [self._threads.submit(work, shard) for shard in numbers]
        wait(futures)
        for future in futures:
            future.result()

    def _publish(self, shard: int, batch: list[Staged], until: float) -> list[Published]:
        left = until - self._clock.monotonic()
        try:
            if left <= 0:
                raise BrokerDown("publishing: there was no time left within the lease")
            results: list[Published] = self._sinks[shard][1].publish_within(batch, left)
        except FencedOff as error:
            log.warning(
                "shard %d was taken over, or another outbox uses transactional id %s: %s",
                shard, self._prefix, error,
            )  # fmt: skip
            self._discard(shard)
            return [Published(error=LeaseLost())] * len(batch)
        except (DependencyDown, Transient) as error:
            self._discard(shard)
            return [Published(error=error)] * len(batch)
        if any(result.error is not None for result in results):
            # It would open its transactional id again by itself, without asking for the lease.
            self._discard(shard)
        return results

    def _retire(self, owned: Mapping[int, int]) -> None:
        """Close what was opened under a lease that is over."""
        for shard, (epoch, _) in list(self._sinks.items()):
            if owned.get(shard) != epoch:
                self._discard(shard)

    def _discard(self, shard: int) -> None:
        _, sink = self._sinks.pop(shard, (0, None))
        if sink is not None:
            try:
                sink.close()
            except (ConfigurationError, DependencyDown, Transient) as error:
                log.debug("closing the sink of shard %d: %s", shard, error)

    def close(self) -> None:
        """Close every sink."""
        for shard in list(self._sinks):
            self._discard(shard)
        self._threads.shutdown()
