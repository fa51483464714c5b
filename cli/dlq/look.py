"""`stats`, `groups` and `list`: from the whole down to the messages."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from sqlalchemy import select

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
    moment,
)
from holdfast.cli.dlq.shown import age, ago, bars, sparkline, when
from holdfast.cli.options import Config, Json, Limit
from holdfast.dlq.groups import STATES, Groups, Which
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.schema import message
from holdfast.dlq.stats import stats


def stats_(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show how many wait, since when, of what, and whether the outflow keeps up."""
    with dead_letters(database) as engine:
        found = stats(engine)
    if as_json:
        print_json(asdict(found))
        return
    flow = sum(found.inflow) - sum(found.outflow)
    word = "rising" if flow > 0 else "falling" if flow < 0 else "steady"
    say(f"pending {found.pending:,}   oldest {age(found.oldest_seconds)}   parked {found.parked:,}")
    say(f"in  24 h {sum(found.inflow):>8,}  {sparkline(found.inflow)}")
    say(f"out 24 h {sum(found.outflow):>8,}  {sparkline(found.outflow)}  {word} by {abs(flow):,}")
    states = ", ".join(
        f"{count} {state}" for state, count in found.groups_by_state.items() if count
    )
    say(f"groups: {states or 'none'}; {found.new_today} new today; {found.due:,} due for a retry")
    for title, counts in (("topic", found.by_topic), ("error", found.by_error),
                          ("class", found.by_class)):  # fmt: skip
        if counts:
            rows = [(name, bar, f"{count:,}") for name, bar, count in bars(counts)]
            print_table((title, "", "pending"), rows)
    if found.pending:
        say("next: holdfast dlq groups")


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
    states = tuple(state) if state else STATES if resolved else Which().states
    which = Which(topic=topic, consumer_group=consumer, kind=kind, states=states)
    with dead_letters(database) as engine:
        found = Groups(engine).listed(which, limit=limit)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        say("no problems: nothing is pending")
        return
    now = datetime.now(UTC).timestamp()
    table = Table("group", "pending", "state", "class", "keys", "last seen", "problem")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for one in found:
        cells = (
            one.group_id[:8],
            f"{one.pending:,}",
            one.state,
            one.kind,
            one.keys_text,
            ago(one.last_seen, now),
            f"{one.title}\n{one.topic} → {one.consumer_group}\n{sparkline(one.trend)}",
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
        with engine.connect() as db:
            rows = db.execute(query.order_by(message.c.seq.desc()).limit(limit)).mappings().all()
    if as_json:
        print_json([_plain(row) for row in rows])
        return
    if not rows:
        say("nothing matches")
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


def _key(row: Any) -> str:
    return (
        "" if row["message_key"] is None else bytes(row["message_key"]).decode("utf-8", "replace")
    )


def _plain(row: Any) -> dict[str, Any]:
    return {**row, "message_key": None if row["message_key"] is None else _key(row)}


_FIELDS = (
    "dlq_id", "group_id", "state", "message_id", "topic", "message_key", "lane", "position",
    "consumer_group", "handler", "service_version", "class", "stage", "error_type", "error_text",
    "tenant", "attempts", "occurrences", "first_failed_at", "last_failed_at", "replay_count",
    "revision", "replayable",
)  # fmt: skip
