"""What the consumer writes to its database: attempts, held keys, dead letters."""

from __future__ import annotations

import json
import logging
import math
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import exists, select, update
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from holdfast.consumer.parking.store import ParkedKey, ParkedMessages, hash_of
from holdfast.consumer.scheduling.work import ReplayFacts
from holdfast.db.engine import looking
from holdfast.db.errors import DatabaseDown, is_deadlock
from holdfast.db.sql import executed, statements
from holdfast.db.text import ascii_only, cut, fitted
from holdfast.db.transactions import transact
from holdfast.dlq import closed
from holdfast.dlq.replay.admission import (
    ReplayStanding,
    require_live,
    standing,
    standings,
    withdrawn,
)
from holdfast.dlq.replay.outcomes import confirmed, handled_after_all
from holdfast.dlq.store.overtaking import open_letters, overtake
from holdfast.dlq.store.recognition import open_letter_of, with_letters
from holdfast.dlq.store.rows import key_hash
from holdfast.errors import DependencyDown
from holdfast.headers import REPLAY_GROUP, ReplayHeaders, replay_topic
from holdfast.idempotency import AttemptLog
from holdfast.idempotency.attempts import listed_ids
from holdfast.idempotency.idempotent import Idempotent
from holdfast.idempotency.leased import Leased
from holdfast.idempotency.schema import attempt, inbox, roster
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.clock import Clock
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.scheduling.work import Work
    from holdfast.consumer.settings import Settings
    from holdfast.ports import Delivery


log = logging.getLogger("holdfast.consumer")
T = TypeVar("T")
_LOUD_SECONDS = 1.0


class TooManyParked(DependencyDown):
    """The bound of parked messages is reached: the partition waits, nothing overtakes."""


class ConsumerStore:
    """The consumer's side of the database; every method is one short transaction.

    Whatever goes wrong in it is `DatabaseDown`: nothing was written, the message is not
    acknowledged and comes again.
    """

    def __init__(self, engine: Engine, group: str, settings: Settings, clock: Clock) -> None:
        self.engine = engine
        self.held = ParkedMessages(group)
        self._group = group
        self.ledger = AttemptLog(engine, clock=clock, owner_seconds=settings.takeover_seconds)
        self.held_total = 0
        """How many messages are parked, as last counted."""
        self.burials = 0
        """How many dead letters this process has stored."""
        self._quiet_at = -math.inf
        """When it is asked again whether nothing waits at all; until then, each look is whole."""
        self._counting = threading.Lock()
        self._settings = settings
        self._lineage = settings.lineage
        self._clock = clock
        self._at_once: Engine | None = None
        if engine.dialect.name == "postgresql":
            self._at_once = looking(engine)
            self._sql = statements("holdfast.consumer", engine.dialect.name)

    def begun(self, works: Sequence[Work], ended: Collection[str], owner: str) -> bool:
        """Mark *works*, of one handler, as begun, in one round trip; remove the marks of *ended*.

        False where something is known of one of them, or might be: nothing is marked then, and
        each has to be looked up. No work may be among *ended*.
        """
        if self._at_once is None or self.ledger.owes_sign(owner):
            return False
        if any(work.row is not None or REPLAY_GROUP in work.message.headers for work in works):
            return False
        clear = ReplayFacts(letters_seen=self.burials)
        values = {
            "consumer": fitted(works[0].route.consumer),
            "owner": owner,
            "ids": listed_ids(work.message.identity for work in works),
            "ended": listed_ids(ended) or "[]",
            "grp": self._group,
        }
        with translated():
            try:
                with self._at_once.connect() as db:
                    begun = (
                        self._begun_quietly(db, values)
                        or not executed(
                            db, self._sql["begin_unless_known"], values | self._asked(works)
                        ).scalar_one()
                    )
            except DBAPIError as error:
                if is_deadlock(error):
                    return False
                raise
        if begun:
            for work in works:
                work.replay = clear
        return begun

    def _begun_quietly(self, db: Connection, values: dict[str, Any]) -> bool:
        """Mark works as begun if nothing waits at all; after the contrary not asked for a while."""
        if self._clock.monotonic() < self._quiet_at:
            return False
        if not executed(db, self._sql["begin_while_quiet"], values).scalar_one():
            return True
        self._quiet_at = self._clock.monotonic() + _LOUD_SECONDS
        return False

    def _asked(self, works: Sequence[Work]) -> dict[str, str]:
        """Return what *works*, of one handler, are looked up by."""
        topic, messages = works[0].route.topic, [work.message for work in works]
        lists: dict[str, set[str | None]] = {
            "lanes": {hash_of(work.key, work.message.id) for work in works},
            "names": {cut(one.id) for one in messages},
            "keys": {key_hash(one.key) for one in messages if one.key is not None},
        }
        return {
            "topic": topic,
            "own_group": cut(self._group),
            "own_topic": cut(topic),
            **{name: json.dumps(list(found), ensure_ascii=False) for name, found in lists.items()},
        }

    def read(self, query: Callable[[Connection], T]) -> T:
        """Return what one *query* finds; where it can be, without a transaction around it."""
        if self._at_once is None:
            return self.run(query)
        with translated(), self._at_once.connect() as db:
            return query(db)

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
                if isinstance(layer, Idempotent):
                    with translated(), Session(self.engine) as session, session.begin():
                        layer.inbox.enter(session, scope_of(layer, route.consumer))

    def failed(self, work: Work, error: BaseException) -> None:
        """Count a failed attempt."""
        self._told(
            work.told(error),
            lambda db, said: self.ledger.failed(*work.identity, said, connection=db),
        )
        work.note(recorded=True)

    def crashed(self, work: Work) -> None:
        """Count that *work* by itself has ended the process."""
        with translated():
            self.ledger.crashed(*work.identity)
        work.note(recorded=True)

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
            for _ in range(work.history.unblamed):
                self.ledger.failed(*work.identity, note, connection=db)
            if work.row is not None:
                self.held.postpone_again(db, work.row, attempt=work.history.attempt, delay=delay)
            else:
                self.held.postpone(
                    db, key_of(work), origin_of(work), attempt=work.history.attempt, delay=delay,
                    note=note, rules=rules_of(work),
                )  # fmt: skip

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
            raise TooManyParked(
                f"{self.held_total} messages are held, the most allowed (most_held): close their "
                "dead letters, or use  holdfast keys release"
            )
        most = self._settings.most_held_per_key

        def write(db: Connection) -> int | None:
            if self.is_dead(db, work):
                return 0
            waiting = self.held.park(
                db, key_of(work), origin_of(work), work.history.attempt,
                rules=rules_of(work),
            )  # fmt: skip
            if waiting is not None and waiting > most:
                raise TooManyParked(
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
        if work.history.recorded:
            self.ledger.forget(work.route.consumer, [work.message.identity], connection=db)

    def confirm(self, db: Connection, work: Work, *, duplicate: bool) -> None:
        """Note in the transaction of its effect that *work* was handled, now or before."""
        self.confirm_all(db, [(work, duplicate)])

    def confirm_all(self, db: Connection, ended: Sequence[tuple[Work, bool]]) -> None:
        """Note it of many works, with whether each was a duplicate."""
        for work, duplicate in ended:
            if not self._is_clear(work):
                self._confirm(db, work, duplicate=duplicate)
        if self._lineage is not None:
            fresh = [work.message for work, duplicate in ended if not duplicate]
            self._lineage.handled(db, fresh)

    def _is_clear(self, work: Work) -> bool:
        """Whether nothing is known of *work* that ends with it, as nearly always."""
        replay, message = work.replay, work.message
        return (
            work.row is None
            and not work.history.recorded
            and replay.letters_seen == self.burials
            and not replay.has_letter
            and not replay.overtakes
            and not ((message.replayed or message.headers.pairs) and message.is_replay)
        )

    def _confirm(self, db: Connection, work: Work, *, duplicate: bool) -> None:
        self.settle(db, work)
        if work.message.is_replay:
            require_live(db, work.message)
            heard = confirmed(db, work.message, clock=self._clock)
            work.replayed(confirmation_pending=not heard)
            return
        if work.replay.letters_seen != self.burials:
            self.look_ahead(db, [work], self.burials)
        if work.replay.has_letter:
            self._close_own(db, work)
        if work.message.key is not None and not duplicate:
            self._overtake(db, work)

    def look_ahead(self, db: Connection, works: Sequence[Work], burials: int) -> None:
        """Write onto *works* which open dead letters of their keys they would go ahead of.

        And whether there is a letter of their own id, which ends when they are handled.
        """
        ordinary = [work for work in works if not work.message.is_replay]
        known = with_letters(db, [work.message.id for work in ordinary])
        by_topic: dict[str, dict[bytes, None]] = {}
        for work in ordinary:
            if work.message.key is not None:
                by_topic.setdefault(work.route.topic, {})[work.message.key] = None
        found = {
            topic: open_letters(db, self._group, topic, keys)
            for topic, keys in sorted(by_topic.items())
        }
        clear = ReplayFacts(letters_seen=burials)  # of nearly every message
        if not known and not any(found.values()):
            for work in ordinary:
                work.replay = clear
            return
        for work in ordinary:
            key, has_letter = work.message.key, cut(work.message.id) in known
            passed = () if key is None else found[work.route.topic].get(key, ())
            work.replay = (
                ReplayFacts(overtakes=passed, has_letter=has_letter, letters_seen=burials)
                if passed or has_letter
                else clear
            )

    def sift(self, db: Connection, works: Iterable[Work]) -> list[Work]:
        """Write onto *works* with marks of a replay what its plan says; return the ordinary ones.

        Those are marked by somebody who is no replay. One whose plan and letter are in another
        database is believed if it came by the group's own replay topic.
        """
        marked = [work for work in works if REPLAY_GROUP in work.message.headers]
        if not marked:
            return []
        ordinary = []
        found = standings(db, [(work.message, work.came_by) for work in marked])
        for work, known in zip(marked, found, strict=True):
            marks = ReplayHeaders.of(work.message.headers)
            private = replay_topic(work.route.topic, self._group)
            is_ours = marks is not None and marks.group == self._group
            if (
                marks is None
                or known is ReplayStanding.FORGED
                or (known is ReplayStanding.ELSEWHERE and not (is_ours and work.came_by == private))
            ):
                ordinary.append(work)
                continue
            work.replayed(standing=known, meant_for=None if is_ours else marks.group)
            work.message = work.message.with_(replayed=True)
        return ordinary

    def standing(self, work: Work) -> ReplayStanding | None:
        """Return what the plan says of the replayed *work* now, right before it is run."""
        if work.replay.standing is not ReplayStanding.ELSEWHERE:
            found = self.run(lambda db: standing(db, work.message, work.came_by))
            work.replayed(standing=found)
        return work.replay.standing

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
        if work.replay.overtakes:
            origin = work.delivery if work.row is None else work.row.origin
            overtake(db, work.replay.overtakes, work.message, origin, clock=self._clock)

    def bury(self, work: Work, letter: Any, put: Callable[[Any, Connection], None]) -> None:
        """Store *letter* and hold its key: both or neither."""

        def write(db: Connection) -> None:
            put(letter, db)
            work.note(recorded=True)  # no inbox knows a dead letter, so nobody else would acquit it
            self.settle(db, work)
            if self._lineage is not None:
                root = letter.failure.root
                self._lineage.dead_lettered(db, work.message, f"{root.type}: {root.text}")
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


def key_of(work: Work) -> ParkedKey:
    """Return the key of *work* as it is held."""
    if work.row is not None:
        return work.row.key
    message = work.message
    return ParkedKey(work.route.topic, hash_of(work.key, message.id), message.key)


def rules_of(work: Work) -> str:
    """Return what is kept with a parked *work* for a command that makes a dead letter of it."""
    route = work.route
    return route.letters.origin.rules("" if route.name == route.topic else route.name)


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


def scope_of(layer: Idempotent | Leased, consumer: str) -> str:
    """Return whose memory *layer* uses: what its user says, or the handler's own."""
    said = None if layer.subject is None else layer.subject.scope
    return consumer if said is None else said


def scopes_of(route: Route) -> set[str]:
    """Return the scopes in which *route* remembers messages; none without `@idempotent`."""
    return {
        scope_of(layer, route.consumer)
        for layer in route.plan.layers
        if isinstance(layer, Idempotent | Leased)
    }


def known_scopes(db: Connection, group: str) -> set[str]:
    """Return the names under which *group* remembers messages in this database."""
    named = roster.c.name.startswith(f"{group}/", autoescape=True)
    rows = db.execute(select(roster.c.id, roster.c.name).where(named)).all()
    return {row.name for row in rows if _remembers(db, row.id)}


def tell_changes(group: str, routes: Iterable[Route], before: set[str]) -> None:
    """Say which scopes of *group* are new here and which nobody has here, after a start.

    *before* is what the database knew until then. A name that changed is a new one here as well:
    where nothing is new, what nobody has here belongs to another program of the group.
    """
    mine = list(routes)
    now = {scope for route in mine for scope in scopes_of(route)}
    gone = {scope for scope in before - now if not any(route.formerly.has(scope) for route in mine)}
    fresh = {
        scope
        for route in mine
        for scope in scopes_of(route)
        if scope not in before and not any(route.formerly.has(one) for one in before)
    }
    likely = next(iter(fresh)) if len(fresh) == 1 else f"{group}/NAME"
    for scope in sorted(gone if fresh else ()):
        log.warning(
            "group %s remembers messages under %s, and no handler here has that name. If another "
            "program of the group has it, all is well; if its topic or name has changed, what it "
            "has handled is new to its successor and takes effect again, until you run  holdfast "
            "inbox rename %s %s --reason …",
            group, scope, scope, likely,
        )  # fmt: skip
    for scope in sorted(fresh if before else ()):
        log.info("%s is new in group %s and remembers nothing yet", scope, group)


def carry_attempts(db: Connection, routes: Iterable[Route]) -> None:
    """Enter what earlier versions counted of messages under the name that the handler has now."""
    other = attempt.alias()
    for route in routes:
        own = fitted(route.consumer)
        former = [fitted(scope) for scope in route.formerly.scopes if fitted(scope) != own]
        for name in former:
            there = exists().where(
                other.c.consumer == own, other.c.message_id == attempt.c.message_id
            )
            # Read first: MySQL updates no table that it reads in the same statement.
            wanted = select(attempt.c.message_id).where(attempt.c.consumer == name, ~there)
            for message_id in db.execute(wanted).scalars().all():
                mine = (attempt.c.consumer == name) & (attempt.c.message_id == message_id)
                db.execute(update(attempt).where(mine).values(consumer=own))


def _remembers(db: Connection, number: int) -> bool:
    first = select(inbox.c.message).where(inbox.c.consumer == number).limit(1)
    return db.execute(first).first() is not None
