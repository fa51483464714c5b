"""`holdfast spark blast-radius`: whom the failures hit, and what that is worth."""

from holdfast.cli.analytics import (
    DimensionKey,
    DimensionPlace,
    DimensionValue,
    ScopeOptions,
    Shown,
    present,
    submit,
)
from holdfast.cli.late import grouped
from holdfast.cli.options import Config, Json
from holdfast.cli.spark.options import Report, Sources, SparkOptions, running
from holdfast.spark_jobs.analytics.inputs import Dimension


@grouped
def blast_radius(
    *,
    config: Config = None,
    source: Sources,
    wanted: ScopeOptions,
    place: DimensionPlace = None,
    key: DimensionKey = "entity_ref",
    value: DimensionValue = "value",
    where: SparkOptions,
    report: Report = None,
    limit: Shown = 20,
    as_json: Json = False,
) -> None:
    """Show which entities and tenants are hit, and what they are worth by a table of yours."""
    scope = wanted.scope()
    dimension = None if place is None else Dimension(place=place, key=key, value=value)
    with running("blast-radius", where) as spark:
        from holdfast.spark_jobs.analytics.spark_engine import SparkEngine

        found = SparkEngine(spark).blast_radius(source, scope, dimension=dimension)
    present(found, title="Whom it hits", report=report, as_json=as_json, limit=limit)


def main() -> None:
    """Run the job under spark-submit."""
    submit("blast-radius")


if __name__ == "__main__":
    main()
