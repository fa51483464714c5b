# ruff: noqa: TC001, TC003 - the command lines are made of these
"""`holdfast spark plan`, `replay` and `verify`: bulk replay in lanes, steered by `dlq plans`."""

from __future__ import annotations

import tempfile
import threading
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.analytics import save_page
from holdfast.cli.display import note, print_json, say
from holdfast.cli.dlq.options import LetterFilter, Letters, Names, dead_letters, operator
from holdfast.cli.dlq.plans import Name, facts_of
from holdfast.cli.dlq.progress import shown_replay
from holdfast.cli.dlq.sending import ending_code, resuming, tell
from holdfast.cli.dlq.terms import ReplayTerms
from holdfast.cli.exits import EXIT_NOT_FOUND, EXIT_PARTLY, EXIT_PAUSED, EXIT_UNCONFIRMED
from holdfast.cli.options import Actor, AnyReason, Broker, Config, Database, IsDryRun, Json, Reason
from holdfast.cli.spark.options import Format, Report, SparkOptions, running
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.operations import DeadLetterAdmin
from holdfast.dlq.replay.lane_sender import LanesSender
from holdfast.dlq.replay.lanes import marks_of
from holdfast.dlq.replay.plan import Rate
from holdfast.dlq.replay.plans import Plans
from holdfast.dlq.replay.sender import Pace
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.spark_jobs.job_pages import plan_page, replay_page
from holdfast.spark_jobs.planning import PlanRequest, make_plan
from holdfast.spark_jobs.replaying import BATCH, SparkLanes, check_plan
from holdfast.spark_jobs.secrets import require_no_secret, revealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq.replay.lane_check import PlanCheck
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.spark_jobs.planning import Planned

_DRAIN_SECONDS = 60.0
_HOT = 0.5
Lanes = Annotated[
    int,
    typer.Option(
        min=1, max=4096,
        help="Into how many lanes the plan is divided; as many as the cluster has cores.",
    ),
]  # fmt: skip


def plan(
    names: Names = None,
    *,
    config: Config = None,
    database: Database,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Where to look for candidates, e.g. archive:FOLDER or parquet:FOLDER; the store "
            "itself unless given. The store always says which of them are still pending.",
        ),
    ] = None,
    format_: Format = None,
    letter: Letters = None,
    wanted: LetterFilter,
    how: ReplayTerms,
    lanes: Lanes = 8,
    staging: Annotated[
        str | None,
        typer.Option(
            help="A folder that driver and executors share, for what is judged and not yet "
            "claimed; on one machine a temporary one unless given."
        ),
    ] = None,
    reason: AnyReason = None,
    actor: Actor = None,
    is_dry: IsDryRun = False,
    spark: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Freeze a replay plan of any size, divided into lanes by key; nothing is sent.

    The plan is one like any other: see and steer it with holdfast dlq plans.
    """
    if reason is None and not is_dry:
        raise ConfigurationError("a plan needs a reason: say why, with --reason")
    require_no_secret(database)
    with dead_letters(revealed(database)) as engine:
        selection = wanted.selection(DeadLetterAdmin(engine), groups=names, letters=letter)
        terms = how.options(engine)
    with _staging(staging, spark) as folder, running("plan", spark) as session:
        request = PlanRequest(
            database=database, selection=selection, terms=terms, source=source, format=format_,
            lanes=lanes, staging=folder,
        )  # fmt: skip
        made = make_plan(session, request, None if is_dry else operator(actor, reason or ""))
    if report is not None:
        save_page(report, plan_page(made, selection.described()))
    _tell_plan(made, as_json=as_json)
    if made.plan is not None and made.plan.waits_for_approval:
        raise SystemExit(EXIT_PAUSED)


@contextmanager
def _staging(given: str | None, spark: SparkOptions) -> Iterator[str]:
    if given is not None:
        yield given
        return
    if not spark.cluster().is_local:
        raise ConfigurationError(
            "--staging is missing: name a folder that all machines of the cluster can write, "
            "e.g. --staging s3a://bucket/staging"
        )
    with tempfile.TemporaryDirectory(prefix="holdfast-plan-") as folder:
        yield folder


def _tell_plan(made: Planned, *, as_json: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {**asdict(made), "plan": None}
        if made.plan is not None:
            facts |= {"plan": made.plan.id, "hash": made.plan.hash,
                      "waits_for_approval": made.plan.waits_for_approval}  # fmt: skip
        print_json(facts)
        return
    aside = ", ".join(f"{count:,} {state}" for state, count in sorted(made.aside.items()))
    what = "would replay" if made.plan is None else f"plan {made.plan.short}:"
    say(f"{what} {made.total:,} messages in {made.lanes} lanes, canary {made.canary}; set aside: "
        f"{aside or 'none'}; not pending or claimed elsewhere: {made.gone:,}")  # fmt: skip
    if made.total and made.largest_lane > max(_HOT, 2 / made.lanes) * made.total:
        say(f"one lane holds {made.largest_lane / made.total:.0%} of them: a key is hot, and the "
            "replay takes as long as its lane")  # fmt: skip
    if made.plan is None:
        say("nothing was written")
    elif made.plan.waits_for_approval:
        say(f"it waits for somebody else:  holdfast dlq plans approve {made.plan.short} --reason …")
    else:
        say(f"next: {resuming(made.plan)}")


def replay(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    broker: Broker,
    reason: Reason,
    rate: Annotated[str | None, typer.Option(help="From now on at most, e.g. 500/s.")] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Messages between two marks of a lane: a crash repeats as many at most."
        ),
    ] = BATCH,
    actor: Actor = None,
    master_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="HOLDFAST_MASTER_KEY_FILE",
            help="Where executors have the vault's master key in hex, for encrypted fields.",
        ),
    ] = None,
    spark: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Send a plan with lanes, or send it on: one task per lane, at the plan's rate together.

    Pause, slow or abort it with holdfast dlq plans; a signal pauses it. What is confirmed is not
    sent again.
    """
    require_no_secret(database)
    stopping = threading.Event()
    with dead_letters(revealed(database)) as engine:
        plans = Plans(engine)
        found = plans.find(name)
        with running("replay", spark) as session:
            lanes = SparkLanes(
                spark=session, database=database, broker=broker,
                master_key_file=None if master_key_file is None else str(master_key_file),
            )  # fmt: skip
            speed = None if rate is None else Rate.parse(rate)
            if found.lanes:
                found = plans.resume(found, operator(actor, reason), rate=speed)
            with (
                stopped_by_signals(stopping.set, drain_seconds=_DRAIN_SECONDS),
                shown_replay(found.total) as observe,
            ):
                sender = LanesSender(
                    engine, lanes, pace=Pace(batch=batch), observe=observe, stopping=stopping
                )
                try:
                    ending = sender.run(found.id)
                except HoldfastError:
                    note(f"plan {found.short} keeps its messages. Go on with:  {resuming(found)}")
                    raise
        if report is not None:
            told = f"{ending.kind.value}: {ending.reason}"
            _save_replay(report, engine, plans.find(found.id), told)
        tell(engine, plans.find(found.id), ending, as_json=as_json)
    raise SystemExit(ending_code(ending))


def _save_replay(report: Path, engine: Engine, plan: ReplayPlan, ending: str) -> None:
    with engine.connect() as db:
        marks = marks_of(db, plan.id)
    counts = Plans(engine).tally(plan)
    save_page(report, replay_page(plan, counts, marks, ending=ending))


def _verdict(check: PlanCheck) -> str:
    return (
        f"manifest {'is whole' if check.is_whole else 'WAS CHANGED'}; {check.confirmed:,} "
        f"confirmed, {check.failed:,} failed again, {check.aside:,} set aside, {check.unsent:,} "
        f"not sent, {check.unconfirmed:,} sent and without an outcome, {check.contradictions:,} "
        "confirmed and their letters still pending"
    )


def verify(
    name: Name,
    *,
    config: Config = None,
    database: Database,
    actor: Actor = None,
    spark: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Compare a plan with lanes, its ledger, and what the consumers confirmed."""
    require_no_secret(database)
    with dead_letters(revealed(database)) as engine:
        plans = Plans(engine)
        found = plans.find(name)
        with running("verify", spark) as session:
            check = check_plan(session, database, found)
        if check.is_whole and not check.contradictions:
            found = plans.ended(found, operator(actor, "verify: every message has an outcome"))
        counts = plans.tally(found)
        if report is not None:
            _save_replay(report, engine, found, f"verified: {_verdict(check)}")
    if as_json:
        print_json({**facts_of(found, counts), **asdict(check), "waiting": check.waiting})
    else:
        say(f"plan {found.short} of {found.total:,}: {_verdict(check)}")
    if not check.is_whole or check.contradictions:
        raise SystemExit(EXIT_NOT_FOUND)
    if check.waiting:
        raise SystemExit(EXIT_UNCONFIRMED)
    if check.failed:
        raise SystemExit(EXIT_PARTLY)
