"""The groups that triage finds, written back to the SQL store by the store's own functions.

Letters whose stored group is not the one of today's rules are moved where they are, by the tasks
that found them: figures, the map from old to new groups and the audit trail stay right, as with
`holdfast dlq regroup`. A task that runs again finds its letters moved and does nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.db.engine import open_database
from holdfast.dlq.operations import require_tables
from holdfast.dlq.store.regroup import begin_regroup, finish_regroup, moves, regroup_letters
from holdfast.spark_jobs.analytics.results import EVERYTHING, Scope
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.secrets import require_no_secret, revealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import Engine

    from holdfast.db.audit import Operator
    from holdfast.spark_jobs.analytics.inputs import Source
    from holdfast.spark_jobs.analytics.spark_engine import SparkEngine


def write_back(
    engine: SparkEngine,
    source: Source,
    database: str,
    operator: Operator,
    scope: Scope = EVERYTHING,
) -> dict[tuple[str, str], int]:
    """Have the letters of *source* that are in the store *database* in their groups.

    Return how many moved from which group to which. *database* may name its password as
    `${NAME}`: it is read where a task connects.
    """
    from pyspark.sql import functions as f

    require_no_secret(database)  # it goes to the tasks
    store = open_database(revealed(database))
    try:
        require_tables(store)
        before, known = begin_regroup(store), _moves(store)
        letters = engine.letters(source, ("dlq_id", "stored_group"), scope)
        wrong = letters.filter(~f.col("group_id").eqNullSafe(f.col("stored_group")))
        with translated():
            ids = wrong.select("dlq_id").persist()
            try:
                # Read to the end first: a store of one file cannot be read and written at once.
                if ids.count():
                    work = partial(_moved, database=database)
                    ids.mapInArrow(work, "n bigint").agg(f.sum("n")).collect()
            finally:
                ids.unpersist()
        # From the store's own map: what a task moved before it was run again counts, too.
        moved = {pair: n - known.get(pair, 0) for pair, n in _moves(store).items()}
        moved = {pair: n for pair, n in moved.items() if n}
        finish_regroup(store, moved, before, operator)
    finally:
        store.dispose()
    return moved


def _moves(store: Engine) -> dict[tuple[str, str], int]:
    with store.connect() as db:
        return {(old, new): n for old, new, n in moves(db)}


def _moved(batches: Iterator[pa.RecordBatch], database: str) -> Iterator[pa.RecordBatch]:
    """Move the letters of *batches*: what runs in a task."""
    store = open_database(revealed(database))
    try:
        for batch in batches:
            found = regroup_letters(store, batch.column("dlq_id").to_pylist())
            yield pa.RecordBatch.from_pydict({"n": pa.array([sum(found.values())], pa.int64())})
    finally:
        store.dispose()
