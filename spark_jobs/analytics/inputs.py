"""What is looked at: sources of records, a table of the user's, a list of deploys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.analytics.results import Deployed
from holdfast.spark_jobs.sources import SourceSpec

Source = str | SourceSpec | Sequence[str | SourceSpec]
"""One source of records, or several that are read as one."""


def specs_of(source: Source) -> list[SourceSpec]:
    """Return the sources that *source* names."""
    several = [source] if isinstance(source, str | SourceSpec) else list(source)
    if not several:
        raise ConfigurationError("no source: name one with --from, e.g. parquet:letters/")
    return [SourceSpec.parse(one) if isinstance(one, str) else one for one in several]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A user's table that says what an entity is worth: Parquet files or CSV with a header."""

    place: str
    key: str = "entity_ref"
    """The column that holds what the letters call `entity_ref` (or the hash of their key)."""
    value: str = "value"

    @property
    def is_csv(self) -> bool:
        """Whether it is CSV."""
        return self.place.endswith((".csv", ".csv.gz"))

    @property
    def files(self) -> str:
        """The files, as a pattern."""
        return f"{self.place}/**/*.parquet" if Path(self.place).is_dir() else self.place


def dimension_error(
    dimension: Dimension, error: Exception | None, *, double: Sequence[str] = ()
) -> ConfigurationError:
    """Return what is wrong with the user's table, in one sentence."""
    if double:
        names = ", ".join(double)
        return ConfigurationError(
            f"{dimension.place}: {dimension.key} is not unique ({names}, …): value would count "
            "twice; give a table with one row per entity"
        )
    first = str(error).strip().splitlines()[0][:250]
    return ConfigurationError(
        f"{dimension.place} cannot be used as the dimension table with the key {dimension.key!r} "
        f"and the value {dimension.value!r}: {first}"
    )


class _Deploy(msgspec.Struct, frozen=True):
    consumer_group: str
    version: str
    at: float | str


_EXAMPLE = '[{"consumer_group": "billing", "version": "2.1", "at": "2026-11-16T03:00Z"}]'


def _moment(at: float | str) -> float:
    if not isinstance(at, str):
        return at
    found = datetime.fromisoformat(at)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def read_deploys(path: Path) -> list[Deployed]:
    """Return the deploys in a JSON file: a list of `consumer_group`, `version` and `at`.

    `at` is in seconds since 1970, or a moment like 2026-11-16T03:00Z.
    """
    try:
        given = msgspec.json.decode(path.read_bytes(), type=list[_Deploy])
        moments = [_moment(one.at) for one in given]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path}: write a JSON list of deploys, e.g. {_EXAMPLE} ({error})"
        ) from error
    return [
        Deployed(consumer_group=one.consumer_group, version=one.version, at=at)
        for one, at in zip(given, moments, strict=True)
    ]
