"""The reports of the jobs: one page each that opens offline, with foreign text escaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from holdfast.dlq.replay.lanes import LaneMark
from holdfast.dlq.replay.plan import ItemState, PlanCounts, PlanState
from holdfast.dlq.topic.stream import StreamCounts
from holdfast.spark_jobs.archive.state import ArchiveState, DataFile
from holdfast.spark_jobs.html_parts import columns
from holdfast.spark_jobs.job_pages import (
    archive_page,
    plan_page,
    replay_page,
    stream_page,
    transform_page,
)
from holdfast.spark_jobs.planning import Planned
from holdfast.spark_jobs.transforming import Transformed

EVIL = "<script>alert('x')</script><img src=//evil.example/x>"


class _Plan:
    """What a page asks of a plan."""

    short, total, state = "9c41", 30, PlanState.PAUSED


def planned() -> Planned:
    return Planned(total=90, canary=5, aside={"held": 3, EVIL: 1}, gone=2, largest_lane=60,
                   by_lane=(60, 20, 10), lanes=3, high_water=99)  # fmt: skip


def replayed() -> str:
    marks = [LaneMark(stage=1, lane=lane, start=10 * lane, beyond=10 * lane + 10, claimed=0,
                      sent=10 * lane + lane) for lane in range(3)]  # fmt: skip
    counts = PlanCounts(
        total=30, published=3, counts={ItemState.SENT: 2, ItemState.CONFIRMED: 1, ItemState.HELD: 0}
    )
    plan: Any = _Plan()
    return replay_page(plan, counts, marks, ending=f"paused: {EVIL}")


def archived() -> str:
    files = tuple(DataFile(path=f"{n}.parquet", day=f"2026-11-{n:02}", rows=1000 * n, bytes=9_000)
                  for n in range(1, 29))  # fmt: skip
    state = ArchiveState(files=files, operation=EVIL, at=1_793_491_200.0)
    return archive_page(EVIL, state, {"new": 28_000, "known": 7})


PAGES = {
    "archive": archived,
    "plan": lambda: plan_page(planned(), {"topic": EVIL}),
    "replay": replayed,
    "stream": lambda: stream_page(
        EVIL, StreamCounts(stored=1234, passed=5), [(7, StreamCounts(stored=1234))]
    ),
    "transform": lambda: transform_page(
        Transformed(transform=f"shop:{EVIL}@2", read=120, written=100, refused=20, rounds=2,
                    reasons={EVIL: 20}, aside="/data/refused")
    ),
}  # fmt: skip


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br", "rect", "line", "polygon", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_opens_offline_and_runs_nothing_of_others(name: str) -> None:
    """No script, no address, balanced tags; what is foreign is shown as the text that it is."""
    page = PAGES[name]()
    found = _Tags()
    found.feed(page)
    assert found.open == []
    assert found.tags.isdisjoint({"script", "img", "link", "iframe"})
    assert "svg" in found.tags
    assert "<script" in found.text
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href|url)\s*[=(]", page.replace("src=//evil.example", ""))


@pytest.mark.parametrize(
    ("name", "facts"),
    [("archive", ["406,000", "28,000", "2026-11-28", "2026-11-01 00:00"]),
     ("plan", ["67%", "lane 2", "held"]), ("replay", ["paused", "confirmed", "sent"]),
     ("stream", ["1,234", "batch 7"]), ("transform", ["120", "/data/refused", "DIFFER"])],
)  # fmt: skip
def test_a_page_tells_what_the_job_did(name: str, facts: list[str]) -> None:
    """The figures that an operator looks for."""
    found = _Tags()
    page = PAGES[name]() if name != "transform" else transform_page(
        Transformed(transform="a:b@1", read=120, written=99, refused=20, reasons={"bad": 20},
                    aside="/data/refused"))  # fmt: skip
    found.feed(page)
    for fact in facts:
        assert fact in found.text


def test_the_lanes_of_a_replay_come_by_what_is_left() -> None:
    """Lane 0 has sent nothing of its ten, lane 2 has sent two."""
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", replayed())
    assert [cells[n : n + 4] for n in range(0, 12, 4)] == [
        ["0", "10", "0", "10"], ["1", "10", "1", "9"], ["2", "10", "2", "8"]]  # fmt: skip


def test_more_bars_than_there_is_room_for_are_added_up() -> None:
    """Ten thousand batches are no ten thousand bars, and none is left out."""
    drawn = columns([(str(n), 1.0) for n in range(10_000)])
    heights = [float(one) for one in re.findall(r'height="([\d.]+)"/>', drawn)]
    assert 100 < len(heights) < 1000
    assert min(heights) > 0
    assert columns([]) == "<p>nothing</p>"
