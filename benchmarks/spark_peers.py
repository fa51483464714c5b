"""One triage of Parquet files in a process of its own: by Holdfast, or written by hand.

`python spark_peers.py SIDE FOLDER` prints seconds, CPU-seconds and the number of groups as JSON.
By hand means what a good engineer writes for it: the stack by module and function, or else the
text with six expressions that mask what varies; then count, first, last, keys and tenants.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from trees import cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RULES = (
    (r"https?://[^ '\"]+", "<url>"),
    (r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+", "<email>"),
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<uuid>"),
    (r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]+Z", "<time>"),
    (r"[0-9a-f]{16,64}", "<n>"),
    (r"[0-9]+([.,][0-9]+)*", "<n>"),
)
FRAMES = json.dumps({"failure": {"chain": [{"frames": [
    {"module": "VARCHAR", "function": "VARCHAR", "in_app": "BOOLEAN"}]}]}})  # fmt: skip
COLUMNS = ("dlq_id", "topic", "consumer_group", "handler", "error_type", "error_text", "envelope",
           "key_hash", "tenant", "failed_at")  # fmt: skip


def ours_duckdb(folder: str) -> int:
    from holdfast.spark_jobs.analytics.duckdb_engine import DuckDbEngine

    return DuckDbEngine().triage(folder).groups_total


def ours_spark(folder: str) -> int:
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

    return SparkEngine(_session()).triage(folder).groups_total


def plain_duckdb(folder: str) -> int:
    import duckdb

    text = "error_text"
    for rule, word in RULES:
        text = f"regexp_replace({text}, '{rule.replace(chr(39), chr(39) * 2)}', '{word}', 'g')"
    frames = f"from_json(envelope, '{FRAMES}').failure.chain[1].frames"
    query = f"""
        WITH read AS (SELECT *, list_transform(list_filter({frames}, lambda f: f.in_app),
                             lambda f: f.module || ':' || f.function) AS own,
                      FROM read_parquet('{folder}/*.parquet')),
             named AS (SELECT *, sha256(error_type || chr(10) || consumer_group || topic || handler
                              || CASE WHEN len(own) > 0 THEN array_to_string(own, '>')
                                 ELSE {text} END) AS problem FROM read)
        SELECT problem, count(*) AS n, min(failed_at), max(failed_at), min(dlq_id),
               approx_count_distinct(key_hash), approx_count_distinct(tenant)
        FROM named GROUP BY problem ORDER BY n DESC
    """  # noqa: S608
    return len(duckdb.connect(config={"memory_limit": "2GB"}).execute(query).fetchall())


def plain_polars(folder: str) -> int:
    import polars as pl

    found = pl.scan_parquet(f"{folder}/*.parquet").select(COLUMNS)
    groups = _named(found).group_by("group_id").agg(
        pl.len(), pl.min("failed_at").alias("first"), pl.max("failed_at").alias("last"),
        pl.min("dlq_id"), pl.col("key_hash").approx_n_unique(), pl.col("tenant").approx_n_unique(),
    )  # fmt: skip
    return groups.collect(engine="streaming").height


def plain_spark(folder: str) -> int:
    """Count in Spark what Polars names in `mapInArrow`: the fastest way that was measured."""
    from pyspark.sql import functions as f

    frame = _session().read.parquet(folder).select(*COLUMNS)
    named = frame.mapInArrow(
        _by_polars, "dlq_id string, key_hash string, tenant string, failed_at timestamp, "
        "group_id string")  # fmt: skip
    groups = named.groupBy("group_id").agg(
        f.count("*"), f.min("failed_at"), f.max("failed_at"), f.min("dlq_id"),
        f.approx_count_distinct("key_hash"), f.approx_count_distinct("tenant"),
    )  # fmt: skip
    return len(groups.collect())


def _by_polars(batches: Iterator[Any]) -> Iterator[Any]:
    import polars as pl

    for batch in batches:
        named = _named(pl.from_arrow(batch).lazy()).collect().select(_schema().names)
        table = named.to_arrow(compat_level=pl.CompatLevel.oldest())
        yield from table.cast(_schema()).to_batches()


def _schema() -> Any:
    import pyarrow as pa

    words = [(name, pa.string()) for name in ("dlq_id", "key_hash", "tenant")]
    return pa.schema([*words, ("failed_at", pa.timestamp("us", tz="UTC")),
                      ("group_id", pa.string())])  # fmt: skip


def _named(frame: Any) -> Any:
    """Return *frame* with the group of each record, by Polars."""
    import polars as pl

    call = pl.Struct({"module": pl.String, "function": pl.String, "in_app": pl.Boolean})
    raised = pl.List(pl.Struct({"frames": pl.List(call)}))
    kind = pl.Struct({"failure": pl.Struct({"chain": raised})})
    failure = pl.col("envelope").str.json_decode(kind).struct.field("failure")
    frames = failure.struct.field("chain").list.first().struct.field("frames")
    element = pl.element().struct
    own = frames.list.eval(
        pl.when(element.field("in_app"))
        .then(element.field("module") + ":" + element.field("function"))
    ).list.drop_nulls().list.join(">")  # fmt: skip
    text = pl.col("error_text")
    for rule, word in RULES:
        text = text.str.replace_all(rule, word)
    what = pl.when(own != "").then(own).otherwise(text)
    named = pl.concat_str("error_type", "consumer_group", "topic", "handler", what, separator="\n")
    return frame.with_columns(named.hash().cast(pl.String).alias("group_id"))


def _session() -> Any:
    from holdfast.spark_jobs.session import session

    return session("bench", master="local[2,4]", conf={"spark.log.level": "ERROR"})


SIDES: dict[str, Callable[[str], int]] = {
    "ours_duckdb": ours_duckdb, "ours_spark": ours_spark, "plain_duckdb": plain_duckdb,
    "plain_polars": plain_polars, "plain_spark": plain_spark,
}  # fmt: skip


def main() -> None:
    side, folder = sys.argv[1:3]
    assert re.fullmatch(r"[\w/.-]+", folder)
    began = time.monotonic()
    groups = partial(SIDES[side], folder)()
    found = {"seconds": time.monotonic() - began, "cpu": cpu(os.getpid()), "groups": groups}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
