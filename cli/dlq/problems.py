"""Problems, the failure groups: looked after, muted, noted, resolved, told to others, made anew."""

import logging
import shlex
import threading
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer
from sqlalchemy.engine import Engine

from holdfast.cli.confirming import confirm
from holdfast.cli.display import answer, print_json, print_table, say
from holdfast.cli.dlq.options import dead_letters, operator
from holdfast.cli.options import Actor, Config, Database, Json, Reason, Yes, seconds
from holdfast.cli.stopping import stopped_by_signals
from holdfast.clock import SYSTEM_CLOCK
from holdfast.dlq.alerts import Alerts, Command, Hook, Webhook
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.store.groups import FailureGroup, FailureGroups
from holdfast.dlq.store.regroup import regroup as regrouped
from holdfast.errors import ConfigurationError, DependencyDown

Name = Annotated[str, typer.Argument(help="A failure group, or its first characters.")]


def ack(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    owner: Annotated[
        str | None, typer.Option(help="Who looks after it; you, unless given.")
    ] = None,
    note: Annotated[str | None, typer.Option(help="A note kept with the group.")] = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Say that somebody looks after a group."""
    who = operator(actor, reason)
    with dead_letters(database) as engine:
        groups = FailureGroups(engine)
        found = groups.acknowledge(DeadLetterAdmin(engine).group(name).group_id, who, owner=owner)
        if note is not None:
            found = groups.annotate(found.group_id, who, note=note)
    _tell(found, f"is looked after by {found.owner}", as_json=as_json)


def mute(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    length: Annotated[str, typer.Option("--for", help="How long, e.g. 30m, 4h or 2d.")],
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Keep a group out of alerts for a while."""
    try:
        until = SYSTEM_CLOCK.now() + timedelta(seconds=seconds(length, "--for"))
    except OverflowError as error:
        raise ConfigurationError(
            f"--for {length}: nobody would hear of it again, say e.g. 4h or 2d"
        ) from error
    with dead_letters(database) as engine:
        found = FailureGroups(engine).mute(
            DeadLetterAdmin(engine).group(name).group_id, operator(actor, reason), until=until
        )
    text = f"is muted until {until:%Y-%m-%d %H:%M}Z; it goes on counting"
    _tell(found, text, as_json=as_json)


def note(
    name: Name,
    text: Annotated[str, typer.Argument(help="What the next one should know.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason = "a note",
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Keep a note with a group, for whoever looks next."""
    with dead_letters(database) as engine:
        group_id = DeadLetterAdmin(engine).group(name).group_id
        found = FailureGroups(engine).annotate(group_id, operator(actor, reason), note=text)
    _tell(found, "has the note", as_json=as_json)


def resolve(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Say that a problem is over; refused while a message of it is pending."""
    with dead_letters(database) as engine:
        found = FailureGroups(engine).resolve(
            DeadLetterAdmin(engine).group(name).group_id, operator(actor, reason)
        )
    _tell(found, f"is {found.state}; should it return, it is told as regressed", as_json=as_json)


def _tell(found: FailureGroup, text: str, *, as_json: bool) -> None:
    answer(f"group {found.group_id[:8]} {text}", asdict(found), as_json=as_json)


log = logging.getLogger("holdfast.dlq")


def alerts(
    *,
    config: Config = None,
    database: Database,
    webhook: Annotated[
        list[str] | None, typer.Option(help="Post the alert as JSON to this URL; may repeat.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(help="Run this program with the alert as JSON on its input; may repeat."),
    ] = None,
    every: Annotated[
        str | None, typer.Option(help="Go on and look every so often, e.g. 30s; else once.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell each new or returned problem once, to a webhook or a command.

    Problems that are tried again by themselves are told once their retries are used up,
    acknowledged and muted ones not at all. The alert's "verdicts" say what the triage thinks.
    """
    hooks: list[Hook] = [Webhook(url) for url in webhook or ()]
    hooks += [Command(shlex.split(text)) for text in run or ()]
    if not hooks:
        raise ConfigurationError("tell whom? give --webhook URL or --run PROGRAM")
    with dead_letters(database) as engine:
        if every is None:
            told = Alerts(engine, hooks).run_once()
        else:
            told = _again_and_again(engine, hooks, max(seconds(every, "--every"), 1.0))
    answer(f"{told:,} problems were told", {"told": told}, as_json=as_json)


def _again_and_again(engine: Engine, hooks: list[Hook], every: float) -> int:
    stop, told, teller = threading.Event(), 0, Alerts(engine, hooks)
    with stopped_by_signals(stop.set, drain_seconds=30):
        while not stop.is_set():
            try:
                told += teller.run_once()
            except DependencyDown as error:
                log.error("nothing can be told until it comes back: %s", error)  # noqa: TRY400
            stop.wait(every)
    return told


def regroup(
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    only_map: Annotated[
        bool, typer.Option("--map", help="Only show which groups became which, so far.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Group all dead letters anew after an upgrade of the algorithm; the map is kept."""
    with dead_letters(database) as engine:
        if not only_map:
            confirm("Group every dead letter anew", yes=yes, as_json=as_json)
            regrouped(engine, operator(actor, reason))
        found = DeadLetterAdmin(engine).regrouped()
    if as_json:
        print_json([{"from": old, "to": new, "messages": count} for old, new, count in found])
    elif found:
        rows = [(old[:8], new[:8], f"{count:,}") for old, new, count in found]
        print_table(("from", "to", "messages"), rows)
    else:
        say("every dead letter is in the group that this version gives it")
