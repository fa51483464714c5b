"""What the tasks of a plan do on executors: judge candidates, claim a lane, send a lane.

Each is a value that travels to the executor and is called there with Arrow batches. It carries
names of secrets, never secrets. A task that is begun again has a higher attempt number, by which
it takes its lane over from the one before, dead or not.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.brokers import connect
from holdfast.db.engine import open_database
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.lane_check import check_lane
from holdfast.dlq.replay.lane_freeze import PlannedLetter, claim_lane
from holdfast.dlq.replay.lane_sender import LaneOrder, LaneResult, send_lane
from holdfast.dlq.replay.lanes import LaneClaim, marks_of
from holdfast.dlq.replay.lease import Fenced
from holdfast.dlq.replay.letters import candidate, candidates
from holdfast.dlq.replay.selection import Selection
from holdfast.dlq.replay.survey import judged
from holdfast.errors import DependencyDown
from holdfast.spark_jobs.secrets import revealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayOptions

_CHUNK = 500
JUDGED = (
    "lane int, key_hash string, place string, seq bigint, dlq_id string, fingerprint string, "
    "version string, state string, note string, is_first boolean"
)
"""One candidate as it was judged. `state` is that of its item, or `gone`."""


@contextmanager
def _opened(url: str) -> Iterator[Engine]:
    engine = open_database(revealed(url))
    try:
        yield engine
    finally:
        engine.dispose()


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    """Yield the rows of *batches* as values with attributes, a batch in memory at a time."""
    from types import SimpleNamespace

    for batch in batches:
        for row in batch.to_pylist():
            yield SimpleNamespace(**row)


def _chunks(rows: Iterator[Any], size: int = _CHUNK) -> Iterator[list[Any]]:
    chunk = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges the candidates of a lane, which come key by key, each key in its order.

    However many a key has, a chunk of them is in memory at a time.
    """

    database: str
    selection: Selection
    terms: ReplayOptions
    below: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the judgements."""
        import pyarrow

        from holdfast.spark_jobs.arrow import schema_of

        schema = schema_of(JUDGED)
        blocked: dict[str, str] = {}
        last, had_first = "", False
        with _opened(self.database) as engine:
            for chunk in _chunks(_rows(batches)):
                with engine.connect() as db:
                    found = self._judged(db, chunk, blocked)
                for row in found:
                    if row["key_hash"] != last:
                        last, had_first = row["key_hash"], False
                    row["is_first"] = row["state"] == ItemState.CLAIMED and not had_first
                    had_first = had_first or row["is_first"]
                # Keys come one after the other: only the last one may go on.
                for key in [key for key in blocked if key != last]:
                    del blocked[key]
                yield pyarrow.RecordBatch.from_pylist(found, schema=schema)

    def _judged(
        self, db: Connection, chunk: list[Any], blocked: dict[str, str]
    ) -> list[dict[str, Any]]:
        ids = tuple(row.dlq_id for row in chunk)
        free = {row.dlq_id: row for row in candidates(db, Selection(dlq_ids=ids), below=self.below)}
        ordered = [candidate(free[one.dlq_id]) for one in chunk if one.dlq_id in free]
        doubtful = [row.dlq_id for row in free.values() if not row.replayable]
        aside = judged(db, self.selection, ordered, self.terms, doubtful=doubtful, blocked=blocked)
        refs = {letter.dlq_id: letter for letter in ordered}
        found = []
        for one in chunk:
            letter = refs.get(one.dlq_id)
            state, note = aside.get(one.dlq_id, (ItemState.CLAIMED, None))
            found.append(
                {
                    "lane": one.lane,
                    "key_hash": one.key_hash,
                    "place": one.place,
                    "seq": one.seq if letter is None else letter.seq,
                    "dlq_id": one.dlq_id,
                    "fingerprint": None if letter is None else letter.fingerprint,
                    "version": None if letter is None else letter.version,
                    "state": "gone" if letter is None else state.value,
                    "note": note,
                }
            )
        return found


def attempt_id() -> int:
    """Return the number of this attempt at this task: it grows with every one that is begun."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.taskAttemptId())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLanes:
    """Claims the messages of a lane, which come in the order of sending."""

    SCHEMA: ClassVar[str] = "stage int, lane int, hash string"

    database: str
    plan_id: str
    epoch: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the hashes of the lane, nothing when another has taken it over."""
        import pyarrow

        from holdfast.spark_jobs.arrow import schema_of

        with _opened(self.database) as engine:
            for lane, rows in groupby(_rows(batches), attrgetter("lane")):
                try:
                    claim = LaneClaim.take(
                        engine, self.plan_id, lane, epoch=self.epoch, attempt=attempt_id()
                    )
                    hashes = claim_lane(claim, (_planned(row) for row in rows))
                except Fenced:
                    return
                found = [dict(zip(one._fields, one, strict=True)) for one in hashes]
                yield pyarrow.RecordBatch.from_pylist(found, schema=schema_of(self.SCHEMA))


def _planned(row: Any) -> PlannedLetter:
    return PlannedLetter(row.dlq_id, row.seq, row.key_hash, row.fingerprint, row.state, row.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLane:
    """Sends the lanes whose numbers come, each by itself, through the adapter of the broker."""

    SCHEMA: ClassVar[str] = "lane int, sent bigint, outage string"

    order: LaneOrder
    database: str
    broker: str
    master_key_file: str | None = None
    """Where executors have the vault's master key."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield how far each lane came, nothing when another has taken it over."""
        import pyarrow

        from holdfast.spark_jobs.arrow import schema_of

        with _opened(self.database) as engine:
            for row in _rows(batches):
                try:
                    result = self._sent(int(row.id), engine)
                except Fenced:
                    return
                found = {"lane": result.lane, "sent": result.sent, "outage": result.outage}
                yield pyarrow.RecordBatch.from_pylist([found], schema=schema_of(self.SCHEMA))

    def _sent(self, lane: int, engine: Engine) -> LaneResult:
        """Send *lane*; a server that cannot be reached is told: to begin again would not help."""
        try:
            with closing(connect(revealed(self.broker))) as broker:
                return send_lane(
                    self.order, lane, engine, broker,
                    attempt=attempt_id(), vault=self._vault(engine),
                )  # fmt: skip
        except DependencyDown as error:
            return LaneResult(lane=lane, sent=0, outage=str(error))

    def _vault(self, engine: Engine) -> Vault | None:
        if self.master_key_file is None:
            return None
        from holdfast.dlq.protection.vault import Vault

        return Vault(engine, bytes.fromhex(Path(self.master_key_file).read_text().strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLanes:
    """Checks the lanes whose places in the ledger come."""

    SCHEMA: ClassVar[str] = (
        "stage int, lane int, start bigint, beyond bigint, hash string, missing bigint, "
        "confirmed bigint, failed bigint, aside bigint, unsent bigint, unconfirmed bigint, "
        "contradictions bigint"
    )

    database: str
    plan_id: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what each lane holds."""
        import pyarrow

        from holdfast.spark_jobs.arrow import schema_of

        with _opened(self.database) as engine:
            with engine.connect() as db:
                marks = marks_of(db, self.plan_id)
            for row in _rows(batches):
                with engine.connect() as db:
                    found = check_lane(db, self.plan_id, marks[int(row.id)])
                yield pyarrow.RecordBatch.from_pylist(
                    [found._asdict()], schema=schema_of(self.SCHEMA)
                )
