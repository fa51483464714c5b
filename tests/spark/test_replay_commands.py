"""`holdfast spark plan`, `replay` and `verify`, and what `holdfast dlq` says of the same plan."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

from holdfast.brokers import connect
from holdfast.cli import main
from holdfast.cli.exits import EXIT_FIX, EXIT_UNCONFIRMED
from holdfast.cli.migrations import Migrations
from holdfast.db.engine import open_database
from holdfast.headers import replay_topic
from tests.spark.billing import Billing, in_order, metadata
from tests.spark.replaying import letters, put

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from pyspark.sql import SparkSession


def test_a_plan_is_made_sent_and_checked_by_its_commands(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes tell scripts; the commands of `dlq` know the plan, and who sends it."""
    del spark  # the commands find the session that is there
    store, broker = f"sqlite:///{tmp_path}/store.db", f"sqlite:///{tmp_path}/broker.db"
    engine = open_database(store)
    Migrations(engine).upgrade()
    metadata.create_all(engine)
    put(engine, letters(60, key=lambda n: f"k{n % 7}"))
    with closing(connect(broker)) as opened:
        opened.create_topic("orders", partitions=2)
        opened.create_topic(replay_topic("orders", "billing"), partitions=2)

    def holdfast(*words: str, code: int = 0) -> Any:
        ended: Any = 0
        try:
            main([*words, "--database", store, "--json"])
        except SystemExit as exit_:
            ended = exit_.code or 0
        out, err = capsys.readouterr()
        assert ended == code, err
        return json.loads(out) if out.strip() else err

    made = holdfast("spark", "plan", "--group", "billing", "--lanes", "2", "--canary", "4",
                    "--ramp", "50%", "--patience", "90s", "--reason", "fixed",
                    "--report", str(tmp_path / "plan.html"))  # fmt: skip
    assert (made["total"], made["lanes"], made["canary"]) == (60, 2, 4)
    plan = made["plan"]
    refused = holdfast("dlq", "plans", "resume", plan, "--broker", broker, "--reason", "x",
                       code=EXIT_FIX)  # fmt: skip
    assert "holdfast spark replay" in str(refused)
    assert holdfast("spark", "verify", plan, code=EXIT_UNCONFIRMED)["unsent"] == 60
    with Billing(store, broker, replay_topic("orders", "billing"), "billing").running():
        ending = holdfast("spark", "replay", plan, "--broker", broker, "--batch", "10",
                          "--reason", "fixed", "--report",
                          str(tmp_path / "replay.html"))  # fmt: skip
    assert (ending["ending"], ending["sent"]) == ("confirmed", 60)
    checked = holdfast("spark", "verify", plan, "--report", str(tmp_path / "verify.html"))
    assert (checked["confirmed"], checked["waiting"], checked["is_whole"]) == (60, 0, True)
    assert holdfast("dlq", "verify", plan)["manifest"] is True
    shown = holdfast("dlq", "plans", "show", plan)
    assert (shown["state"], shown["lanes"], shown["items"]) == ("done", 2, {"confirmed": 60})
    pages = [(tmp_path / f"{name}.html").read_text() for name in ("plan", "replay", "verify")]
    assert "Messages by lane" in pages[0]
    assert f"Replay of plan {plan[-8:]}" in pages[1]
    assert "verified: manifest is whole; 60 confirmed" in pages[2]
    effects = in_order(engine)
    assert sum(map(len, effects.values())) == 60
    assert all(numbers == sorted(numbers) for numbers in effects.values())
    engine.dispose()
