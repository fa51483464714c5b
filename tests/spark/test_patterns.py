"""Poison patterns and schema usage by their commands: what they leave out, and their pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.cli import main
from holdfast.spark_jobs.analytics.page import page
from holdfast.spark_jobs.analytics.results import (
    FieldUsage,
    PoisonPattern,
    PoisonResult,
    Ran,
    UsageResult,
)
from tests.dead_letters import failed
from tests.spark_letters import files_of, lettered

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

HOSTILE = "<script>alert(1)</script>\"'&"
RAN = Ran(engine="spark", why="asked", records=7, seconds=1.0)


def test_a_group_of_twenty_has_patterns_and_one_of_nineteen_has_none(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chance makes patterns of few payloads; both jobs print JSON and write their pages."""
    del spark  # the commands find the session that is there
    letters = [
        lettered(n, error=failed_with(n < 20), payload=b'{"currency": "CHF"}') for n in range(39)
    ]
    source = files_of(tmp_path / "letters", letters)
    healthy = [b'{"currency": "EUR"}'] * 50
    pq.write_table(pa.table({"payload": healthy}), tmp_path / "healthy.parquet")

    def holdfast(job: str, *words: str) -> tuple[dict[str, list[dict[str, object]]], str]:
        report = tmp_path / f"{job}.html"
        with pytest.raises(SystemExit) as ended:
            main(["spark", job, "--from", source, "--report", str(report), "--json", *words])
        assert not ended.value.code
        return json.loads(capsys.readouterr().out), report.read_text()

    found, text = holdfast("poison-patterns", "--healthy", str(tmp_path / "healthy.parquet"))
    assert [(one["path"], one["value"], one["support"]) for one in found["patterns"]] == [
        ("$.currency", "CHF", 20)
    ]
    assert "$.currency = CHF" in text
    found, text = holdfast("schema-usage")
    assert {one["path"] for one in found["fields"]} == {"", "$", "$.currency"}
    assert "$.currency" in text
    assert text.count("<svg") == 1


def failed_with(is_large: bool) -> BaseException:
    """Return the error of the large group, or of the small one."""
    return failed(ValueError("bad money") if is_large else KeyError("vat"))


def test_the_pages_of_payloads_run_nothing_and_show_no_more_than_asked() -> None:
    """What payloads say is text; what may be dropped has a table of its own."""
    pattern = PoisonPattern(
        group_id=HOSTILE, title=HOSTILE, consumer_group=HOSTILE, path=HOSTILE, what="value",
        value=HOSTILE, failed=1.0, healthy=0.1, lift=10.0, support=7,
    )  # fmt: skip
    used = FieldUsage(type=HOSTILE, version=HOSTILE, path="", kind="event", count=7, share=1.0,
                      first=0.0, last=1.0, unused=True)  # fmt: skip
    field = FieldUsage(type="t", version="1", path=HOSTILE, kind="null", count=1, share=0.1,
                       first=None, last=None, unused=False)  # fmt: skip
    text = page(
        HOSTILE,
        PoisonResult(ran=RAN, healthy=3, patterns=(pattern,) * 30),
        UsageResult(ran=RAN, fields=(used, field), unused_days=30.0),
    )
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "and 5 more" in text
    assert "Not seen for 30 days" in text
    none = page("t", PoisonResult(ran=RAN, healthy=3, patterns=()))
    assert "look at the code" in none
