"""A participant that books seats, as a handler with `@participant`; a process of it may be doomed.

`python -m tests.saga_shop.office DATABASE MOMENT MESSAGE_ID DIRECTION ATTEMPT` carries out one
command and is killed at MOMENT.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table, event, insert, select
from sqlalchemy.orm import Session  # noqa: TC002 - the consumer looks at the annotations

from holdfast import Message, outbox
from holdfast.brokers import connect
from holdfast.consumer import Consumer, HandlerOutcome
from holdfast.consumer import create_tables as create_consumer_tables
from holdfast.db import open_database
from holdfast.dlq import dead_letter
from holdfast.outbox import LeaseEngine, Relay
from holdfast.sagas import StepFailed, create_tables, current_step, participant
from holdfast.sagas.states import Direction
from holdfast.sagas.wire import CommandHeaders

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

SAGA, STEP, SEATS, REPLIES = "saga-1", "book", "seats", "seats.replies"
tables = MetaData()
effects = Table(
    "office_effects",
    tables,
    Column("seq", Integer, primary_key=True),
    Column("what", String(20), nullable=False),
    Column("attempt", Integer, nullable=False),
)


class Seat(msgspec.Struct):
    name: str


class Booked(msgspec.Struct):
    ticket: str


class Office:
    """The participant, its database, and what it has replied."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        create_consumer_tables(engine)
        outbox.create_tables(engine)
        create_tables(engine)
        tables.create_all(engine)
        self.broker = connect("memory:")
        for topic in (SEATS, REPLIES):
            self.broker.create_topic(topic, partitions=1)
        self.consumer = Consumer(self.broker, group="office", database=engine, takeover_seconds=1.0)
        self.failing: list[StepFailed] = []
        self.calls = 0
        self._replies = self.broker.source([REPLIES], group="saga")

        @self.consumer.on(SEATS, ordered=False)
        @dead_letter()
        @participant
        def seats(seat: Seat, session: Session) -> Booked | None:
            return self._carry_out(seat, session)

    def _carry_out(self, seat: Seat, session: Session) -> Booked | None:
        step = current_step()
        assert step is not None
        self.calls += 1
        what = "booked" if step.direction is Direction.DO else "freed"
        session.execute(insert(effects).values(what=what, attempt=step.attempt))
        if self.failing:
            raise self.failing.pop(0)
        return Booked(f"{seat.name}, call {self.calls}") if what == "booked" else None

    def handle(self, message: Message) -> HandlerOutcome:
        """Carry out one command, as the consumer does."""
        return self.consumer.handler(SEATS).handle(message)

    def effects(self) -> list[tuple[str, int]]:
        """Return what has happened, and by which attempt."""
        with self.engine.connect() as db:
            rows = db.execute(select(effects.c.what, effects.c.attempt).order_by(effects.c.seq))
            return [(row.what, row.attempt) for row in rows]

    def replies(self) -> list[tuple[str, bytes | None]]:
        """Return what was replied since the last look: the answer, and what came with it."""
        Relay(LeaseEngine(self.engine, self.broker.sink())).run_once()
        found: list[tuple[str, bytes | None]] = []
        while batch := self._replies.poll(100, 0.0):
            self._replies.accept(batch)
            found += [
                (one.message.headers.text("x-saga-answer") or "", one.message.payload)
                for one in batch
            ]
        return found

    def close(self) -> None:
        """Let go of everything."""
        self._replies.close()
        self.broker.close()
        self.engine.dispose()


def command(message_id: str, direction: str = "do", attempt: int = 1) -> Message:
    """Return a command of the saga."""
    headers = CommandHeaders(
        saga_id=SAGA, saga_type="trip", step=STEP, direction=Direction(direction),
        attempt=attempt, reply_to=REPLIES,
    ).headers()  # fmt: skip
    return Message.new(
        SEATS, b'{"name": "12A"}', key=SAGA, type="Seat", headers=headers, ids=lambda: message_id
    )


def doomed(url: str, moment: str, message: Message) -> None:
    """Carry out *message* and be killed: in the handler, before its commit, or just after it."""
    engine = open_database(url)
    office = Office(engine)
    has_committed = False

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @event.listens_for(engine, "after_cursor_execute")
    def executed(db: object, cursor: object, statement: str, *_: object) -> None:
        if moment == "handler" and "office_effects" in statement and "INSERT" in statement:
            die()

    @event.listens_for(engine, "commit")
    def committing(db: object) -> None:
        nonlocal has_committed
        if office.calls and moment == "commit":
            die()
        has_committed = bool(office.calls)

    @event.listens_for(engine.pool, "reset")
    def returned(*_: object) -> None:
        if has_committed and moment == "acknowledge":
            die()

    office.handle(message)


if __name__ == "__main__":
    doomed(sys.argv[1], sys.argv[2], command(sys.argv[3], sys.argv[4], int(sys.argv[5])))
