"""`stats`, `groups` and `list`: from the whole down to the messages."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from sqlalchemy import select

from holdfast.brokers import connect
from holdfast.cli.display import out, plain, print_json, print_table, say
from holdfast.cli.dlq.opened import dead_letters, one_group
from holdfast.cli.dlq.options import (
    ConsumerGroup,
    Database,
    Error,
    InGroup,
    Key,
    Kind,
    Since,
    Tenant,
    Topic,
    Until,
    Version,
    known_class,
    moment,
)
from holdfast.cli.dlq.shown import age, ago, bars, sparkline, when
from holdfast.cli.options import Config, Json, Limit
from holdfast.database import reading
from holdfast.dlq.groups import STATES, Groups, Which
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.schema import message
from holdfast.dlq.stats import stats
from holdfast.dlq.topic import COLLECTOR
from holdfast.dlq.uncollected import uncollected
from holdfast.errors import ConfigurationError


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
    flow = sum(found.inflow) - sum(found.outflow)
    word = "rising" if flow > 0 else "falling" if flow < 0 else "steady"
    say(f"pending {found.pending:,}   oldest {age(found.oldest_seconds)}   parked {found.parked:,}")
    say(f"in  24 h {sum(found.inflow):>8,}  {sparkline(found.inflow)}")
    say(f"out 24 h {sum(found.outflow):>8,}  {sparkline(found.outflow)}  {word} by {abs(flow):,}")
    say(_pace(found.inflow))
    states = ", ".join(
        f"{count} {state}" for state, count in found.groups_by_state.items() if count
    )
    say(f"groups: {states or 'none'}; {found.new_today} new today")
    if found.due:
        say(f"{found.due:,} wait for a retry, {found.due_now:,} are due now: holdfast dlq replay "
            "--due --every 1m --reason 'automatic retry' sends them")  # fmt: skip
    if found.parked:
        say(f"{found.parked:,} are parked for a person: holdfast dlq list --state parked")
    for name, count in waiting.items():
        if count:
            say(f"WARNING {count:,} dead letters wait on {name} and are in no store: run  holdfast "
                f"dlq collect {name}  before the broker's retention eats them")  # fmt: skip
    for title, counts in (("topic", found.by_topic), ("error", found.by_error),
                          ("class", found.by_class)):  # fmt: skip
        if counts:
            rows = [(name, bar, f"{count:,}") for name, bar, count in bars(counts)]
            print_table((title, "", "pending"), rows)
    if found.pending:
        say("next: holdfast dlq groups")


def _uncollected(broker: str | None, topics: list[str], group: str) -> dict[str, int]:
    if broker is None:
        raise ConfigurationError("ask whom? give --broker, e.g. kafka://host:9092")
    opened = connect(broker)
    try:
        return uncollected(opened, topics, group)
    finally:
        opened.close()


def groups(
    *,
    config: Config = None,
    database: Database,
    topic: Topic = None,
    consumer: ConsumerGroup = None,
    kind: Kind = None,
    state: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STATES)}; may repeat.")
    ] = None,
    resolved: Annotated[bool, typer.Option("--all", help="Also those that are resolved.")] = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List the problems, the largest first."""
    known_class(kind)
    states = tuple(state) if state else STATES if resolved else Which().states
    which = Which(topic=topic, consumer_group=consumer, kind=kind, states=states)
    with dead_letters(database) as engine:
        found = Groups(engine).listed(which, limit=limit)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        _say_nothing(database, topic=topic, consumer=consumer, kind=kind, state=state)
        return
    now = datetime.now(UTC).timestamp()
    table = Table("group", "pending", "last seen", "last 24 h", "problem")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for one in found:
        cells = (
            f"{one.group_id[:8]}\n{one.state}",
            f"{one.pending:,}\n{one.keys_text} keys",
            f"{ago(one.last_seen, now)}\n{one.kind}",
            sparkline(one.trend),
            f"{one.title}\n{one.topic} → {one.consumer_group}",
        )
        table.add_row(*(Text(plain(cell, lines=True)) for cell in cells))
    out.print(table)
    say("next: holdfast dlq show GROUP, then simulate and replay it")


def list_(
    *,
    config: Config = None,
    database: Database,
    group: InGroup = None,
    topic: Topic = None,
    consumer: ConsumerGroup = None,
    kind: Kind = None,
    error: Error = None,
    tenant: Tenant = None,
    version: Version = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    state: Annotated[
        str, typer.Option(help="pending, confirmed, discarded, parked or any.")
    ] = "pending",
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """List dead letters by filters."""
    known_class(kind)
    if state not in _STATES:
        raise ConfigurationError(f"--state {state!r}: use one of {', '.join(_STATES)}")
    with dead_letters(database) as engine:
        selection = Selection(
            groups=tuple(one_group(engine, name).group_id for name in group or ()),
            topic=topic,
            consumer_group=consumer,
            kind=kind,
            error=error,
            tenant=tenant,
            version=version,
            key=key,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            state=None if state == "any" else state,
        )
        query = select(*(message.c[name] for name in _FIELDS)).where(*selection.where())
        with reading(engine).connect() as db:
            rows = db.execute(query.order_by(message.c.seq.desc()).limit(limit)).mappings().all()
    if as_json:
        print_json([_plain(row) for row in rows])
        return
    if not rows:
        given = {name: value for name, value in selection.described().items() if name != "state"}
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        say(f"nothing matches {told}" if told else f"nothing is {state}")
        return
    print_table(
        ("id", "group", "state", "topic", "key", "failed", "replays", "error"),
        [
            (row["dlq_id"][:8], row["group_id"][:8], row["state"], row["topic"], _key(row),
             when(row["last_failed_at"]), row["replay_count"],
             f"{row['error_type']}: {row['error_text'][:80]}")
            for row in rows
        ],
    )  # fmt: skip


def _pace(inflow: tuple[int, ...]) -> str:
    """Return how this hour and the last compare with the rest of the day."""
    now, usual = sum(inflow[-2:]) / 2, sum(inflow[:-2]) / (len(inflow) - 2)
    told = f"this hour and the last: {now:.1f} an hour, before that {usual:.1f}"
    if now > _CRITICAL * usual:
        return f"{told}: a storm" if now >= _FEW else told
    return f"{told}: more than usual" if now > _MORE * usual and now >= _FEW else told


def _say_nothing(database: str, **filters: object) -> None:
    """Say that nothing matches; a mistyped filter must not look like peace."""
    given = ", ".join(f"--{name} {value}" for name, value in filters.items() if value)
    if not given:
        say("no problems: nothing is pending")
        return
    with dead_letters(database) as engine:
        pending = sum(one.pending for one in Groups(engine).figures())
    say(f"nothing matches {given}; {pending:,} messages are pending without it")


def _key(row: Any) -> str:
    return (
        "" if row["message_key"] is None else bytes(row["message_key"]).decode("utf-8", "replace")
    )


def _plain(row: Any) -> dict[str, Any]:
    return {**row, "message_key": None if row["message_key"] is None else _key(row)}


_MORE, _CRITICAL = 2, 5  # times the usual inflow
_FEW = 5  # an hour: fewer are no storm whatever the usual is
_STATES = ("pending", "confirmed", "discarded", "parked", "any")
_FIELDS = (
    "dlq_id", "group_id", "state", "message_id", "topic", "message_key", "lane", "position",
    "consumer_group", "handler", "service_version", "class", "stage", "error_type", "error_text",
    "tenant", "attempts", "occurrences", "first_failed_at", "last_failed_at", "replay_count",
    "revision", "replayable",
)  # fmt: skip
