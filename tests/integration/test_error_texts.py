"""What a dead letter hides stands nowhere else: not in notes, not in attempts, not in logs."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session  # noqa: TC002 - a handler asks for it by annotation

from holdfast import Message
from holdfast.dlq import CaptureSettings, DeadLetterStore, Redaction, dead_letter
from holdfast.errors import DependencyDown
from holdfast.health import Endpoint, Exposition, ProbeResult
from holdfast.idempotency import AttemptLog, idempotent
from holdfast.retry import Backoff, retry
from holdfast.scrubbing import told
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CARD = "4111111111111111"
PASSWORD = "hunter2"
HIDING = CaptureSettings(redaction=Redaction(paths=("card.number",)))
ORDER = {"card": {"number": CARD}, "total": 5}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a database in files."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def told_anywhere(bench: Bench, log: pytest.LogCaptureFixture) -> str:
    """Return all that was stored about the failure, and all that was logged."""
    stored = [*bench.held_keys, *bench.attempts]
    lines = [f"{record.getMessage()} {record.exc_text}" for record in log.records]
    traces = [str(record.exc_info[1]) for record in log.records if record.exc_info]
    return "\n".join([*(str(tuple(row)) for row in stored), *lines, *traces])


def fail(order: dict[str, Any]) -> None:
    """Raise what quotes too much, as errors do."""
    raise ValueError(f"no such card {order['card']['number']}; password={PASSWORD}")


@pytest.mark.parametrize("whose", ["handler", "consumer"])
def test_a_message_that_is_retried_tells_no_more_than_its_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    """Notes of held keys, attempts and log lines while it waits for a retry in the database."""
    caplog.set_level(logging.DEBUG, "holdfast")
    consumer = bench.consumer(patience=0.01, **({} if whose == "handler" else {"origin": HIDING}))

    @consumer.on("orders")
    @dead_letter(origin=HIDING if whose == "handler" else CaptureSettings())
    @retry(Backoff(first=60, ceiling=60, attempts=3))
    def handle(order: dict[str, Any]) -> None:
        fail(order)

    bench.publish(ORDER)
    with running(consumer):
        until(lambda: bench.held_keys and bench.attempts, "it waits in the database")
    found = told_anywhere(bench, caplog)
    assert "no such card ***" in bench.attempts[0].last_error
    assert "no such card ***" in bench.held_keys[0].note
    assert "no such card ***" in found
    assert CARD not in found
    assert PASSWORD not in found


def test_a_handler_without_dead_letters_hides_what_its_consumer_says(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes again and again: the ledger and the log hold nothing of the card."""
    caplog.set_level(logging.DEBUG, "holdfast")
    consumer = bench.consumer(origin=HIDING)

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=2))
    def handle(order: dict[str, Any]) -> None:
        fail(order)

    bench.publish(ORDER)
    with running(consumer):
        until(lambda: bench.attempts, "it failed")
    found = told_anywhere(bench, caplog)
    assert "attempt 1 failed" in found
    assert CARD not in found
    assert PASSWORD not in found


def test_a_message_that_waits_for_a_dependency_tells_no_more(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason of the wait is logged without the card."""
    caplog.set_level(logging.DEBUG, "holdfast")
    consumer = bench.consumer()

    @consumer.on("orders")
    @dead_letter(origin=HIDING)
    def handle(order: dict[str, Any]) -> None:
        raise DependencyDown(f"the gateway is away for card {order['card']['number']}")

    bench.publish(ORDER)
    with running(consumer):
        until(lambda: "nothing is acknowledged" in caplog.text, "it waits")
    found = told_anywhere(bench, caplog)
    assert "away for card ***" in found
    assert CARD not in found


def test_a_batch_that_fails_tells_no_more(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of the batch, whose error may quote any message, nor of the run alone."""
    caplog.set_level(logging.DEBUG, "holdfast")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders", batch=10)
    @dead_letter(origin=HIDING)
    @retry(Backoff(first=60, ceiling=60, attempts=3))
    @idempotent()
    def handle(order: dict[str, Any]) -> None:
        fail(order)

    bench.publish(ORDER, ORDER)
    with running(consumer):
        until(lambda: bench.attempts, "it failed")
    found = told_anywhere(bench, caplog)
    assert CARD not in found
    assert PASSWORD not in found


def test_a_function_of_ones_own_loop_logs_no_more_than_its_dead_letter(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any consumer, `@retry` asks the dead-letter layer around it."""
    caplog.set_level(logging.DEBUG, "holdfast")

    @dead_letter(DeadLetterStore(bench.engine), group="g", origin=HIDING)
    @retry(Backoff(first=0.001, ceiling=0.001, attempts=3))
    def handle(message: Message) -> None:
        fail(json.loads(message.payload or b""))

    handle(Message.new("orders", json.dumps(ORDER).encode()))
    assert "attempt 2 failed" in caplog.text
    assert "no such card ***" in caplog.text
    assert CARD not in caplog.text
    assert PASSWORD not in caplog.text
    assert CARD not in str(bench.letters[0])


def test_a_statement_that_fails_in_a_handler_leaves_no_parameters_anywhere(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the log nor in the ledger, where nobody has said what is to be hidden."""
    caplog.set_level(logging.DEBUG, "holdfast")
    consumer = bench.consumer()

    @consumer.on("orders")
    @retry(Backoff(first=0.01, ceiling=0.01, attempts=2))
    def handle(order: str, session: Session) -> None:
        session.execute(text("INSERT INTO nowhere VALUES (:card)"), {"card": order})

    bench.publish(CARD)
    with running(consumer):
        until(lambda: bench.attempts and "(attempt 1)" in caplog.text, "it failed")
    found = told_anywhere(bench, caplog)
    assert "no such table: nowhere" in found
    assert CARD not in found


def test_statements_and_their_parameters_stay_out_of_texts(bench: Bench) -> None:
    """The ledger of attempts, an error's text and the probe's answer name the fault alone."""
    with pytest.raises(Exception, match="no such table") as caught, bench.engine.connect() as db:
        db.execute(text("INSERT INTO nowhere VALUES (:card)"), {"card": CARD})
    AttemptLog(bench.engine).failed("g/handle", "m-1", caught.value)
    kept = bench.attempts[0].last_error
    assert kept == told(caught.value)
    assert kept.endswith("(sqlite3.OperationalError) no such table: nowhere")
    why = f"the database is down: {caught.value}; amqp://u:{PASSWORD}@h"
    page = Endpoint("127.0.0.1:0", alive=lambda: ProbeResult(True, ""),
                    metrics=lambda _: Exposition("", b""),
                    ready=lambda: ProbeResult(False, why))  # fmt: skip
    answer = page.answer("/readyz")[2].decode()
    page.stop()
    assert "no such table" in answer
    assert CARD not in answer
    assert "INSERT" not in answer
    assert PASSWORD not in answer
