"""Which engine answers, and why: one process as long as that is faster, a cluster beyond it.

On the same cores DuckDB is several times faster than Spark, and needs no JVM. Spark is for what
one machine does not hold, and for sources that only Spark reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.inputs import specs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.spark_jobs.analytics.inputs import Source

MOST_RECORDS = 50_000_000
"""More records than this are Spark's, if it is installed."""


class AnalyticsEngineName(StrEnum):
    """The engines, and the word that leaves the choice to us."""

    AUTO = "auto"
    DUCKDB = "duckdb"
    SPARK = "spark"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The engine, and why it is that one."""

    engine: AnalyticsEngineName
    why: str


def is_installed(module: str) -> bool:
    """Whether *module* can be imported."""
    return find_spec(module) is not None


def choose(
    source: Source,
    asked: AnalyticsEngineName = AnalyticsEngineName.AUTO,
    *,
    most: int = MOST_RECORDS,
    installed: Callable[[str], bool] = is_installed,
) -> EngineChoice:
    """Return the engine for *source*: the one that is *asked* for, or the faster one that can."""
    if asked is not AnalyticsEngineName.AUTO:
        return EngineChoice(engine=asked, why="asked for")
    specs = specs_of(source)
    if not installed("duckdb"):
        return EngineChoice(engine=AnalyticsEngineName.SPARK, why="duckdb is not installed")
    from holdfast.spark_jobs.analytics.reading import count, is_readable

    foreign = [one.format or one.kind for one in specs if not is_readable(one)]
    if foreign:
        return EngineChoice(engine=AnalyticsEngineName.SPARK, why=f"only Spark reads {foreign[0]}")
    records = sum(count(one) for one in specs)
    if records <= most:
        why = f"{records:,} records; up to {most:,} one process is faster than a cluster"
        return EngineChoice(engine=AnalyticsEngineName.DUCKDB, why=why)
    if not installed("pyspark"):
        why = f"{records:,} records are many for one process, but pyspark is not installed"
        return EngineChoice(engine=AnalyticsEngineName.DUCKDB, why=why)
    why = f"{records:,} records are more than {most:,}"
    return EngineChoice(engine=AnalyticsEngineName.SPARK, why=why)
