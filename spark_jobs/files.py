"""Files of records: any format that the session has, any version, and what to say about others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

_SIGNS = (
    "CANNOT_READ_FILE_FOOTER", "is not a Parquet file", "FAILED_READ_FILE", "CANNOT_MERGE_SCHEMAS",
    "Could not read footer", "Failed to merge", "DATA_SOURCE_NOT_FOUND",
)  # fmt: skip


def read_files(
    spark: SparkSession, place: str, kind: str, options: Mapping[str, str] | None = None
) -> DataFrame:
    """Return the records in the files or the table at *place*, of format *kind*."""
    from pyspark.errors import AnalysisException

    reader = spark.read.format(kind)
    if kind == "parquet":
        reader = reader.option("mergeSchema", "true")  # older and newer versions side by side
    try:
        found = reader.options(**dict(options or {})).load(place)
        columns = dict(found.dtypes)
    except AnalysisException as error:
        raise unreadable(place, kind, error) from error
    except Exception as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        raise unreadable(place, kind, error) from error
    return upgraded(found, columns, of=place)


def upgraded(frame: DataFrame, columns: Mapping[str, str] | None = None, *, of: str) -> DataFrame:
    """Return *frame* as records of this version; `ConfigurationError` when it holds none."""
    known = dict(frame.dtypes) if columns is None else columns
    if lacking := records.missing(known):
        names = ", ".join(sorted(known)[:12]) or "none"
        raise ConfigurationError(
            f"{of} holds no dead letters: it has no field {', '.join(lacking)} (its fields: "
            f"{names}); write records with holdfast spark archive, or holdfast dlq export"
        )
    return frame.selectExpr(*records.upgrades(known))


def _bringing(kind: str) -> str:
    """Return what makes *kind* a format of the session; where that is known, word for word."""
    import pyspark

    spark = ".".join(pyspark.__version__.split(".")[:2])
    match kind:
        case "delta":
            return (
                f"add --packages io.delta:delta-spark_{spark}_2.13:VERSION --conf "
                "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension --conf "
                "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
            )
        case "iceberg":
            return f"add --packages org.apache.iceberg:iceberg-spark-runtime-{spark}_2.13:VERSION"
        case _:
            return "add its jar with --packages or --jars"


def unreadable(place: str, kind: str, error: Exception) -> ConfigurationError:
    """Return what to do about files that Spark cannot open."""
    text = str(error)
    if "PATH_NOT_FOUND" in text:
        return ConfigurationError(f"{place}: there is nothing at that path")
    if "CANNOT_MERGE_SCHEMAS" in text or "Failed to merge" in text:
        return ConfigurationError(
            f"{place} mixes files of two kinds, e.g. an export beside records: read each folder "
            "for itself, with --from twice"
        )
    if "UNABLE_TO_INFER_SCHEMA" in text:
        return ConfigurationError(f"{place} holds no {kind} file")
    if "DATA_SOURCE_NOT_FOUND" in text or "DELTA_CONFIGURE_SPARK_SESSION" in text:
        return ConfigurationError(f"Spark does not know the format {kind!r}: {_bringing(kind)}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if "Parquet" in line or "footer" in line), lines[0])
    return ConfigurationError(f"{place} cannot be read as {kind}: {mask(said[:300])}")
