"""`holdfast dlq replay --due --every 1m`: automatic retries, for as long as it runs."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.sending import outlet
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.replay.retrying import Retrying
from holdfast.errors import ConfigurationError, DependencyDown

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.plan import Terms
    from holdfast.dlq.replay.selection import Selection

log = logging.getLogger("holdfast.cli")
_DRAIN_SECONDS = 30.0


def retry_again_and_again(
    engine: Engine,
    broker: str,
    master_key: Path | None,
    selection: Selection,
    terms: Terms,
    warrant: Warrant,
    *,
    every: float,
    as_json: bool,
) -> None:
    """Send what is due, every so often, until SIGTERM or Ctrl-C, which leaves the plan to the next.

    While database or broker is down it waits for them.
    """
    if not selection.due:
        raise ConfigurationError("--every repeats automatic retries: give --due as well")
    stopping = threading.Event()
    with (
        outlet(engine, broker, master_key) as through,
        stopped_by_signals(stopping.set, drain_seconds=_DRAIN_SECONDS),
    ):
        retrying = Retrying(
            engine, through.broker, warrant, selection=selection, terms=terms,
            vault=through.vault, stopping=stopping,
        )  # fmt: skip
        while not stopping.is_set():
            try:
                endings = retrying.round()
            except DependencyDown as error:
                log.warning("nothing is retried now: %s", error)
                endings = []
            for one in endings:
                if as_json:
                    print_json({"plan": one.plan_id, "ending": one.kind, "reason": one.reason})
                else:
                    say(f"plan {one.plan_id[-8:]}: {one.kind}, {one.reason}")
            stopping.wait(max(every, 1.0))
