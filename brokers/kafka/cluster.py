"""What the adapter knows of the cluster, asked over a connection of its own."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import BrokerDown, InvalidMessage, UnknownGroup, UnknownTopic
from holdfast.ports import GroupProgress, Lane, LaneProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from holdfast.brokers.kafka.broker import KafkaSettings
    from holdfast.brokers.kafka.driver import Admin, OffsetRange
    from holdfast.clock import Clock

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_CREATION_SECONDS = 2.0  # how long a broker may take to make a topic ready for use
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """An existing topic."""

    lanes: tuple[Lane, ...]
    largest: int | None
    """Bytes of the largest batch that it takes; None where the broker does not say."""


class Cluster:
    """Answers about topics and groups; any thread may ask.

    The connection opens with the first question and outlives `close` where somebody still
    asks: sinks and sources stay open when their broker object is closed.
    """

    def __init__(self, connect: Callable[[], Admin], clock: Clock, settings: KafkaSettings) -> None:
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self._admin: Admin | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._topics: dict[str, Topic] = {}

    @contextmanager
    def admin(self) -> Iterator[Admin]:
        """Lend the shared connection; once it is closed, one for this purpose alone."""
        if self._closed:
            own = self._connect()
            try:
                yield own
            finally:
                own.close()
            return
        with self._lock:
            if self._admin is None:
                self._admin = self._connect()
        yield self._admin

    def topic(self, name: str, *, patient: bool = True) -> Topic:
        """Return what is known of topic *name*, asking only once."""
        known = self._topics.get(name)
        if known is None:
            lanes = self.lanes(name, patient=patient, make=self._settings.auto_create)
            with self.admin() as admin:
                known = self._topics[name] = Topic(lanes=lanes, largest=admin.largest(name))
        return known

    def forget(self) -> None:
        """Ask again: something went wrong, and a topic may have been deleted."""
        self._topics.clear()

    def lanes(self, topic: str, *, patient: bool = True, make: bool = False) -> tuple[Lane, ...]:
        """Return the lanes of *topic* now; `UnknownTopic` when it does not exist.

        A *patient* asker waits a moment for one that is just being made. With *make*, one
        that is missing is made as the settings say.
        """
        _check(topic)
        with self.admin() as admin:
            found = admin.partitions(topic)
            if found is None and make:
                self._make(admin, topic)
                patient = True
            if found is None and patient:
                found = self._appear(admin, topic)
        if found is None:
            raise UnknownTopic(
                topic, "create it with  holdfast topics create, or set auto_create=true in the URL"
            )
        return tuple(Lane(topic, partition) for partition in found)

    def exists(self, topic: str) -> bool:
        """Return whether there is such a *topic* now."""
        _check(topic)
        with self.admin() as admin:
            return admin.partitions(topic) is not None

    def create(self, topic: str, partitions: int, largest: int | None = None) -> None:
        """Make sure that *topic* exists, and return when it can be used."""
        _check(topic)
        configs = dict(self._settings.topic)
        if largest is not None:
            configs["max.message.bytes"] = str(largest)
        with self.admin() as admin:
            admin.create(topic, partitions, self._settings.replication_factor, configs)
        self.topic(topic)

    def _make(self, admin: Admin, topic: str) -> None:
        settings = self._settings
        admin.create(topic, settings.partitions, settings.replication_factor, settings.topic)

    def _appear(self, admin: Admin, topic: str) -> list[int] | None:
        """Return the partitions of *topic*, which asking for may have brought into being."""
        until = self._clock.monotonic() + _CREATION_SECONDS
        while (found := admin.partitions(topic)) is None and self._clock.monotonic() < until:
            self._clock.sleep(_LOOK_SECONDS)
        return found

    def extents(self, group: str | None, lanes: Collection[Lane]) -> dict[Lane, OffsetRange]:
        """Return how far each of *lanes* reaches and how far *group*, if any, is.

        A new topic's leaders and a young cluster's coordinators are waited for a moment.
        """
        return self._patiently(lambda admin: admin.extents(group, lanes)) if lanes else {}

    def progress(self, group: str, topics: Sequence[str] | None, broker: str) -> GroupProgress:
        """Return how far *group* is in *topics*, or in all that it has read or reads."""
        lanes = [lane for topic in topics or () for lane in self.lanes(topic, patient=False)]
        committed = self._patiently(lambda admin: admin.committed_topics(group))
        members = self._patiently(lambda admin: admin.members(group))
        if not committed and not members.count:
            raise UnknownGroup(group, broker)
        wanted = sorted(committed | members.readers.keys()) if topics is None else topics
        if topics is None:
            lanes = [lane for topic in wanted for lane in self._left(topic)]
        extents = self.extents(group, lanes)
        behind = {lane: extent.next for lane, extent in extents.items() if extent.lag}
        with self.admin() as admin:
            stored = admin.stored_at(behind) if behind else {}
        readers = {topic: members.of(topic) for topic in wanted}
        return GroupProgress(
            lanes={
                lane: LaneProgress(
                    unsettled=extent.lag,
                    committed=extent.committed,
                    end=extent.end,
                    oldest=stored.get(lane),
                    deleted=extent.deleted,
                )
                for lane, extent in extents.items()
            },
            members={topic: count for topic, count in readers.items() if count is not None},
            retention=self.retention({lane.topic for lane in lanes}),
        )

    def retention(self, topics: Collection[str]) -> dict[str, float]:
        """Return the seconds that topics keep messages; one that is missing is not told."""
        with self.admin() as admin:
            return admin.retention(topics) if topics else {}

    def _left(self, topic: str) -> tuple[Lane, ...]:
        """Return the lanes of *topic*; none of one that was deleted since the group read it."""
        try:
            return self.lanes(topic, patient=False)
        except UnknownTopic:
            return ()

    def _patiently(self, ask: Callable[[Admin], T]) -> T:
        """Ask again for a moment while a young cluster has no leader or coordinator yet."""
        until = self._clock.monotonic() + _CREATION_SECONDS
        while True:
            try:
                with self.admin() as admin:
                    return ask(admin)
            except BrokerDown:
                if self._clock.monotonic() >= until:
                    raise
            self._clock.sleep(_LOOK_SECONDS)

    def ends(self, lanes: Collection[Lane]) -> dict[Lane, int]:
        """Return up to where each of *lanes* can be read now, by one question."""
        with self.admin() as admin:
            return admin.ends(lanes)

    def at_time(self, lane: Lane, milliseconds: int) -> int | None:
        """Return the first offset stored at or after a time; None when there is none."""
        with self.admin() as admin:
            return admin.at_time(lane, milliseconds)

    def close(self) -> None:
        """Close the shared connection."""
        with self._lock:
            self._closed = True
            admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()


def _check(topic: str) -> None:
    if _NAME.fullmatch(topic) is None or topic in {".", ".."}:
        raise InvalidMessage(
            f"topic {topic!r}: use 1 to 249 ASCII letters, digits, dots, dashes and underscores"
        )
