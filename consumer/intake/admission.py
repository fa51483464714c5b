"""Admission: the one thread that asks the database about messages before they may run."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from holdfast.consumer.parking.store import hash_of
from holdfast.dlq.capture.exceptions import traced
from holdfast.dlq.replay.admission import ReplayStanding
from holdfast.errors import HoldfastError
from holdfast.scrubbing import text_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Connection

    from holdfast.consumer.intake.decode import BodyReader
    from holdfast.consumer.scheduling.scheduler import KeyScheduler
    from holdfast.consumer.scheduling.work import LaneKey, Work
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.consumer.store import ConsumerStore

log = logging.getLogger("holdfast.consumer")
_SOON = 0.1  # seconds after which finished marks are removed, many in one write
_LOOK_AGAIN = 1.0


class Admission:
    """Admits polled messages: one transaction per batch reads what is known and marks the start.

    The poll thread never waits for the database: it hands batches over here. While the
    database is down, nothing is admitted and the intake stops by its own bound.
    """

    def __init__(
        self,
        context: ConsumerContext,
        store: ConsumerStore,
        lanes: KeyScheduler,
        reader: BodyReader,
        maintain: Callable[[Callable[[list[Work]], None]], None],
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._reader = reader
        self._owner = context.owner
        self._settings = context.settings
        self._clock = clock = context.clock
        self._maintain = maintain
        self._inbox: SimpleQueue[list[Work] | None] = SimpleQueue()
        self._undecided: list[Work] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-admission", daemon=True)
        self._busy = False
        self._next_maintenance = 0.0
        self.pulse = clock.monotonic()
        """When it last began to do something."""
        self._ended: dict[str, list[str]] = {}
        """Of which handlers which messages have ended, their marks not yet removed."""
        self._ended_since = 0.0
        self.down: str | None = None
        """Why the database cannot be used, None while it can."""

    def start(self) -> None:
        """Begin."""
        self.pulse = self._clock.monotonic()
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether it has begun: not while database or broker are waited for at the start."""
        return self._thread.ident is not None

    def stop(self) -> None:
        """End after what is in hand; the marks of this process are removed."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(timeout=10.0)

    def admit(self, works: list[Work]) -> None:
        """Have *works* admitted, in order."""
        self._inbox.put(works)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for admission."""
        return self._inbox.empty() and not self._busy and not self._undecided

    def _run(self) -> None:
        next_look = 0.0
        while not self._stopping.is_set():
            works = self._next_batch()
            self._busy = True
            if works:
                self._patiently(lambda works=works: self._admit(works))  # type: ignore[misc]
            now = self._clock.monotonic()
            if self._undecided and now >= next_look:
                next_look = now + _LOOK_AGAIN
                waiting, self._undecided = self._undecided, []
                self._patiently(lambda: self._admit(waiting))  # noqa: B023 - run at once
            self._patiently(lambda: self._unmark(_SOON if works else 0.0))  # noqa: B023
            if now >= self._next_maintenance:
                self._next_maintenance = now + self._settings.due_seconds
                self._patiently(lambda: self._maintain(self.admit))
            self._busy = False
        self._patiently(self._unmark)

    def _next_batch(self) -> list[Work]:
        works: list[Work] = []
        patience = _SOON
        if not self._ended and self._lanes.is_empty():
            patience = min(_LOOK_AGAIN, self._next_maintenance - self._clock.monotonic())
        try:
            batch = self._inbox.get(timeout=max(0.0, patience))
            while batch is not None:
                works += batch
                batch = self._inbox.get_nowait()
        except Empty:
            pass
        return works

    def _patiently(self, job: Callable[[], None]) -> None:
        """Do *job*, again and again until the database lets it pass or the consumer stops."""
        attempt = 0
        while True:
            attempt += 1
            self.pulse = self._clock.monotonic()
            try:
                job()
            except HoldfastError as error:
                if self.down is None:
                    log.error("the intake stops, nothing is acknowledged: %s", text_of(error))  # noqa: TRY400
                self.down = text_of(error)
                delay = self._settings.backoff.delay(min(attempt, 6)) or 1.0
                if self._clock.wait(self._stopping, min(delay, 5.0)):
                    return
            except Exception as error:  # noqa: BLE001 - told; the intake waits
                log.critical("the consumer failed in itself: please report this\n%s", traced(error))
                self.down = f"the consumer failed in itself, see its log: {type_name(error)}"
                if self._clock.wait(self._stopping, 1.0):
                    return
            else:
                if self.down is not None:
                    log.warning("the intake goes on")
                self.down = None
                return

    def _admit(self, works: list[Work]) -> None:
        ready: list[Work] = []
        asked: list[Work] = []
        held: set[LaneKey] = set()
        for consumer, mine in _by_consumer(works):
            (ready if self._begun(consumer, mine) else asked).extend(mine)
        if asked:
            if self._ended:
                self._remove_marks()  # first: a message that comes again is marked anew
            found, held = self._store.run(lambda db: self._looked_up(db, asked))
            known = set(map(id, found))
            self._undecided += [
                work for work in asked if id(work) not in known and not work.is_revoked
            ]
            ready += found
        self._lanes.admit(ready, held)

    def _begun(self, consumer: str, works: list[Work]) -> bool:
        """Mark *works* as begun if nothing is known of any of them, as nearly always."""
        ended = self._ended.get(consumer, [])
        if not {work.message.identity for work in works}.isdisjoint(ended):
            return False
        begun = self._store.begun(works, ended, self._owner)
        if begun:
            self._ended.pop(consumer, None)
        return begun

    def _looked_up(self, db: Connection, works: list[Work]) -> tuple[list[Work], set[LaneKey]]:
        ready: list[Work] = []
        held: set[LaneKey] = set()
        burials = self._store.burials
        for work in self._store.sift(db, works):
            work.message = self._reader.ordinary(work.message, work.route.topic)
        for consumer, mine in _by_consumer(works):
            taken = self._standing(db, consumer, mine)
            ids = [work.message.identity for work in taken]
            self._store.ledger.starting(consumer, ids, self._owner, connection=db)
            held |= self._held(db, taken)
            self._store.look_ahead(db, taken, burials)
            ready += taken
        return ready, held

    def _standing(self, db: Connection, consumer: str, works: list[Work]) -> list[Work]:
        """Write what is known onto *works*; leave out those that run alone somewhere else."""
        ids = [work.message.identity for work in works]
        found = self._store.ledger.standing(consumer, ids, owner=self._owner, connection=db)
        if not found:
            return works  # as nearly always
        taken = []
        for work in works:
            standing = found.get(work.message.identity)
            if standing is not None:
                if standing.begun_alone:
                    continue
                work.learn(standing, self._clock.monotonic())
            taken.append(work)
        return taken

    def _held(self, db: Connection, works: list[Work]) -> set[LaneKey]:
        fresh = [
            work
            for work in works
            if work.row is None and work.replay.standing is not ReplayStanding.LIVE
        ]
        by_topic: dict[str, dict[str, LaneKey]] = {}
        for work in fresh:
            hashes = by_topic.setdefault(work.route.topic, {})
            hashes[hash_of(work.key, work.message.id)] = work.lane_key
        return {
            hashes[one]
            for topic, hashes in sorted(by_topic.items())
            for one in self._store.held.among(db, topic, list(hashes))
        }

    def _unmark(self, wait: float = 0.0) -> None:
        """Remove the marks of what has ended; what an outage prevents is tried again later.

        For *wait* seconds they may go with the next poll's question.
        """
        if not self._ended:
            self._ended_since = self._clock.monotonic()
        try:
            while True:
                work = self._lanes.finished.get_nowait()
                if work.row is not None:
                    self._next_maintenance = 0.0  # a parked key may go on
                self._ended.setdefault(work.route.consumer, []).append(work.message.identity)
        except Empty:
            pass
        if not self._ended or self._clock.monotonic() < self._ended_since + wait:
            return
        with suppress(HoldfastError):  # until then, a death would make a suspect too many
            self._remove_marks()

    def _remove_marks(self) -> None:
        ended = self._ended

        def write(db: Connection) -> None:
            for consumer, ids in sorted(ended.items()):
                self._store.ledger.finished(consumer, ids, self._owner, connection=db)

        self._store.run(write)
        self._ended = {}


def _by_consumer(works: list[Work]) -> list[tuple[str, list[Work]]]:
    """Return those of *works* that are not revoked, by their handlers."""
    found: dict[str, list[Work]] = {}
    for work in works:
        if not work.is_revoked:
            found.setdefault(work.route.consumer, []).append(work)
    return sorted(found.items())
