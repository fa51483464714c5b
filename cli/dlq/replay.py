"""`holdfast dlq replay`: select, look at what would happen, then send."""

import os
from typing import Annotated

import typer

from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.confirming import confirm
from holdfast.cli.dlq.dry_run import report
from holdfast.cli.dlq.exits import EXIT_PAUSED
from holdfast.cli.dlq.opened import dead_letters, one_group, one_letter, warrant
from holdfast.cli.dlq.options import (
    ConsumerGroup,
    Correlation,
    Database,
    Error,
    Key,
    Kind,
    Letters,
    MasterKey,
    Names,
    Since,
    Tenant,
    Topic,
    Until,
    Version,
    known_class,
    moment,
    seconds,
    share,
)
from holdfast.cli.dlq.retrying import retry_again_and_again
from holdfast.cli.dlq.sending import opened_vault, outlet, require_some, require_target, send
from holdfast.cli.options import Actor, Config, Json, Yes
from holdfast.dlq.replay.dry_run import dry_run
from holdfast.dlq.replay.freezing import freeze
from holdfast.dlq.replay.handlers import Named
from holdfast.dlq.replay.memory import Memory
from holdfast.dlq.replay.plan import Terms
from holdfast.dlq.replay.rate import Rate
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.state import NotNow
from holdfast.dlq.replay.steps import Policy
from holdfast.dlq.replay.surveying import Manifest, NothingToReplay, surveyed
from holdfast.errors import ConfigurationError
from holdfast.idempotency.roster import windows

_APPROVE_ABOVE = "HOLDFAST_APPROVE_ABOVE"


def _lowered(given: int) -> int:
    """Return *given*, or what the environment says if that is less: a flag only lowers it."""
    ceiling = os.environ.get(_APPROVE_ABOVE, "")
    if not ceiling:
        return given
    if not (ceiling.isascii() and ceiling.isdecimal()):
        raise ConfigurationError(f"{_APPROVE_ABOVE}={ceiling!r}: write digits alone, e.g. 1000")
    return min(given, int(ceiling))


def replay(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    broker: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_BROKER", show_default=False, help="Where to send them."),
    ] = None,
    letter: Letters = None,
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
    due: Annotated[
        bool, typer.Option("--due", help="Only what triage has put down for a retry by now.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(help="With --due: go on and look every so often, e.g. 1m, without asking."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Why; kept in the audit trail. Needed unless --dry-run.")
    ] = None,
    actor: Actor = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")] = False,
    canary: Annotated[
        int, typer.Option(min=0, help="So many go first, and all must be confirmed.")
    ] = 20,
    ramp: Annotated[
        str, typer.Option(help="Shares after which confirmations are waited for.")
    ] = "10%,50%",
    rate: Annotated[str | None, typer.Option(help="At most, e.g. 500/s or 30/m.")] = None,
    stop_at: Annotated[
        str, typer.Option(help="Stop when more than this share failed again.")
    ] = "5%",
    patience: Annotated[
        str, typer.Option(help="How long to wait for confirmations that do not come.")
    ] = "60s",
    commutative: Annotated[
        bool, typer.Option("--commutative", help="Order does not matter to the handler.")
    ] = False,
    to_topic: Annotated[
        str | None,
        typer.Option(
            help="'shared' for the original topic, or a topic that exists; the group's "
            "private replay topic unless given."
        ),
    ] = None,
    expected: Annotated[
        str | None,
        typer.Option(
            "--manifest",
            help="Only if it still is the manifest that --dry-run showed, by its hash.",
        ),
    ] = None,
    handler: Annotated[
        str | None, typer.Option(help="module:function to check payloads against, in --dry-run.")
    ] = None,
    dedup_window: Annotated[
        str | None,
        typer.Option(
            help="How long consumers remember what they handled, e.g. 14d, where this database "
            "does not know: their inbox is elsewhere."
        ),
    ] = None,
    beyond_window: Annotated[
        bool,
        typer.Option(
            "--beyond-window",
            help="Send also what is older than its consumer remembers: an effect may happen twice.",
        ),
    ] = False,
    approve_above: Annotated[
        int,
        typer.Option(
            envvar=_APPROVE_ABOVE,
            min=0,
            callback=_lowered,
            help="Larger plans wait for the approval of somebody else; above the environment's "
            "number always.",
        ),
    ] = 10_000,
    master_key_file: MasterKey = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Send dead letters again to the group that failed: canary, ramp, then the rest."""
    known_class(kind)
    policy = Policy(
        canary=canary,
        ramp=tuple(share(text) for text in ramp.split(",") if text.strip()),
        failure_ratio=share(stop_at),
        patience=seconds(patience, "--patience"),
        commutative=commutative,
    )
    otherwise = None if dedup_window is None else seconds(dedup_window, "--dedup-window")
    with dead_letters(database) as engine:
        terms = Terms(
            policy=policy, rate=Rate.parse(rate), to_topic=to_topic, approve_above=approve_above,
            # An automatic retry comes soon after the failure, at which dedup knew nothing of it.
            memory=None if due else Memory(windows=windows(engine), otherwise=otherwise),
            beyond_window=beyond_window,
        )  # fmt: skip
        selection = Selection(
            groups=tuple(one_group(engine, name).group_id for name in names or ()),
            dlq_ids=tuple(one_letter(engine, name) for name in letter or ()),
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
            due=due,
        )
        if is_dry:
            named = None if handler is None else Named.load(handler)
            manifest = surveyed(engine, selection, terms)
            vault = opened_vault(engine, master_key_file)
            found = dry_run(engine, manifest, terms, handler=named, vault=vault)
            report(engine, found, as_json=as_json)
            return
        if reason is None:
            raise ConfigurationError("a replay needs a reason: say why, with --reason")
        if broker is None:
            raise ConfigurationError("where to? give --broker, e.g. kafka://host:9092")
        who = warrant(actor, reason)
        if every is not None:
            retry_again_and_again(
                engine, broker, master_key_file, selection, terms, who,
                every=seconds(every, "--every"), as_json=as_json,
            )  # fmt: skip
            return
        try:
            manifest = surveyed(engine, selection, terms)
        except NothingToReplay:
            if not due:
                raise
            _nothing_due(as_json=as_json)
            return
        count = len(manifest.letters)
        require_some(manifest)
        _require_same(manifest, expected)
        with outlet(engine, broker, master_key_file) as through:
            require_target(through, terms, manifest)
            confirm(count, f"Replay {count:,} messages", yes=yes)
            plan = freeze(engine, selection, terms, who, agreed=manifest).plan
            if plan.waits_for_approval:
                if as_json:
                    print_json({"plan": plan.id, "ending": "waits for approval",
                                "total": plan.total, "sent": 0, "hash": plan.hash})  # fmt: skip
                    raise SystemExit(EXIT_PAUSED)
                say(
                    f"plan {plan.short} of {plan.total:,} messages is frozen and waits for "
                    f"somebody else:  holdfast dlq plans approve {plan.short} --reason …"
                )
                raise SystemExit(EXIT_PAUSED)
            if not as_json:
                say(f"plan {plan.short}: {plan.total:,} messages, hash {plan.hash[:12]}")
            send(engine, plan, through, who, as_json=as_json)


def _nothing_due(*, as_json: bool) -> None:
    """Say so; a timer that asks every minute has done its work."""
    if as_json:
        print_json({"plan": None, "ending": "nothing due", "total": 0, "sent": 0})
    else:
        say("nothing is due for a retry")


def _require_same(manifest: Manifest, expected: str | None) -> None:
    """Refuse to send something else than what was looked at."""
    if expected is not None and not (expected and manifest.hash.startswith(expected.lower())):
        raise NotNow(
            f"--manifest {expected}: it is {manifest.hash[:12]} now, of {len(manifest.letters):,} "
            "messages; look again with --dry-run"
        )
