"""What operators are told about a replay is so, and nothing is set aside that was only not sent."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, text, update

from holdfast import Message
from holdfast.consumer import HandlerEnding
from holdfast.db.audit import Operator
from holdfast.dlq import DeadLetterStore, capture, dead_letter
from holdfast.dlq.replay import EndingKind, ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.dlq.replay.outcomes import confirm
from holdfast.dlq.replay.schema import plan as plans
from holdfast.dlq.store.schema import message as letters
from holdfast.errors import InvalidMessage, Transient
from holdfast.ports import Published
from holdfast.retry import Backoff, retry
from tests.consuming import Bench
from tests.dead_letters import failed
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from holdfast.dlq import DeadLetter

ADA = Operator(actor="ada", reason="fixed")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Offer a broker and a store."""
    made = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    yield made
    made.close()


def put(bench: Bench, *orders: str, correlation: str | None = None) -> list[DeadLetter]:
    """Dead-letter *orders*, each under a key of its own."""
    made = []
    for order in orders:
        message = Message.new("orders", order.encode(), key=order)
        message = message.with_(correlation_id=correlation or order)
        made.append(capture(message, failed(ValueError("x")), group="g", handler="orders"))
    DeadLetterStore(bench.engine).put_all(made)
    return made


def frozen(bench: Bench) -> Any:
    """Make a plan of all that waits for nobody."""
    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.5))
    return freeze(bench.engine, Selection(consumer_group="g"), terms, ADA).plan


def dlq(bench: Bench, *args: str) -> Any:
    """Run `holdfast dlq` on the store."""
    url = bench.engine.url.render_as_string(hide_password=False)
    return shell("dlq", *args, "--database", url)


class Halting:
    """A broker that refuses one message, and takes none of the others beside it."""

    def __init__(self, broker: Any, poison: bytes) -> None:
        self._broker = broker
        self._poison = poison

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def sink(self) -> Any:
        """Return a sink whose batches are taken whole or not at all."""
        real, poison = self._broker.sink(), self._poison

        class Sink:
            caps = real.caps

            def publish(self, messages: Sequence[Message]) -> list[Published]:
                if all(message.payload != poison for message in messages):
                    return list(real.publish(messages))
                return [
                    Published(
                        error=InvalidMessage("refused")
                        if message.payload == poison
                        else Transient("not sent: another message of its batch was refused")
                    )
                    for message in messages
                ]

            def close(self) -> None:
                real.close()

        return Sink()


def test_what_was_only_not_sent_because_of_another_is_sent_again(bench: Bench) -> None:
    """One is refused and set aside; the others of its batch reach the group."""
    put(bench, "1", "bad", "2", "3")
    broker: Any = Halting(bench.broker, b"bad")
    assert Sender(bench.engine, broker).run(frozen(bench).id).kind is EndingKind.UNCONFIRMED
    source = bench.broker.source(["orders.g.replay"], group="g")
    came = sorted(str(delivery.message.payload) for delivery in source.poll(10, 5.0))
    source.close()
    assert came == ["b'1'", "b'2'", "b'3'"]


def test_letters_are_found_by_their_correlation(bench: Bench) -> None:
    """One business case, whatever failed of it."""
    (mine,) = put(bench, "1", correlation="case-7")
    put(bench, "2")
    found = json.loads(dlq(bench, "list", "--correlation", "case-7", "--json").stdout)
    assert [row["dlq_id"] for row in found] == [mine.dlq_id]
    shown = json.loads(dlq(bench, "show", "--correlation", "case-7", "--json").stdout)
    assert shown["letter"]["dlq_id"] == mine.dlq_id
    assert dlq(bench, "show", "--correlation", "case-8").returncode == 1
    dry = dlq(bench, "replay", "--correlation", "case-7", "--dry-run", "--json").stdout
    assert json.loads(dry)["count"] == 1


def test_a_correlation_is_looked_up_by_its_index(bench: Bench) -> None:
    """Among a million letters nobody waits for the one business case."""
    wanted = select(letters.c.dlq_id).where(*Selection(correlation="case-7", state=None).where())
    shown = str(wanted.compile(bench.engine, compile_kwargs={"literal_binds": True}))
    with bench.engine.connect() as db:
        steps = db.execute(text(f"EXPLAIN QUERY PLAN {shown}")).all()
    assert [row.detail for row in steps if "holdfast_dlq_message_correlation" in row.detail]


def test_a_letter_says_that_it_was_replayed_also_when_that_helped(bench: Bench) -> None:
    """Once sent and confirmed is once replayed."""
    (letter,) = put(bench, "1")
    plan = frozen(bench)
    with bench.engine.begin() as db:
        assert confirm(db, plan.id, {letter.dlq_id: letter.message.id})
    assert "replayed 1 times" in dlq(bench, "show", letter.dlq_id).stdout


def test_verify_says_by_its_exit_code_that_something_failed_again(bench: Bench) -> None:
    """A script must not go on as if all were well."""
    (letter,) = put(bench, "1")
    plan = frozen(bench)
    with bench.engine.begin() as db:
        db.execute(update(plans).values(state="running", sent=1))
    lineage = {"replay_id": plan.id, "replay_count": 1}
    again = capture(letter.message, failed(ValueError("x")), group="g", handler="orders")
    DeadLetterStore(bench.engine).put(_with(again, lineage))
    assert dlq(bench, "verify", plan.id).returncode == 7


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_retried", [False, True], ids=["at once", "retried"])
def test_a_dead_lettered_outcome_carries_its_error(
    bench: Bench, *, is_async: bool, is_retried: bool
) -> None:
    """A loop of one's own can say why."""
    consumer = bench.consumer()

    def refuse(order: str) -> None:
        raise ValueError("no total")

    async def refuse_later(order: str) -> None:
        raise ValueError("no total")

    handle: Any = refuse_later if is_async else refuse
    if is_retried:
        handle = retry(Backoff(first=0.001, ceiling=0.001, attempts=2))(handle)
    consumer.on("orders")(dead_letter()(handle))
    loop, message = consumer.handler("orders"), Message.new("orders", b"x")
    outcome = asyncio.run(loop.handle_async(message)) if is_async else loop.handle(message)
    assert outcome.ending is HandlerEnding.DEAD_LETTERED
    assert repr(outcome.error) == "ValueError('no total')"


def _with(letter: DeadLetter, lineage: dict[str, Any]) -> DeadLetter:
    import msgspec

    made = msgspec.structs.replace(letter.lineage, **lineage)
    return msgspec.structs.replace(letter, lineage=made)
