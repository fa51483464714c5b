"""A consumer process of the effect-once checker; it may be killed at any moment."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert
from sqlalchemy.orm import Session  # noqa: TC002 - a handler asks for it by annotation

from holdfast.brokers import connect
from holdfast.consumer import Attempt, Consumer
from holdfast.dlq import dead_letter
from holdfast.errors import PoisonMessage, Transient
from holdfast.idempotency import idempotent
from holdfast.retry import Backoff, retry

TOPIC, GROUP = "payments", "checker"
metadata = MetaData()
effects = Table(
    "effects",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("number", Integer, nullable=False),  # not unique: a second effect would show
    Column("key", String(32), nullable=False),
    Column("process", Integer, nullable=False),
)


def consumer(broker: str, database: str, native: dict[str, Any], batch: int = 0) -> Consumer:
    """Return the consumer under test; *batch* messages share a transaction, 0: none do."""
    made = Consumer(
        connect(broker, **native),
        group=GROUP,
        database=database,
        workers=8,
        takeover_seconds=2.0,
        revoke_seconds=2.0,
        due_seconds=0.3,
        crash_limit=3,
    )

    @made.on(TOPIC, batch=batch or None)
    @dead_letter()
    @retry(Backoff(first=0.01, ceiling=0.05, attempts=4))
    @idempotent
    def pay(order: dict[str, Any], session: Session, attempt: Attempt) -> None:
        if order["kind"] == "poison":
            raise PoisonMessage("it is bad for ever")
        if order["kind"] == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if order["kind"] == "flaky" and attempt.number == 1:
            raise Transient("try again")
        session.execute(
            insert(effects).values(number=order["number"], key=order["key"], process=os.getpid())
        )

    return made


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("CHECKER_LOG", "ERROR"))
    if sys.argv[4]:
        importlib.import_module(f"tests.sabotage.{sys.argv[4]}")
    consumer(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[5])).run()
