"""`groups` and `list`: from the problems down to the messages."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text
from sqlalchemy import select

from holdfast.cli.display import out, plain, print_json, say
from holdfast.cli.dlq.opened import dead_letters, one_group
from holdfast.cli.dlq.options import (
    ConsumerGroup,
    Correlation,
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
from holdfast.cli.dlq.shown import ago, sparkline, when
from holdfast.cli.options import Config, Json, Limit
from holdfast.database import reading
from holdfast.dlq.groups import STATES, Group, Groups, Which
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.rows import PENDING
from holdfast.dlq.schema import message
from holdfast.errors import ConfigurationError


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
    """List the problems: first those that nobody looks after, the largest of them on top."""
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
    table = Table("group", Column("pending", justify="right"), "problem, and its last 24 hours")
    now = datetime.now(UTC).timestamp()
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


def _problem(one: Group, now: float) -> str:
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
    correlation: Correlation = None,
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
            correlation=correlation,
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
    table = Table("id", "failed", "error, and of what")
    for column in table.columns[:2]:
        column.no_wrap = True
    for row in rows:
        failed = when(row["last_failed_at"]).replace(" ", "\n", 1)
        cells = row["dlq_id"][:8], failed, _failure(row)
        table.add_row(*(Text(plain(cell, lines=True)) for cell in cells))
    out.print(table)
    if len(rows) == limit:
        say(f"these are the newest {limit:,}; see more with --limit, or less with a filter")
    say("next: holdfast dlq show ID")


def _failure(row: Any) -> str:
    """Return what went wrong with which message, in two lines."""
    error = f"{row['error_type']}: {row['error_text']}"[:_MOST_ERROR].replace("\n", " ")
    facts = [f"group {row['group_id'][:8]}", row["topic"]]
    if row["message_key"] is not None:
        facts.append(f"key {_key(row)}")
    facts += [row["tenant"], row["service_version"]]
    if row["state"] != PENDING:
        facts.append(row["state"])
    if row["replay_count"]:
        facts.append(f"replayed {row['replay_count']} times")
    return f"{error}\n{' · '.join(plain(fact) for fact in facts if fact)}"


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


_MOST_TITLE, _MOST_ERROR = 160, 120
_STATES = ("pending", "confirmed", "discarded", "parked", "any")
_FIELDS = (
    "dlq_id", "group_id", "state", "message_id", "topic", "message_key", "lane", "position",
    "consumer_group", "handler", "service_version", "class", "stage", "error_type", "error_text",
    "tenant", "attempts", "occurrences", "first_failed_at", "last_failed_at", "replay_count",
    "revision", "replayable",
)  # fmt: skip
