"""Every example runs as printed, and shows what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    """Run an example and return what it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_outbox_example_keeps_order_through_a_parked_key() -> None:
    """The cured event comes before the one that waited, and the rolled-back one never."""
    lines = run("outbox_sqlite.py").splitlines()
    assert lines == [
        "published: 2",
        "arrived: [('ada', 'gift wrap'), ('bob', 'no hurry')]",
        "parked: orders/ada, 1 refused, 1 behind",
        "published: 2",
        "arrived: [('ada', 'shortened'), ('ada', 'by noon')]",
        "audit: ['release', 'edit']",
    ]


def test_the_retry_example_retries_only_what_may_pass() -> None:
    """Poison, a declined card and a wait beyond the deadline cost one attempt and no time."""
    lines = run("retry.py").splitlines()
    assert lines[:5] == [
        "passing failure: order 17: paid, 5 s were left [3 attempt(s), 0.6 s]",
        "poison: PoisonMessage: no amount [1 attempt(s), 0.0 s]",
        "declined: CardDeclined: no [1 attempt(s), 0.0 s]",
        "unknown error: KeyError: 'amount' [3 attempt(s), 0.6 s]",
        "asked to wait too long: Transient: busy [1 attempt(s), 0.0 s]",
    ]
    assert "within 60 s, budget payment-gateway" in lines[6]


def test_the_circuit_example_opens_probes_and_closes() -> None:
    """Bad orders do not open it, the outage does, and good probes close it."""
    assert run("circuit.py").splitlines() == [
        "bad orders: {'no such order'}",
        "outage:",
        "  now Open",
        "  gateway is down",
        "  not asked, wait 30 s",
        "still down after 30 s:",
        "  now HalfOpen",
        "  now Open",
        "  gateway is down",
        "up again:",
        "  now HalfOpen",
        "  now Closed",
        "  paid and paid",
    ]


def test_the_idempotency_example_has_one_invoice_for_each_good_order() -> None:
    """Duplicates, a crash in the middle and poison in a batch leave the books right."""
    lines = run("idempotency.py").splitlines()
    assert lines[1] == "12 deliveries of 9 orders: 9 invoices"
    assert lines[2].startswith("refused: digest ")
    assert lines[3].startswith("a batch of 100: 99 invoices, failed: [PoisonMessage(")


def test_the_consumer_example_keeps_order_holds_a_key_and_outlives_an_outage() -> None:
    """What was dead is never billed, what waited behind it is, and the outage costs nothing."""
    lines = run("consumer.py").splitlines()
    assert lines[:7] == [
        "in order: ada [1, 2, 3], bob [1, 2, 3]",
        "handled 6, duplicates 1",
        "poison: key ada is held with 2 parked, bob [1, 2, 3, 4]",
        "released: ada [1, 2, 3, 5, 6]",
        "outage: eve [1, 2, 3], 0 dead letters",
        "in batches: 12 entries, 1 dead letter",
        "orders → bill:",
    ]


def test_the_dead_letter_example_replays_only_what_the_fix_can_handle() -> None:
    """Twelve failures are two problems; before the fix nothing but the canary is sent."""
    said = run("dead_letters.py")
    assert "problems: 2 new; 2 first seen in 24 h" in said
    broken, fixed = re.findall("^(?:12 would fail again|all 12 would pass)", said, re.MULTILINE)
    assert (broken, fixed) == ("12 would fail again", "all 12 would pass")
    assert re.search(r"stopped \S+ +2/8 ", said)
    # The sender may look between the two.
    assert re.search("[12] of the canary failed again: the handler is not fixed", said)
    assert "all 12 confirmed" in said
    assert "no problems: nothing is pending" in said
    assert "entries is whole" in said
    assert said.endswith("billed exactly once: True\n")
    assert re.findall(r"\[exit (\d+)\]", said) == list("0005010000" + "00")


def test_the_saga_example_completes_undoes_and_waits_for_a_human() -> None:
    """The books fit in each case, and what a human did by hand ends the last one."""
    assert run("sagas.py").splitlines() == [
        "ann: completed (no trouble): money 30, parcels 1, stock 1",
        "bob: compensated (create_shipment: no such address): money 0, stock 0",
        "cid: parked (create_shipment: no such address): money 30, stock 0",
        "cid: charge was done by hand, compensated",
    ]


def test_the_choreography_example_names_what_is_missing() -> None:
    """The same order without an orchestrator: whole, undone, and stuck at a dead letter."""
    why = "PaymentProcessed is a dead letter of shipping: KeyError: 'cid'"
    assert run("choreography.py").splitlines() == [
        "ann: money 30, parcels 1, stock 1",
        "  OrderPlaced, by shop",
        "    StockReserved, by inventory",
        "      PaymentProcessed, by payment",
        "        ParcelSent, by shipping",
        "bob: money 0, stock 0",
        "  OrderPlaced, by shop",
        "    StockReserved, by inventory",
        "      PaymentProcessed, by payment",
        "        ShippingFailed, by shipping",
        "          PaymentRefunded, by payment",
        "          StockReleased, by inventory",
        "cid: money 30, stock 1",
        "  OrderPlaced, by shop",
        "    StockReserved, by inventory",
        "      PaymentProcessed, by payment",
        f"  missing: ParcelSent or ShippingFailed: {why}",
    ]


def test_the_state_machine_example_refuses_what_an_order_cannot_become() -> None:
    """A cancelled order is not shipped, and the error says what would be allowed."""
    lines = run("state_machine.py").splitlines()
    assert lines[:6] == [
        "ann → paid: done",
        "ann → shipped: done",
        "ann → delivered: done",
        "bob → paid: done",
        "bob → cancelled: done",
        "bob → shipped: order cannot go from cancelled to shipped: it may become nothing any more",
    ]
    assert lines[6] == "stateDiagram-v2"


def test_the_triage_example_finds_the_causes_and_writes_a_report() -> None:
    """Every known cause is one group, and the page is there."""
    printed = run("spark_triage.py")
    assert "made 20,000 dead letters of 212 causes" in printed
    assert re.search(r"the rules know: +200 causes, .* 200 groups: precision 1.0000", printed)
    report = Path(printed.rsplit("the report is in ", 1)[1].strip())
    assert report.read_text().count("<svg") == 3
    shutil.rmtree(report.parent)
