"""`holdfast spark transform`: a whole topic or archive to another, by a versioned transform."""

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.cli.analytics import save_page, submit
from holdfast.cli.display import note, plain, print_json, print_table, say
from holdfast.cli.exits import EXIT_NOT_FOUND, EXIT_PARTLY, EXIT_STOPPED
from holdfast.cli.late import grouped
from holdfast.cli.options import Config, Json, seconds
from holdfast.cli.spark.options import Format, Report, SparkOptions, running
from holdfast.spark_jobs.job_pages import transform_page
from holdfast.spark_jobs.transforming import (
    BATCH,
    LANES,
    CountsDiffer,
    Transformed,
    TransformRequest,
)


@grouped
def transform(
    *,
    config: Config = None,
    source: Annotated[
        str,
        typer.Option(
            "--from", envvar="HOLDFAST_SPARK_FROM",
            help="What is read whole: a broker URL with ?topic=…, archive:FOLDER, or "
            "parquet:FOLDER with dead letters or messages.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Where it goes: a broker URL with ?topic=…, archive:FOLDER for dead letters, or "
            "parquet:FOLDER for messages.",
        ),
    ],
    function: Annotated[
        str,
        typer.Option(
            "--with", metavar="MODULE:FUNCTION@VERSION",
            help="A function that returns a payload for a payload, or the upcast that a module "
            "registers its upcasters with. Each message says what made it.",
        ),
    ],
    checkpoint: Annotated[
        str,
        typer.Option(
            help="A folder that all machines share, for what was made and how far it is: the same "
            "command with the same folder goes on."
        ),
    ],
    on_error: Annotated[
        str,
        typer.Option(
            "--on-error",
            help="When messages are refused: stop, so that nothing is sent, or put them aside.",
        ),
    ] = "stop",
    lanes: Annotated[
        int, typer.Option(min=1, max=4096, help="How many tasks send, each its own keys.")
    ] = LANES,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Messages between two marks: a kill repeats as many at most."),
    ] = BATCH,
    patience: Annotated[
        str, typer.Option(help="How long to wait for a broker that is away, e.g. 60s.")
    ] = "60s",
    format_: Format = None,
    where: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Bring a whole topic or archive to another, through a versioned transform or upcasters.

    Everything is transformed and counted before the first message is sent. The order of each key
    is kept, and so is the id of each message.
    """
    from holdfast.spark_jobs.transforming import transform as transformed

    request = TransformRequest(
        source=source, to=to, transform=function, checkpoint=checkpoint, format=format_,
        lanes=lanes, batch=batch, on_error=on_error, patience=seconds(patience, "--patience"),
    )  # fmt: skip
    with running("transform", where) as spark:
        try:
            found = transformed(spark, request, tell=note)
        except CountsDiffer as error:
            note(str(error))
            raise SystemExit(EXIT_NOT_FOUND) from error
    if report is not None:
        save_page(report, transform_page(found))
    if as_json:
        print_json({**asdict(found), "is_whole": found.is_whole})
    else:
        _tell(found)
    if found.stopped:
        raise SystemExit(EXIT_STOPPED)
    if found.refused:
        raise SystemExit(EXIT_PARTLY)


def _tell(found: Transformed) -> None:
    if not found.read:
        say("the source is empty: nothing to transform")
        return
    say(f"{found.read:,} read, {found.written:,} written by {found.transform}, {found.refused:,} "
        "refused")  # fmt: skip
    if found.before:
        say(f"{found.before:,} of them were written by an earlier run")
    if found.repeated:
        say(f"{found.repeated:,} dead letters are of messages that others are of, too")
    if found.known:
        say(f"{found.known:,} were in the archive before, and stay as they were")
    if not found.refused:
        return
    print_table(
        ("refused", "reason"),
        [(f"{count:,}", plain(reason)) for reason, count in found.reasons.items()],
    )
    say(f"what was refused is in {found.aside}; mend the transform and read it with --from "
        f"parquet:{found.aside}")  # fmt: skip
    if found.stopped and not found.written:
        say("nothing was sent: mend the transform, or go on without those by --on-error aside")
    elif found.stopped:
        say("the same command goes on with the rest")


def main() -> None:
    """Run the job under spark-submit."""
    submit("transform")


if __name__ == "__main__":
    main()
