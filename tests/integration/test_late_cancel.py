"""A cancellation that comes while the commit is under way comes too late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, event, insert, select
from sqlalchemy.ext.asyncio import create_async_engine

from holdfast.call import Call
from holdfast.consumer.attempt.transaction import AsyncTransaction, Transaction
from holdfast.consumer.handlers.arguments import Arguments
from holdfast.db.engine import open_database
from holdfast.outbox import Outbox
from holdfast.pipeline import Pipeline
from tests.consuming import until

if TYPE_CHECKING:
    from tests.servers import Postgres

tables = MetaData()
done = Table("done", tables, Column("id", Integer, primary_key=True))


@pytest.mark.parametrize("colour", ["thread", "loop"])
def test_a_handler_cancelled_while_it_commits_has_done_its_work(
    postgres: Postgres, colour: str
) -> None:
    """Tried again, as after a timeout, it would do it twice: what is committed counts."""
    engine = open_database(postgres.database("late_cancel"))
    tables.create_all(engine)
    asynchronous = create_async_engine(engine.url)
    layer = Transaction(engine) if colour == "thread" else AsyncTransaction(asynchronous)
    tasks: list[asyncio.Task[Any]] = []

    async def work(session: Any) -> str:
        answer = session.execute(insert(done).values(id=1))
        if colour == "loop":
            await answer
        return "done"

    def commits(_connection: object) -> None:
        (task,) = tasks
        task.get_loop().call_soon_threadsafe(task.cancel)
        if colour == "thread":
            until(lambda: task.cancelling() > 0, "cancelled")

    plan = Pipeline((layer, Arguments({"session": "session"}, outbox=Outbox())), work)

    async def main() -> Any:
        target = engine if colour == "thread" else asynchronous.sync_engine
        event.listen(target, "commit", commits)
        tasks.append(asyncio.create_task(plan.run_async(Call((), {}))))
        try:
            return await tasks[0]
        finally:
            event.remove(target, "commit", commits)
            await asynchronous.dispose()

    assert asyncio.run(main()) == "done"
    assert tasks[0].cancelling() > 0
    with engine.connect() as db:
        assert db.execute(select(done.c.id)).scalars().all() == [1]
    engine.dispose()
