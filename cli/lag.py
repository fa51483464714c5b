"""`holdfast lag`: how far behind a group is, whether it moves, and what is at stake."""

from __future__ import annotations

from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.brokers import connect
from holdfast.cli.display import age, note, out, print_json, print_table, say
from holdfast.cli.options import AnyTopics, Broker, Config, Group, Json, seconds
from holdfast.clock import SYSTEM_CLOCK
from holdfast.consumer.lag import LagVerdict, LagWatch, LaneLag
from holdfast.errors import BrokerDown, ConfigurationError, NotFound, UnknownTopic
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WIDE = 100
"""Columns from which on positions that are long texts, as those of Redis, are shown."""
_WORST_FIRST = (LagVerdict.STALLED, LagVerdict.STOPPED, LagVerdict.SLOW, None, LagVerdict.OK)
_NEXT = {
    LagVerdict.STALLED: "read /readyz and the members' log, then holdfast circuits list",
    LagVerdict.STOPPED: "start a member: holdfast consume MODULE:CONSUMER",
    LagVerdict.SLOW: "add members, at most one a partition, or mend a handler that is slow",
}


def lag(
    *,
    config: Config = None,
    broker: Broker,
    group: Group,
    topics: AnyTopics = None,
    window: Annotated[
        str, typer.Option("--window", help="Judge by what happens within so long, e.g. 30s.")
    ] = "10s",
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")
    ] = False,
    every: Annotated[
        str, typer.Option("--every", help="With --watch: how often to look, e.g. 5s.")
    ] = "2s",
    as_json: Json = False,
) -> None:
    """Show how far behind a group is in its topics, and whether it moves.

    Without --topic it finds what the group reads or has read, retries and replays too; RabbitMQ
    must be told. Where something waits, it looks for as long as the window, then judges: ok, slow
    (the lag grows), stalled (nothing is settled although the group has members) or stopped (nobody
    is a member). It warns before a topic's retention deletes what is not settled.
    """
    length, pause = seconds(window, "--window"), seconds(every, "--every")
    if not length or not pause:
        raise ConfigurationError("--window or --every 0s: use a length above 0, e.g. 10s")
    if watch and as_json:
        raise ConfigurationError("--watch draws for people: for a script call lag --json again")
    with closing(connect(broker)) as connected:
        looking = LagWatch(connected, group, topics, window=length, clock=SYSTEM_CLOCK)
        title = f"group {group} on {mask(broker)}, within {window}"
        try:
            if watch:
                _watch(looking, title, pause)
            lanes = looking.judged()
        except UnknownTopic as error:
            raise NotFound(f"{mask(broker)} has no topic {error.topic!r}") from error
    if missing := sorted(set(topics or ()) - {one.lane.topic for one in lanes}):
        raise NotFound(f"{mask(broker)} has no topic {', '.join(map(repr, missing))}")
    if as_json:
        print_json([_facts(one) for one in lanes])
    else:
        _show(lanes, title)


def _watch(looking: LagWatch, title: str, pause: float) -> None:
    """Draw what each look finds, until somebody interrupts; an outage is told and waited out."""
    lanes = looking.look()
    while True:
        if out.is_terminal:
            out.clear()
        _show(lanes, title)
        SYSTEM_CLOCK.sleep(pause)
        try:
            lanes = looking.look()
        except BrokerDown as down:
            note(f"what is shown is old: {down}")


def _facts(one: LaneLag) -> dict[str, Any]:
    return {
        "topic": one.lane.topic,
        "partition": one.lane.partition,
        "current": one.progress.committed,
        "end": one.progress.end,
        "lag": one.progress.unsettled,
        "lag_seconds": one.seconds,
        "lag_change": one.change,
        "members": one.members,
        "verdict": None if one.verdict is None else one.verdict.value,
        "retention_seconds": one.retention,
        "retention_left_seconds": one.retention_left,
        "is_near_retention": one.is_near_retention,
        "deleted": one.progress.deleted,
    }


def _show(lanes: Sequence[LaneLag], title: str) -> None:
    say(title)
    by_topic = [list(of) for _, of in groupby(lanes, key=lambda one: one.lane.topic)]
    for of_topic in sorted(by_topic, key=_urgency):
        _show_topic(of_topic)
    for one in lanes:
        _warn(one)
    found = {one.verdict for one in lanes}
    for verdict, remedy in _NEXT.items():
        if verdict in found:
            say(f"next: {verdict.value}: {remedy}")


def _urgency(of_topic: Sequence[LaneLag]) -> tuple[int, int]:
    """Return what sorts the topic that needs somebody most to the top."""
    worst = min(_WORST_FIRST.index(one.verdict) for one in of_topic)
    return worst, -sum(one.progress.unsettled for one in of_topic)


def _show_topic(of_topic: Sequence[LaneLag]) -> None:
    first = of_topic[0]
    words = [first.lane.topic]
    if first.members is not None:
        words.append(_many(first.members, "member"))
    if first.retention is not None:
        words.append(f"keeps messages for {age(first.retention)}")
    waiting = sum(one.progress.unsettled for one in of_topic)
    words.append(f"{waiting:,} not settled" if waiting else "nothing waits")
    say(" · ".join(words))
    if waiting:
        _print_lanes(of_topic)


def _print_lanes(of_topic: Sequence[LaneLag]) -> None:
    """Print a table, with the positions where the broker has any and there is room."""
    positions = [one.progress.end for one in of_topic if one.progress.end is not None]
    has_room = out.width >= _WIDE or all(isinstance(end, int) for end in positions)
    with_positions = bool(positions) and has_room
    headings = ["partition", "current", "end", "lag", "behind", "trend", "verdict"]
    rows = [[*_place(one), *_pace(one)] for one in of_topic]
    if not with_positions:
        del headings[1:3]
        rows = [[row[0], *row[3:]] for row in rows]
    print_table(headings, rows, whole=len(headings))


def _place(one: LaneLag) -> Iterable[str]:
    yield str(one.lane.partition)
    for position in (one.progress.committed, one.progress.end):
        yield "–" if position is None else str(position)


def _pace(one: LaneLag) -> Iterable[str]:
    yield f"{one.progress.unsettled:,}"
    yield age(one.seconds)
    yield "–" if one.change is None else f"{one.change:+,}" if one.change else "0"
    yield "–" if one.verdict is None else one.verdict.value


def _warn(one: LaneLag) -> None:
    place = f"{one.lane.topic} {one.lane.partition}"
    if one.progress.deleted:
        say(f"LOST: {place}: {_many(one.progress.deleted, 'message')} deleted before they were "
            "settled")  # fmt: skip
    left = one.retention_left
    if not one.is_near_retention or left is None:
        return
    ahead = f"in {age(left)}" if left > 0 else "at any moment"
    say(f"DATA LOSS AHEAD: {place}: its oldest is {age(one.seconds)} old, and deleted {ahead}")


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
