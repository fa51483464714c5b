"""One handler for users with a loop of their own: everything but the polling."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

from holdfast.classification import classify
from holdfast.consumer.outcome import Ending, Outcome
from holdfast.consumer.transaction import before_commit
from holdfast.consumer.work import Work, current_work
from holdfast.errors import Remedy
from holdfast.layer import Call
from holdfast.message import begin_handling, handling

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from holdfast.consumer.books import Books
    from holdfast.consumer.route import Route
    from holdfast.message import Message


class Single:
    """Runs one message through a handler's whole plan, waits included, and says what came of it.

    Only `BaseException`s that end the process go out.
    """

    def __init__(self, route: Route, books: Books | None) -> None:
        self._route = route
        self._books = books

    def handle(self, message: Message) -> Outcome:
        """Handle *message*; acknowledge it if and only if the outcome says so."""
        work, call = self._prepared(message)
        context = contextvars.copy_context()
        try:
            if self._is_held_back(work):
                return Outcome(Ending.HELD_BACK)
            context.run(_enter, work)
            context.run(self._route.plan.run, call)
        except Exception as error:  # noqa: BLE001 - the outcome carries it
            return self._given_back(work, error)
        return _done(work, call)

    async def handle_async(self, message: Message) -> Outcome:
        """Handle *message* with an `async def` handler."""
        work, call = self._prepared(message)
        token = current_work.set(work)
        try:
            if await asyncio.to_thread(self._is_held_back, work):
                return Outcome(Ending.HELD_BACK)
            with handling(message):
                await self._route.plan.run_async(call)
        except Exception as error:  # noqa: BLE001
            return self._given_back(work, error)
        finally:
            current_work.reset(token)
        return _done(work, call)

    def _is_held_back(self, work: Work) -> bool:
        books = self._books
        return books is not None and work.message.is_replay and books.is_held_back(work)

    def _prepared(self, message: Message) -> tuple[Work, Call]:
        work = Work(route=self._route, message=message, lane_key=())
        attempt = 1
        books = self._books
        if books is not None:
            found = books.ledger.standing(self._route.consumer, [message.id]).get(message.id)
            if found is not None:
                attempt, work.known = found.failed + 1, True
        call = Call((), {}, message=message, consumer=self._route.consumer, attempt=attempt)
        if books is not None:
            before_commit(call, lambda db: _settle(db, books, work))
        return work, call

    def _given_back(self, work: Work, error: BaseException) -> Outcome:
        if classify(error) in (Remedy.PAUSE, Remedy.RELEASE):
            return Outcome(Ending.RELEASED, error)
        if self._books is not None:
            self._books.failed(work, error)
        return Outcome(Ending.FAILED, error)


def _settle(db: Connection, books: Books, work: Work) -> None:
    books.confirm(db, work)


def _enter(work: Any) -> None:
    begin_handling(work.message)
    current_work.set(work)


def _done(work: Work, call: Call) -> Outcome:
    if work.letter is not None:
        return Outcome(Ending.DEAD_LETTERED, None)
    return Outcome(Ending.DUPLICATE if call.duplicate else Ending.HANDLED)
