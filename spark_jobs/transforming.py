"""The `transform` job: a whole topic or archive to another, through a versioned transform.

First everything is read, transformed and staged as files, in lanes by key and numbered in the
order of the source. Only when all of it is there does anything go out, so a transform that
refuses messages is known before the first one is sent, and a function that gives another answer
the second time cannot do harm. Then the staged messages are published in rounds; after each one
the log says so. Whoever comes after a kill goes on with the round that was not done: nothing is
lost, and no more than one round is sent twice, in the same order.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.brokers import connect
from holdfast.errors import ConfigurationError, DependencyDown, HoldfastError, UnknownTopic
from holdfast.ids import new_id
from holdfast.ports import BrokerPowers
from holdfast.spark_jobs import records, sources
from holdfast.spark_jobs.archive.adding import add
from holdfast.spark_jobs.archive.state import FORMAT, NumberedLog, folder
from holdfast.spark_jobs.archive.table import Archive
from holdfast.spark_jobs.errors import translated
from holdfast.spark_jobs.files import unreadable, upgraded
from holdfast.spark_jobs.planning import place_of
from holdfast.spark_jobs.secrets import require_no_secret, revealed
from holdfast.spark_jobs.sources import SourceSpec
from holdfast.spark_jobs.topics import kafka_ends, raw_kafka, read_broker
from holdfast.spark_jobs.transform_tasks import (
    COORDINATES,
    MADE,
    MESSAGE,
    REFUSED,
    ApplyTransform,
    NumberLane,
    PublishRound,
    load_work,
    made_ddl,
    outcome_ddl,
    staged_ddl,
)
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

LANES, BATCH = 8, 100_000
_MOST_LANES = 4096
_MOST_REASONS = 10
_STAGED, _OUTCOMES, _ASIDE = "staged", "outcomes", "refused"
_NEEDED = ("message_id", "topic", "payload", "headers")
"""The fields without which files hold no messages."""


class TransformUnfinished(DependencyDown):
    """A server stayed away. What is marked stays done, and the same command goes on behind it."""


class CountsDiffer(HoldfastError):
    """What went in and what came out are not the same number: something was lost or repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformRequest:
    """What is transformed, by what, and where it goes."""

    source: str
    to: str
    transform: str
    """`module:function@version`, or a registry of upcasters in the same way."""
    checkpoint: str
    """A folder that driver and executors share: what was made, and how far it is."""
    format: str | None = None
    lanes: int = LANES
    batch: int = BATCH
    """Messages in a round: after a kill as many are sent again at most."""
    on_error: str = "stop"
    """What the transform refuses. `stop`: nothing is sent. `aside`: they are put aside."""
    patience: float = 60.0
    """Seconds for which a broker that is away is waited for."""

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= _MOST_LANES:
            raise ConfigurationError(f"{self.lanes} lanes: use 1 to {_MOST_LANES}")
        if self.batch < self.lanes:
            raise ConfigurationError(
                f"a batch of {self.batch} for {self.lanes} lanes: use one a lane at least"
            )
        if self.on_error not in ("stop", "aside"):
            raise ConfigurationError(f"on error {self.on_error!r}: use stop or aside")
        if self.patience < 0:
            raise ConfigurationError(f"a patience of {self.patience:g} s: use 0 or more")
        load_work(self.transform)

    @property
    def identity(self) -> dict[str, str | int]:
        """What may not change once something was sent."""
        return {
            "from": mask(self.source), "to": mask(self.to), "with": self.transform,
            "lanes": self.lanes, "batch": self.batch,
        }  # fmt: skip


class TransformState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a transform is; every change is a new state with the next number."""

    number: int = 0
    run: str = ""
    """Whose state it is: a later run that takes over is seen by the one before at its next."""
    phase: Literal["new", "staged", "done"] = "new"
    request: dict[str, str | int] = {}
    read: int = 0
    repeated: int = 0
    refused: int = 0
    known: int = 0
    rounds: tuple[int, ...] = ()
    """How many messages each round has."""
    done: int = 0
    """How many rounds are out."""
    written: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed:
    """What became of the messages."""

    transform: str
    read: int = 0
    written: int = 0
    before: int = 0
    """How many of them an earlier run had written."""
    refused: int = 0
    repeated: int = 0
    """Dead letters of a message that another letter has, too: it goes out once."""
    known: int = 0
    """Dead letters that the archive had already; they stay as they were."""
    rounds: int = 0
    stopped: bool = False
    """Something was refused, and that was to stop it."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why messages were refused, and how many; the most frequent reasons."""
    aside: str | None = None
    """Where what was refused lies; the job reads it as a source."""

    @property
    def is_whole(self) -> bool:
        """Whether everything that was read has its place."""
        return self.read == self.written + self.refused + self.repeated + self.known


def transform(
    spark: SparkSession,
    request: TransformRequest,
    *,
    tell: Callable[[str], object] = lambda _text: None,
) -> Transformed:
    """Transform as *request* says, or go on with it; *tell* hears how far it is.

    Raises `TransformUnfinished` when a server stays away for longer than the patience.
    """
    try:
        with translated():
            return _Run(spark, request, tell).go()
    except DependencyDown as error:
        raise TransformUnfinished(
            f"{error}. Nothing is lost; go on with  holdfast spark transform --from "
            f"{mask(request.source)} --to {mask(request.to)} --with {request.transform} "
            f"--checkpoint {request.checkpoint}  and the other options as they were"
        ) from error


class _Run:
    """One run of the job, from whatever an earlier one has left."""

    def __init__(
        self, spark: SparkSession, request: TransformRequest, tell: Callable[[str], object]
    ) -> None:
        place = request.checkpoint
        self._spark = spark
        self._request = request
        self._tell = tell
        self._place = place if "://" in place else str(Path(place).absolute())
        self._log = NumberedLog(folder(spark, self._place), TransformState, called="transform")
        self._name = new_id()
        self._source = SourceSpec.parse(request.source, format=request.format)
        self._target = _target(request)
        self._state = self._log.newest()

    def go(self) -> Transformed:
        state, mine = self._state, self._request.identity
        if state.phase != "new" and state.request != mine:
            was = ", ".join(f"--{name} {value}" for name, value in state.request.items())
            raise ConfigurationError(
                f"{self._place} belongs to another transform ({was}), which has begun to write: "
                "finish that, or name another --checkpoint"
            )
        if state.phase == "done":
            return self._told(before=state.written)
        self._check(is_new=state.phase == "new")
        self._commit()  # from now on an earlier run of the same is refused at its next commit
        if state.phase == "new":
            self._stage()
            if self._state.refused and self._request.on_error == "stop":
                return self._told(stopped=True)
        before = self._state.written
        if not self._write():
            return self._told(before=before, stopped=True)
        self._commit(phase="done")
        found = self._told(before=before)
        if not found.is_whole:
            raise CountsDiffer(
                f"{found.read:,} were read, but {found.written:,} are written, {found.refused:,} "
                f"refused, {found.repeated:,} repeated and {found.known:,} were there: look at "
                f"{self._place}"
            )
        return found

    def _commit(self, **changes: Any) -> None:
        state = msgspec.structs.replace(
            self._state, number=self._state.number + 1, run=self._name,
            request=self._request.identity, **changes,
        )  # fmt: skip
        self._log.commit(state)
        self._state = state

    @property
    def _as_letters(self) -> bool:
        return self._target.kind == "archive"

    @property
    def _sends(self) -> bool:
        return self._target.kind == "broker"

    def _check(self, *, is_new: bool) -> None:
        """Refuse what cannot end well, before anything is done."""
        source, target = self._source, self._target
        if source.kind == "store":
            raise ConfigurationError(
                "a store changes while it is read: first  holdfast spark archive add --from "
                f"{mask(source.place)} --to FOLDER, then transform --from archive:FOLDER"
            )
        is_same = source.place.rstrip("/") == target.place.rstrip("/")
        if source.kind in ("kafka", "broker"):
            own = _broker(self._request.source)
            is_same = own.place == target.place and not set(own.topics).isdisjoint(target.topics)
        if is_same:
            raise ConfigurationError("--from and --to are the same: nothing would stay as it was")
        if self._sends:
            _require_topic(target)
        elif target.kind == "files" and is_new:
            there = folder(self._spark, _absolute(target.place)).names("")
            if there:
                raise ConfigurationError(f"{target.place} is not empty: name a new folder")

    def _stage(self) -> None:
        """Read, transform and number everything; nothing goes out yet."""
        from pyspark.sql import functions as f

        request = self._request
        frame, is_raw = self._messages()
        # A topic by an adapter ends where its tasks find it: what they took is what was read.
        read = None if self._source.kind == "broker" else frame.count()
        has_letters = "dlq_id" in frame.columns
        if has_letters:
            frame = self._once(frame)
        work = ApplyTransform(
            transform=request.transform, topic=self._target.topics[0] if self._sends else None,
            is_raw=is_raw, as_letters=self._as_letters,
        )  # fmt: skip
        key = f.coalesce("key", f.encode("message_id", "UTF-8"))
        per_round = -(-request.batch // request.lanes)
        (
            frame.mapInArrow(work, made_ddl(as_letters=self._as_letters))
            .withColumn("_lane", f.pmod(f.crc32(key), f.lit(request.lanes)).cast("int"))
            .withColumn("_place", place_of())
            # Not `repartition`: adaptive execution would put several lanes into one task.
            .repartitionById(request.lanes, "_lane")
            .sortWithinPartitions("topic", "lane", "_place", "seq", "message_id")
            .drop("_place")
            .mapInArrow(NumberLane(per_round=per_round), staged_ddl(as_letters=self._as_letters))
            .write.mode("overwrite")
            .partitionBy("kind", "round")
            .parquet(f"{self._place}/{_STAGED}")
        )
        counts = self._staged().groupBy("kind", "round").count().collect()
        refused = sum(row["count"] for row in counts if row["kind"] == REFUSED)
        by_round = {row["round"]: row["count"] for row in counts if row["kind"] == MADE}
        rounds = tuple(by_round[number] for number in range(len(by_round)))
        staged = sum(rounds) + refused
        read = staged if read is None else read
        if read < staged or (read > staged and not has_letters):
            raise CountsDiffer(
                f"{read:,} messages were counted at the source and {staged:,} staged: the source "
                "changed meanwhile; nothing was sent, run it again"
            )
        stops = refused and request.on_error == "stop"
        self._commit(
            phase="new" if stops else "staged", read=read, repeated=read - staged,
            refused=refused, rounds=rounds, done=0, written=0,
        )  # fmt: skip
        self._tell(f"{read:,} read, {sum(rounds):,} made, {refused:,} refused")

    def _once(self, letters: DataFrame) -> DataFrame:
        """Return each dead letter once, or each message where messages go out."""
        from pyspark.sql import Window
        from pyspark.sql import functions as f

        same = ("dlq_id",) if self._as_letters else ("topic", "source", "message_id", "exact")
        best = Window.partitionBy(*same).orderBy(f.desc("replayable"), "dlq_id")
        once = letters.withColumn("_nth", f.row_number().over(best)).where("_nth = 1").drop("_nth")
        wanted = (*MESSAGE, *COORDINATES, "replayable", "envelope")
        return once if self._as_letters else once.select(*wanted)

    def _messages(self) -> tuple[DataFrame, bool]:
        """Return what is to be transformed, and whether it is what lies on a topic."""
        source, spark = self._source, self._spark
        if self._as_letters or source.kind == "archive":
            # An archive holds dead letters, so those are looked for, on topics too.
            return sources.read(spark, source), False
        if source.kind == "kafka":
            ends = kafka_ends(source)
            return raw_kafka(spark, source, end=ends).withColumn("offset", _text("offset")), True
        if source.kind == "broker":
            return read_broker(spark, source, raw=True), True
        return self._files(), False

    def _files(self) -> DataFrame:
        """Return the messages in files: dead letters, or what a transform has written."""
        from pyspark.errors import AnalysisException

        place, kind = self._source.place, self._source.format
        try:
            frame = self._spark.read.format(kind).load(place)
        except AnalysisException as error:
            raise unreadable(place, kind, error) from error
        if not records.missing(frame.columns):
            return upgraded(frame, of=place)
        if lacking := [name for name in _NEEDED if name not in frame.columns]:
            raise ConfigurationError(
                f"{place} holds no messages: it has no field {', '.join(lacking)}"
            )
        names = (*MESSAGE, *COORDINATES)
        known = {name: kind for name, kind in frame.dtypes if name in names}
        return frame.selectExpr(
            *(
                f"CAST({f'`{name}`' if name in known else 'NULL'} AS {records.BY_NAME[name].type}) "
                f"AS `{name}`"
                for name in names
            )
        )

    def _staged(self) -> DataFrame:
        schema = staged_ddl(as_letters=self._as_letters)
        return self._spark.read.schema(schema).parquet(f"{self._place}/{_STAGED}")

    def _write(self) -> bool:
        """Bring what is staged to its target; False: something was refused and that stops it."""
        made = self._staged().where(f"kind = '{MADE}'")
        if not sum(self._state.rounds):
            return True
        if self._sends:
            return self._publish(made)
        if self._target.kind == "archive":
            done = add(
                Archive(self._spark, self._target.place),
                [f"parquet:{self._place}/{_STAGED}/kind={MADE}"],
            )
            self._commit(written=done.new + done.changed, known=done.known)
            return True
        self._save(made)
        return True

    def _publish(self, made: DataFrame) -> bool:
        state, request = self._state, self._request
        work = PublishRound(broker=self._target.place, patience=request.patience)
        for number in range(state.done, len(state.rounds)):
            place = f"{self._place}/{_OUTCOMES}/round={number}"
            (
                made.where(f"round = {number}")
                .repartitionById(request.lanes, "_lane")
                .sortWithinPartitions("_number")
                .drop("_lane", "_number", "kind", "round")
                .mapInArrow(work, outcome_ddl())
                .write.mode("overwrite")
                .parquet(place)
            )
            sent, refused, outage = self._outcome(place)
            if outage is not None:
                raise DependencyDown(f"round {number + 1} of {len(state.rounds)} gave up: {outage}")
            if sent + refused != state.rounds[number]:
                raise CountsDiffer(
                    f"round {number} has {state.rounds[number]:,} messages, and the broker took "
                    f"{sent:,} and refused {refused:,} of them; run it again"
                )
            self._commit(
                done=number + 1, written=self._state.written + sent,
                refused=self._state.refused + refused,
            )  # fmt: skip
            self._tell(f"round {number + 1} of {len(state.rounds)}: {self._state.written:,} sent")
            if refused and request.on_error == "stop":
                return False
        return True

    def _outcome(self, place: str) -> tuple[int, int, str | None]:
        from pyspark.sql import functions as f

        found = self._spark.read.schema(outcome_ddl()).parquet(place)
        row: Any = found.agg(f.sum("sent"), f.count("reason"), f.min("outage")).first()
        return int(row[0] or 0), int(row[1]), row[2]

    def _save(self, made: DataFrame) -> None:
        """Write files; what a killed run had begun there is written anew."""
        target = self._target
        (
            made.repartitionById(self._request.lanes, "_lane")
            .sortWithinPartitions("_number")
            .drop("_lane", "_number", "kind", "round", "reason")
            .write.format(target.format)
            .mode("overwrite")
            .save(target.place)
        )
        self._commit(written=self._spark.read.format(target.format).load(target.place).count())

    def _told(self, *, before: int = 0, stopped: bool = False) -> Transformed:
        state = self._state
        reasons: dict[str, int] = {}
        aside = None
        if state.refused:
            aside, reasons = self._aside()
        return Transformed(
            transform=self._request.transform, read=state.read, written=state.written,
            before=before, refused=state.refused, repeated=state.repeated, known=state.known,
            rounds=len(state.rounds), stopped=stopped, reasons=reasons, aside=aside,
        )  # fmt: skip

    def _aside(self) -> tuple[str, dict[str, int]]:
        """Put everything that was refused into one place, and return that and the reasons."""
        from pyspark.sql import functions as f

        place = f"{self._place}/{_ASIDE}"
        refused = self._staged().where(f"kind = '{REFUSED}'")
        refused = refused.drop("_lane", "_number", "kind", "round")
        if self._sends and self._state.done:
            outcomes = self._spark.read.schema(outcome_ddl())
            later = outcomes.parquet(f"{self._place}/{_OUTCOMES}")
            refused = refused.unionByName(
                later.where("reason IS NOT NULL").select(*refused.columns)
            )
        refused.write.mode("overwrite").parquet(place)
        counted = (
            self._spark.read.parquet(place)
            .groupBy("reason")
            .count()
            .orderBy(f.desc("count"), "reason")
        )
        return place, {row[0]: row[1] for row in counted.limit(_MOST_REASONS).collect()}


def _text(name: str) -> Any:
    from pyspark.sql import functions as f

    return f.col(name).cast("string")


def _absolute(place: str) -> str:
    return place if "://" in place else str(Path(place).absolute())


def _target(request: TransformRequest) -> SourceSpec:
    """Return where it goes: `kind` is broker, archive or files."""
    found = SourceSpec.parse(request.to)
    if found.kind == "store":
        raise ConfigurationError(
            f"{mask(request.to)} is a store: write to a topic of a broker, archive:FOLDER or "
            "parquet:FOLDER"
        )
    if found.kind in ("kafka", "broker"):
        found = _broker(request.to)
        if len(found.topics) > 1:
            raise ConfigurationError(f"{mask(request.to)} names several topics: give one")
    return found


def _broker(text: str) -> SourceSpec:
    """Return the broker and topics of *text* as our adapters know them, Kafka's too."""
    is_native = text.startswith("kafka://") and "via=adapter" not in text
    found = SourceSpec.parse(f"{text}&via=adapter" if is_native else text)
    require_no_secret(found.place)
    return found


def _require_topic(target: SourceSpec) -> None:
    with closing(connect(revealed(target.place))) as broker:
        known = BrokerPowers.of(broker).topics()
    (topic,) = target.topics
    if known is not None and topic not in known:
        raise UnknownTopic(topic, f"holdfast topics create {topic} --partitions …")
