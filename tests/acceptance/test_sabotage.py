"""The suite turns red when a promise is broken on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INBOX = "tests/integration/idempotency/test_inbox.py"
KIT = "tests/unit/test_memory_broker.py::TestMemoryBroker"
RUNTIME = "tests/integration/test_consumer_runtime.py"
OVERTAKING = "tests/integration/test_overtaking.py"
AGAIN = "tests/integration/test_dead_letter_again.py"


@pytest.mark.parametrize(
    ("sabotage", "suite"),
    [
        ("acknowledge_early", f"{KIT}::test_a_living_member_takes_over_from_a_killed_one"),
        ("skip_unfinished", "tests/unit/test_watermark.py"),
        ("two_owners", f"{KIT}::test_two_members_share_the_work"),
        ("dedup_apart", f"{RUNTIME}::test_a_failed_attempt_is_not_remembered_as_done"),
        ("acknowledge_first", f"{RUNTIME}::test_nothing_is_acknowledged_before_its_commit"),
        ("blame_the_outage", f"{RUNTIME}::test_an_outage_burns_no_attempt_and_kills_no_message"),
        ("overtake_unseen", f"{OVERTAKING}::test_a_loop_of_ones_own_notices_it"),
        ("prune_undecided", f"{AGAIN}::test_what_the_loop_cap_parked_is_never_pruned[sqlite]"),
        ("dedup_apart", f"{INBOX}::test_a_failed_delivery_is_not_remembered_as_done[sqlite]"),
    ],
)
def test_a_broken_promise_is_seen(sabotage: str, suite: str) -> None:
    """Each sabotage fails what guards the promise; without it the suite passes."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider",
         "-p", "tests.sabotage.impatience", "-p", f"tests.sabotage.{sabotage}", suite],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\d+ failed", done.stdout), done.stdout
