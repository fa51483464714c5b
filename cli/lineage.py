"""`holdfast lineage`: which event came of which, what is missing, and the map of the system."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated

import typer
from sqlalchemy.engine import Engine

from holdfast.cli.chains import event_line, traced_facts, traced_lines
from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.opened import also_databases, existing_database
from holdfast.cli.options import Also, Config, Database, Json
from holdfast.tracing import trace
from holdfast.tracing.learned import learn
from holdfast.tracing.system_map import SystemMap, system_map

app = typer.Typer(
    help="See which event came of which, what is missing, and who publishes what to whom.",
    no_args_is_help=True,
)


class MapFormat(Enum):
    """How the map is written."""

    TABLE = "table"
    MERMAID = "mermaid"
    OPENLINEAGE = "openlineage"


@app.command(epilog="Example: holdfast lineage show corr-def-456 --event evt-104")
def show(
    reference: Annotated[str, typer.Argument(help="A correlation id, or the id of an event.")],
    *,
    config: Config = None,
    database: Database,
    also: Also = None,
    event: Annotated[
        str | None,
        typer.Option(help="Also say what led to this event, its root cause, and what came of it."),
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="With --event: the nearest event that led to both.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the events of a correlation as a tree, with times, failures, and what is missing.

    What is missing is learned from the newest other correlations that began with the same event:
    what nearly all of them have. Ends with 1 if something is overdue.
    """
    with _opened(database, also) as engines:
        found = trace(engines, reference)
        learned = learn(engines, found.chain)
    missing = tuple(learned.missing(found.chain, now=found.now))
    found = replace(found, missing=missing)
    chain = found.chain
    facts = traced_facts(found) | {"learned_from": learned.looked_at}
    lines: list[str] = []
    if event is not None:
        one = chain[event]
        causes = [*chain.ancestors(one)]
        root = chain.root_cause(one)
        came = sorted(chain.descendants(one), key=lambda later: (later.time, later.id))
        facts |= {"causes": [cause.id for cause in causes], "root_cause": root.id,
                  "descendants": [later.id for later in came]}  # fmt: skip
        lines.append(f"root cause of {one.type} {one.id}: {event_line(root)}")
        lines += [f"  led to by {event_line(cause)}" for cause in causes]
        lines += [f"  it led to {event_line(later)}" for later in came]
        if other is not None:
            both = chain.common_ancestor(one, chain[other])
            facts["common_ancestor"] = None if both is None else both.id
            told = "none" if both is None else event_line(both)
            lines.append(f"common ancestor of {event} and {other}: {told}")
    if as_json:
        print_json(facts)
    else:
        for line in (*traced_lines(found), *lines):
            say(line)
    if found.is_overdue:
        raise SystemExit(EXIT_NOT_FOUND)


@app.command("map", epilog="Example: holdfast lineage map --format mermaid --also sqlite:///b.db")
def map_(
    *,
    config: Config = None,
    database: Database,
    also: Also = None,
    format_: Annotated[MapFormat, typer.Option("--format", help="How to write it.")] = (
        MapFormat.TABLE
    ),
    as_json: Json = False,
) -> None:
    """Show who publishes what to whom, how often, and how long chains of events are."""
    with _opened(database, also) as engines:
        found = system_map(engines)
    if as_json:
        print_json(asdict(found) | {"depth": found.depth})
    elif format_ is MapFormat.MERMAID:
        print(found.mermaid(), end="")
    elif format_ is MapFormat.OPENLINEAGE:
        print_json(found.openlineage())
    else:
        _print_map(found)


def _print_map(found: SystemMap) -> None:
    headings = ("event", "topic", "from", "to", "events", "handled", "dead")
    print_table(
        headings,
        [
            (one.type, one.topic, one.publisher, one.handler or "nobody",
             found.published.get(one.type, 0), one.handled, one.dead_letters)
            for one in found.routes
        ],
    )  # fmt: skip
    for one in found.leads:
        say(f"{one.cause} leads to {one.effect}: {one.count:,}")
    for action in found.actions:
        say(f"{action.type} is {action.mean_events:.1f} events on average, "
            f"{action.most_events:,} at most, {action.deepest} deep, in its newest "
            f"{action.looked_at} chains")  # fmt: skip
    say(f"the longest chain of types has {found.depth}")


@contextmanager
def _opened(database: str, also: Sequence[str] | None) -> Iterator[list[Engine]]:
    engine = existing_database(database)
    try:
        with also_databases(also) as others:
            yield [engine, *others]
    finally:
        engine.dispose()
