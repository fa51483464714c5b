"""Micro-batches: many messages in one transaction, and one poison among them forfeits nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.idempotency.claim import Claim, Wanted, unclaim
from holdfast.idempotency.inbox import Inbox, wanted
from holdfast.idempotency.transactions import DEADLOCKS, is_deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Engine

    from holdfast.message import Message

    Each = Callable[[Any, Message], Any]
    Whole = Callable[[Any, list[Message]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages to handle in one transaction."""

    consumer: str
    messages: Sequence[Message]
    wanted: Sequence[Wanted] | None = None
    """Their identities, where a key function of the user makes them; else their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one message: handled now, handled before, or failed with an error.

    Every outcome is final once `run_batch` returns: what was done is committed.
    """

    error: BaseException | None = None
    is_duplicate: bool = False
    result: Any = None

    @property
    def is_done(self) -> bool:
        """Whether the effect is there, from now or before: the broker may be told."""
        return self.error is None


HANDLED = Outcome()


class BatchRunner:
    """Runs batches on one database.

    All new messages are claimed by one statement and handled in one transaction. If a
    handler fails, the transaction is rolled back and run again with a savepoint around each
    message, so that only the failed ones are left out; a handler therefore may run twice,
    but what it wrote counts once. A handler of whole lists is given halves and halves of
    halves until the failing messages stand alone. Deadlocks begin again by themselves;
    errors of the connection and of the commit go out, and then nothing is done.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        inbox: Inbox | None = None,
        session: Callable[[Engine], Any] = Session,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._inbox = Inbox() if inbox is None else inbox
        self._session = session
        self._clock = clock

    def run(self, batch: Batch, handle: Each) -> list[Outcome]:
        """Handle each message of *batch* by `handle(session, message)`; one outcome for each."""
        return self._again(lambda: self._each(batch, handle))

    def run_whole(self, batch: Batch, handle: Whole) -> list[Outcome]:
        """Handle the new messages of *batch* by `handle(session, messages)`, all at once."""
        return self._again(lambda: self._whole(batch, handle))

    def _again(self, work: Callable[[], list[Outcome]]) -> list[Outcome]:
        attempt = 0
        while True:
            attempt += 1
            try:
                return work()
            except DBAPIError as error:
                delay = DEADLOCKS.delay(attempt) if is_deadlock(error) else None
                if delay is None:
                    raise
            self._clock.sleep(delay)

    def _each(self, batch: Batch, handle: Each) -> list[Outcome]:
        try:
            with _Work(self, batch) as work:
                for place in work.new:
                    work.handled(place, handle(work.session, batch.messages[place]))
                return work.commit()
        except _Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._each(part, handle))
        except Exception as error:
            if is_deadlock(error) or _is_lost(error):
                raise
        return self._carefully(batch, handle)

    def _carefully(self, batch: Batch, handle: Each) -> list[Outcome]:
        try:
            with _Work(self, batch) as work:
                for place in work.new:
                    try:
                        with work.session.begin_nested():
                            result = handle(work.session, batch.messages[place])
                    except Exception as error:  # noqa: BLE001 - it is this message's outcome
                        work.failed(place, error)
                    else:
                        work.handled(place, result)
                return work.commit()
        except _Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._carefully(part, handle))

    def _whole(self, batch: Batch, handle: Whole) -> list[Outcome]:
        try:
            with _Work(self, batch) as work:
                self._bisect(work, work.new, handle)
                return work.commit()
        except _Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._whole(part, handle))

    def _bisect(self, work: _Work, places: list[int], handle: Whole) -> None:
        if not places:
            return
        try:
            with work.session.begin_nested():
                results = handle(work.session, [work.batch.messages[place] for place in places])
        except Exception as error:  # noqa: BLE001 - it is the outcome of one of these messages
            if len(places) == 1 or is_deadlock(error) or _is_lost(error):
                work.failed(places[0], error)
                return
            middle = len(places) // 2
            self._bisect(work, places[:middle], handle)
            self._bisect(work, places[middle:], handle)
            return
        fit = isinstance(results, list) and len(results) == len(places)
        for place, result in zip(places, results if fit else [None] * len(places), strict=True):
            work.handled(place, result)

    def _halves(
        self, batch: Batch, error: BaseException, run: Callable[[Batch], list[Outcome]]
    ) -> list[Outcome]:
        """Commit in two parts what could not be committed in one."""
        size = len(batch.messages)
        if size == 1:
            return [Outcome(error=error)]
        items = batch.wanted
        outcomes: list[Outcome] = []
        for part in (slice(size // 2), slice(size // 2, size)):
            half = Batch(
                consumer=batch.consumer,
                messages=batch.messages[part],
                wanted=None if items is None else items[part],
            )
            outcomes += self._again(lambda half=half: run(half))  # type: ignore[misc]
        return outcomes


class _Uncommitted(Exception):
    """The database refused the commit because of what is in it, e.g. a deferred constraint."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Work:
    """One transaction of a batch: the claims, and what has become of them."""

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self.batch = batch
        self.session = runner._session(runner._engine)
        self._inbox = runner._inbox
        self._outcomes: list[Outcome | None] = [None] * len(batch.messages)
        self._items = (
            [wanted(message) for message in batch.messages]
            if batch.wanted is None
            else batch.wanted
        )
        self._claims: list[Claim] = []
        self._failed: list[bytes] = []
        self.new: list[int] = []

    def __enter__(self) -> Self:
        try:
            consumer = self.batch.consumer
            self._claims = self._inbox.claim_all(self.session, consumer, self._items)
        except BaseException:
            Session.close(self.session)
            raise
        for place, claim in enumerate(self._claims):
            if claim.is_new:
                self.new.append(place)
            elif claim.conflict is not None:
                self._outcomes[place] = Outcome(error=claim.conflict)
            elif claim.twin is None:
                self._outcomes[place] = Outcome(is_duplicate=True, result=claim.result)
        return self

    def __exit__(self, *_: object) -> None:
        Session.close(self.session)

    def handled(self, place: int, result: Any) -> None:
        """Note that the message at *place* was handled."""
        self._outcomes[place] = HANDLED if result is None else Outcome(result=result)

    def failed(self, place: int, error: Exception) -> None:
        """Note that it failed; an error of the database itself ends the whole transaction."""
        if is_deadlock(error) or _is_lost(error):
            raise error
        self._outcomes[place] = Outcome(error=error)
        self._failed.append(self._items[place].key)

    def commit(self) -> list[Outcome]:
        """Commit, without the claims of what failed; return all outcomes."""
        unclaim(self.session, self.batch.consumer, self._failed)
        try:
            Session.commit(self.session)
        except DBAPIError as error:
            if is_deadlock(error) or _is_lost(error):
                raise
            raise _Uncommitted(error) from error
        return [self._outcome(place) for place in range(len(self._outcomes))]

    def _outcome(self, place: int) -> Outcome:
        outcome = self._outcomes[place]
        if outcome is not None:
            return outcome
        twin = self._claims[place].twin
        first = self._outcome(place if twin is None else twin)
        return first if first.error is not None else Outcome(is_duplicate=True, result=first.result)


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated
