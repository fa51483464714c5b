"""One handler for users with a loop of their own: everything but the polling."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.classification import classify
from holdfast.consumer.books import translated
from holdfast.consumer.burial import bury
from holdfast.consumer.failed_replays import FailedReplays
from holdfast.consumer.outcome import Ending, Outcome
from holdfast.consumer.performer import ProcessKilled
from holdfast.consumer.reader import Reader
from holdfast.consumer.transaction import before_commit
from holdfast.consumer.work import Work, current_work
from holdfast.dlq import dead_lettered
from holdfast.dlq.layer import FAILURE
from holdfast.dlq.replay.admission import Standing, Withdrawn
from holdfast.dlq.replay.marks import counted
from holdfast.errors import (
    ConfigurationError,
    DependencyDown,
    HoldfastError,
    Remedy,
    StaleDelivery,
)
from holdfast.layer import Call
from holdfast.message import REPLAY_HEADER, Message, begin_handling, handling

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.circuit import Breaker
    from holdfast.circuit.breaker import Permit
    from holdfast.consumer.books import Books
    from holdfast.consumer.metrics import ConsumerMetrics
    from holdfast.consumer.reporter import Reporter
    from holdfast.consumer.route import Route
    from holdfast.consumer.settings import Settings
    from holdfast.consumer.tally import Tally
    from holdfast.consumer.vigil import Vigil

log = logging.getLogger("holdfast.consumer")

T = TypeVar("T")

_COUNTS = {
    Ending.HANDLED: "handled",
    Ending.DUPLICATE: "duplicates",
    Ending.DEAD_LETTERED: "dead_lettered",
    Ending.FAILED: "failed",
    Ending.RELEASED: "released",
    Ending.HELD_BACK: "held_back",
    Ending.SKIPPED: "skipped",
    Ending.WITHDRAWN: "withdrawn",
}
_STAYS = {
    Standing.HELD: Ending.HELD_BACK,
    Standing.DONE: Ending.DUPLICATE,
    Standing.OVER: Ending.WITHDRAWN,
}


class KeyHeld(DependencyDown):
    """An earlier message of its key is a dead letter, or waits for a retry: this one waits, too."""

    def __init__(self, message_id: str, key: str | None, topic: str) -> None:
        super().__init__(
            f"message {message_id} must not overtake its key {key!r} of {topic}: close the "
            "dead letter that holds it, or use  holdfast keys release"
        )


class _DeadAlready(Exception):
    """The message is one of the dead letters, or has become one."""


class Single:
    """Runs one message through a handler's whole plan, waits included, and says what came of it.

    What ended is counted, too many dead letters stop it, and a message that ended the process
    too often is dead-lettered. Only `BaseException`s that end the process go out.
    """

    def __init__(
        self,
        route: Route,
        books: Books | None,
        reporter: Reporter,
        vigil: Vigil | None,
        *,
        owner: str,
        settings: Settings,
        tally: Tally,
        metrics: ConsumerMetrics,
    ) -> None:
        self._route = route
        self._books = books
        self._reporter = reporter
        self._replays = FailedReplays()
        self._vigil = vigil
        self._owner = owner
        self._settings = settings
        self._tally = tally
        self._metrics = metrics
        self._reader = Reader(settings, tally, metrics)

    def __call__(self, message: Message) -> Any:
        """Handle *message* like `handle`, or return what is to be awaited for an `async def`."""
        return self.handle_async(message) if self._route.plan.is_async else self.handle(message)

    def handle(self, message: Message) -> Outcome:
        """Handle *message*; acknowledge it if and only if the outcome says so."""
        self._check(message, is_async=False)
        run = _Run(self, self._correlated(message))
        with run:
            try:
                if (ending := run.stays()) is not None:
                    return run.ended(Outcome(ending))
                call = run.prepared()
                context = contextvars.copy_context()
                context.run(_enter, run.work)
                context.run(self._route.plan.run, call)
            except Exception as error:  # noqa: BLE001 - the outcome carries it
                return run.ended(run.given_back(error))
            return run.ended(run.done(call))

    async def handle_async(self, message: Message) -> Outcome:
        """Handle *message* with an `async def` handler."""
        self._check(message, is_async=True)
        run = _Run(self, self._correlated(message))
        token = current_work.set(run.work)
        try:
            if (ending := await run.off_loop(run.stays)) is not None:
                return run.ended(Outcome(ending))
            call = await run.off_loop(run.prepared)
            with handling(run.work.message):
                await self._route.plan.run_async(call)
        except Exception as error:  # noqa: BLE001
            return run.ended(await run.off_loop(run.given_back, error))
        else:
            return run.ended(await run.off_loop(run.done, call))
        finally:
            current_work.reset(token)
            await run.off_loop(run.close)

    def _check(self, message: object, *, is_async: bool) -> None:
        """Refuse a call that could only fail, or run the handler and call that a failure."""
        plan = self._route.plan
        if plan.is_async is not is_async:
            colour, right = ("async def", "handle_async") if plan.is_async else ("def", "handle")
            raise ConfigurationError(f"{plan.name}() is {colour}: use {right}(message)")
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"{plan.name}() is to handle a {type(message).__name__}: pass a Message, e.g. "
                "Message.new(topic, payload, key=…), or the message of a Delivery"
            )

    def _correlated(self, message: Message) -> Message:
        if message.correlation_id is not None or self._settings.strict:
            return message
        self._tally.add("uncorrelated")
        return message.with_(correlation_id=message.id)


class _Run:
    """One message on its way through a `Single`."""

    def __init__(self, single: Single, message: Message) -> None:
        self._single = single
        self.work = Work(route=single._route, message=message, lane_key=(), came_by=message.topic)
        self._books = single._books
        self._limit: Breaker | None = single._route.limit
        self._permit: Permit | None = None
        self._is_new = True
        """Whether its end counts, as that of a dead letter that came again does not."""
        self._stack = ExitStack()
        self._clock = single._route.plan.clock
        self._since = self._clock.monotonic()

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the mark: the process outlived the message."""
        limit, permit = self._limit, self._permit
        if limit is not None and permit is not None:
            limit.give_back(permit)
        self._stack.close()

    async def off_loop(self, step: Callable[..., T], *args: Any) -> T:
        """Return what *step* returns, in a thread if it may wait for the database or the broker."""
        if self._books is None and REPLAY_HEADER not in self.work.message.headers:
            return step(*args)
        return await asyncio.to_thread(step, *args)

    def stays(self) -> Ending | None:
        """Return how a message with the marks of a replay ends that is not to be handled."""
        work, books = self.work, self._books
        if REPLAY_HEADER not in work.message.headers:
            return None
        if books is None:
            marks = counted(work.message, work.came_by)
            ordinary = [work] if marks is None else []
            work.meant_for = (
                None if marks is None or marks.group == work.route.group else marks.group
            )
        else:
            ordinary = books.run(lambda db: books.sift(db, [work]))
        if ordinary:
            work.message = self._single._reader.ordinary(work.message, work.route.topic)
            return None
        if work.meant_for is not None:
            return Ending.SKIPPED
        if self._single._replays.holds(work):
            return Ending.HELD_BACK
        if work.standing is Standing.OVER and books is not None:
            books.withdraw(work)
        return None if work.standing is None else _STAYS.get(work.standing)

    def prepared(self) -> Call:
        """Return the call, once nothing speaks against it and its start is marked."""
        work, books, consumer = self.work, self._books, self.work.route.consumer
        if self._limit is not None:
            self._permit = self._limit.admit()  # raises where too many die
        letters = work.route.letters
        call = Call(
            (), {}, message=work.message, consumer=consumer, scrub=letters.scrub,
            visible=letters.visible,
        )  # fmt: skip
        if books is None:
            return call
        self._look_up(books, call)
        if work.standing is not Standing.LIVE and not books.is_free(work):
            if books.run(lambda db: books.is_dead(db, work)):
                raise _DeadAlready
            raise KeyHeld(work.message.id, work.message.key_text, work.route.topic)
        if work.crashes >= self._single._settings.crash_limit:
            self._bury()
        self._mark(books)
        before_commit(call, lambda db: books.confirm(db, work, duplicate=call.duplicate))
        return call

    def _look_up(self, books: Books, call: Call) -> None:
        """Write down what is known of the message, after starts of the dead were counted."""
        work, owner, ids = self.work, self._single._owner, [self.work.message.identity]
        with translated():
            found = books.ledger.standing(call.consumer, ids, owner=owner).get(ids[0])
            if found is not None and found.begun:
                books.ledger.orphans()
                found = books.ledger.standing(call.consumer, ids, owner=owner).get(ids[0])
        if found is None:
            return
        if found.begun_alone:
            raise StaleDelivery(f"message {work.message.id} runs in another process")
        call.attempt, work.known, work.crashes = found.failed + 1, True, found.crashed
        work.attempt = call.attempt
        if found.failing_for is not None:
            call.failing_since = self._clock.monotonic() - found.failing_for

    def _mark(self, books: Books) -> None:
        """Mark the start, so that the death of the process is counted; it ends with the run."""
        work, owner = self.work, self._single._owner
        if self._single._vigil is not None:
            self._stack.enter_context(self._single._vigil)
        with translated():
            books.ledger.starting(work.route.consumer, [work.message.identity], owner)
        self._stack.callback(self._unmark, books)

    def _unmark(self, books: Books) -> None:
        try:
            books.finished(self.work, self._single._owner)
        except DependencyDown as error:
            log.warning("the mark of message %s stays for now: %s", self.work.message.id, error)

    def _bury(self) -> None:
        """Dead-letter a message that no handler may see any more."""
        killed = ProcessKilled(self.work.crashes)
        bury(self.work, killed, self._clock)
        self._single._tally.add("crashed")
        self._single._metrics.count(self.work.route.topic, "crashed")
        raise _DeadAlready from killed

    def given_back(self, error: BaseException) -> Outcome:
        """Return what came of a run that raised *error*."""
        if isinstance(error, Withdrawn):
            return Outcome(Ending.WITHDRAWN, error)
        if isinstance(error, _DeadAlready):
            self._is_new = False
            return Outcome(Ending.DEAD_LETTERED, error.__cause__)
        if classify(error) in (Remedy.PAUSE, Remedy.RELEASE):
            return Outcome(Ending.RELEASED, error)
        if self._books is not None:
            try:
                self._books.failed(self.work, error)
            except DependencyDown as outage:
                return Outcome(Ending.RELEASED, outage)
        return Outcome(Ending.FAILED, error)

    def done(self, call: Call) -> Outcome:
        """Return what came of a run that ended well."""
        work = self.work
        work.letter = work.letter or dead_lettered(call)
        if work.letter is not None:
            self._single._replays.note(work)
            return Outcome(Ending.DEAD_LETTERED, call.notes.get(FAILURE))
        if work.unsaid or (self._books is None and work.message.is_replay):
            try:
                self._single._reporter.tell(work.message)
            except HoldfastError as error:
                log.error("message %s was handled, its replay does not hear of it: %s",  # noqa: TRY400
                          work.message.id, work.told(error))  # fmt: skip
        return Outcome(Ending.DUPLICATE if call.duplicate else Ending.HANDLED)

    def ended(self, outcome: Outcome) -> Outcome:
        """Count *outcome*, and tell the kill switch of dead letters."""
        topic, metrics, limit = self.work.route.topic, self._single._metrics, self._limit
        metrics.seconds.labels(topic).observe(self._clock.monotonic() - self._since)
        if not self._is_new:
            return outcome
        name = _COUNTS[outcome.ending]
        self._single._tally.add(name)
        metrics.count(topic, name)
        if limit is not None and self._permit is not None and outcome.acknowledge:
            permit, self._permit = self._permit, None
            if outcome.ending is Ending.DEAD_LETTERED:
                limit.failed(permit)
            else:
                limit.succeeded(permit)
        return outcome


def _enter(work: Any) -> None:
    begin_handling(work.message)
    current_work.set(work)
