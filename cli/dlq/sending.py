"""Sending in the foreground: one plan, told how it ended, or automatic retries until a signal."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.progress import shown_replay
from holdfast.cli.exits import (
    EXIT_INTERRUPTED,
    EXIT_PARTLY,
    EXIT_PAUSED,
    EXIT_STOPPED,
    EXIT_UNCONFIRMED,
)
from holdfast.cli.failures import sentence
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.replay.auto_retry import Retrying
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.plan import ACTIVE, EndingKind, NotNow, RunResult
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.sender import Sender
from holdfast.dlq.replay.target import Target
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError
from holdfast.tracing.setup import setup_if_asked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import NoReturn

    from sqlalchemy.engine import Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayOptions, ReplayPlan
    from holdfast.dlq.replay.selection import Selection
    from holdfast.dlq.replay.survey import Manifest
    from holdfast.ports import Broker


_CODES = {
    EndingKind.CONFIRMED: 0,
    EndingKind.STOPPED: EXIT_STOPPED,
    EndingKind.UNCONFIRMED: EXIT_UNCONFIRMED,
    EndingKind.PARTLY: EXIT_PARTLY,
    EndingKind.PAUSED: EXIT_PAUSED,
    EndingKind.ABORTED: EXIT_PAUSED,
}


def ending_code(ending: RunResult) -> int:
    """Return the exit code of a command whose replay ended so."""
    return _CODES[ending.kind]


@dataclass(frozen=True, slots=True)
class ReplayOutput:
    """What a plan is sent with."""

    broker: Broker
    vault: Vault | None


@contextmanager
def outlet(engine: Engine, broker: str, master_key: Path | None) -> Iterator[ReplayOutput]:
    """Open what a plan is sent with, before it is made: wrong settings leave nothing behind."""
    vault = opened_vault(engine, master_key)
    opened = connect(broker)
    try:
        yield ReplayOutput(opened, vault)
    finally:
        opened.close()


def require_target(through: ReplayOutput, terms: ReplayOptions, manifest: Manifest) -> None:
    """Refuse a topic that is not there before anything is claimed for it."""
    if terms.to_topic is not None:
        places = {(letter.topic, letter.group) for letter in manifest.letters}
        Target(through.broker, terms.to_topic).prepare(places)


def require_some(manifest: Manifest) -> None:
    """Refuse to make a plan that sends nothing, and say why; the loop cap parks by one."""
    if manifest.letters or any(state is ItemState.PARKED for _, state, _ in manifest.aside):
        return
    letter, state, why = manifest.aside[0]
    raise NotNow(
        f"none of the {len(manifest.aside):,} messages can be sent: {letter.dlq_id[:8]} is "
        f"{state.value}, {why}"
    )


def send(
    engine: Engine, plan: ReplayPlan, through: ReplayOutput, operator: Operator, *, as_json: bool
) -> NoReturn:
    """Send *plan* to its end and exit with the code of that end; a signal pauses it."""
    plans = Plans(engine)
    setup_if_asked("holdfast-replay")
    try:
        with terminated_like_interrupted(), shown_replay(plan.total) as observe:
            sender = Sender(engine, through.broker, observe=observe, vault=through.vault)
            ending = sender.run(plan.id)
    except KeyboardInterrupt:
        found = plans.find(plan.id)
        if found.state in ACTIVE:
            found = plans.pause(found, replace(operator, reason="interrupted by a signal"))
        onward = f"nothing is lost. Go on with:  {resuming(plan)}"
        if as_json:
            _print_facts(engine, found, "interrupted", onward)
        else:
            say(f"interrupted; {onward}")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except HoldfastError as error:
        if as_json:
            _print_facts(engine, plans.find(plan.id), "failed", sentence(error))
        else:
            say(f"plan {plan.short} keeps its messages. Go on with:  {resuming(plan)}, or free "
                f"them:  holdfast dlq plans abort {plan.short} --reason …")  # fmt: skip
        raise
    tell(engine, plans.find(plan.id), ending, as_json=as_json)
    raise SystemExit(ending_code(ending))


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does; only the main thread hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def opened_vault(engine: Engine, path: Path | None) -> Vault | None:
    """Return the vault whose master key is in the file at *path*; None if none is named."""
    if path is None:
        return None
    from holdfast.dlq.protection.vault import Vault

    try:
        return Vault(engine, bytes.fromhex(path.read_text().strip()))
    except OSError as error:
        raise ConfigurationError(f"--master-key-file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--master-key-file {path}: it is not hexadecimal") from error


def resuming(plan: ReplayPlan) -> str:
    """Return the command that sends *plan* on."""
    command = "spark replay" if plan.lanes else "dlq plans resume"
    return f"holdfast {command} {plan.short} --reason …"


def tell(engine: Engine, plan: ReplayPlan, ending: RunResult, *, as_json: bool) -> None:
    """Say how a run of *plan* ended and what to do next."""
    if as_json:
        _print_facts(engine, plan, ending.kind, ending.reason)
        return
    say(f"plan {plan.short}: {ending.reason}")
    match ending.kind:
        case EndingKind.STOPPED:
            say("nothing more was sent. See  holdfast dlq plans show "
                f"{plan.short}; after a fix:  {resuming(plan)}, or abort it")  # fmt: skip
        case EndingKind.UNCONFIRMED:
            say(f"they wait in the broker. Later:  holdfast dlq verify {plan.short}")
        case EndingKind.PARTLY:
            say(f"see  holdfast dlq plans show {plan.short}")
        case EndingKind.PAUSED:
            say(f"go on with:  {resuming(plan)}")
        case _:
            pass


def _print_facts(engine: Engine, plan: ReplayPlan, ending: str, reason: str) -> None:
    counts = Plans(engine).tally(plan)
    print_json(
        {"plan": plan.id, "ending": ending, "reason": reason, "total": plan.total,
         "sent": counts.published, "forgiven": plan.forgiven, "hash": plan.hash,
         "items": {state.value: count for state, count in counts.counts.items()}}
    )  # fmt: skip


log = logging.getLogger("holdfast.cli")
_DRAIN_SECONDS = 30.0


def retry_again_and_again(
    engine: Engine,
    broker: str,
    master_key: Path | None,
    selection: Selection,
    terms: ReplayOptions,
    operator: Operator,
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
            engine, through.broker, operator, selection=selection, terms=terms,
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
