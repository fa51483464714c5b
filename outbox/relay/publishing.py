"""Publishing the relay's rows: what may be sent, under which lease, and what became of it.

What the broker would refuse is found before anything is sent: once a later event of the same
key is on its way, a refusal comes too late, for that one is stored first. What it did refuse,
and what an outage hit, is told apart afterwards.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import (
    BrokerDown,
    ConfigurationError,
    DependencyDown,
    FencedOff,
    HoldfastError,
    Remedy,
    Transient,
    UnknownTopic,
    Unsupported,
)
from holdfast.message import Message
from holdfast.outbox.relay.latency import LATENCY
from holdfast.outbox.relay.leases import ShardLeaseLost
from holdfast.outbox.rows import Cells, Row, StagedRows, as_row
from holdfast.ports import Published, SinkPowers
from holdfast.tracing.messaging import send
from holdfast.tracing.switch import system_of
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from holdfast.outbox.relay.leases import Leases
    from holdfast.ports import Broker, Sink
    from holdfast.stored_message import StoredMessage

log = logging.getLogger("holdfast.outbox")

LOOK_SECONDS, _SELDOM_SECONDS, _SUMMARY_SECONDS = 1.0, 5.0, 60.0
_SPARE = 4096  # bytes that keys and CloudEvents headers are allowed for before a close look
_LONGEST_PREFIX = 200
_AT_ONCE = 8  # transactions under way at the same time
_error = attrgetter("error")

Refused = tuple[Row, HoldfastError | None]
"""A row with the error that the broker gave, or None for one that waits behind such a row."""


class Overtaken(HoldfastError):
    """The broker refused an event and stored later ones of its key, sent in the same batch."""

    def __init__(self, refusal: HoldfastError, later: int) -> None:
        super().__init__(
            f"{refusal}; {later} later event(s) of its key, sent together with it, are stored "
            "already: a release puts it behind them, and then repeats them"
        )
        self.refusal = refusal
        self.later = later


@dataclass(slots=True)
class PublishOutcome:
    """Which rows are done, which are to be parked, and the outage if there was one."""

    done: list[int] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    """Rows with the error that the broker gave, or None for those that wait behind one."""
    outage: HoldfastError | None = None
    missing: dict[str, UnknownTopic] = field(default_factory=dict)
    """Topics that do not exist; their rows are neither done nor refused."""


def classify_results(rows: Sequence[Cells], results: Sequence[Published]) -> PublishOutcome:
    """Return what became of *rows*.

    Of each key only the acknowledged prefix is done. A message that the broker refuses for
    good is parked with what follows of its key; an outage or a missing topic parks nothing.
    """
    outcome = PublishOutcome()
    if not any(map(_error, results)):
        outcome.done = [row[0] for row in rows]
        return outcome
    stuck: set[tuple[str, str]] = set()
    blocked: dict[tuple[str, str], int] = {}
    later: Counter[tuple[str, str]] = Counter()
    for row, result in zip(map(as_row, rows), results, strict=True):
        error, key = result.error, None if row.key is None else (row.topic, row.key)
        if key in stuck:
            continue
        if isinstance(error, UnknownTopic):
            outcome.missing[row.topic] = error
            if key is not None:
                stuck.add(key)
            continue
        if error is None and key not in blocked:
            outcome.done.append(row.seq)
        elif error is None or error.remedy in (Remedy.FIX, Remedy.DEAD_LETTER):
            if key is not None:
                blocked.setdefault(key, len(outcome.refused))
                later[key] += error is None
            outcome.refused.append((row, error))
        else:
            outcome.outage = outcome.outage or error
            if key is not None:
                stuck.add(key)
    for key, place in blocked.items():
        row, error = outcome.refused[place]
        if later[key] and error is not None:
            outcome.refused[place] = row, Overtaken(error, later[key])
    return outcome


class MissingTopics:
    """What a relay found missing; whole topics wait, so that the order of each key holds.

    Each topic is told once when it is found missing and once when it is there; while any is
    missing, one line a minute sums up.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._found: set[str] = set()
        self._tried: set[str] = set()
        """Those that are looked for again by trying to publish to them."""
        self._looked = self._told = float("-inf")
        self._pause = LOOK_SECONDS

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are missing, as far as is known."""
        return tuple(sorted(self._found))

    @property
    def held(self) -> set[str]:
        """The topics to which nothing is to be published now."""
        return self._found - self._tried

    def try_again(self) -> bool:
        """Hold nothing back for one try, if it is time; what is noted then is held again.

        What a try before this one has not met has no events any more, and is forgotten.
        """
        self._found -= self._tried
        self._tried.clear()
        if not self.due:
            return False
        self._tried = set(self._found)
        return True

    @property
    def due(self) -> bool:
        """Whether it is time to look for them again."""
        return bool(self._found) and self._clock.monotonic() - self._looked >= self._pause

    def note(self, errors: Mapping[str, UnknownTopic]) -> None:
        """Remember that the topics of *errors* are missing."""
        if not errors:
            return
        self._looked = now = self._clock.monotonic()
        self._pause = min(2 * self._pause, _SELDOM_SECONDS)
        for topic in errors.keys() - self._found:
            self._told, self._pause = now, LOOK_SECONDS
            log.error(
                "events to %s wait in the outbox, and nothing is parked: %s",
                topic, mask(str(errors[topic])), extra={"topic": topic},
            )  # fmt: skip
        self._found |= errors.keys()
        self._tried -= errors.keys()
        if now - self._told >= _SUMMARY_SECONDS:
            self._told = now
            log.error("events to %s still wait: no such topic", ", ".join(self.topics))

    def there(self, topics: Iterable[str]) -> None:
        """Note that *topics* were published to."""
        for topic in self._found & set(topics):
            self._tried.discard(topic)
            self._found.discard(topic)
            log.warning("topic %s is there: its events go out", topic, extra={"topic": topic})

    def learn(self, rows: Sequence[Cells], outcome: PublishOutcome) -> None:
        """Note which topics of *rows*, which were sent, are missing, and which are there."""
        self.note(outcome.missing)
        if self._found and outcome.outage is None:
            self.there({row[2] for row in rows} - outcome.missing.keys())


class RelaySink:
    """What a relay asks of its sink; it sends nothing once the leases may be another's.

    Before each batch it asks the lease. What is under way when the lease ends is given up
    by a sink that keeps deadlines; the others give up after their own timeout.
    """

    def __init__(self, sink: Sink | ShardSinks, leases: Leases) -> None:
        self._leases = leases
        self._system = system_of(sink)
        self._powers = SinkPowers.of(sink)
        self._publish: Callable[[Sequence[Any], float], list[Published]]
        self._publish = self._powers.publish_within
        if isinstance(sink, ShardSinks):
            self._publish = partial(sink.publish_under, leases)
        self._powers.prepare()

    @property
    def keeps_deadlines(self) -> bool:
        """Whether no publish takes longer than the lease lasts."""
        return self._powers.keeps_deadlines

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Publish *messages*, or raise `LeaseLost` when it is too late for that."""
        left = self._leases.publishable
        if left <= 0:
            raise ShardLeaseLost
        results = send(self._system, messages, lambda: self._publish(messages, left))
        LATENCY.note(messages, results)
        return results

    def absent(self, topics: Collection[str]) -> dict[str, UnknownTopic]:
        """Return the errors of those of *topics* that surely do not exist; none if nobody knows."""
        if self._powers.room(topics) != 0:
            return {}
        found = {topic: self._powers.refusal(Message.new(topic, b"")) for topic in topics}
        return {topic: why for topic, why in found.items() if isinstance(why, UnknownTopic)}

    def precheck(
        self, rows: list[Cells], missing: MissingTopics
    ) -> tuple[list[Cells], list[Refused]]:
        """Return the rows to publish, and those to park: what would be refused, and what follows.

        Rows of a topic that does not exist are in neither, and the topic is noted as *missing*.
        """
        if not rows:
            return [], []
        limit = self._powers.room({row[2] for row in rows})
        if limit is None or not _may_exceed(rows, limit):
            return rows, []
        absent: dict[str, UnknownTopic] = {}
        fine: list[Cells] = []
        refused: list[Refused] = []
        blocked: set[tuple[str, str]] = set()
        for row, message in zip(map(as_row, rows), StagedRows(rows), strict=True):
            key = None if row.key is None else (row.topic, row.key)
            if row.topic in absent:
                continue
            error = self._powers.refusal(message) if _may_exceed((row,), limit) else None
            if isinstance(error, UnknownTopic):
                absent[row.topic] = error
                continue
            if error is not None or key in blocked:
                refused.append((row, error))
                if key is not None:
                    blocked.add(key)
            else:
                fine.append(row)
        missing.note(absent)
        return fine, refused


def _may_exceed(rows: Sequence[Cells], limit: int) -> bool:
    # The largest parts of all rows together: seldom more than one row has, and quickly found.
    payload = max([0 if (body := row[4]) is None else len(body) for row in rows])
    return payload + max([len(row[5]) for row in rows]) > limit - _SPARE


class ShardSinks(SinkPowers):
    """Publishes the events of each shard in transactions under `<prefix>-<shard>`.

    Opening a sink ends the transaction that a former owner of the shard left open and
    refuses all that it sends from then on. The lease is asked for once more after the
    opening: whoever takes it over later opens later, so of two owners the elder is refused.
    """

    keeps_deadlines = True

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

    def publish(self, messages: Sequence[Message]) -> list[Published]:
        """Refuse: only who has the lease of a shard may publish its events."""
        del messages
        raise Unsupported("publish without leases", self._broker.name, "use publish_under()")

    def publish_under(
        self, leases: Leases, messages: Sequence[StoredMessage], seconds: float
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
                raise ShardLeaseLost from error
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

    def _publish(self, shard: int, batch: list[StoredMessage], until: float) -> list[Published]:
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
            return [Published(error=ShardLeaseLost())] * len(batch)
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
