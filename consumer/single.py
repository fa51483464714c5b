"""One handler for users with a loop of their own: everything but the polling."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any

from holdfast.classification import classify
from holdfast.consumer.books import translated
from holdfast.consumer.outcome import Ending, Outcome
from holdfast.consumer.transaction import before_commit
from holdfast.consumer.work import Work, current_work
from holdfast.dlq import dead_lettered
from holdfast.errors import DependencyDown, HoldfastError, Remedy
from holdfast.layer import Call
from holdfast.message import begin_handling, handling

if TYPE_CHECKING:
    from holdfast.consumer.books import Books
    from holdfast.consumer.reporter import Reporter
    from holdfast.consumer.route import Route
    from holdfast.message import Message

log = logging.getLogger("holdfast.consumer")


class KeyHeld(DependencyDown):
    """An earlier message of its key is a dead letter, or waits for a retry: this one waits, too."""

    def __init__(self, message_id: str, key: str | None, topic: str) -> None:
        super().__init__(
            f"message {message_id} must not overtake its key {key!r} of {topic}: close the "
            "dead letter that holds it, or use  holdfast keys release"
        )


class _DeadAlready(Exception):
    """The message is one of the dead letters, and came again."""


class Single:
    """Runs one message through a handler's whole plan, waits included, and says what came of it.

    Only `BaseException`s that end the process go out.
    """

    def __init__(self, route: Route, books: Books | None, reporter: Reporter) -> None:
        self._route = route
        self._books = books
        self._reporter = reporter

    def handle(self, message: Message) -> Outcome:
        """Handle *message*; acknowledge it if and only if the outcome says so."""
        work = Work(route=self._route, message=message, lane_key=())
        context = contextvars.copy_context()
        try:
            if self._is_held_back(work):
                return Outcome(Ending.HELD_BACK)
            call = self._prepared(work)
            context.run(_enter, work)
            context.run(self._route.plan.run, call)
        except Exception as error:  # noqa: BLE001 - the outcome carries it
            return self._given_back(work, error)
        return self._done(work, call)

    async def handle_async(self, message: Message) -> Outcome:
        """Handle *message* with an `async def` handler."""
        work = Work(route=self._route, message=message, lane_key=())
        token = current_work.set(work)
        try:
            if await asyncio.to_thread(self._is_held_back, work):
                return Outcome(Ending.HELD_BACK)
            call = await asyncio.to_thread(self._prepared, work)
            with handling(message):
                await self._route.plan.run_async(call)
        except Exception as error:  # noqa: BLE001
            return await asyncio.to_thread(self._given_back, work, error)
        finally:
            current_work.reset(token)
        return await asyncio.to_thread(self._done, work, call)

    def _is_held_back(self, work: Work) -> bool:
        books = self._books
        return books is not None and work.message.is_replay and books.is_held_back(work)

    def _prepared(self, work: Work) -> Call:
        message, books, consumer = work.message, self._books, self._route.consumer
        call = Call((), {}, message=message, consumer=consumer)
        if books is not None:
            with translated():
                found = books.ledger.standing(consumer, [message.id]).get(message.id)
            if found is not None:
                call.attempt, work.known = found.failed + 1, True
            if not message.is_replay and not books.is_free(work):
                if books.run(lambda db: books.is_dead(db, work)):
                    raise _DeadAlready
                raise KeyHeld(message.id, message.key_text, self._route.topic)
            before_commit(call, lambda db: books.confirm(db, work, duplicate=call.duplicate))
        return call

    def _given_back(self, work: Work, error: BaseException) -> Outcome:
        if isinstance(error, _DeadAlready):
            return Outcome(Ending.DEAD_LETTERED)
        if classify(error) in (Remedy.PAUSE, Remedy.RELEASE):
            return Outcome(Ending.RELEASED, error)
        if self._books is not None:
            try:
                self._books.failed(work, error)
            except DependencyDown as outage:
                return Outcome(Ending.RELEASED, outage)
        return Outcome(Ending.FAILED, error)

    def _done(self, work: Work, call: Call) -> Outcome:
        if work.letter is not None or dead_lettered(call) is not None:
            return Outcome(Ending.DEAD_LETTERED, None)
        if work.unsaid or (self._books is None and work.message.is_replay):
            try:
                self._reporter.tell(work.message)
            except HoldfastError:
                log.exception("message %s was handled, its replay does not hear of it",
                              work.message.id)  # fmt: skip
        return Outcome(Ending.DUPLICATE if call.duplicate else Ending.HANDLED)


def _enter(work: Any) -> None:
    begin_handling(work.message)
    current_work.set(work)
