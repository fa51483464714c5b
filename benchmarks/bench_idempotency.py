"""Idempotent handling: what a batch saves, and what dedup costs on top of plain inserts."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, Integer, LargeBinary, MetaData, String, Table, insert
from sqlalchemy.orm import Session

from figures import Figure, Goal, compare
from holdfast.db.engine import open_database
from holdfast.idempotency import AttemptLog, BatchRunner, InboxBatch, create_tables, idempotent
from holdfast.message import Message
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

BODY = b"x" * 300
BATCH = 500
CONSUMER = "bench/shop.bill"
tables = MetaData()
invoices = Table(
    "invoices",
    tables,
    Column("id", Integer, primary_key=True),
    Column("customer", String(64)),
    Column("document", LargeBinary),
)


def figures() -> Iterator[Figure]:
    """Measure on a PostgreSQL of our own."""
    with Postgres() as postgres:
        engine = open_database(postgres.database("bench"))
        create_tables(engine)
        tables.create_all(engine)
        yield batched_against_single(engine)
        yield batched_against_plain(engine)
        yield marks(engine)
        engine.dispose()


def row(message: Message) -> dict[str, Any]:
    """Return what a handler writes for *message*."""
    return {"customer": message.key_text, "document": message.payload}


def bill_all(session: Session, messages: list[Message]) -> None:
    session.execute(insert(invoices), [row(message) for message in messages])


@idempotent
def bill(message: Message, session: Session) -> None:
    session.execute(insert(invoices), row(message))


def fresh(count: int, before: list[Message] | None = None) -> list[Message]:
    """Make new messages; every tenth comes again, as at-least-once brokers send them.

    Half of those came *before*, and are known to the database; the others are twice in here.
    """
    made = [Message.new("orders", BODY, key=f"c{n}") for n in range(count * 9 // 10)]
    again = count - len(made)
    known = [] if before is None else before[: again // 2]
    return [*made, *known, *made[: again - len(known)]]


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that *work* takes, with the collector out of the way."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def batched_against_single(engine: Engine) -> Figure:
    """Measure messages per second in batches, against a transaction for each."""
    runner = BatchRunner(engine)

    def batched() -> float:
        batches = [fresh(BATCH)]
        while len(batches) < 10:
            batches.append(fresh(BATCH, batches[-1]))

        def work() -> None:
            for messages in batches:
                runner.run_whole(InboxBatch(consumer=CONSUMER, messages=messages), bill_all)

        return 10 * BATCH / timed(work)

    def single() -> float:
        messages = fresh(400)
        messages = [*messages[:200], *fresh(200, messages[:200])]

        def work() -> None:
            for message in messages:
                with Session(engine) as session, session.begin():
                    bill(message, session)

        return 400 / timed(work)

    return compare(
        "idempotency: batches of 500, against a transaction per message",
        ours=batched,
        peer=single,
        unit="messages/s",
        goal=Goal(at_least=10),
        detail="PostgreSQL, commit to disk, one business row of 300 bytes each, 10 % duplicates, "
        "within a batch and of the batch before; "
        "the peer is @idempotent on single messages",
    )


def batched_against_plain(engine: Engine) -> Figure:
    """Measure the cost of dedup on top of the same batched inserts without it.

    Batch by batch in turns: a commit that the disk or a neighbour delays spoils one pair of
    many, and the median does not see it.
    """
    runner = BatchRunner(engine)

    def messages() -> list[Message]:
        return [Message.new("orders", BODY, key=f"c{n}") for n in range(BATCH)]

    def ours() -> float:
        batch = InboxBatch(consumer=CONSUMER, messages=messages())
        return timed(lambda: _ignore(runner.run_whole(batch, bill_all))) * 1e6 / BATCH

    def plain() -> float:
        batch = messages()

        def work() -> None:
            with Session(engine) as session, session.begin():
                bill_all(session, batch)

        return timed(work) * 1e6 / BATCH

    for _ in range(3):  # connections, plans and caches are there
        ours()
        plain()
    return compare(
        "idempotency: batches of 500, against plain batched inserts",
        ours=ours,
        peer=plain,
        unit="µs per message",
        goal=Goal(at_most=1.3),
        detail="PostgreSQL, commit to disk, one business row of 300 bytes each; the peer writes "
        "the same rows by the same statement in as many transactions, without dedup; the median "
        "of 101 pairs of batches",
        rounds=101,
    )


def _ignore(_outcomes: object) -> None:
    """Take what is returned."""


def marks(engine: Engine) -> Figure:
    """Measure the ledger's two writes for a poll batch, against its one transaction of work."""
    ledger, runner = AttemptLog(engine), BatchRunner(engine)

    def ours() -> float:
        batch = [Message.new("orders", BODY, key=f"c{n}") for n in range(BATCH)]
        ids = [message.id for message in batch]

        def work() -> None:
            ledger.starting(CONSUMER, ids, "bench")
            ledger.finished(CONSUMER, ids, "bench")

        return timed(work) * 1e6 / BATCH

    def handled() -> float:
        batch = [Message.new("orders", BODY, key=f"c{n}") for n in range(BATCH)]

        def work() -> None:
            runner.run_whole(InboxBatch(consumer=CONSUMER, messages=batch), bill_all)

        return timed(work) * 1e6 / BATCH

    return compare(
        "idempotency: marks of the attempt ledger, against the work they guard",
        ours=ours,
        peer=handled,
        unit="µs per message",
        goal=Goal(),
        detail="PostgreSQL, commit to disk, two writes for a poll batch of 500; the peer handles "
        "the batch in one transaction",
        rounds=9,
    )
