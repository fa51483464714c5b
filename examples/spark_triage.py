"""From dead letters to a report in one command, on a laptop: no server, no cluster.

Makes 20,000 dead letters with known causes, asks what failed, when, and whom it hits, and writes
a page that opens offline. `--engine spark` asks the same of a local Spark.

    python examples/spark_triage.py --records 200000 --to /tmp/triage
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.duckdb_engine import DuckDbEngine
from holdfast.spark_jobs.analytics.inputs import Dimension, read_deploys
from holdfast.spark_jobs.analytics.page import page, told
from holdfast.spark_jobs.analytics.scores import scores
from holdfast.spark_jobs.generator import Recipe, generate

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--engine", choices=("duckdb", "spark"), default="duckdb")
    parser.add_argument("--to", type=Path, default=None, help="a new folder")
    given = parser.parse_args()
    folder = given.to or Path(mkdtemp(prefix="holdfast-triage-"))

    made = generate(folder, Recipe(records=given.records, entities=5_000))
    print(f"made {made.records:,} dead letters of {len(made.causes)} causes")

    engine, stop = (DuckDbEngine(), lambda: None) if given.engine == "duckdb" else on_spark()
    try:
        letters = f"parquet:{made.letters}"
        triage = engine.triage(letters)
        print(told(triage.ran))
        for one in triage.groups[:3]:
            print(f"  {one.count:>6,}  {one.consumer_group}: {one.title[:70]}")
        like = triage.clusters[0]
        print(f"{like.groups} groups look like one cause: {like.title[:70]}")

        trends = engine.trends(letters, deploys=read_deploys(made.deployed))
        print(f"{len(trends.anomalies)} unusual times, "
              f"{len(trends.effects)} deploys changed something")  # fmt: skip

        worth = Dimension(place=str(made.customers))
        blast = engine.blast_radius(letters, dimension=worth)
        print(f"{blast.entities:,} customers of {blast.tenants} tenants are hit, "
              f"worth {blast.value:,.0f}")  # fmt: skip

        known, unknown = scores(engine.confusion(letters, made.truth), made.causes)
        print(f"causes that the rules know:   {known}")
        print(f"causes that they do not know: {unknown}")
    finally:
        stop()
    report = folder / "report.html"
    report.write_text(page("Dead letters", triage, trends, blast), encoding="utf-8")
    print(f"the report is in {report}")


def on_spark() -> tuple[SparkEngine, Callable[[], None]]:
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine
    from holdfast.spark_jobs.session import session

    spark = session("example")
    return SparkEngine(spark), spark.stop


if __name__ == "__main__":
    sys.exit(main())
