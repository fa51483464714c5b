"""`holdfast spark poison-patterns`: what failed payloads have and healthy ones have not."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.analytics import ScopeOptions, Shown, submit, write_page
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.late import grouped
from holdfast.cli.options import Config, Json
from holdfast.cli.spark.options import Report, Sources, SparkOptions, running
from holdfast.spark_jobs.analytics.page import told


@grouped
def poison_patterns(
    *,
    config: Config = None,
    source: Sources,
    healthy: Annotated[
        list[str],
        typer.Option(help="A sample of handled payloads: files with a column payload; may repeat."),
    ],
    hide: Annotated[
        list[str] | None,
        typer.Option(help="A field whose values are not shown, by name or path; may repeat."),
    ] = None,
    wanted: ScopeOptions,
    where: SparkOptions,
    report: Report = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Find fields and values that separate failed payloads from healthy ones, with their lift.

    Values of fields whose names speak of credentials are never shown.
    """
    scope = wanted.scope()
    with running("poison-patterns", where) as spark:
        from holdfast.spark_jobs.analytics.contrast import poison_patterns as found_in
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

        found = found_in(SparkEngine(spark), source, healthy, scope, hidden=frozenset(hide or ()))
    if report is not None:
        write_page(report, "What sets failed payloads apart", found)
    if as_json:
        print_json(asdict(found))
        return
    say(f"{told(found.ran)}; held against {found.healthy:,} healthy payloads")
    if not found.patterns:
        say("nothing separates them: look at the code, not at the data")
        return
    print_table(
        ("group", "pattern", "failed", "healthy", "lift", "problem"),
        [(one.group_id[:8], one.told, f"{one.failed:.0%}", f"{one.healthy:.0%}",
          f"{one.lift:,.1f}×", f"{one.consumer_group}: {one.title[:60]}")
         for one in found.patterns[:limit]],
    )  # fmt: skip


def main() -> None:
    """Run the job under spark-submit."""
    submit("poison-patterns")


if __name__ == "__main__":
    main()
