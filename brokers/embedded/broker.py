"""The embedded broker: topics, sinks and sources over one store.

Settings of the embedded broker, from keywords and from the URL's query.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.brokers.embedded.cursor import CursorTable
from holdfast.brokers.embedded.group import EmbeddedGroup
from holdfast.brokers.embedded.sink import EmbeddedSink
from holdfast.brokers.embedded.source import EmbeddedSource
from holdfast.brokers.embedded.store import EmbeddedTopics
from holdfast.brokers.groups.broker import LateGroups, subscribed
from holdfast.brokers.groups.member import Subscription
from holdfast.brokers.settings import converted, kinds, positive
from holdfast.errors import ConfigurationError, UnknownGroup, UnknownTopic
from holdfast.ids import new_id
from holdfast.ports import (
    BrokerPowers,
    Caps,
    Counts,
    GroupProgress,
    Lane,
    LaneProgress,
    Ordering,
    Pause,
    Settle,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.embedded.store import Store
    from holdfast.clock import Clock
    from holdfast.ports import Listener, Sink, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """What can be set; the same names work as `?name=value` in the URL."""

    partitions: int = 4
    """Lanes of a topic that is created on first use."""
    session: float = 10.0
    """Seconds without a poll after which a member is taken for dead."""
    lease: float = 60.0
    """Seconds that a delivery may stay unsettled before it is handed out again."""
    max_message: int = 1_048_576
    """Bytes of payload, key and headers."""
    auto_create: bool = True
    """Whether a topic may be created by its first use."""
    adopt: bool = False
    """Whether the tables may join another application's SQLite file."""

    def __post_init__(self) -> None:
        positive(self, "partitions", "session", "lease", "max_message")

    @classmethod
    def read(cls, options: Mapping[str, str], native: Mapping[str, Any]) -> EmbeddedSettings:
        """Return the settings in *options* (text, from the URL) and *native* (keywords)."""
        known = kinds(cls)
        values: dict[str, Any] = {}
        for name, value in {**options, **native}.items():
            if name not in known:
                raise ConfigurationError(
                    f"the embedded broker has no setting {name!r}; it has {', '.join(known)}"
                )
            values[name] = converted(name, value, known[name])
        return cls(**values)

    @staticmethod
    def refuse(native: Mapping[str, Any], what: str) -> None:
        """Refuse settings where there are none."""
        if native:
            raise ConfigurationError(
                f"{what} of the embedded broker takes no settings ({', '.join(native)}): "
                "give them to connect()"
            )


_PRUNABLE = (
    "SELECT l.topic, m.id FROM hf_lane l"
    " JOIN (SELECT lane, min(committed) AS settled FROM hf_cursor GROUP BY lane) c ON c.lane = l.id"
    " JOIN hf_message m ON m.id >= (l.id << 40) AND m.id < (l.id << 40) + c.settled"
    " WHERE (? IS NULL OR l.topic IN (SELECT value FROM json_each(?))) AND m.stored < ? LIMIT ?"
)


_PROGRESS = (
    "SELECT l.topic, l.partition, l.next, coalesce(c.committed, 0), c.grp IS NOT NULL,"
    " (SELECT count(*) FROM hf_mark m WHERE m.grp = c.grp AND m.lane = c.lane AND m.state = 1),"
    " (SELECT m.stored FROM hf_message m WHERE m.id >= (l.id << 40) + coalesce(c.committed, 0)"
    " AND m.id < (l.id + 1) << 40 ORDER BY m.id LIMIT 1)"
    " FROM hf_lane l LEFT JOIN hf_cursor c ON c.lane = l.id AND c.grp = ?"
)


class EmbeddedBroker(LateGroups, BrokerPowers):
    """Topics with partitions by key, groups that share them, and a durable log behind."""

    tells_progress = True

    def __init__(self, name: str, store: Store, clock: Clock, settings: EmbeddedSettings) -> None:
        self.name = name
        self._store = store
        self._db = store.session()
        self._topics = EmbeddedTopics(self._db, settings)
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
        return EmbeddedSink(
            session, EmbeddedTopics(session, self._settings), self.caps, self._clock
        )

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
        subscribed(topics, group)
        for topic in topics:
            self._topics.lanes(topic)
        subscription = Subscription(
            group=group, member=new_id(), topics=topics, session=self._settings.session
        )
        db, clock = self._store.session(), self._clock
        place = EmbeddedGroup(db, subscription, clock)
        return EmbeddedSource(db, place, self.caps, clock, listener)

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

    def _introduce(self, topic: str, group: str) -> None:
        """Note that *group* reads *topic* from its beginning: `prune` keeps it for the group."""
        rows = [(group, lane_id) for lane_id in self._topics.lanes(topic).values()]
        with self._db.write() as db:
            db.executemany("INSERT OR IGNORE INTO hf_cursor (grp, lane) VALUES (?, ?)", rows)

    def _has_topic(self, topic: str) -> bool:
        return bool(self._topics.find(topic))

    def lag(self, group: str, topics: Sequence[str]) -> Mapping[Lane, int]:
        """Return the unsettled messages of *group* in every lane of *topics*."""
        counts = dict(self._db.read(CursorTable.LAG, group))
        return {
            Lane(topic, partition): counts[lane_id]
            for topic in topics
            for partition, lane_id in self._topics.find(topic).items()
        }

    def progress(self, group: str, topics: Sequence[str] | None = None) -> GroupProgress:
        """Return how far *group* is; messages are kept until every group has settled them."""
        for topic in topics or ():
            if not self._topics.find(topic):
                raise UnknownTopic(topic, "there is nothing to lag behind in it")
        now = self._clock.now().timestamp()
        rows = self._db.read(_PROGRESS, group)
        listed = "SELECT topics FROM hf_member WHERE grp = ? AND expires >= ?"
        members = [json.loads(wanted) for (wanted,) in self._db.read(listed, group, now)]
        readers = Counter(topic for wanted in members for topic in wanted)
        known = {topic for topic, _, _, _, has_read, _, _ in rows if has_read}
        if not known and not members:
            raise UnknownGroup(group, self.name)
        asked = (known | readers.keys()) if topics is None else set(topics)
        return GroupProgress(
            lanes={
                Lane(topic, partition): LaneProgress(
                    unsettled=end - committed - ahead,
                    committed=committed,
                    end=end,
                    oldest=oldest if end > committed else None,
                )
                for topic, partition, end, committed, _, ahead, oldest in rows
                if topic in asked
            },
            members={topic: readers[topic] for topic in asked},
        )

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

    def abandon(self, source: Source) -> bool:
        """Treat *source* as if its process had died now; for tests of what follows."""
        if not isinstance(source, EmbeddedSource):
            raise ConfigurationError(f"{source!r} is not a source of {self.name}")
        source.die()
        with self._db.write() as db:
            db.execute("UPDATE hf_member SET expires = -1 WHERE id = ?", (source.member,))
        return True

    def close(self) -> None:
        """Close the broker's own session."""
        self._db.close()
