"""`holdfast spark stream`: dead letters go from their topics into the store as they come."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.analytics import save_page
from holdfast.cli.display import print_json, say
from holdfast.cli.dlq.options import dead_letters
from holdfast.cli.options import Config, Database, Json, seconds
from holdfast.cli.spark.options import Report, SparkOptions, running
from holdfast.cli.stopping import stopped_by_signals
from holdfast.dlq.topic.stream import StreamCounts
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.job_pages import stream_page
from holdfast.spark_jobs.secrets import require_no_secret, revealed
from holdfast.spark_jobs.streaming import StreamRequest, start_stream

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_DRAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_MOST_BATCHES = 10_000


def stream(
    *,
    config: Config = None,
    database: Database,
    source: Annotated[
        str,
        typer.Option("--from", help="The dead-letter topics: kafka://host:9092?topic=…&topic=…"),
    ],
    checkpoint: Annotated[
        str, typer.Option(help="A folder that all machines share, where Spark keeps its offsets.")
    ],
    name: Annotated[
        str, typer.Option(help="By which the store knows the stream, and goes on with it.")
    ] = "holdfast",
    every: Annotated[
        str | None,
        typer.Option(
            help="Go on until a signal, with a batch every so often, e.g. 10s; without it, store "
            "what is there now and end."
        ),
    ] = None,
    spark: SparkOptions,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Store dead letters from topics of Kafka as they come, each once, with their groups."""
    request = StreamRequest(
        database=require_no_secret(database), source=source, name=name, checkpoint=checkpoint,
        every=None if every is None else seconds(every, "--every"),
    )  # fmt: skip
    total, batches = StreamCounts(), 0
    last: deque[tuple[int, StreamCounts]] = deque(maxlen=_MOST_BATCHES)

    def told(batch: int, found: StreamCounts) -> None:
        nonlocal total, batches
        total, batches = total + found, batches + 1
        last.append((batch, found))
        if every is not None and not as_json and found.stored:
            say(f"batch {batch}: {found.stored:,} stored, {found.confirmed:,} confirmed")

    with dead_letters(revealed(database)):
        pass  # the tables are there
    with running("stream", spark) as session:
        query = start_stream(session, request, tell=told)
        _follow(query)
    if report is not None:
        save_page(report, stream_page(name, total, list(last)))
    if as_json:
        print_json({"batches": batches, "stored": total.stored, "confirmed": total.confirmed,
                    "passed": total.passed, "unreadable": total.unreadable})  # fmt: skip
    else:
        say(f"{total.stored:,} dead letters stored in {batches} batches, {total.unreadable:,} of "
            f"them unreadable; {total.confirmed:,} replays confirmed, {total.passed:,} were stored "
            "before")  # fmt: skip


def _follow(query: StreamingQuery) -> None:
    """Return when *query* has ended by itself or a signal asked for it; raise what broke it."""
    stopping = threading.Event()
    with stopped_by_signals(stopping.set, drain_seconds=_DRAIN_SECONDS), translated():
        while query.isActive and not stopping.wait(_LOOK_SECONDS):
            pass
        if query.isActive:
            query.stop()
        query.awaitTermination()
