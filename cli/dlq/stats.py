"""`holdfast dlq stats`: how many, since when, of what, and is the outflow keeping up."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from holdfast.brokers import connect
from holdfast.cli.display import out, plain, print_json, say
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database
from holdfast.cli.dlq.shown import age, bars, sparkline
from holdfast.cli.options import Config, Json
from holdfast.dlq.stats import MOST_COUNTED, Stats, stats
from holdfast.dlq.topic import COLLECTOR
from holdfast.dlq.uncollected import uncollected
from holdfast.errors import ConfigurationError

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
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_BROKER", show_default=False, help="Where to ask, with --uncollected."
        ),
    ] = None,
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
    say(f"in  24 h {came:>8,}  {sparkline(found.inflow)}")
    say(f"out 24 h {went:>8,}  {sparkline(found.outflow)}  (right: this hour)")
    say(pace(found.inflow, datetime.now(UTC).timestamp()))
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
        say(f"closed so far: {closed['replay']:,} replayed and confirmed, "
            f"{closed['discard']:,} discarded, {closed['park']:,} parked")  # fmt: skip
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
            cells = ("" if place else title, name, bar, f"{count:,}", share)
            table.add_row(*(Text(plain(cell)) for cell in cells))
        table.add_section()
    out.print(table)


def counted(number: int) -> str:
    """Return a number that is not counted beyond a limit."""
    return f"{number:,} or more" if number >= MOST_COUNTED else f"{number:,}"


def pace(inflow: tuple[int, ...], now: float) -> str:
    """Return how the inflow since the hour before this one compares with the rest of the day."""
    begun = now % _HOUR / _HOUR  # the last hour of *inflow* is only as long as this
    rate, usual = sum(inflow[-2:]) / (1 + begun), sum(inflow[:-2]) / (len(inflow) - 2)
    told = f"inflow {rate:.1f} an hour in the last {60 * (1 + begun):.0f} min, {usual:.1f} before"
    if rate >= _FEW and rate > _CRITICAL * usual:
        return f"{told}: A STORM, more than {_CRITICAL} times the usual"
    if rate >= _FEW and rate > _MORE * usual:
        return f"{told}: RISING, more than {_MORE} times the usual"
    return f"{told}: falling" if rate * _MORE < usual else f"{told}: about as usual"
