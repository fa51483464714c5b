"""`holdfast spark triage`: failure groups of any number of dead letters."""

from typing import Annotated

import typer

from holdfast.cli.analytics import ScopeOptions, Shown, present, submit
from holdfast.cli.display import note
from holdfast.cli.dlq.options import operator
from holdfast.cli.late import grouped
from holdfast.cli.options import Actor, Config, Json, Reason
from holdfast.cli.spark.options import Report, Sources, SparkOptions, running


@grouped
def triage(
    *,
    config: Config = None,
    source: Sources,
    wanted: ScopeOptions,
    output: Annotated[
        str | None, typer.Option(help="A new folder for all groups, as Parquet.")
    ] = None,
    write_back: Annotated[
        str | None,
        typer.Option(
            "--write-back", metavar="DATABASE",
            help="Move the letters of this store into the groups that were found; audited.",
        ),
    ] = None,
    reason: Reason = "triage",
    actor: Actor = None,
    where: SparkOptions,
    report: Report = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Fingerprint all dead letters anew and list the problems, with those that look like one."""
    scope = wanted.scope()
    with running("triage", where) as spark:
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine
        from holdfast.spark_jobs.analytics.write_back import write_back as written

        engine = SparkEngine(spark)
        found = engine.triage(source, scope, output=output)
        if write_back is not None:
            moved = written(engine, source, write_back, operator(actor, reason), scope)
            note(f"{sum(moved.values()):,} letters of the store have another group now")
    present(found, title="What failed", report=report, as_json=as_json, limit=limit)


def main() -> None:
    """Run the job under spark-submit."""
    submit("triage")


if __name__ == "__main__":
    main()
