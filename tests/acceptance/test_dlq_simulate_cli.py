"""`holdfast dlq simulate` tries every pending message as a consumer would, or says why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, update

from holdfast.dlq.store.schema import message
from holdfast.outbox.schema import outbox
from tests.acceptance.test_dlq_replay_cli import Desk
from tests.dead_letters import count, failed, letter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HANDLERS = """
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.consumer import Attempt
from holdfast.outbox import Outbox

def passes(order: dict) -> None: ...

def picky(order: dict, message: Message) -> None:
    if message.id == "id-2":
        raise ValueError("bad order")

def by_name(order: dict, session, message, attempt, outbox) -> None:
    assert (attempt.number, attempt.error, message.is_replay) == (1, None, False)
    assert attempt.idempotency_key
    outbox.add(session, {"billed": order["n"]}, topic="bills", key=message.id)

def by_annotation(order: dict, db: Session, m: Message, a: Attempt, events: Outbox) -> None:
    by_name(order, session=db, message=m, attempt=a, outbox=events)

async def waits(order: dict, db: Session, events: Outbox) -> None:
    events.add(db, order, topic="bills", key="k")

def whole(message: Message) -> None:
    assert message.topic == "orders"

async def is_async(order: dict, session: AsyncSession) -> None: ...

def asks_too_much(order: dict, moon) -> None: ...
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Open a desk on SQLite."""
    made = Desk(tmp_path)
    yield made
    made.broker.close()
    made.engine.dispose()


def test_groups_that_failed_alike_are_simulated_apart(desk: Desk) -> None:
    """Two consumer groups break at the same place: both are tried, each is told of by itself."""
    error = failed(ValueError("bad order"))
    desk.home.put_all([letter(1, error), letter(2, error, group="shipping"), letter(3, error)])
    groups = {group["group_id"]: group["pending"] for group in desk.json("groups")}
    assert len(groups) == 2
    module = desk.code(HANDLERS)
    found = desk.json("simulate", *groups, *groups, "--handler", f"{module}:passes")
    assert {one["group_id"]: one["passes"] for one in found} == groups
    assert len({one["fingerprint"] for one in found}) == 1
    said = desk.run("simulate", *groups, "--handler", f"{module}:picky")
    assert said.returncode == 1
    assert "1 would fail again" in said.stdout


def test_what_a_plan_has_claimed_is_tried_and_what_is_not_tried_is_told(desk: Desk) -> None:
    """A yes is a yes to every pending message; to some of them it is no yes."""
    desk.home.put_all([letter(n) for n in range(3)])
    module, group = desk.code(HANDLERS), desk.group
    try_it = ("simulate", group, "--handler", f"{module}:passes")
    assert desk.replay("--id", letter(0).dlq_id).returncode == 6  # sent, and not confirmed
    said = desk.run(*try_it)
    assert (said.returncode, "all 3 would pass" in said.stdout) == (0, True), said
    with desk.engine.begin() as db:
        redacted = message.c.message_id == "id-1"
        db.execute(update(message).where(redacted).values(replayable=False))
    said = desk.run(*try_it)
    assert said.returncode == 1
    assert "1 were not tried: what is stored is not what was sent" in said.stdout
    assert "2 would pass; nobody knows about the others" in said.stdout
    (found,) = desk.json(*try_it)
    assert (found["tried"], found["passes"], sum(found["untried"].values())) == (2, 2, 1)
    with desk.engine.begin() as db:
        db.execute(update(message).values(replayable=False))
    said = desk.run(*try_it)
    assert (said.returncode, "would pass;" in said.stdout) == (1, True)
    assert "all" not in said.stdout


def test_a_limit_that_was_asked_for_is_no_failure(desk: Desk) -> None:
    """How many are beyond it is told."""
    desk.home.put_all([letter(n) for n in range(3)])
    module, group = desk.code(HANDLERS), desk.group
    said = desk.run("simulate", group, "--handler", f"{module}:passes", "--limit", "2")
    assert (said.returncode, "tried 2; 1 more are beyond --limit" in said.stdout) == (0, True)


@pytest.mark.parametrize("name", ["by_name", "by_annotation", "waits", "whole"])
def test_a_handler_gets_all_that_a_consumer_gives_it(desk: Desk, name: str) -> None:
    """By name or by annotation; what it adds to the outbox is rolled back."""
    desk.home.put_all([letter(n) for n in range(3)])
    module, group = desk.code(HANDLERS), desk.group
    said = desk.run("simulate", group, "--handler", f"{module}:{name}")
    assert (said.returncode, "all 3 would pass" in said.stdout) == (0, True), said
    assert count(desk.engine, outbox) == 0


@pytest.mark.parametrize(("name", "why"), [("is_async", "AsyncSession"), ("asks_too_much", "moon")])
def test_what_a_simulation_cannot_give_is_said_at_once(desk: Desk, name: str, why: str) -> None:
    """And nothing is predicted."""
    desk.home.put(letter(1))
    module, group = desk.code(HANDLERS), desk.group
    said = desk.run("simulate", group, "--handler", f"{module}:{name}")
    assert (said.returncode, said.stdout) == (2, "")
    assert why in said.stderr


def test_a_database_that_is_not_there_is_not_made(desk: Desk) -> None:
    """A typing error would predict on an empty file."""
    desk.home.put(letter(1))
    module, group = desk.code(HANDLERS), desk.group
    typo = desk.folder / "typo.db"
    said = desk.run("simulate", group, "--handler", f"{module}:passes",
                    "--handler-database", f"sqlite:///{typo}")  # fmt: skip
    assert said.returncode == 2
    assert "--handler-database" in said.stderr
    assert not typo.exists()
    with desk.engine.connect() as db:
        assert db.execute(select(message.c.state)).scalars().all() == ["pending"]
