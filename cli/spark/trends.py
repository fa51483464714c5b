"""`holdfast spark trends`: failures by hour, unusual times, deploys that changed something."""

from holdfast.cli.analytics import Deploys, ScopeOptions, Shown, present, submit
from holdfast.cli.late import grouped
from holdfast.cli.options import Config, Json
from holdfast.cli.spark.options import Report, Sources, SparkOptions, running
from holdfast.spark_jobs.analytics.inputs import read_deploys


@grouped
def trends(
    *,
    config: Config = None,
    source: Sources,
    wanted: ScopeOptions,
    deploys: Deploys = None,
    where: SparkOptions,
    report: Report = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Show failures by hour, unusual times, and which deploy changed something."""
    scope = wanted.scope()
    known = None if deploys is None else read_deploys(deploys)
    with running("trends", where) as spark:
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

        found = SparkEngine(spark).trends(source, scope, deploys=known)
    present(found, title="When it failed", report=report, as_json=as_json, limit=limit)


def main() -> None:
    """Run the job under spark-submit."""
    submit("trends")


if __name__ == "__main__":
    main()
