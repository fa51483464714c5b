"""The detective's way: from a customer's complaint to the replay, by the example's own commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

INVESTIGATE = Path(__file__).parents[2] / "examples" / "detective" / "investigate.py"

FIELDS = ("service", "message_id", "event_type", "topic", "correlation_id", "causation_id")


@dataclass(frozen=True)
class Answer:
    """What a command said, and how it ended."""

    command: str
    text: str
    code: int

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@pytest.fixture(scope="module")
def story() -> list[Answer]:
    """Run the example once; return its commands with their answers."""
    done = subprocess.run(
        [sys.executable, INVESTIGATE], capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\$ (.+)\n((?:.*\n)*?)\[exit (\d+)\]$", done.stdout, re.MULTILINE)
    return [Answer(command, text, int(code)) for command, text, code in found]


def test_the_chain_names_what_is_missing(story: list[Answer]) -> None:
    """Four events with their times and causes, and CustomerNotified after evt-102."""
    chain = story[0]
    assert (chain.command.split()[:4], chain.code) == (
        ["holdfast", "lineage", "show", "corr-def-456"], 1,
    )  # fmt: skip
    assert re.fullmatch(
        r"corr-def-456: 4 events in 1\.000 s, from \S+T14:22:33\.100000Z", chain.lines[0]
    )
    assert [re.split("  ", line)[:4] for line in chain.lines[1:5]] == [
        ["OrderCreated", "+0.000 s", "orders", "evt-101"],
        ["└─ PaymentProcessed", "+0.150 s", "payment", "evt-102"],
        ["", " └─ InventoryReserved", "+0.300 s", "inventory"],
        ["", "", "", "└─ ShipmentCreated"],
    ]
    assert chain.lines[4].split("  ")[4:7] == ["+1.000 s", "shipping", "evt-104"]
    (missing,) = chain.lines[5:]
    assert missing.startswith("missing: CustomerNotified after PaymentProcessed evt-102, overdue ")
    assert "100% of 7 others that began with OrderCreated have it" in missing
    assert missing.endswith(
        "PaymentProcessed is a dead letter of notification: KeyError: 'customerEmail'"
    )


def test_the_service_is_not_behind_and_its_log_tells_the_error(story: list[Answer]) -> None:
    """Each line about evt-102 says what it belongs to."""
    lag, log = story[1:3]
    assert (lag.command, lag.code) == ("holdfast lag --group notification", 0)
    assert re.search(r"^payments · \d+ members? · nothing waits$", lag.text, re.MULTILINE)
    assert (log.command, log.code) == ("grep evt-102 notification.log", 0)
    lines = [json.loads(line) for line in log.lines]
    inside = [line for line in lines if "message_id" in line]  # others are about it, from outside
    assert any("KeyError: 'customerEmail'" in line["message"] for line in inside)
    for line in inside:
        assert line["duration_ms"] > 0
        told = {name: line[name] for name in FIELDS}
        assert told == {
            "service": "notification", "message_id": "evt-102", "event_type": "PaymentProcessed",
            "topic": "payments", "correlation_id": "corr-def-456", "causation_id": "evt-101",
        }  # fmt: skip
    assert "ada@example.com" not in log.text


def test_the_dead_letter_is_found_with_its_relatives(story: list[Answer]) -> None:
    """By the correlation alone; what went well beside it tells what is different about it."""
    listed, shown = story[3:5]
    assert (listed.command, listed.code) == ("holdfast dlq list --correlation corr-def-456", 0)
    assert len(re.findall("KeyError: 'customerEmail'", listed.text)) == 1
    assert (shown.command.split()[:5], shown.code) == (
        ["holdfast", "dlq", "show", "--correlation", "corr-def-456"], 0,
    )  # fmt: skip
    assert re.search(r"^dead letter \S+  pending  message evt-102 ", shown.text, re.MULTILINE)
    for line in (
        r"root cause: OrderCreated evt-101 at \S+T14:22:33\.100000Z from orders",
        r"this one: PaymentProcessed evt-102 at \S+T14:22:33\.250000Z from payment",
        r"it led to InventoryReserved evt-103 at \S+T14:22:33\.400000Z from inventory",
        r"it led to ShipmentCreated evt-104 at \S+T14:22:34\.100000Z from shipping",
        r"this one by inventory at \S+",
        r"(?:before|after): \S+ at \S+, key order-45\d, correlation \S+",
    ):
        assert re.search(f"^ +{line}$", shown.text, re.MULTILINE), line


def test_the_fix_is_simulated_and_replayed_and_the_chain_is_whole(story: list[Answer]) -> None:
    """The old handler would fail again, the new one passes; nothing is missing any more."""
    old, new, replay, relay, whole = story[5:10]
    assert old.command.endswith("--handler notification:notify")
    assert (old.code, old.lines[-1]) == (1, "1 would fail again: a replay would stop")
    assert new.command.endswith("--handler notification_fixed:notify")
    assert new.code == 0
    assert new.lines[-1].startswith("all 1 would pass")
    assert replay.command.startswith("holdfast dlq replay --correlation corr-def-456 ")
    assert (replay.code, "all 1 confirmed" in replay.text) == (0, True)
    assert (relay.command, relay.lines) == ("holdfast relay --once", ["published 5 events"])
    assert whole.command == story[0].command
    assert whole.code == 0
    assert whole.lines[0].startswith("corr-def-456: 5 events in ")
    assert re.search(
        r"^   └─ CustomerNotified  \+\S+.*  notification  \S+  ", whole.text, re.MULTILINE
    )
    assert "missing" not in whole.text


def test_the_relations_of_a_healthy_chain(story: list[Answer]) -> None:
    """The root cause of evt-005 is evt-001; evt-002 led to both evt-004 and evt-005."""
    healthy = story[10]
    assert healthy.code == 0
    assert healthy.command.endswith("--event evt-005 --other evt-004")
    assert "root cause of CustomerNotified evt-005: OrderCreated evt-001 at " in healthy.text
    assert "common ancestor of evt-005 and evt-004: PaymentProcessed evt-002 at " in healthy.text
    assert "missing" not in healthy.text
    assert len(story) == 11
