"""The record: one schema for every source, and what becomes of what does not fit it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.store.rows import letter_of
from holdfast.dlq.store.schema import message
from holdfast.spark_jobs import records
from tests.dead_letters import letter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)


def test_every_column_of_the_store_is_a_field() -> None:
    """A column that is added to the store is not forgotten here."""
    assert {field.column for field in records.STORED} == {one.name for one in message.columns}


def test_every_field_says_what_it_means() -> None:
    """Names are unique, and each field has a sentence."""
    assert len(set(records.NAMES)) == len(records.FIELDS)
    assert all(field.meaning for field in records.FIELDS)


def test_a_letter_survives_being_a_record() -> None:
    """The original message and all that is known of its failure come back as they were."""
    original = letter(7, payload=b"\x00\xff", key="k7")
    back = letter_of(records.row_of_record(records.record_of(original, stored_at=NOW.timestamp())))
    assert back == original


def test_a_record_fits_the_arrow_schema() -> None:
    """What is written has the types that are promised, also where there is no key."""
    record = records.record_of(letter(1, key=None), stored_at=NOW.timestamp())
    batch = records.batch_of([record])
    assert batch.schema == records.arrow_schema()
    assert batch.to_pylist()[0]["key"] is None


@pytest.mark.parametrize(
    ("last", "stored", "expected"),
    [
        (NOW, NOW, (NOW, False)),
        (datetime(1970, 1, 1, tzinfo=UTC), NOW, (NOW, True)),
        (datetime(2099, 1, 1, tzinfo=UTC), NOW, (NOW, True)),
        (NOW + timedelta(hours=3), NOW, (NOW + timedelta(hours=3), False)),
        (None, NOW, (NOW, True)),
        (datetime(1970, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC), (None, True)),
        (NOW, None, (NOW, False)),
    ],
)
def test_a_clock_that_cannot_be_right_is_not_believed(
    last: Any, stored: Any, expected: tuple[Any, bool]
) -> None:
    """The moment of storing stands for it, and the record says so."""
    assert records.failed_moment(last, stored) == expected


def test_spark_and_python_believe_the_same_clocks(spark: SparkSession) -> None:
    """The rule is written twice, in SQL and in Python: they agree on every case."""
    moments = [None, 0.0, NOW.timestamp(), NOW.timestamp() + 90_000, 4_070_908_800.0]
    cases = [(f"{i}", last, stored) for i, last in enumerate(moments) for stored in moments]
    frame = spark.createDataFrame(
        [(f"{name}-{j}", b"", last, stored) for j, (name, last, stored) in enumerate(cases)],
        "dlq_id string, message_key binary, last_failed_at double, stored_at double",
    )
    found = {
        row["dlq_id"]: (row["failed_at"], row["clock_outlier"])
        for row in frame.selectExpr(*records.upgrades(dict(frame.dtypes))).collect()
    }
    for j, (name, last, stored) in enumerate(cases):
        at, is_outlier = records.failed_moment(records.moment(last), records.moment(stored))
        mine = None if at is None else at.timestamp()
        theirs = found[f"{name}-{j}"]
        assert (theirs[0] and theirs[0].astimezone(UTC).timestamp(), theirs[1]) == (
            mine, is_outlier,
        ), (last, stored)  # fmt: skip


def test_the_ddl_and_the_arrow_schema_are_one(spark: SparkSession) -> None:
    """Spark takes the Arrow batches as they are."""
    record = records.record_of(letter(1), stored_at=SYSTEM_CLOCK.now().timestamp())
    empty = spark.createDataFrame([], records.ddl())

    def one(_batches: Any) -> Any:
        yield records.batch_of([record])

    assert empty.repartition(1).mapInArrow(one, records.ddl()).count() == 1
