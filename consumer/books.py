"""What the consumer writes to its database: attempts, held keys, dead letters."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import DataError, SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast.columns import ascii_only, cut
from holdfast.consumer.held import Held, HeldKey, hash_of
from holdfast.consumer.scopes import carry_attempts, known_scopes, scope_of, tell_changes
from holdfast.consumer.transaction import DatabaseDown
from holdfast.dlq import closed
from holdfast.dlq.overtaking import open_letters, overtake
from holdfast.dlq.recognition import open_letter_of, with_letters
from holdfast.dlq.replay.admission import (
    Standing,
    require_live,
    standing,
    standings,
    withdrawn,
)
from holdfast.dlq.replay.marks import Marks, replay_topic
from holdfast.dlq.replay.outcomes import confirmed, handled_after_all
from holdfast.errors import DependencyDown
from holdfast.idempotency import Inbox, Ledger
from holdfast.idempotency.layer import Idempotent
from holdfast.message import REPLAY_HEADER
from holdfast.scrubbing import told
from holdfast.transactions import transact

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.consumer.route import Route
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.work import Work
    from holdfast.ports import Delivery

log = logging.getLogger("holdfast.consumer")
T = TypeVar("T")


class TooManyHeld(DependencyDown):
    """The bound of parked messages is reached: the partition waits, nothing overtakes."""


class Books:
    """The consumer's side of the database; every method is one short transaction.

    Whatever goes wrong in it is `DatabaseDown`: nothing was written, the message is not
    acknowledged and comes again.
    """

    def __init__(self, engine: Engine, group: str, settings: Settings, clock: Clock) -> None:
        self.engine = engine
        self.held = Held(group)
        self._group = group
        self.ledger = Ledger(engine, clock=clock, owner_seconds=settings.takeover_seconds)
        self.held_total = 0
        """How many messages are parked, as last counted."""
        self.burials = 0
        """How many dead letters this process has stored."""
        self._counting = threading.Lock()
        self._settings = settings
        self._clock = clock

    def run(self, work: Callable[[Connection], T]) -> T:
        """Return what *work* returns in a transaction of its own."""
        with translated():
            return transact(self.engine, work, clock=self._clock)

    def _told(self, text: str, write: Callable[[Connection, str], object]) -> None:
        """Write what *text* says; in plain characters if the database has no others.

        What an error says is never the reason why it cannot be counted.
        """
        try:
            self.run(lambda db: write(db, text))
        except (DatabaseDown, UnicodeEncodeError) as error:
            if not isinstance(error.__cause__ or error, (DataError, UnicodeEncodeError)):
                raise
            self.run(lambda db: write(db, ascii_only(text)))

    def introduce(self, routes: Collection[Route]) -> None:
        """Enter the consumers in the inbox's roster now: handlers would wait for each other.

        What earlier versions kept under other names is taken over, and whoever reads the log is
        told of scopes that have come or gone.
        """
        before = self.run(lambda db: known_scopes(db, self._group))
        tell_changes(self._group, routes, before)
        self.run(lambda db: carry_attempts(db, routes))
        for route in routes:
            for layer in route.plan.layers:
                inbox = getattr(layer, "inbox", None)
                if isinstance(layer, Idempotent) and isinstance(inbox, Inbox):
                    with translated(), Session(self.engine) as session, session.begin():
                        inbox.enter(session, scope_of(layer, route.consumer))

    def failed(self, work: Work, error: BaseException) -> None:
        """Count a failed attempt."""
        self._told(
            work.told(error),
            lambda db, said: self.ledger.failed(*work.identity, said, connection=db),
        )
        work.known = True

    def crashed(self, work: Work) -> None:
        """Count that *work* by itself has ended the process."""
        with translated():
            self.ledger.crashed(*work.identity)
        work.known = True

    def alone(self, work: Work, owner: str) -> None:
        """Mark that *work* runs with nothing beside it."""
        with translated():
            self.ledger.starting(work.route.consumer, [work.message.identity], owner, alone=True)

    def finished(self, work: Work, owner: str) -> None:
        """Remove the mark of *work*."""
        with translated():
            self.ledger.finished(work.route.consumer, [work.message.identity], owner)

    def postpone(self, work: Work, delay: float, error: BaseException | None) -> None:
        """Park *work* until its retry is due: committed before the broker is told."""
        note = "retry" if error is None else f"retry after {work.told(error)}"

        def write(db: Connection, note: str) -> None:
            for _ in range(work.unproven):
                self.ledger.failed(*work.identity, note, connection=db)
            if work.row is not None:
                self.held.postpone_again(db, work.row, attempt=work.attempt, delay=delay)
            else:
                self.held.postpone(
                    db, key_of(work), origin_of(work), attempt=work.attempt, delay=delay, note=note
                )

        self._told(note, write)

    def is_dead(self, db: Connection, work: Work) -> bool:
        """Whether *work* is a message that waits among the dead letters: it came again."""
        route = work.route
        hidden = route.letters.origin.hidden
        return open_letter_of(db, route.group, route.name, work.message, hidden) is not None

    def park_behind(self, work: Work) -> bool:
        """Park *work* behind its key; False if the key is not held any more.

        A copy of a dead letter is done with as that letter is: it must not run when somebody
        decides that the letter shall not.
        """
        if self.held_total >= self._settings.most_held:
            raise TooManyHeld(
                f"{self.held_total} messages are held, the most allowed (most_held): close their "
                "dead letters, or use  holdfast keys release"
            )
        most = self._settings.most_held_per_key

        def write(db: Connection) -> int | None:
            if self.is_dead(db, work):
                return 0
            waiting = self.held.park(db, key_of(work), origin_of(work), work.attempt)
            if waiting is not None and waiting > most:
                raise TooManyHeld(
                    f"key {work.message.key_text!r} of {work.route.topic} has {most} messages "
                    "parked, the most allowed (most_held_per_key): close its dead letter, or use  "
                    "holdfast keys release"
                )
            return waiting

        return self.run(write) is not None

    def is_free(self, work: Work) -> bool:
        """Whether *work* may run at once: nothing of its key is held, or not any more."""

        def look(db: Connection) -> bool:
            key = key_of(work)
            dlq_id = self.held.held_by(db, key)
            if dlq_id and closed(db, [dlq_id]):
                self.held.release(db, key)
            return self.held.let_go(db, key) or not self.held.among(db, key.topic, [key.key_hash])

        return self.run(look)

    def settle(self, db: Connection, work: Work) -> None:
        """Note in the transaction of its effect that *work* is done with."""
        if work.row is not None:
            self.held.done(db, work.row)
        if work.known:
            self.ledger.forget(work.route.consumer, [work.message.identity], connection=db)

    def confirm(self, db: Connection, work: Work, *, duplicate: bool) -> None:
        """Note in the transaction of its effect that *work* was handled, now or before."""
        self.settle(db, work)
        if work.message.is_replay:
            require_live(db, work.message)
            work.unsaid = not confirmed(db, work.message, clock=self._clock)
            return
        if work.burials != self.burials:
            self.look_ahead(db, [work], self.burials)
        if work.has_letter:
            self._close_own(db, work)
        if work.message.key is not None and not duplicate:
            self._overtake(db, work)

    def look_ahead(self, db: Connection, works: Sequence[Work], burials: int) -> None:
        """Write onto *works* which open dead letters of their keys they would go ahead of.

        And whether there is a letter of their own id, which ends when they are handled.
        """
        by_topic: dict[str, dict[bytes, list[Work]]] = {}
        ordinary = [work for work in works if not work.message.is_replay]
        known = with_letters(db, [work.message.id for work in ordinary])
        for work in ordinary:
            work.has_letter = cut(work.message.id) in known
        for work in works:
            work.burials = burials
            if work.message.key is not None and not work.message.is_replay:
                keys = by_topic.setdefault(work.route.topic, {})
                keys.setdefault(work.message.key, []).append(work)
        for topic, keys in sorted(by_topic.items()):
            found = open_letters(db, self._group, topic, keys)
            for key, mine in keys.items():
                for work in mine:
                    work.passes = found.get(key, ())

    def sift(self, db: Connection, works: Iterable[Work]) -> list[Work]:
        """Write onto *works* with marks of a replay what its plan says; return the ordinary ones.

        Those are marked by somebody who is no replay. One whose plan and letter are in another
        database is believed if it came by the group's own replay topic.
        """
        marked = [work for work in works if REPLAY_HEADER in work.message.headers]
        if not marked:
            return []
        ordinary = []
        found = standings(db, [(work.message, work.came_by) for work in marked])
        for work, known in zip(marked, found, strict=True):
            marks = Marks.of(work.message.headers)
            private = replay_topic(work.route.topic, self._group)
            is_ours = marks is not None and marks.group == self._group
            if (
                marks is None
                or known is Standing.FORGED
                or (known is Standing.ELSEWHERE and not (is_ours and work.came_by == private))
            ):
                ordinary.append(work)
                continue
            work.standing = known
            work.meant_for = None if is_ours else marks.group
            work.message = work.message.with_(replayed=True)
        return ordinary

    def standing(self, work: Work) -> Standing | None:
        """Return what the plan says of the replayed *work* now, right before it is run."""
        if work.standing is not Standing.ELSEWHERE:
            work.standing = self.run(lambda db: standing(db, work.message, work.came_by))
        return work.standing

    def withdraw(self, work: Work) -> None:
        """Note in its plan that the replayed *work* came too late, and was not handled."""
        self.run(lambda db: withdrawn(db, work.message, clock=self._clock))

    def _close_own(self, db: Connection, work: Work) -> None:
        """Close the dead letter that *work* is: it came again, and was handled after all."""
        route = work.route
        hidden = route.letters.origin.hidden
        own = open_letter_of(db, route.group, route.name, work.message, hidden)
        if own is not None:
            handled_after_all(db, own, clock=self._clock)

    def _overtake(self, db: Connection, work: Work) -> None:
        """Note which dead letters of its key *work* went ahead of, also the latest ones."""
        if work.passes:
            origin = work.delivery if work.row is None else work.row.origin
            overtake(db, work.passes, work.message, origin, clock=self._clock)

    def bury(self, work: Work, letter: Any, put: Callable[[Any, Connection], None]) -> None:
        """Store *letter* and hold its key: both or neither."""

        def write(db: Connection) -> None:
            put(letter, db)
            self.settle(db, work)
            if self._settings.quarantine and self._settings.parks and work.key is not None:
                self.held.hold(
                    db, key_of(work), dlq_id=str(letter.dlq_id), note=f"dead letter {letter.dlq_id}"
                )

        self.run(write)
        self.buried()

    def buried(self) -> None:
        """Count a dead letter: what was looked up about open ones before is out of date."""
        with self._counting:
            self.burials += 1


def key_of(work: Work) -> HeldKey:
    """Return the key of *work* as it is held."""
    if work.row is not None:
        return work.row.key
    message = work.message
    return HeldKey(work.route.topic, hash_of(work.key, message.id), message.key)


def origin_of(work: Work) -> Delivery:
    """Return the delivery that *work* came with, at first."""
    found = work.delivery if work.row is None else work.row.origin
    if found is None:
        raise ValueError("a work comes from a delivery or from a row")
    return found


@contextmanager
def translated() -> Iterator[None]:
    """Raise what the database raises as `DatabaseDown`."""
    try:
        yield
    except SQLAlchemyError as error:
        raise DatabaseDown(
            f"the consumer's tables cannot be written: {told(error)}"[:500]
        ) from error
