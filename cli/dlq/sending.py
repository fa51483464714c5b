"""Sending a plan in the foreground, and telling how it ended."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.brokers import connect
from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.exits import CODES
from holdfast.cli.dlq.progress import shown_replay
from holdfast.cli.failures import EXIT_INTERRUPTED, sentence
from holdfast.dlq.replay.ending import Ending, EndingKind
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.sender import Sender
from holdfast.dlq.replay.state import ACTIVE, ItemState, NotNow
from holdfast.dlq.replay.target import Target
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import NoReturn

    from sqlalchemy.engine import Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.plan import Plan, Terms
    from holdfast.dlq.replay.surveying import Manifest
    from holdfast.dlq.vault import Vault
    from holdfast.ports import Broker


@dataclass(frozen=True, slots=True)
class Outlet:
    """What a plan is sent with."""

    broker: Broker
    vault: Vault | None


@contextmanager
def outlet(engine: Engine, broker: str, master_key: Path | None) -> Iterator[Outlet]:
    """Open what a plan is sent with, before it is made: wrong settings leave nothing behind."""
    vault = opened_vault(engine, master_key)
    opened = connect(broker)
    try:
        yield Outlet(opened, vault)
    finally:
        opened.close()


def require_target(through: Outlet, terms: Terms, manifest: Manifest) -> None:
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
    engine: Engine, plan: Plan, through: Outlet, warrant: Warrant, *, as_json: bool
) -> NoReturn:
    """Send *plan* to its end and exit with the code of that end; a signal pauses it."""
    plans = Plans(engine)
    try:
        with terminated_like_interrupted(), shown_replay(plan.total) as observe:
            sender = Sender(engine, through.broker, observe=observe, vault=through.vault)
            ending = sender.run(plan.id)
    except KeyboardInterrupt:
        found = plans.find(plan.id)
        if found.state in ACTIVE:
            found = plans.pause(found, replace(warrant, reason="interrupted by a signal"))
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
    raise SystemExit(CODES[ending.kind])


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
    from holdfast.dlq.vault import Vault

    try:
        return Vault(engine, bytes.fromhex(path.read_text().strip()))
    except OSError as error:
        raise ConfigurationError(f"--master-key-file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--master-key-file {path}: it is not hexadecimal") from error


def resuming(plan: Plan) -> str:
    """Return the command that sends *plan* on."""
    return f"holdfast dlq plans resume {plan.short} --reason …"


def tell(engine: Engine, plan: Plan, ending: Ending, *, as_json: bool) -> None:
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


def _print_facts(engine: Engine, plan: Plan, ending: str, reason: str) -> None:
    counts = Plans(engine).tally(plan)
    print_json(
        {"plan": plan.id, "ending": ending, "reason": reason, "total": plan.total,
         "sent": plan.sent, "forgiven": plan.forgiven, "hash": plan.hash,
         "items": {state.value: count for state, count in counts.counts.items()}}
    )  # fmt: skip
