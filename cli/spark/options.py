"""What the jobs of `holdfast spark` share: where they run, how they report, how far they are."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.display import err
from holdfast.cli.options import seconds
from holdfast.clock import SYSTEM_CLOCK
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.progress import watched
from holdfast.spark_jobs.secrets import require_no_secret
from holdfast.spark_jobs.session import SUBMITTED, SparkTarget, has_session, session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from holdfast.spark_jobs.progress import JobProgress

log = logging.getLogger("holdfast.spark")
_LOG_EVERY = 10.0

Sources = Annotated[
    list[str],
    typer.Option(
        "--from", envvar="HOLDFAST_SPARK_FROM", show_default=False,
        help="Where the dead letters are: parquet:FOLDER, archive:FOLDER, a database URL, or a "
        "broker URL with ?topic=…; may repeat. ${NAME} stands for an environment variable, "
        "${file:PATH} for the content of a file.",
    ),
]  # fmt: skip
Format = Annotated[
    str | None,
    typer.Option("--format", help="How files are read: parquet, delta, iceberg, orc, …"),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", help="Write a page with plots here, e.g. report.html."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Where a job runs; the same options for every job."""

    master: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_SPARK_MASTER",
            help="A cluster, e.g. spark://host:7077, yarn or k8s://…; this machine unless given.",
        ),
    ] = None
    remote: Annotated[
        str | None,
        typer.Option(envvar="HOLDFAST_SPARK_REMOTE",
                     help="A Spark Connect server, e.g. sc://host:15002."),
    ] = None  # fmt: skip
    jars: Annotated[
        list[str] | None, typer.Option("--jars", help="A jar file for Spark; may repeat.")
    ] = None
    packages: Annotated[
        list[str] | None,
        typer.Option("--packages", help="A Maven coordinate that Spark fetches; may repeat."),
    ] = None
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may repeat."),
    ] = None
    ui: Annotated[bool, typer.Option("--ui", help="Serve Spark's own web page.")] = False

    def cluster(self) -> SparkTarget:
        """Return where that is; under spark-submit, what that was told."""
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        if submitted and self.master is None and self.remote is None:
            return SparkTarget(master=SUBMITTED, conf=_settings(self.conf), ui=self.ui)
        return SparkTarget(
            master=self.master, remote=self.remote, jars=_several(self.jars),
            packages=_several(self.packages), conf=_settings(self.conf), ui=self.ui,
        )  # fmt: skip


def _several(given: list[str] | None) -> tuple[str, ...]:
    return tuple(one for text in given or () for one in text.split(",") if one)


def _settings(given: list[str] | None) -> dict[str, str]:
    found = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or not name.startswith("spark."):
            raise ConfigurationError(f"--conf {one!r}: write spark.NAME=VALUE")
        found[name] = value
    return found


@contextmanager
def running(job: str, options: SparkOptions) -> Iterator[SparkSession]:
    """Yield the session of *job*, with its progress shown; Spark's errors come out as ours."""
    cluster = options.cluster()
    if cluster.master == SUBMITTED:
        _refuse_shown_secrets(sys.argv)
    with translated():
        is_ours = not has_session()
        spark = session(job, cluster)
    try:
        with translated(), shown(job) as tell, watched(spark, tell):
            yield spark
    finally:
        if is_ours:  # one that was there before belongs to somebody else
            spark.stop()


def _refuse_shown_secrets(words: Sequence[str]) -> None:
    """Raise `ConfigurationError` for a URL with a secret on the command line of a submitted job.

    Spark writes that line into the event log and onto its web page.
    """
    for word in words:
        if "://" in word:
            require_no_secret(word)


@contextmanager
def shown(job: str) -> Iterator[Callable[[JobProgress], None]]:
    """Yield what is told of the progress: a bar on a terminal, a line in the log elsewhere."""
    if not err.is_terminal:
        yield _Logged(job)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(job), BarColumn(), MofNCompleteColumn(), TextColumn("tasks"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(job, total=None)
        yield lambda now: progress.update(task, completed=now.done, total=now.total)


class _Logged:
    def __init__(self, job: str) -> None:
        self._job = job
        self._last = SYSTEM_CLOCK.monotonic()

    def __call__(self, now: JobProgress) -> None:
        at = SYSTEM_CLOCK.monotonic()
        if at - self._last >= _LOG_EVERY:
            self._last = at
            log.info("%s: %s of %s tasks done, %s running", self._job, now.done, now.total,
                     now.running)  # fmt: skip


def age(text: str | None, option: str) -> float | None:
    """Return a length of time in seconds, None where none is given."""
    return None if text is None else seconds(text, option)


def write_json(facts: Any, to: Path) -> None:
    """Write *facts* to a file for machines."""
    to.write_text(json.dumps(facts, indent=2, default=str) + "\n")
