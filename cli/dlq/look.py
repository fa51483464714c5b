"""`stats`, `groups` and `list`: from how many wait, over the problems, down to the messages."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from holdfast.brokers import connect
from holdfast.cli.display import (
    age,
    ago,
    bars,
    hour_marks,
    out,
    plain,
    print_json,
    say,
    sparkline,
    when,
)
from holdfast.cli.dlq.options import Kind, LetterFilter, Problems, State, dead_letters, known_class
from holdfast.cli.late import grouped
from holdfast.cli.options import AnyBroker, AnyGroup, AnyTopic, Config, Database, Json, Limit
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.operations import DeadLetterAdmin, LetterSummary
from holdfast.dlq.store.groups import STATES, FailureGroup, FailureGroups, GroupFilter
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.stats import MOST_COUNTED, Stats, per_hour, stats
from holdfast.dlq.topic.collector import uncollected
from holdfast.dlq.topic.topic import COLLECTOR
from holdfast.errors import ConfigurationError


def groups(
    *,
    config: Config = None,
    database: Database,
    topic: AnyTopic = None,
    group: AnyGroup = None,
    kind: Kind = None,
    state: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STATES)}; may repeat.")
    ] = None,
    resolved: Annotated[bool, typer.Option("--all", help="Also those that are resolved.")] = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List the problems: first those that nobody looks after, the largest of them on top."""
    known_class(kind)
    states = tuple(state) if state else STATES if resolved else GroupFilter().states
    which = GroupFilter(topic=topic, consumer_group=group, kind=kind, states=states)
    with dead_letters(database) as engine:
        found = FailureGroups(engine).listed(which, limit=limit)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        _say_nothing(database, topic=topic, group=group, kind=kind, state=state)
        return
    table = Table("group", Column("pending", justify="right"), "problem, and its last 24 hours")
    now = SYSTEM_CLOCK.now().timestamp()
    for column in table.columns[:2]:
        column.no_wrap = True
    for one in found:
        cells = f"{one.group_id[:8]}\n{one.state}", f"{one.pending:,}", _problem(one, now)
        table.add_row(*(Text(plain(cell, lines=True)) for cell in cells))
        table.add_section()
    out.print(table)
    if len(found) == limit:
        say(f"these are the {limit:,} most urgent; see more with --limit")
    say("next: holdfast dlq show GROUP, then simulate and replay it")


def _problem(one: FailureGroup, now: float) -> str:
    """Return what the problem is, whom it hits, and what was said about it."""
    title = one.title.replace("\n", " ")
    hit = f"{one.keys_text} keys · {one.tenants_text} tenants"
    lines = [
        title if len(title) <= _MOST_TITLE else f"{title[:_MOST_TITLE]}…",
        f"{one.topic} → {one.consumer_group} · {one.kind} · {hit}",
        f"{sparkline(one.trend)}  last {ago(one.last_seen, now)}",
    ]
    if one.state == "muted":
        lines.append(f"muted until {when(one.muted_until)}")
    elif one.owner:
        lines.append(f"looked after by {one.owner}")
    return "\n".join(lines)


@grouped
def list_(
    *,
    config: Config = None,
    database: Database,
    problem: Problems = None,
    wanted: LetterFilter,
    state: State = PENDING,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List dead letters by filters."""
    with dead_letters(database) as engine:
        admin = DeadLetterAdmin(engine)
        selection = wanted.selection(admin, groups=problem, state=state)
        found = admin.letters(selection, limit=limit)
    if as_json:
        print_json([_facts(one) for one in found])
        return
    if not found:
        given = {name: value for name, value in selection.described().items() if name != "state"}
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        say(f"nothing matches {told}" if told else f"nothing is {state}")
        if wanted.group is not None:
            say("--group is a consumer group; a problem is named by --problem")
        return
    table = Table("id", "failed", "error, and of what")
    for column in table.columns[:2]:
        column.no_wrap = True
    for one in found:
        failed = when(one.last_failed_at).replace(" ", "\n", 1)
        cells = one.dlq_id[:8], failed, _failure(one)
        table.add_row(*(Text(plain(cell, lines=True)) for cell in cells))
    out.print(table)
    if len(found) == limit:
        say(f"these are the newest {limit:,}; see more with --limit, or less with a filter")
    say("next: holdfast dlq show ID")


def _failure(one: LetterSummary) -> str:
    """Return what went wrong with which message, in two lines."""
    error = f"{one.error_type}: {one.error_text}"[:_MOST_ERROR].replace("\n", " ")
    facts = [f"group {one.group_id[:8]}", one.topic]
    if one.message_key is not None:
        facts.append(f"key {one.message_key}")
    facts += [one.tenant or "", one.service_version]
    if one.state != PENDING:
        facts.append(one.state)
    if one.replay_count:
        facts.append(f"replayed {one.replay_count} times")
    return f"{error}\n{' · '.join(plain(fact) for fact in facts if fact)}"


def _facts(one: LetterSummary) -> dict[str, Any]:
    """Return *one* as scripts get it."""
    found = asdict(one)
    return {"class" if name == "kind" else name: value for name, value in found.items()}


def _say_nothing(database: str, **filters: object) -> None:
    """Say that nothing matches; a mistyped filter must not look like peace."""
    given = ", ".join(f"--{name} {value}" for name, value in filters.items() if value)
    if not given:
        say("no problems: nothing is pending")
        return
    with dead_letters(database) as engine:
        pending = sum(one.pending for one in FailureGroups(engine).figures())
    say(f"nothing matches {given}; {pending:,} messages are pending without it")


_MOST_TITLE, _MOST_ERROR = 160, 120
_LEAST_NAME, _BESIDE_NAME = 31, 49  # columns of the table of shares


_MORE, _CRITICAL = 2, 5  # times the usual inflow
_FEW = 5  # an hour: fewer are no storm whatever the usual is
_HOUR = 3600


def stats_(
    *,
    config: Config = None,
    database: Database,
    topics: Annotated[
        list[str] | None,
        typer.Option(
            "--uncollected",
            metavar="TOPIC",
            help="Ask the broker how many dead letters wait on this topic and are in no store; "
            "may repeat.",
        ),
    ] = None,
    broker: AnyBroker = None,
    collector: Annotated[
        str, typer.Option(help="The consumer group that collects, with --uncollected.")
    ] = COLLECTOR,
    as_json: Json = False,
) -> None:
    """Show how many wait, since when, of what, and whether the outflow keeps up."""
    with dead_letters(database) as engine:
        found = stats(engine)
    waiting = _uncollected(broker, topics, collector) if topics else {}
    if as_json:
        print_json({**asdict(found), "uncollected": waiting})
        return
    _say_flow(found)
    _say_waiting(found)
    for name, count in waiting.items():
        if count:
            say(f"WARNING {count:,} dead letters wait on {name} and are in no store: run  holdfast "
                f"dlq collect {name}  before the broker's retention eats them")  # fmt: skip
    if found.pending:
        _print_shares(
            {"topic": found.by_topic, "error": found.by_error, "class": found.by_class},
            found.pending,
        )
        say("next: holdfast dlq groups")


def _uncollected(broker: str | None, topics: list[str], group: str) -> dict[str, int]:
    if broker is None:
        raise ConfigurationError("ask whom? give --broker, e.g. kafka://host:9092")
    opened = connect(broker)
    try:
        return uncollected(opened, topics, group)
    finally:
        opened.close()


def _say_flow(found: Stats) -> None:
    came, went = sum(found.inflow), sum(found.outflow)
    say(f"pending {found.pending:,}   oldest {age(found.oldest_seconds)}   "
        f"parked {counted(found.parked)}")  # fmt: skip
    now = SYSTEM_CLOCK.now().timestamp()
    for name, rate, count, flow in (
        ("in", found.inflow_per_hour, came, found.inflow),
        ("out", found.outflow_per_hour, went, found.outflow),
    ):
        say(f"{name:<4}{_rate(rate):>6}/h  24 h {count:>8,}  {sparkline(flow)}")
    say(f"{'hours, UTC; right: this one':<29}{hour_marks(now)}")
    say(pace(found.inflow, now))
    if came > went:
        say(f"outflow does not keep up: {came - went:,} more came than went in 24 h")
    elif went:
        say(f"outflow keeps up: {went - came:,} more went than came in 24 h")


def _say_waiting(found: Stats) -> None:
    states = ", ".join(
        f"{count} {state}" for state, count in found.groups_by_state.items() if count
    )
    say(f"problems: {states or 'none'}; {found.new_today} first seen in 24 h")
    closed = found.resolved_by
    if any(closed.values()):
        fixed = f", {closed['fix']:,} fixed by hand" if closed["fix"] else ""
        say(f"closed so far: {closed['replay']:,} replayed and confirmed, "
            f"{closed['discard']:,} discarded, {closed['park']:,} parked{fixed}")  # fmt: skip
    if found.due:
        say(f"{counted(found.due)} wait for a retry, {counted(found.due_now)} are due now: "
            "holdfast dlq replay --due --every 1m --reason 'automatic retry' sends them"
        )  # fmt: skip
    if found.parked:
        say(f"{counted(found.parked)} are parked for a person: holdfast dlq list --state parked")


def _print_shares(shares: Mapping[str, Mapping[str, int]], pending: int) -> None:
    """Print bars of what is pending, by each of the names in *shares*."""
    table = Table("by", "", "", "pending", "share")
    for column in table.columns[3:]:
        column.justify = "right"
    for title, counts in shares.items():
        for place, (name, bar, count) in enumerate(bars(counts)):
            share = f"{100 * count / pending:.0f} %" if count * 100 >= pending else "< 1 %"
            cells = ("" if place else title, _end_of(name), bar, f"{count:,}", share)
            table.add_row(*(Text(plain(cell)) for cell in cells))
        table.add_section()
    out.print(table)


def _end_of(name: str) -> str:
    """Return *name*, or its end if there is no room: types of one module differ at the end."""
    room = max(_LEAST_NAME, out.width - _BESIDE_NAME)
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _rate(per_hour: float) -> str:
    return f"{per_hour:,.1f}".removesuffix(".0")


def counted(number: int) -> str:
    """Return a number that is not counted beyond a limit."""
    return f"{number:,} or more" if number >= MOST_COUNTED else f"{number:,}"


def pace(inflow: tuple[int, ...], now: float) -> str:
    """Return how the inflow since the hour before this one compares with the rest of the day."""
    begun = now % _HOUR / _HOUR  # the last hour of *inflow* is only as long as this
    rate, usual = per_hour(inflow, now), sum(inflow[:-2]) / (len(inflow) - 2)
    told = f"inflow {rate:.1f} an hour in the last {60 * (1 + begun):.0f} min, {usual:.1f} before"
    if rate >= _FEW and rate > _CRITICAL * usual:
        return f"{told}: A STORM, more than {_CRITICAL} times the usual"
    if rate >= _FEW and rate > _MORE * usual:
        return f"{told}: RISING, more than {_MORE} times the usual"
    return f"{told}: falling" if rate * _MORE < usual else f"{told}: about as usual"
