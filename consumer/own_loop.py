"""One handler for users with a loop of their own: everything but the polling."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from holdfast.consumer.attempt.executor import AttemptExecutor, entered
from holdfast.consumer.attempt.outcome import HandlerOutcome
from holdfast.consumer.intake.decode import BodyReader
from holdfast.consumer.scheduling.eligibility import Bury, Park, eligibility
from holdfast.consumer.scheduling.work import HandlerEnding, Work, current_work
from holdfast.consumer.store import translated
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, StaleDelivery
from holdfast.headers import REPLAY_GROUP
from holdfast.message import Message, counted, handling
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.call import Call
    from holdfast.circuit import Breaker
    from holdfast.circuit.breaker import Permit
    from holdfast.clock import Clock
    from holdfast.consumer.handlers.route import Route
    from holdfast.consumer.replays import ReplayConfirmations
    from holdfast.consumer.settings import ConsumerContext
    from holdfast.consumer.store import ConsumerStore
    from holdfast.idempotency import AttemptLog

log = logging.getLogger("holdfast.consumer")

T = TypeVar("T")


class KeyParked(DependencyDown):
    """An earlier message of its key is a dead letter, or waits for a retry: this one waits, too."""

    def __init__(self, message_id: str, key: str | None, topic: str) -> None:
        super().__init__(
            f"message {message_id} must not overtake its key {key!r} of {topic}: close the "
            "dead letter that holds it, or use  holdfast keys release"
        )


class _DeadAlready(Exception):
    """The message is one of the dead letters, or has become one."""


class MessageHandler:
    """Runs one message through a handler's whole plan, waits included, and says what came of it.

    What ended is counted, too many dead letters stop it, and a message that ended the process
    too often is dead-lettered. Only `BaseException`s that end the process go out.
    """

    def __init__(
        self,
        context: ConsumerContext,
        route: Route,
        confirmations: ReplayConfirmations,
        heartbeat: OwnerHeartbeat | None,
    ) -> None:
        self.context = context
        self.route = route
        self.executor = AttemptExecutor(context, confirmations)
        self.heartbeat = heartbeat
        self.reader = BodyReader(context)
        self.ended: deque[str] = deque()
        """Messages that have ended and whose marks an outage has left behind."""

    def __call__(self, message: Message) -> Any:
        """Handle *message* like `handle`, or return what is to be awaited for an `async def`."""
        return self.handle_async(message) if self.route.plan.is_async else self.handle(message)

    def handle(self, message: Message) -> HandlerOutcome:
        """Handle *message*; acknowledge it if and only if the outcome says so."""
        self._check(message, is_async=False)
        run = _Run(self, self._correlated(message))
        try:
            if (ending := run.refused_replay()) is not None:
                return run.counted(HandlerOutcome(ending))
            call = run.prepared()
            plan, span = self.route.plan, run.work.run.span
            if span is None:
                entered(run.work).run(plan.run, call)
            else:
                entered(run.work).run(span.run, plan.run, call)
        except Exception as error:  # noqa: BLE001 - the outcome carries it
            return run.counted(run.ended(error))
        else:
            return run.counted(run.ended())
        finally:
            run.close()

    async def handle_async(self, message: Message) -> HandlerOutcome:
        """Handle *message* with an `async def` handler."""
        self._check(message, is_async=True)
        run = _Run(self, self._correlated(message))
        token = current_work.set(run.work)
        try:
            if (ending := await run.off_loop(run.refused_replay)) is not None:
                return run.counted(HandlerOutcome(ending))
            call = await run.off_loop(run.prepared)
            plan, span = self.route.plan, run.work.run.span
            with handling(run.work.message):
                if span is None:
                    await plan.run_async(call)
                else:
                    await span.run_async(plan.run_async, call)
        except Exception as error:  # noqa: BLE001
            return run.counted(await run.off_loop(run.ended, error))
        else:
            return run.counted(await run.off_loop(run.ended))
        finally:
            current_work.reset(token)
            await run.off_loop(run.close)

    def _check(self, message: object, *, is_async: bool) -> None:
        """Refuse a call that could only fail, or run the handler and call that a failure."""
        plan = self.route.plan
        if plan.is_async is not is_async:
            colour, right = ("async def", "handle_async") if plan.is_async else ("def", "handle")
            raise ConfigurationError(f"{plan.name}() is {colour}: use {right}(message)")
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"{plan.name}() is to handle a {type(message).__name__}: pass a Message, e.g. "
                "Message.new(topic, payload, key=…), or the message of a Delivery"
            )

    def _correlated(self, message: Message) -> Message:
        if message.correlation_id is not None or self.context.settings.strict:
            return message
        self.context.counters.add(message.topic, "uncorrelated")
        return message.with_(correlation_id=message.id)


class _Run:
    """One message on its way through a `MessageHandler`."""

    def __init__(self, handler: MessageHandler, message: Message) -> None:
        self._handler = handler
        self._context = handler.context
        self._executor = handler.executor
        self._store = handler.context.store
        self.work = Work(route=handler.route, message=message, lane_key=(), came_by=message.topic)
        self._limit: Breaker | None = handler.route.limit
        self._permit: Permit | None = None
        self._is_new = True
        """Whether its end counts, as that of a dead letter that came again does not."""
        self._stack = ExitStack()
        self._clock = handler.route.plan.clock
        self._since = self._clock.monotonic()

    def close(self) -> None:
        """Remove the mark: the process outlived the message."""
        limit, permit = self._limit, self._permit
        if limit is not None and permit is not None:
            limit.give_back(permit)
        self._stack.close()

    async def off_loop(self, step: Callable[..., T], *args: Any) -> T:
        """Return what *step* returns, in a thread if it may wait for the database or the broker."""
        if self._store is None and REPLAY_GROUP not in self.work.message.headers:
            return step(*args)
        return await asyncio.to_thread(step, *args)

    def refused_replay(self) -> HandlerEnding | None:
        """Return how a message with the marks of a replay ends that is not to be handled."""
        work, store = self.work, self._store
        if REPLAY_GROUP not in work.message.headers:
            return None
        if store is None:
            marks = counted(work.message, work.came_by)
            ordinary = [work] if marks is None else []
            if marks is not None and marks.group != work.route.group:
                work.replayed(meant_for=marks.group)
        else:
            ordinary = store.run(lambda db: store.sift(db, [work]))
        if ordinary:
            work.message = self._handler.reader.ordinary(work.message, work.route.topic)
            return None
        return self._executor.refused_replay(work, ask_again=False)

    def prepared(self) -> Call:
        """Return the call, once nothing speaks against it and its start is marked."""
        work, store = self.work, self._store
        if self._limit is not None:
            self._permit = self._limit.admit()  # raises where too many die
        if store is None:
            return self._executor.prepare(work, suspends=False)
        self._look_up(store)
        crash_limit = self._context.settings.crash_limit
        found = eligibility(work, key_held=True, crash_limit=crash_limit)
        if isinstance(found, Park):
            if not store.is_free(work):
                if store.run(lambda db: store.is_dead(db, work)):
                    raise _DeadAlready
                raise KeyParked(work.message.id, work.message.key_text, work.route.topic)
            found = eligibility(work, key_held=False, crash_limit=crash_limit)
        if isinstance(found, Bury):
            self._executor.bury(work, found.error)
            raise _DeadAlready from found.error
        self._mark(store)
        return self._executor.prepare(work, suspends=False)

    def _look_up(self, store: ConsumerStore) -> None:
        """Write down what is known of the message, after starts of the dead were counted."""
        work, ids = self.work, [self.work.message.identity]
        consumer, owner = work.route.consumer, self._context.owner
        with translated():
            found = store.ledger.standing(consumer, ids, owner=owner).get(ids[0])
            if found is not None and found.begun:
                store.ledger.orphans()
                found = store.ledger.standing(consumer, ids, owner=owner).get(ids[0])
        if found is None:
            return
        if found.begun_alone:
            raise StaleDelivery(f"message {work.message.id} runs in another process")
        work.learn(found, self._clock.monotonic())

    def _mark(self, store: ConsumerStore) -> None:
        """Mark the start, so that the death of the process is counted; it ends with the run."""
        work = self.work
        if self._handler.heartbeat is not None:
            self._stack.enter_context(self._handler.heartbeat)
        owner, consumer = self._context.owner, work.route.consumer
        with translated():
            if ended := list(self._handler.ended):
                store.ledger.finished(consumer, ended, owner)
                for one in ended:
                    with suppress(ValueError):  # removed by another thread
                        self._handler.ended.remove(one)
            store.ledger.starting(consumer, [work.message.identity], owner)
        self._stack.callback(self._unmark, store)

    def _unmark(self, store: ConsumerStore) -> None:
        try:
            store.finished(self.work, self._context.owner)
        except DependencyDown as error:
            self._handler.ended.append(self.work.message.identity)
            log.warning("the mark of message %s stays for now: %s", self.work.message.id, error)

    def ended(self, error: BaseException | None = None) -> HandlerOutcome:
        """Return what came of a run that raised *error*, or ended well."""
        work, call = self.work, self.work.run.call
        if isinstance(error, _DeadAlready):
            self._is_new = False
            return HandlerOutcome(HandlerEnding.DEAD_LETTERED, error.__cause__)
        duplicate = call is not None and call.duplicate
        self._measure(error)
        outcome = self._executor.ended(work, error, duplicate=duplicate)
        if outcome.ending is HandlerEnding.DEAD_LETTERED:
            return HandlerOutcome(outcome.ending, None if call is None else call.failure)
        if outcome.acknowledge and error is None and self._executor.policy.must_confirm(work):
            try:
                self._executor.confirm(work)
            except HoldfastError as down:
                log.error("message %s was handled, its replay does not hear of it: %s",  # noqa: TRY400
                          work.message.id, work.told(down))  # fmt: skip
        return outcome

    def _measure(self, error: BaseException | None) -> None:
        """Note how long the handler ran; a call of one's own holds all attempts in it."""
        work, call = self.work, self.work.run.call
        if call is None:
            return
        retries = call.attempt - work.history.attempt + int(work.history.attempt > 1)
        failure = call.failure if error is None else error
        seconds = self._clock.monotonic() - self._since
        self._executor.measure(work, seconds, failure, retries=retries)

    def counted(self, outcome: HandlerOutcome) -> HandlerOutcome:
        """Count *outcome*, and tell the kill switch of dead letters."""
        limit = self._limit
        if not self._is_new:
            return outcome
        self._executor.count(self.work, outcome.ending)
        if limit is not None and self._permit is not None and outcome.acknowledge:
            permit, self._permit = self._permit, None
            if outcome.ending is HandlerEnding.DEAD_LETTERED:
                limit.failed(permit)
            else:
                limit.succeeded(permit)
        return outcome


class OwnerHeartbeat:
    """Keeps *owner* known as alive inside its `with` block; any thread may enter it.

    Without it a handler that takes its time would be taken for a crash. One thread, which
    ends by itself when nothing has run for a while.
    """

    def __init__(self, ledger: AttemptLog, owner: str, clock: Clock) -> None:
        self._ledger, self._owner, self._clock = ledger, owner, clock
        self._every = ledger.owner_seconds / 3
        self._lock = threading.Lock()
        self._inside = 0
        self._thread: threading.Thread | None = None
        self._never = threading.Event()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-heartbeat", daemon=True
                )
                self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1

    def _run(self) -> None:
        while not self._clock.wait(self._never, self._every):
            with self._lock:
                if not self._inside:
                    self._thread = None
                    return
            try:
                self._ledger.alive(self._owner)
            except SQLAlchemyError as error:
                log.warning("no sign of life reached the database: %s", told(error))
