"""What is looked after every second: signs of life, crashes, parked keys, circuits."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from holdfast.consumer.scheduling.work import History, LaneKey, Work
from holdfast.consumer.store import translated
from holdfast.dlq import closed
from holdfast.dlq.store.counters import fold
from holdfast.idempotency import prune
from holdfast.message import SOURCE_END

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy.engine import Connection

    from holdfast.circuit import Sharing
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.intake.decode import BodyReader
    from holdfast.consumer.parking.store import ParkedKey, ParkedRow
    from holdfast.consumer.scheduling.scheduler import KeyScheduler
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.consumer.store import ConsumerStore

log = logging.getLogger("holdfast.consumer")
_KEYS_AT_ONCE = 20
_ROWS_AT_ONCE = 50
_LETTERS_AT_ONCE = 1000
_PRUNE_EVERY = 600.0
_PRUNE_SECONDS = 0.2
_PRUNE_AGAIN = 1.0
_FOLD_EVERY = 10.0
_PRUNE_OLDER = 7 * 86400.0


class Maintenance:
    """Keeps this process known as alive and lets parked messages run when their time comes."""

    def __init__(
        self,
        context: ConsumerContext,
        store: ConsumerStore,
        lanes: KeyScheduler,
        routes: Mapping[str, Route],
        reader: BodyReader,
        sharing: list[Sharing],
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._routes = routes
        self._reader = reader
        self._owner = context.owner
        self._settings = context.settings
        self._clock = clock = context.clock
        self._metrics = context.metrics
        self._sharing = sharing
        self._after = ""
        self._next_sweep = self._next_prune = 0.0
        self._next_fold = clock.monotonic() + _FOLD_EVERY
        self.retrying = 0
        """How many keys wait for a retry that is due later."""

    def __call__(self, admit: Callable[[list[Work]], None]) -> None:
        """Do everything once; parked messages whose time has come go to *admit*.

        Raises `DatabaseDown` when the database does not answer.
        """
        now = self._clock.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + self._settings.takeover_seconds / 3
            with translated():
                self._store.ledger.alive(self._owner)
                for orphan in self._store.ledger.orphans():
                    log.warning("process %s died while it handled message %s of %s%s", orphan.owner,
                                orphan.message_id.replace(SOURCE_END, " "), orphan.consumer,
                                ", alone" if orphan.alone else "")  # fmt: skip
                self._store.ledger.acquit()
        if now >= self._next_prune:
            with translated():
                self._prune()
        if now >= self._next_fold:
            self._next_fold = now + _FOLD_EVERY
            fold(self._store.engine, clock=self._clock, batches=2)
        for sharing in self._sharing:
            with translated():
                sharing.refresh()
        if self._settings.parks and self._store.read(self._count):
            self._store.run(self._release_closed)
            for key, rows in self._store.run(self._due).items():
                self._take_up(key, rows, admit)
            self._store.read(self._count)

    def _prune(self) -> None:
        """Prune for a moment: the intake waits meanwhile. What is left goes the next time."""
        began = self._clock.monotonic()
        self._store.ledger.prune(older_than=_PRUNE_OLDER, seconds=_PRUNE_SECONDS)
        prune(self._store.engine, seconds=_PRUNE_SECONDS, clock=self._clock)
        if self._settings.lineage is not None:
            self._settings.lineage.prune(
                self._store.engine, seconds=_PRUNE_SECONDS, clock=self._clock
            )
        ended = self._clock.monotonic()
        is_done = ended - began < _PRUNE_SECONDS
        self._next_prune = ended + (_PRUNE_EVERY if is_done else _PRUNE_AGAIN)

    def _release_closed(self, db: Connection) -> None:
        waiting = self._store.held.quarantined(db, self._after, _LETTERS_AT_ONCE)
        self._after = waiting[-1][0] if len(waiting) == _LETTERS_AT_ONCE else ""
        if not waiting:
            return
        resolved = closed(db, [dlq_id for dlq_id, _ in waiting])
        for dlq_id, key in waiting:
            if dlq_id in resolved and self._store.held.release(db, key):
                log.info("dead letter %s is closed: its key goes on", dlq_id)

    def _due(self, db: Connection) -> dict[ParkedKey, list[Work]]:
        """Return the works of the keys that are ours now and of which nothing is in hand."""
        held, ttl = self._store.held, self._settings.takeover_seconds
        mine = held.renew(db, self._owner, ttl)
        in_hand = Counter(key.topic for key in mine)
        # By topic: keys that wait here for a circuit or a lease keep no other topic waiting.
        if topics := [topic for topic in self._routes if in_hand[topic] < _KEYS_AT_ONCE]:
            mine += held.claim_due(db, self._owner, ttl, _KEYS_AT_ONCE, topics)
        found: dict[ParkedKey, list[Work]] = {}
        for key in mine:
            route = self._routes.get(key.topic)
            if route is None or self._lanes.has(lane_key(key)):
                continue
            rows = held.rows(db, key, _ROWS_AT_ONCE)
            if not rows:
                held.let_go(db, key)
                continue
            found[key] = [self._work(route, row) for row in rows]
        return found

    def _work(self, route: Route, row: ParkedRow) -> Work:
        message, refused = self._reader.parked(row.origin, row.key.topic)
        return Work(
            route=route,
            message=message,
            lane_key=lane_key(row.key),
            row=row,
            history=History(attempt=row.attempt),
            refused=refused,
        )

    def _take_up(
        self, key: ParkedKey, works: list[Work], admit: Callable[[list[Work]], None]
    ) -> None:
        if not self._lanes.has(lane_key(key)):
            self._lanes.reserve(works)
            admit(works)

    def _count(self, db: Connection) -> int:
        """Show how much is held, and return how many keys."""
        keys, parked, self.retrying = self._store.held.totals(db, self._routes)
        self._store.held_total = parked
        self._metrics.held_keys.set(keys)
        self._metrics.parked.set(parked)
        return keys


def lane_key(key: ParkedKey) -> LaneKey:
    """Return the lane in which the parked messages of *key* run."""
    return ("held", key.topic, key.key_hash)
