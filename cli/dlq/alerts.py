"""`holdfast dlq alerts`: what nobody knows yet is told, once or every so often."""

import logging
import shlex
import threading
from typing import Annotated

import typer
from sqlalchemy.engine import Engine

from holdfast.cli.display import answer
from holdfast.cli.dlq.opened import dead_letters
from holdfast.cli.dlq.options import Database, seconds
from holdfast.cli.options import Config, Json
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.alerts import Alerts
from holdfast.dlq.hooks import Command, Hook, Webhook
from holdfast.errors import ConfigurationError, DependencyDown

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
