"""`holdfast dlq replay`: select, look at what would happen, then send."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.confirming import confirm
from holdfast.cli.display import age, print_json, print_table, say
from holdfast.cli.dlq.options import (
    LetterFilter,
    Letters,
    MasterKey,
    Names,
    dead_letters,
    operator,
)
from holdfast.cli.dlq.sending import (
    opened_vault,
    outlet,
    require_some,
    require_target,
    retry_again_and_again,
    send,
)
from holdfast.cli.dlq.terms import ReplayTerms  # noqa: TC001 - the command line is made of it
from holdfast.cli.exits import EXIT_PAUSED
from holdfast.cli.late import grouped
from holdfast.cli.options import (
    Actor,
    AnyBroker,
    AnyReason,
    Config,
    Database,
    IsDryRun,
    Json,
    Yes,
    seconds,
)
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.dry_run import dry_run
from holdfast.dlq.replay.plan import NotNow
from holdfast.dlq.replay.plan_freeze import freeze
from holdfast.dlq.replay.simulation import Named
from holdfast.dlq.replay.survey import Manifest, NothingToReplay, surveyed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.dlq.replay.dry_run import DryRun


_MOST_GROUPS, _MOST_TITLE = 10, 60


def report(admin: DeadLetterAdmin, found: DryRun, *, as_json: bool) -> None:
    """Say what the replay would do, and how to send exactly that."""
    if as_json:
        print_json(asdict(found))
        return
    say(f"would replay {found.count:,} messages of {found.keys:,} keys, canary {found.canary}; "
        "nothing was sent")  # fmt: skip
    titles = admin.titles(list(found.by_group)[:_MOST_GROUPS])
    rows = [("to", topic, count) for topic, count in found.targets.items()]
    rows += [("group", f"{name[:8]} {title[:_MOST_TITLE]}", found.by_group[name])
             for name, title in titles.items()]  # fmt: skip
    if len(titles) < len(found.by_group):
        rest = sum(found.by_group.values()) - sum(found.by_group[name] for name in titles)
        rows.append(("group", f"({len(found.by_group) - len(titles)} more)", rest))
    rows += [("version", version, count) for version, count in found.by_version.items()]
    rows += [("tenant", tenant, count) for tenant, count in found.by_tenant.items()]
    rows += [("set aside", state, count) for state, count in found.aside.items()]
    rows += [("claimed by plan", plan[-8:], n) for plan, n in found.claimed_elsewhere.items()]
    print_table(("", "", "messages"), rows)
    window = "for ever or unknown" if found.dedup_window is None else age(found.dedup_window)
    say(f"oldest event {age(found.oldest_seconds)}; dedup window {window}: "
        + (f"{found.beyond_window:,} are older, the consumer could not tell a duplicate of them"
           if found.beyond_window else "all inside"))  # fmt: skip
    if found.valid is not None:
        say(f"payloads: {found.valid:,} valid, {found.invalid:,} invalid"
            + (f", {found.unread:,} with encrypted fields not read: give --master-key-file"
               if found.unread else "")
            + (f", e.g. {found.invalid_example}" if found.invalid_example else ""))  # fmt: skip
    say(f"order: {found.conflicts:,} held, an earlier one of their key is open or a newer one was "
        "handled" if found.conflicts else "order: no conflicts")  # fmt: skip
    for dlq_id, why in found.aside_examples[:5]:
        say(f"  {dlq_id[:8]}: {why}")
    eta = age(found.seconds)
    if found.assumed_rate is not None:
        eta = f"{eta} at {found.assumed_rate:g}/s, say; without --rate the consumer decides"
    say(f"time: {eta}; manifest {found.hash[:12]} up to number {found.high_water}")
    if found.needs_approval:
        say("a second person must approve it")
    if found.count:
        say(f"next: the same command without --dry-run, with --manifest {found.hash[:12]} and "
            "--reason, sends exactly this")  # fmt: skip


@grouped
def replay(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    broker: AnyBroker = None,
    letter: Letters = None,
    wanted: LetterFilter,
    due: Annotated[
        bool, typer.Option("--due", help="Only what triage has put down for a retry by now.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(help="With --due: go on and look every so often, e.g. 1m, without asking."),
    ] = None,
    reason: AnyReason = None,
    actor: Actor = None,
    is_dry: IsDryRun = False,
    how: ReplayTerms,
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
    master_key_file: MasterKey = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Send dead letters again to the group that failed: canary, ramp, then the rest."""
    with dead_letters(database) as engine:
        terms = how.options(engine, due=due)
        admin = DeadLetterAdmin(engine)
        selection = wanted.selection(admin, groups=names, letters=letter, due=due)
        if is_dry:
            named = None if handler is None else Named.load(handler)
            manifest = surveyed(engine, selection, terms)
            vault = opened_vault(engine, master_key_file)
            found = dry_run(engine, manifest, terms, handler=named, vault=vault)
            report(admin, found, as_json=as_json)
            return
        if reason is None:
            raise ConfigurationError("a replay needs a reason: say why, with --reason")
        if broker is None:
            raise ConfigurationError("where to? give --broker, e.g. kafka://host:9092")
        who = operator(actor, reason)
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
            confirm(f"Replay {count:,} messages", count=count, yes=yes, as_json=as_json)
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
