"""Micro-batches: many messages in one transaction, and one poison among them forfeits nothing.

One transaction of a batch: the claims in it, and what becomes of each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.errors import is_deadlock
from holdfast.db.transactions import DEADLOCKS
from holdfast.errors import StaleDelivery
from holdfast.idempotency.inbox import Inbox, wanted
from holdfast.idempotency.savepoints import require_live, require_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Self

    from sqlalchemy.engine import Engine

    from holdfast.idempotency.claim import Claim, ClaimRequest
    from holdfast.message import Message


if TYPE_CHECKING:
    Committing = Callable[[Any, "InboxBatch", list["BatchOutcome"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxBatch:
    """Messages to handle in one transaction."""

    consumer: str
    messages: Sequence[Message]
    wanted: Sequence[ClaimRequest] | None = None
    """Their identities, where a key function of the user makes them; else their ids."""
    lanes: Sequence[Hashable] | None = None
    """What each keeps its order in, e.g. its key: once one fails, the later ones of its lane
    are left out. Without lanes, none waits for another."""
    committing: Committing | None = None
    """Given the session, the batch and the outcomes, it may add to the transaction just
    before it commits."""

    def only(self, places: Sequence[int]) -> InboxBatch:
        """Return a batch of the messages at *places*."""
        return InboxBatch(
            consumer=self.consumer,
            messages=[self.messages[place] for place in places],
            wanted=None if self.wanted is None else [self.wanted[place] for place in places],
            lanes=None if self.lanes is None else [self.lanes[place] for place in places],
            committing=self.committing,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What became of one message: handled now, handled before, or failed with an error.

    Every outcome is final once the batch has run: what was done is committed.
    """

    error: BaseException | None = None
    is_duplicate: bool = False
    result: Any = None

    @property
    def is_done(self) -> bool:
        """Whether the effect is there, from now or before: the broker may be told."""
        return self.error is None


HANDLED = BatchOutcome()


class BatchLeftOpen(StaleDelivery):
    """An earlier message of the same lane failed; this one was not handled and keeps its turn."""


class KnownMessages(Exception):
    """A message that was hoped to be new has been handled before."""


class Uncommitted(Exception):
    """The database refused the commit because of what is in it, e.g. a deferred constraint."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class BatchWork:
    """One transaction of a batch: the claims, and what has become of them."""

    def __init__(
        self,
        session: Any,
        inbox: Inbox,
        batch: InboxBatch,
        *,
        hopeful: bool,
    ) -> None:
        self.batch = batch
        self._stuck: set[Hashable] = set()
        self.session = session
        self._inbox = inbox
        self._hopeful = hopeful
        self._outcomes: list[BatchOutcome | None] = [None] * len(batch.messages)
        self._items = (
            [wanted(message) for message in batch.messages]
            if batch.wanted is None
            else batch.wanted
        )
        self._claims: list[Claim] = []
        self._failed: list[int] = []
        self.new: list[int] = []

    def __enter__(self) -> Self:
        hopeful, consumer = self._hopeful, self.batch.consumer
        try:
            self._claims = self._inbox.claim_all(
                self.session, consumer, self._items, hopeful=hopeful
            )
        except BaseException as error:
            Session.close(self.session)
            if hopeful and isinstance(error, IntegrityError):
                raise KnownMessages from error
            raise
        for place, claim in enumerate(self._claims):
            if claim.is_new:
                if not self._stuck or not self.is_left_out(place):
                    self.new.append(place)
            elif claim.conflict is not None:
                self._outcomes[place] = BatchOutcome(error=claim.conflict)
                self._stick(place)
            elif claim.twin is None:
                self._outcomes[place] = BatchOutcome(is_duplicate=True, result=claim.result)
        return self

    def __exit__(self, *_: object) -> None:
        Session.close(self.session)

    def handled(self, place: int, result: Any) -> None:
        """Note that the message at *place* was handled."""
        self._outcomes[place] = HANDLED if result is None else BatchOutcome(result=result)

    def all_handled(self, places: list[int], results: Any) -> None:
        """Note that the messages at *places* were handled together."""
        fit = isinstance(results, list) and len(results) == len(places)
        for place, result in zip(places, results if fit else [None] * len(places), strict=True):
            self.handled(place, result)

    def failed(self, place: int, error: Exception) -> None:
        """Note that it failed; an error of the database itself ends the whole transaction."""
        if ends(error):
            raise error
        self._outcomes[place] = BatchOutcome(error=error)
        self._failed.append(place)
        self._stick(place)

    def is_left_out(self, place: int) -> bool:
        """Whether an earlier message of its lane failed; it is noted as left behind then."""
        lanes = self.batch.lanes
        if lanes is None or lanes[place] not in self._stuck:
            return False
        self._outcomes[place] = BatchOutcome(error=left_behind(self.batch, place))
        self._failed.append(place)
        return True

    def commit(self) -> list[BatchOutcome]:
        """Commit, without the claims of what failed; return all outcomes."""
        require_whole(self.session)
        gone = [(self._items[place], self._claims[place]) for place in self._failed]
        self._inbox.unclaim_all(self.session, self.batch.consumer, gone)
        outcomes = [self._outcome(place) for place in range(len(self._outcomes))]
        if self.batch.committing is not None:
            self.batch.committing(self.session, self.batch, outcomes)
        try:
            self._commit()
        except DBAPIError as error:
            if ends(error):
                raise
            raise Uncommitted(error) from error
        return outcomes

    def _commit(self) -> None:
        end = getattr(self.session, "end", None)  # a session of handlers, who may not commit it
        if end is None:
            Session.commit(self.session)
        else:
            end(commit=True)

    def _stick(self, place: int) -> None:
        if self.batch.lanes is not None:
            self._stuck.add(self.batch.lanes[place])

    def _outcome(self, place: int) -> BatchOutcome:
        outcome = self._outcomes[place]
        if outcome is not None:
            return outcome
        twin = self._claims[place].twin
        first = self._outcome(place if twin is None else twin)
        return (
            first
            if first.error is not None
            else BatchOutcome(is_duplicate=True, result=first.result)
        )


def left_behind(batch: InboxBatch, place: int) -> BatchLeftOpen:
    """Return why the message at *place* was not handled."""
    return BatchLeftOpen(f"message {batch.messages[place].id} waits behind one that failed")


def ends(error: BaseException) -> bool:
    """Whether *error* has ended the whole transaction, not only one message's work."""
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, KnownMessages) or is_deadlock(error)


if TYPE_CHECKING:
    Each = Callable[[Any, Message], Any]
    Whole = Callable[[Any, list[Message]], Any]

_DOUBTFUL_BATCHES = 50
"""How long duplicates are expected after one was met; PostgreSQL logs each broken hope."""


class BatchRunner:
    """Runs batches on one database.

    All new messages are claimed by one statement and handled in one transaction. If a
    handler fails, the transaction is rolled back and run again with savepoints, around each
    message or, for a handler of whole lists, around halves and halves of halves until the
    failing ones stand alone: only these are left out. A handler therefore may run twice,
    but what it wrote counts once. Deadlocks begin again by themselves; errors of the
    connection go out, and then nothing is done and nobody is to blame.

    Keep one for all batches of a handler: it remembers whether duplicates are to be expected.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        inbox: Inbox | None = None,
        session: Callable[[Engine], Any] = Session,
        hasten: Callable[[Any], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._inbox = Inbox() if inbox is None else inbox
        self._session = session
        self._hasten = hasten
        """Told of the session before the handlers of a first pass: its errors may come late."""
        self._clock = clock
        self._doubts = 0

    def run(self, batch: InboxBatch, handle: Each) -> list[BatchOutcome]:
        """Handle each message of *batch* by `handle(session, message)`; one outcome for each."""
        return self._again(lambda: self._each(batch, handle))

    def run_whole(self, batch: InboxBatch, handle: Whole) -> list[BatchOutcome]:
        """Handle the new messages of *batch* by `handle(session, messages)`, all at once."""
        return self._again(lambda: self._whole(batch, handle))

    def _again(self, work: Callable[[], list[BatchOutcome]]) -> list[BatchOutcome]:
        attempt = 0
        while True:
            attempt += 1
            try:
                return work()
            except KnownMessages:
                self._doubts = _DOUBTFUL_BATCHES
                continue
            except DBAPIError as error:
                delay = DEADLOCKS.delay(attempt) if is_deadlock(error) else None
                if delay is None:
                    raise
            self._clock.sleep(delay)

    def _work(self, batch: InboxBatch) -> BatchWork:
        if self._doubts:
            self._doubts -= 1
        session = self._session(self._engine)
        return BatchWork(session, self._inbox, batch, hopeful=self._doubts == 0)

    def _each(self, batch: InboxBatch, handle: Each) -> list[BatchOutcome]:
        try:
            with self._work(batch) as work:
                if self._hasten is not None:
                    self._hasten(work.session)
                for place in work.new:
                    work.handled(place, handle(work.session, batch.messages[place]))
                return work.commit()
        except Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._each(part, handle))
        except Exception as error:
            if ends(error):
                raise
        return self._carefully(batch, handle)

    def _carefully(self, batch: InboxBatch, handle: Each) -> list[BatchOutcome]:
        try:
            with self._work(batch) as work:
                for place in work.new:
                    if work.is_left_out(place):
                        continue
                    try:
                        with work.session.begin_nested():
                            result = handle(work.session, batch.messages[place])
                            require_live(work.session)
                    except Exception as error:  # noqa: BLE001 - it is this message's outcome
                        work.failed(place, error)
                    else:
                        work.handled(place, result)
                return work.commit()
        except Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._carefully(part, handle))

    def _whole(self, batch: InboxBatch, handle: Whole) -> list[BatchOutcome]:
        try:
            with self._work(batch) as work:
                if self._hasten is not None:
                    self._hasten(work.session)
                if work.new:
                    given = [batch.messages[place] for place in work.new]
                    work.all_handled(work.new, handle(work.session, given))
                return work.commit()
        except Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._whole(part, handle))
        except Exception as error:
            if ends(error):
                raise
        return self._by_halves(batch, handle)

    def _by_halves(self, batch: InboxBatch, handle: Whole) -> list[BatchOutcome]:
        try:
            with self._work(batch) as work:
                self._bisect(work, work.new, handle)
                return work.commit()
        except Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._by_halves(part, handle))

    def _bisect(self, work: BatchWork, places: list[int], handle: Whole) -> None:
        places = [place for place in places if not work.is_left_out(place)]
        if not places:
            return
        try:
            with work.session.begin_nested():
                results = handle(work.session, [work.batch.messages[place] for place in places])
                require_live(work.session)
        except Exception as error:  # noqa: BLE001 - it is the outcome of one of these messages
            if len(places) == 1 or ends(error):
                work.failed(places[0], error)
                return
            middle = len(places) // 2
            self._bisect(work, places[:middle], handle)
            self._bisect(work, places[middle:], handle)
            return
        work.all_handled(places, results)

    def _halves(
        self,
        batch: InboxBatch,
        error: BaseException,
        run: Callable[[InboxBatch], list[BatchOutcome]],
    ) -> list[BatchOutcome]:
        """Commit in two parts what could not be committed in one."""
        size = len(batch.messages)
        if size == 1:
            return [BatchOutcome(error=error)]
        outcomes: dict[int, BatchOutcome] = {}
        stuck: set[Hashable] = set()
        for part in (range(size // 2), range(size // 2, size)):
            free = [n for n in part if batch.lanes is None or batch.lanes[n] not in stuck]
            half = batch.only(free)
            done = self._again(lambda half=half: run(half)) if free else []  # type: ignore[misc]
            outcomes |= zip(free, done, strict=True)
            for n in part:
                outcomes.setdefault(n, BatchOutcome(error=left_behind(batch, n)))
                if batch.lanes is not None and not outcomes[n].is_done:
                    stuck.add(batch.lanes[n])
        return [outcomes[n] for n in range(size)]
