"""Hourly counts of one failure group: what is unusual in them, and which deploy changed them.

Pure decisions over arrays, run by every engine on the same figures: Spark calls them once per
group on its executors, DuckDB in this process. What is usual is the median of the same hour of
the week, or of the day while there are fewer than three weeks. Medians do not mind a burst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.spark_jobs.analytics.results import HOUR, Anomaly, DeployEffect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from holdfast.spark_jobs.analytics.results import Deployed

DAY_HOURS, WEEK_HOURS = 24, 168
WARNING, CRITICAL = 2.0, 5.0
"""Times the usual: a warning from twice as many, critical from five times as many."""
FEWEST = 5
"""Fewer failures in an hour are no anomaly, whatever is usual."""
_SCORE = 5.0
_CHANGE, _SURE = 2.0, 5.0
_MOST_HOURS = 20 * 366 * DAY_HOURS


def dense(
    hours: NDArray[np.int64], counts: NDArray[np.int64], first: int, last: int
) -> NDArray[np.float64]:
    """Return the counts of every hour from *first* to *last*; nothing is a count, too."""
    first = max(first, last - _MOST_HOURS)
    series = np.zeros(max(0, last - first + 1))
    inside = (hours >= first) & (hours <= last)
    np.add.at(series, hours[inside] - first, counts[inside])
    return series


def usual(series: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what is usual in each hour of *series*."""
    size = len(series)
    season = WEEK_HOURS if size >= 3 * WEEK_HOURS else DAY_HOURS if size >= 3 * DAY_HOURS else 1
    if season == 1:
        return np.full(size, float(np.median(series)) if size else 0.0)
    rounds = -(-size // season)
    padded = np.full(rounds * season, np.nan)
    padded[:size] = series
    table = padded.reshape(rounds, season)
    # The hours beside it count as well: four values alone make no median.
    near = np.concatenate([np.roll(table, shift, axis=1) for shift in (-1, 0, 1)])
    return np.asarray(np.tile(np.nanmedian(near, axis=0), rounds)[:size])


def anomalies(group_id: str, series: NDArray[np.float64], first: int) -> Iterator[Anomaly]:
    """Yield the unusual times in *series*, whose first hour is *first*; neighbours are one."""
    if not len(series):
        return
    expected = usual(series)
    away = series - expected
    spread = 1.4826 * float(np.median(np.abs(away)))
    scale = np.maximum(np.maximum(spread, np.sqrt(expected + 1)), 1.0)
    odd = (away / scale >= _SCORE) & (series >= FEWEST) & (series >= WARNING * expected)
    at = np.flatnonzero(odd)
    if not len(at):
        return
    for run in np.split(at, np.flatnonzero(np.diff(at) > 2) + 1):
        start, end = int(run[0]), int(run[-1]) + 1
        observed, normal = float(series[start:end].sum()), float(expected[start:end].sum())
        peak = float((series[run] / np.maximum(expected[run], 1.0)).max())
        yield Anomaly(
            group_id=group_id, start=float((first + start) * HOUR), hours=end - start,
            observed=int(observed), expected=round(normal, 3),
            level="critical" if peak >= CRITICAL else "warning",
        )  # fmt: skip


def deploy_effects(
    group_id: str, series: NDArray[np.float64], first: int, deploys: Sequence[Deployed]
) -> Iterator[DeployEffect]:
    """Yield which of *deploys* changed how often the group fails: at least twofold, and surely.

    Up to a week before is held against as long a time after; the median day of each counts.
    """
    for one in deploys:
        at = int(one.at // HOUR) - first
        width = min(WEEK_HOURS, at, len(series) - at) // DAY_HOURS * DAY_HOURS
        if width < DAY_HOURS:
            continue
        past, since = series[at - width : at], series[at : at + width]
        before = float(np.median(past.reshape(-1, DAY_HOURS).sum(axis=1)))
        after = float(np.median(since.reshape(-1, DAY_HOURS).sum(axis=1)))
        total = float(past.sum() + since.sum())
        sure = abs(float(since.sum() - past.sum())) / np.sqrt(total) if total else 0.0
        lower, higher = sorted((before, after))
        if sure < _SURE or higher < FEWEST or higher < _CHANGE * max(lower, 0.5):
            continue
        yield DeployEffect(
            group_id=group_id, consumer_group=one.consumer_group, version=one.version, at=one.at,
            before=before, after=after, verdict="worse" if after > before else "better",
        )  # fmt: skip
