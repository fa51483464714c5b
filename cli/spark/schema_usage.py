"""`holdfast spark schema-usage`: which types, versions and fields occur, and until when."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.analytics import ScopeOptions, Shown, submit, write_page
from holdfast.cli.display import print_json, print_table, say, when
from holdfast.cli.late import grouped
from holdfast.cli.options import Config, Json, seconds
from holdfast.cli.spark.options import Report, Sources, SparkOptions, running
from holdfast.spark_jobs.analytics.page import told


@grouped
def schema_usage(
    *,
    config: Config = None,
    source: Sources,
    unused_for: Annotated[
        str, typer.Option("--unused-for", help="What was not seen for so long may be dropped.")
    ] = "30d",
    wanted: ScopeOptions,
    where: SparkOptions,
    report: Report = None,
    limit: Shown = 100,
    as_json: Json = False,
) -> None:
    """Show which types, versions and fields occur: since when, last seen, how many."""
    scope, unused = wanted.scope(), seconds(unused_for, "--unused-for") / 86_400
    with running("schema-usage", where) as spark:
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine
        from holdfast.spark_jobs.analytics.usage import schema_usage as found_in

        found = found_in(SparkEngine(spark), source, scope, unused_days=unused)
    if report is not None:
        write_page(report, "What occurs in the payloads", found)
    if as_json:
        print_json(asdict(found))
        return
    say(told(found.ran))
    rows = [
        (one.type, one.version or "–", one.path or "(the event)", one.kind, f"{one.count:,}",
         f"{one.share:.0%}", when(one.first), when(one.last), "may go" if one.unused else "")
        for one in found.fields[:limit]
    ]  # fmt: skip
    if not rows:
        say("no events: nothing to look at")
        return
    print_table(("type", "version", "field", "kind", "count", "share", "first", "last", ""), rows)


def main() -> None:
    """Run the job under spark-submit."""
    submit("schema-usage")


if __name__ == "__main__":
    main()
