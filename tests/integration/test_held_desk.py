"""The operator's desk: every held key can be named, whatever its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast import Message, Transient
from holdfast.consumer.desk import Desk, NotHeld
from holdfast.errors import ConfigurationError
from holdfast.outbox.audit import Warrant
from holdfast.retry import Backoff, retry
from tests.consuming import Bench, running, until

if TYPE_CHECKING:
    from pathlib import Path

WHY = Warrant(actor="ada", reason="seen to")


def test_keys_that_are_no_text_are_shown_released_and_skipped_by_their_id(tmp_path: Path) -> None:
    """Messages without a key and with a binary one wait for a retry; an operator acts on each."""
    bench = Bench(tmp_path, f"sqlite:///{tmp_path}/app.db")
    consumer = bench.consumer(patience=0.01)

    @consumer.on("orders")
    @retry(Backoff(first=500, ceiling=500, attempts=3))
    def handle(order: bytes) -> None:
        raise Transient("later")

    keys = [None, None, b"\xff\x00\x01", b"text"]
    bench.send(*(Message.new("orders", b"x%d" % n, key=key) for n, key in enumerate(keys)))
    with running(consumer):
        until(lambda: len(bench.held) == 4, "all are parked")
    desk = Desk(bench.engine)
    waiting = desk.waiting()
    assert sorted(one.key for one in waiting) == ["(no key)", "(no key)", "0xff0001", "text"]
    assert len({one.id for one in waiting}) == 4
    for one in waiting:
        (row,) = desk.messages("g", "orders", one.id)
        assert desk.skip("g", "orders", one.id, WHY) == 1
        assert desk.release("g", "orders", one.id, WHY) == 0
        assert row.origin.body is not None
    assert desk.messages("g", "orders", "text") == []
    assert len(desk.audited()) == 8
    for wrong in ("id:", "id:zz", "id:ffffffffffff0000", "eve"):
        with pytest.raises(NotHeld, match="named by its id"):
            desk.release("g", "orders", wrong, WHY)
    bench.close()


def test_a_reason_is_needed() -> None:
    """An act without one is refused."""
    with pytest.raises(ConfigurationError, match="reason is empty"):
        Warrant(actor="ada", reason=" ")
