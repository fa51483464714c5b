"""`holdfast spark archive`: dead letters as partitioned files, each once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.analytics import save_page
from holdfast.cli.display import answer, print_json, print_table, say, when
from holdfast.cli.exits import TOLD
from holdfast.cli.late import Late, LateGroup, add_late
from holdfast.cli.options import Config, Json, Reason, seconds
from holdfast.cli.spark.options import Format, Report, Sources, SparkOptions, running
from holdfast.spark_jobs.archive.adding import PATIENCE, add
from holdfast.spark_jobs.archive.keeping import TARGET, compact, erase, expire
from holdfast.spark_jobs.archive.state import LocalFolder, StateLog
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.job_pages import archive_page

if TYPE_CHECKING:
    from holdfast.spark_jobs.archive.keeping import Kept

HELP = (
    "Keep dead letters as Parquet files by day: each letter once, added to bit by bit.\n\n"
    "A killed job or a full disk leaves the archive as it was; run the same command again. Read it "
    "with --from archive:FOLDER in every other job."
)
COMMANDS = (
    Late("add", "holdfast.cli.spark.archive:add_",
         "Add what stores, topics or files have and the archive has not.",
         "holdfast spark archive add --from sqlite:///shop.db --to letters"),
    Late("compact", "holdfast.cli.spark.archive:compact_",
         "Join the small files of a day into few.",
         "holdfast spark archive compact --to letters"),
    Late("expire", "holdfast.cli.spark.archive:expire_",
         "Delete closed letters that failed long ago.",
         "holdfast spark archive expire --to letters --older-than 730d"),
    Late("erase", "holdfast.cli.spark.archive:erase_",
         "Delete all letters of one data subject, from every file, at once.",
         "holdfast spark archive erase customer-17 --to letters --reason 'erasure request 4711'"),
    Late("show", "holdfast.cli.spark.archive:show",
         "Show what the archive holds, and how far its sources were read.",
         "holdfast spark archive show --to letters"),
)  # fmt: skip

app = typer.Typer(cls=LateGroup, help=HELP, epilog=TOLD, no_args_is_help=True, add_completion=False)
add_late(app, COMMANDS)

Place = Annotated[
    str,
    typer.Option("--to", envvar="HOLDFAST_SPARK_ARCHIVE",
                 help="The folder of the archive: a path, or s3a://…, hdfs://…"),
]  # fmt: skip


def add_(
    *,
    config: Config = None,
    sources: Sources,
    to: Place,
    format: Format = None,  # noqa: A002
    full: Annotated[
        bool, typer.Option("--full", help="Read everything again, not only what is new.")
    ] = False,
    patience: Annotated[
        str, typer.Option(help="How long to wait for open transactions of a store, e.g. 30s.")
    ] = f"{PATIENCE:g}s",
    partitions: Annotated[
        int | None,
        typer.Option(min=1, help="How many tasks read a store; by its size if absent."),
    ] = None,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Add what stores, topics or files have and the archive has not.

    A store is read behind the last letter that was settled: while a transaction is open that may
    hold an older one, the mark stays, and nothing is missed. What is read twice is kept once.
    """
    with running("archive", where) as spark:
        archive = Archive(spark, to)
        done = add(
            archive, sources, full=full, patience=seconds(patience, "--patience"), format=format,
            partitions=partitions,
        )  # fmt: skip
        archive.swept()
        state = archive.state()
    if report is not None:
        facts = {"read": done.read, "new": done.new, "changed": done.changed, "known": done.known}
        save_page(report, archive_page(to, state, facts))
    text = (
        f"archived {done.new:,} new and {done.changed:,} changed dead letters, {done.known:,} were "
        f"known; {done.total:,} in {to}"
    )
    if done.outliers:
        text += f"\n{done.outliers:,} come from hosts with a wrong clock (clock_outlier)"
    if done.newer:
        text += f"\n{done.newer:,} were written by a newer Holdfast; upgrade to see all of them"
    for one in done.unsettled:
        text += f"\na transaction is still open in {one}: the next run reads that part again"
    answer(text, asdict(done), as_json=as_json)


def compact_(
    *,
    config: Config = None,
    to: Place,
    target: Annotated[int, typer.Option(min=1024, help="Bytes that a file should have.")] = TARGET,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Join the small files of a day into few; the records stay the same."""
    with running("archive compact", where) as spark:
        archive = Archive(spark, to)
        done = compact(archive, target=target)
        archive.swept()
        _save(report, archive, done)
    _tell(f"{done.files_before:,} files became {done.files_after:,}", done, as_json=as_json)


def expire_(
    *,
    config: Config = None,
    to: Place,
    older_than: Annotated[
        str, typer.Option("--older-than", help="Only what failed longer ago, e.g. 730d.")
    ],
    pending_too: Annotated[
        bool, typer.Option("--pending-too", help="Also what nobody has decided about.")
    ] = False,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Delete letters that failed long ago; pending ones stay unless --pending-too."""
    length = seconds(older_than, "--older-than")
    with running("archive expire", where) as spark:
        archive = Archive(spark, to)
        done = expire(archive, older_than=length, pending_too=pending_too)
        archive.swept()
        _save(report, archive, done)
    _tell(f"{done.deleted:,} dead letters expired", done, as_json=as_json)


def erase_(
    *,
    config: Config = None,
    subject: Annotated[str, typer.Argument(help="The data subject, as the letters name it.")],
    to: Place,
    reason: Reason,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Delete all letters of one data subject, and the files that held them, at once.

    The store and the topics are not touched: see holdfast dlq forget. What they still have of the
    subject is not taken into the archive again.
    """
    with running("archive erase", where) as spark:
        archive = Archive(spark, to)
        done = erase(archive, subject, reason=reason)
        _save(report, archive, done)
    _tell(f"{done.deleted:,} dead letters erased", done, as_json=as_json)


def show(
    *,
    config: Config = None,
    to: Place,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Show what the archive holds, and how far its sources were read."""
    if "://" in to:
        with running("archive show", where) as spark:
            state = Archive(spark, to).state()
    else:
        state = StateLog(LocalFolder(Path(to))).newest()
    if report is not None:
        save_page(report, archive_page(to, state))
    days: dict[str, list[int]] = {}
    for file in state.files:
        known = days.setdefault(file.day, [0, 0, 0])
        for place, value in enumerate((file.rows, 1, file.bytes)):
            known[place] += value
    if as_json:
        print_json({
            "letters": state.rows, "files": len(state.files), "state": state.number,
            "marks": state.marks, "days": {day: rows for day, (rows, _, _) in sorted(days.items())},
        })  # fmt: skip
        return
    say(f"{state.rows:,} dead letters in {len(state.files):,} files; last changed by "
        f"{state.operation} at {when(state.at or None)}")  # fmt: skip
    if days:
        rows: list[list[Any]] = [[day, *figures] for day, figures in sorted(days.items())]
        print_table(["day", "letters", "files", "bytes"], rows)


def _save(report: Path | None, archive: Archive, done: Kept) -> None:
    if report is not None:
        facts = {"deleted": done.deleted, "files before": done.files_before}
        save_page(report, archive_page(archive.place, archive.state(), facts))


def _tell(text: str, done: Kept, *, as_json: bool) -> None:
    answer(f"{text}; {done.total:,} dead letters in the archive", asdict(done), as_json=as_json)
