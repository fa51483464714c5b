"""What every engine does with what it found: clusters, and deploys known by their versions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.spark_jobs.analytics.clusters import Likeness, clusters
from holdfast.spark_jobs.analytics.results import (
    HOUR,
    Deployed,
    GroupCluster,
    Ran,
    TrendsResult,
    TriageGroup,
    TriageResult,
)
from holdfast.spark_jobs.analytics.series import DAY_HOURS

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_LISTED = 1_000
"""Anomalies, effects, groups and tenants that an answer lists."""


def with_clusters(ran: Ran, groups: Sequence[TriageGroup], *, total: int) -> TriageResult:
    """Return the answer of triage: *groups* with the clusters that they are in."""
    found = clusters(
        [
            Likeness(group_id=one.group_id, error_type=one.error_type, title=one.title,
                     calls=one.calls)
            for one in groups
        ]
    )  # fmt: skip
    listed = tuple(replace(one, cluster=found.get(one.group_id)) for one in groups)
    together: dict[str, list[TriageGroup]] = {}
    for one in listed:
        if one.cluster is not None:
            together.setdefault(one.cluster, []).append(one)
    sized = [
        GroupCluster(cluster=name, groups=len(some), count=sum(one.count for one in some),
                     title=some[0].title)
        for name, some in together.items()
    ]  # fmt: skip
    sized.sort(key=lambda one: (-one.count, one.cluster))
    return TriageResult(
        ran=ran, groups=listed, groups_total=int(total), clusters=tuple(sized),
        unlisted=ran.records - sum(one.count for one in listed),
    )  # fmt: skip


def found_nothing(ran: Ran) -> TrendsResult:
    """Return the trends of nothing."""
    return TrendsResult(
        ran=ran, first_hour=0, hourly=(), usual=(), anomalies=(), effects=(), named=()
    )


def inferred_deploys(versions: Sequence[tuple[str, str, float]], first_hour: int) -> list[Deployed]:
    """Return when each version went live: at the latest when it first failed.

    A version that fails from the first day on may be older than the records: it is no deploy.
    """
    return [
        Deployed(consumer_group=consumer, version=version, at=at)
        for consumer, version, at in versions
        if at // HOUR - first_hour >= DAY_HOURS
    ]
