"""Micro-batches: many messages in one transaction, and one poison among them forfeits nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.idempotency.aborted import require_live
from holdfast.idempotency.batch_work import (
    Batch,
    BatchWork,
    Known,
    Outcome,
    Uncommitted,
    ends,
    left_behind,
)
from holdfast.idempotency.inbox import Inbox
from holdfast.transactions import DEADLOCKS, is_deadlock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sqlalchemy.engine import Engine

    from holdfast.message import Message

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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._inbox = Inbox() if inbox is None else inbox
        self._session = session
        self._clock = clock
        self._doubts = 0

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
            except Known:
                self._doubts = _DOUBTFUL_BATCHES
                continue
            except DBAPIError as error:
                delay = DEADLOCKS.delay(attempt) if is_deadlock(error) else None
                if delay is None:
                    raise
            self._clock.sleep(delay)

    def _work(self, batch: Batch) -> BatchWork:
        if self._doubts:
            self._doubts -= 1
        session = self._session(self._engine)
        return BatchWork(session, self._inbox, batch, hopeful=self._doubts == 0)

    def _each(self, batch: Batch, handle: Each) -> list[Outcome]:
        try:
            with self._work(batch) as work:
                for place in work.new:
                    work.handled(place, handle(work.session, batch.messages[place]))
                return work.commit()
        except Uncommitted as refused:
            return self._halves(batch, refused.error, lambda part: self._each(part, handle))
        except Exception as error:
            if ends(error):
                raise
        return self._carefully(batch, handle)

    def _carefully(self, batch: Batch, handle: Each) -> list[Outcome]:
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

    def _whole(self, batch: Batch, handle: Whole) -> list[Outcome]:
        try:
            with self._work(batch) as work:
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

    def _by_halves(self, batch: Batch, handle: Whole) -> list[Outcome]:
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
        self, batch: Batch, error: BaseException, run: Callable[[Batch], list[Outcome]]
    ) -> list[Outcome]:
        """Commit in two parts what could not be committed in one."""
        size = len(batch.messages)
        if size == 1:
            return [Outcome(error=error)]
        outcomes: dict[int, Outcome] = {}
        stuck: set[Hashable] = set()
        for part in (range(size // 2), range(size // 2, size)):
            free = [n for n in part if batch.lanes is None or batch.lanes[n] not in stuck]
            half = batch.only(free)
            done = self._again(lambda half=half: run(half)) if free else []  # type: ignore[misc]
            outcomes |= zip(free, done, strict=True)
            for n in part:
                outcomes.setdefault(n, Outcome(error=left_behind(batch, n)))
                if batch.lanes is not None and not outcomes[n].is_done:
                    stuck.add(batch.lanes[n])
        return [outcomes[n] for n in range(size)]
