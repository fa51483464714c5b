"""The embedded broker: topics, sinks and sources over one store."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.brokers.embedded.marks import Marks
from holdfast.brokers.embedded.membership import Membership
from holdfast.brokers.embedded.settings import EmbeddedSettings
from holdfast.brokers.embedded.sink import EmbeddedSink
from holdfast.brokers.embedded.source import EmbeddedSource
from holdfast.brokers.embedded.topics import Topics
from holdfast.brokers.groups import named
from holdfast.caps import Caps, Counts, Ordering, Pause, Settle
from holdfast.errors import ConfigurationError
from holdfast.ids import new_id
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.embedded.store import Store
    from holdfast.clock import Clock
    from holdfast.ports import Listener, Sink, Source


_PRUNABLE = (
    "SELECT l.topic, m.id FROM hf_lane l"
    " JOIN (SELECT lane, min(committed) AS settled FROM hf_cursor GROUP BY lane) c ON c.lane = l.id"
    " JOIN hf_message m ON m.id >= (l.id << 40) AND m.id < (l.id << 40) + c.settled"
    " WHERE (? IS NULL OR l.topic IN (SELECT value FROM json_each(?))) AND m.stored < ? LIMIT ?"
)


class EmbeddedBroker:
    """Topics with partitions by key, groups that share them, and a durable log behind."""

    def __init__(self, name: str, store: Store, clock: Clock, settings: EmbeddedSettings) -> None:
        self.name = name
        self._store = store
        self._db = store.session()
        self._topics = Topics(self._db, settings)
        self._clock = clock
        self._settings = settings
        self.caps = Caps(
            settle=Settle.INDIVIDUAL,
            ordering=Ordering.PARTITION,
            counts=Counts.FAILURE,
            blameless_release=True,
            release_keeps_order=True,
            delay=float("inf"),
            lease=settings.lease,
            pause=Pause.LANE,
            transactions=True,
            max_message=settings.max_message,
            replay=True,
            prune=True,
            late_groups=True,
        )

    def sink(self, **native: Any) -> Sink:
        """Return a new sink."""
        EmbeddedSettings.refuse(native, "a sink")
        session = self._store.session()
        return EmbeddedSink(session, Topics(session, self._settings), self.caps, self._clock)

    def source(
        self,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
        **native: Any,
    ) -> Source:
        """Return a new member of *group*, which starts at the beginning of *topics*."""
        EmbeddedSettings.refuse(native, "a source")
        if isinstance(topics, str) or not topics or not group:
            raise ConfigurationError(
                f"source(topics={topics!r}, group={group!r}): name a list of topics and a group"
            )
        for topic in topics:
            self._topics.lanes(topic)
        membership = Membership(group, new_id(), topics, self._settings.session)
        return EmbeddedSource(self._store.session(), membership, self.caps, self._clock, listener)

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        """Make sure that *topic* exists; an existing one keeps its partitions."""
        self._topics.create(topic, partitions)

    @property
    def default_partitions(self) -> int:
        """How many lanes a topic gets that is made when first used."""
        return self._settings.partitions

    def topics(self) -> Mapping[str, int]:
        """Return all topics with the number of their lanes."""
        return dict(self._db.read("SELECT topic, count(*) FROM hf_lane GROUP BY topic"))

    def create_group(self, topic: str, group: str) -> None:
        """Note that *group* reads *topic* from its beginning: `prune` keeps it for the group."""
        named(topic, group)
        rows = [(group, lane_id) for lane_id in self._topics.lanes(topic).values()]
        with self._db.write() as db:
            db.executemany("INSERT OR IGNORE INTO hf_cursor (grp, lane) VALUES (?, ?)", rows)

    def has_group(self, topic: str, group: str) -> bool:
        """Return whether *topic* exists: every group starts at its beginning."""
        named(topic, group)
        return bool(self._topics.find(topic))

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        counts = dict(self._db.read(Marks.LAG, group))
        return {
            Lane(topic, partition): counts[lane_id]
            for topic in topics
            for partition, lane_id in self._topics.find(topic).items()
        }

    def prune(
        self,
        topics: Sequence[str] | None = None,
        *,
        older_than: float,
        most: int = 10_000,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Delete at most *most* messages that every group settled, *older_than* seconds old.

        A message that any group has not settled is never deleted, nor one in a topic that
        no group has read yet.
        """
        before = self._clock.now().timestamp() - older_than
        wanted = None if topics is None else json.dumps(sorted(topics))
        if dry_run:
            rows = self._db.read(_PRUNABLE, wanted, wanted, before, most)
        else:
            with self._db.write() as db:
                rows = db.execute(_PRUNABLE, (wanted, wanted, before, most)).fetchall()
                ids = [(message_id,) for _, message_id in rows]
                db.executemany("DELETE FROM hf_message WHERE id = ?", ids)
        return dict(Counter(topic for topic, _ in rows))

    def abandon(self, source: Source) -> None:
        """Treat *source* as if its process had died now; for tests of what follows."""
        if not isinstance(source, EmbeddedSource):
            raise ConfigurationError(f"{source!r} is not a source of {self.name}")
        source.die()
        with self._db.write() as db:
            db.execute("UPDATE hf_member SET expires = -1 WHERE id = ?", (source.member,))

    def close(self) -> None:
        """Close the broker's own session."""
        self._db.close()
