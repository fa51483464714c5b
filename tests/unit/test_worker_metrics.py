"""The metrics of worker processes: what one counted stays counted when another takes its place."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from holdfast.cli.worker_metrics import Family, Merged, WorkerSeries, reported
from holdfast.metrics import exposition

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Process:
    """What a worker process counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.handled = Counter("handled", "Handled.", ["topic"], registry=self.registry)
        self.seconds = Histogram("seconds", "Took.", buckets=(1, 10), registry=self.registry)
        self.busy = Gauge("busy", "Now.", registry=self.registry)

    def tells(self) -> list[Family]:
        """Return it as it comes over the link."""
        whole = msgspec.json.encode(reported(self.registry.collect()))
        return msgspec.json.decode(whole, type=list[Family])


def figures(*workers: list[Family]) -> dict[str, float]:
    """Return what a scrape sees, by series."""
    body = exposition([Merged(workers)], OPENMETRICS).body.decode()
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def test_counters_and_histograms_go_on_where_the_dead_process_left_them() -> None:
    """So a rate over them neither drops nor jumps, whatever is scraped in between."""
    place, first, second = WorkerSeries(), Process(), Process()
    first.handled.labels("orders").inc(5)
    first.handled.labels("bills").inc(1)
    first.seconds.observe(0.5)
    first.busy.set(3)
    place.came(place.process, first.tells())
    before = figures(place.shown(answers=True))
    place.ended()
    between = figures(place.shown(answers=False))
    second.handled.labels("orders").inc(7)
    second.seconds.observe(5)
    second.busy.set(1)
    place.came(place.process, second.tells())
    after = figures(place.shown(answers=True))
    assert [seen["handled_total['0', 'orders']"] for seen in (before, between, after)] == [5, 5, 12]
    assert [seen["handled_total['0', 'bills']"] for seen in (before, between, after)] == [1, 1, 1]
    assert [seen["seconds_count['0']"] for seen in (before, between, after)] == [1, 1, 2]
    assert after["seconds_bucket['0', '1.0']"] == 1
    assert after["seconds_bucket['0', '10.0']"] == after["seconds_bucket['+Inf', '0']"] == 2
    assert after["seconds_sum['0']"] == pytest.approx(5.5)
    # As long as it has counted, not since the last restart.
    assert after["seconds_created['0']"] == before["seconds_created['0']"]
    assert (before["busy['0']"], after["busy['0']"]) == (3, 1)
    assert "busy['0']" not in between  # what is gone is not busy


def test_many_deaths_add_up() -> None:
    """Each process counts from 0."""
    place = WorkerSeries()
    for _ in range(4):
        process = Process()
        process.handled.labels("orders").inc(2)
        place.came(place.process, process.tells())
        place.ended()
    assert figures(place.shown(answers=False))["handled_total['0', 'orders']"] == 8


def test_what_a_dead_process_said_is_not_the_next_ones() -> None:
    """An answer that was read as it died would be counted twice."""
    place, process = WorkerSeries(), Process()
    process.handled.labels("orders").inc(2)
    asked = place.process
    place.came(asked, process.tells())
    place.ended()
    place.came(asked, process.tells())
    assert figures(place.shown(answers=True))["handled_total['0', 'orders']"] == 2


def test_a_process_that_is_silent_shows_what_it_counted_and_nothing_of_now() -> None:
    """A counter that vanishes for a scrape would look like a restart."""
    place, process = WorkerSeries(), Process()
    process.handled.labels("orders").inc(2)
    process.busy.set(1)
    place.came(place.process, process.tells())
    seen = figures(place.shown(answers=False))
    assert seen["handled_total['0', 'orders']"] == 2
    assert "busy['0']" not in seen


def test_workers_are_told_apart_and_keep_their_exemplars() -> None:
    """Of two that count the same."""
    workers = []
    for number in range(2):
        process = Process()
        process.seconds.observe(0.5, {"trace_id": f"t{number}"})
        process.handled.labels("orders").inc(number)
        workers.append(process.tells())
    body = exposition([Merged(workers)], OPENMETRICS).body.decode()
    seen = {
        (sample.labels["worker"], sample.exemplar.labels["trace_id"])
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert seen == {("0", "t0"), ("1", "t1")}
    found = figures(*workers)
    assert (found["handled_total['0', 'orders']"], found["handled_total['1', 'orders']"]) == (0, 1)
