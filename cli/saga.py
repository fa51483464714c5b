"""`holdfast saga`: run sagas, see where they are, and help those that are parked."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer
from prometheus_client import REGISTRY
from sqlalchemy.engine import Engine

from holdfast.cli.chains import traced_facts, traced_lines
from holdfast.cli.display import answer, plain, print_json, print_table, say
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.late import grouped
from holdfast.cli.logs import Logging
from holdfast.cli.opened import existing_database, operator_of
from holdfast.cli.options import (
    Actor,
    AnyGroup,
    Broker,
    Config,
    Database,
    Http,
    Json,
    Limit,
    Reason,
    Stall,
    seconds,
)
from holdfast.cli.pictures import rendered_svg
from holdfast.cli.stopping import stopped_by_signals
from holdfast.codec import JsonCodec
from holdfast.consumer import Consumer
from holdfast.db.tables import require_tables
from holdfast.errors import ConfigurationError
from holdfast.health import Endpoint
from holdfast.metrics import exposition
from holdfast.sagas import Saga, Sagas, StateMachine, metadata
from holdfast.sagas.monitoring import SagaCollector, SagaHealth
from holdfast.sagas.operations import Act, SagaDetails, SagaOperations
from holdfast.tracing import Flow, switch
from holdfast.tracing import trace as trace_events
from holdfast.tracing.setup import setup_if_asked

app = typer.Typer(
    help="Run sagas, see where they are, and help those that are parked.", no_args_is_help=True
)

_SOME_KEYS = 3

Reference = Annotated[str, typer.Argument(help="The saga's business key, or its id.")]
Step = Annotated[
    str | None, typer.Option(help="The parked step; may be left out where only one is.")
]
Target = Annotated[str, typer.Argument(help="Where it is: module:variable.")]


@app.command("list", epilog="Example: holdfast saga list --status parked")
def list_(
    *,
    config: Config = None,
    database: Database,
    status: Annotated[
        str | None,
        typer.Option(help="running, compensating, parked, completed or compensated."),
    ] = None,
    kind: Annotated[str | None, typer.Option("--type", help="Only sagas of this name.")] = None,
    overdue: Annotated[bool, typer.Option(help="Only those past their deadline.")] = False,
    after: Annotated[
        str | None, typer.Option(help="The page behind the saga with this id, the last of a page.")
    ] = None,
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List sagas by their start: the newest first, with --status or --overdue the oldest."""
    with _operations(database) as operations:
        found = operations.list(status=status, kind=kind, overdue=overdue, after=after, limit=limit)
    if as_json:
        print_json([asdict(one) for one in found])
    elif not found:
        say("no sagas")
    else:
        rows = [
            (one.key, f"{one.type} v{one.version}", one.status, f"{one.quiet_seconds:.0f} s",
             one.reason)
            for one in found
        ]  # fmt: skip
        print_table(("key", "saga", "status", "unchanged", "reason"), rows)
        parked = next((one.key for one in found if one.status == "parked"), None)
        if parked is not None:
            say(f"next: holdfast saga show {parked}, then retry, skip or mark-done its step")
        if len(found) == limit:
            say(f"there may be more: --after {found[-1].id}")


@app.command(epilog="Example: holdfast saga show ord-7829")
def show(
    reference: Reference, *, config: Config = None, database: Database, as_json: Json = False
) -> None:
    """Show one saga: its steps, attempts, timers, history and state."""
    with _operations(database) as operations:
        found = operations.show(reference)
    if as_json:
        print_json(asdict(found))
        return
    _print(found)


@app.command(epilog="Example: holdfast saga retry ord-7829 --reason 'the bank is back'")
def retry(
    reference: Reference,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    step: Step = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Try a parked step again, or its compensation."""
    _ask(database, Act.RETRY, reference, reason, actor, step, as_json=as_json)


@app.command(epilog="Example: holdfast saga skip ord-7829 --reason 'written off, ticket 17'")
def skip(
    reference: Reference,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    step: Step = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Leave a parked step undone: a compensation that need not happen, a step that was not done."""
    _ask(database, Act.SKIP, reference, reason, actor, step, as_json=as_json)


@app.command("mark-done", epilog="Example: holdfast saga mark-done ord-7829 --reason 'by hand'")
def mark_done(
    reference: Reference,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    step: Step = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Say that a parked step, or its compensation, was done by hand."""
    _ask(database, Act.MARK_DONE, reference, reason, actor, step, as_json=as_json)


@app.command(epilog="Example: holdfast saga cancel ord-7829 --reason 'the customer called'")
def cancel(
    reference: Reference,
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Undo a saga that has not passed its pivot."""
    _ask(database, Act.CANCEL, reference, reason, actor, None, as_json=as_json)


@app.command(epilog="Example: holdfast saga signal ord-7829 approved --reason 'called back'")
def signal(
    reference: Reference,
    name: Annotated[str, typer.Argument(help="The step that waits for the signal.")],
    *,
    config: Config = None,
    database: Database,
    reason: Reason,
    payload: Annotated[str | None, typer.Option(help="What the signal brings, as JSON.")] = None,
    actor: Actor = None,
    as_json: Json = False,
) -> None:
    """Send a signal that a saga waits for, or will wait for."""
    content = None
    if payload is not None:
        try:
            # As a program sends it, which writes a text without the quotes of JSON.
            content, _ = JsonCodec().encode(msgspec.json.decode(payload))
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"--payload is no JSON: {error}") from error
    _ask(database, Act.SIGNAL, reference, reason, actor, name, content, as_json=as_json)


@app.command(epilog="Example: holdfast saga diagram shop:order --svg > order.svg")
def diagram(
    target: Target,
    *,
    config: Config = None,
    svg: Annotated[
        bool, typer.Option("--svg", help="Print a picture instead: needs mmdc of mermaid-cli.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print sagas, a state machine or a flow as Mermaid."""
    drawn = _drawn(target)
    if svg:
        if len(drawn) > 1:
            raise ConfigurationError(
                f"{target!r} has {len(drawn)} sagas, and a picture shows one: name one of them"
            )
        drawn = [one | {"diagram": rendered_svg(one["diagram"])} for one in drawn]
    if as_json:
        print_json(drawn)
        return
    for one in drawn:
        print(one["diagram"], end="")


@app.command(epilog="Example: holdfast saga trace ord-7829 --flow shop:order_flow")
def trace(
    correlation: Annotated[
        str, typer.Argument(help="The correlation id, or the id of an event in it.")
    ],
    *,
    config: Config = None,
    database: Database,
    also: Annotated[
        list[str] | None,
        typer.Option(help="The database of another service that took part; may be repeated."),
    ] = None,
    flow: Annotated[
        str | None, typer.Option(help="What should have happened: module:flow.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which event led to which, who handled it, and what is missing.

    Events are known from services that have a lineage. Ends with 1 if something is overdue.
    """
    expected = None if flow is None else _loaded(flow)
    if expected is not None and not isinstance(expected, Flow):
        raise ConfigurationError(f"{flow!r} is a {type(expected).__name__}, not a Flow")
    with ExitStack() as closing:
        engines = [existing_database(database)]
        engines += [existing_database(url, "--also") for url in also or ()]
        for engine in engines:
            closing.callback(engine.dispose)
        found = trace_events(engines, correlation, flow=expected)
    if as_json:
        print_json(traced_facts(found))
    else:
        for line in traced_lines(found):
            say(line)
        if expected is not None and not found.missing:
            say(f"nothing of flow {expected.name} is missing")
    if found.is_overdue:
        raise SystemExit(EXIT_NOT_FOUND)


@app.command(epilog="Example: holdfast saga check shop:sagas")
def check(
    target: Target, *, config: Config = None, database: Database, as_json: Json = False
) -> None:
    """Say what would become of each running saga if only these definitions were deployed.

    Migrations are tried on copies of the real states; nothing is changed. Ends with 1 if some
    could not go on.
    """
    sagas = _sagas_of(target)
    with _operations(database) as operations:
        found = operations.check(sagas)
    if as_json:
        print_json([asdict(one) for one in found])
    elif not found:
        say("no saga of these names is running")
    else:
        rows = [
            (one.type, one.version, one.running, one.verdict,
             ", ".join(one.keys[:_SOME_KEYS]) + (", …" if one.running > _SOME_KEYS else ""))
            for one in found
        ]  # fmt: skip
        print_table(("saga", "version", "running", "what becomes of them", "keys"), rows)
    if not all(one.is_fine for one in found):
        raise SystemExit(EXIT_NOT_FOUND)


@app.command(epilog="Example: holdfast saga run shop:sagas --broker kafka://host:9092")
@grouped
def run(
    target: Target,
    *,
    config: Config = None,
    broker: Broker,
    group: AnyGroup = None,
    http: Http = None,
    stall: Stall = "2m",
    logging: Logging,
    as_json: Json = False,
) -> None:
    """Run sagas until SIGTERM or Ctrl-C: take replies, work off timers and local steps.

    As many of these as you like share the work. What is in hand is finished first. The group of
    the replies is called sagas unless --group says otherwise.
    """
    logging.configure(as_json=as_json)
    setup_if_asked("holdfast-saga")
    stall_seconds = seconds(stall, "--stall")
    sagas = _loaded(target)
    if not isinstance(sagas, Sagas):
        raise ConfigurationError(f"{target!r} is a {type(sagas).__name__}, not a Sagas")
    _require_tables(sagas.engine)
    named = "sagas" if group is None else group
    consumer = Consumer(broker, group=named, database=sagas.engine)
    if http is not None or switch.meters is not None:
        REGISTRY.register(SagaCollector(sagas.engine))
    with ExitStack() as closing:
        # Signals first: whoever sees the endpoint answer may end this in good order.
        drain = consumer.settings.drain_seconds
        closing.enter_context(stopped_by_signals(consumer.stop, drain_seconds=drain))
        if http is not None:
            closing.callback(_served(http, consumer, sagas, stall_seconds).stop)
        sagas.run(consumer)


def _served(address: str, consumer: Consumer, sagas: Sagas, stall_seconds: float) -> Endpoint:
    own = consumer.metrics.registry
    registries = [REGISTRY] if own is REGISTRY else [own, REGISTRY]
    checks = SagaHealth(sagas, consumer, stall_seconds=stall_seconds)
    endpoint = Endpoint(
        address, alive=checks.alive, ready=checks.ready,
        metrics=lambda accept: exposition(registries, accept),
    )  # fmt: skip
    endpoint.start()
    return endpoint


def _ask(
    database: str,
    act: Act,
    reference: str,
    reason: str,
    actor: str | None,
    name: str | None,
    payload: bytes | None = None,
    *,
    as_json: bool,
) -> None:
    operator = operator_of(actor, reason)
    with _operations(database) as operations:
        step = operations.act(act, reference, operator, name=name, payload=payload)
    about = f" {step}" if step else ""
    text = f"{act.verb}{about} of {reference}: a worker that runs this saga does it in a moment"
    answer(text, {"asked": act.verb, "saga": reference, "step": step}, as_json=as_json)


def _print(found: SagaDetails) -> None:
    summary = found.summary
    say(f"{summary.type} v{summary.version}  {summary.key}  {summary.id}")
    say(f"status    {summary.status}{f', because {summary.reason}' if summary.reason else ''}")
    if found.parked:
        say(f"parked    {', '.join(found.parked)}: holdfast saga retry | skip | mark-done")
    say(f"trace     {found.correlation_id}")
    say(f"state     {plain(found.state)}")
    print_table(("step", "status"), list(found.steps.items()))
    if found.attempts:
        print_table(
            ("step", "direction", "attempt", "status", "seconds", "error"),
            [
                (one.step, one.direction, one.attempt, one.status,
                 "" if one.seconds is None else one.seconds, one.error or "")
                for one in found.attempts
            ],
        )  # fmt: skip
    if found.timers:
        print_table(
            ("waits for", "of", "in"),
            [(kind, step or "the saga", f"{left:.0f} s") for step, kind, left in found.timers],
        )
    print_table(("ago", "what happened"), [(f"{ago:.0f} s", what) for ago, what in found.history])


@contextmanager
def _operations(database: str) -> Iterator[SagaOperations]:
    engine = existing_database(database)
    try:
        _require_tables(engine)
        yield SagaOperations(engine)
    finally:
        engine.dispose()


def _require_tables(engine: Engine) -> None:
    with engine.connect() as db:
        otherwise = ", or call holdfast.sagas.create_tables(engine)"
        require_tables(db, metadata, otherwise=otherwise)


def _drawn(target: str) -> list[dict[str, Any]]:
    """Return what can be drawn of *target*, each with its name."""
    found = _loaded(target)
    match found:
        case StateMachine():
            return [{"state_machine": found.name, "diagram": found.diagram()}]
        case Flow():
            return [{"flow": found.name, "diagram": found.diagram()}]
    return [
        {"saga": one.name, "version": one.version, "diagram": one.diagram()}
        for one in _sagas_in(target, found, "a Saga, Sagas, a StateMachine or a Flow")
    ]


def _sagas_of(target: str) -> list[Saga[Any]]:
    return _sagas_in(target, _loaded(target), "a Saga or Sagas")


def _sagas_in(target: str, found: Any, wanted: str) -> list[Saga[Any]]:
    if isinstance(found, Saga):
        return [found]
    if isinstance(found, Sagas):
        return list(found.definitions.known.values())
    raise ConfigurationError(f"{target!r} is a {type(found).__name__}, not {wanted}")


def _loaded(target: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigurationError(f"{target!r} names no saga: write module:variable")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{target!r}: {error}; run it where the module is") from error
    except AttributeError as error:
        raise ConfigurationError(f"{module!r} has no {name!r}") from error
