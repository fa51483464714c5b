"""Questions about many dead letters, by Spark: the answers of DuckDB, on any number of machines."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select

from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, create_tables
from holdfast.dlq.capture.fingerprint import Fingerprint, fingerprint
from holdfast.dlq.store.groups import FailureGroups
from holdfast.dlq.store.regroup import moves, regroup
from holdfast.dlq.store.schema import audit
from holdfast.errors import ConfigurationError
from holdfast.spark_jobs import records
from holdfast.spark_jobs.analytics.contrast import poison_patterns
from holdfast.spark_jobs.analytics.duckdb_engine import DuckDbEngine
from holdfast.spark_jobs.analytics.inputs import Dimension
from holdfast.spark_jobs.analytics.results import EVERYTHING, Ran, Scope, TriageResult
from holdfast.spark_jobs.analytics.scores import scores
from holdfast.spark_jobs.analytics.spark_engine import SparkEngine
from holdfast.spark_jobs.analytics.usage import schema_usage
from holdfast.spark_jobs.analytics.write_back import write_back
from holdfast.spark_jobs.generator import KNOWN_CAUSES, Generated, Recipe, generate
from tests.dead_letters import failed, letter

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from holdfast.dlq.letter import Failure

NOBODY = Ran(engine="", why="", records=0, seconds=0.0)
VECTORS = json.loads(files("holdfast.dlq").joinpath("vectors.json").read_text())["fingerprints"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """Share 25,000 generated letters with a hot key, in two files."""
    found = generate(
        tmp_path_factory.mktemp("made"), Recipe(records=25_000, entities=5_000, hot_share=0.5)
    )
    (file,) = found.letters.glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 10_000), found.letters / "one.parquet")
    pq.write_table(table.slice(10_000), found.letters / "two.parquet")
    file.unlink()
    return found


@pytest.fixture(scope="module")
def engine(spark: SparkSession) -> SparkEngine:
    """Share the engine."""
    return SparkEngine(spark)


def exact(found: TriageResult) -> TriageResult:
    """Return *found* without what is approximate."""
    groups = tuple(replace(one, keys=0, tenants=0) for one in found.groups)
    return replace(found, ran=NOBODY, groups=groups)


def test_spark_finds_the_known_causes(
    engine: SparkEngine, made: Generated, capsys: pytest.CaptureFixture[str]
) -> None:
    """Precision and recall of 0.98, and record by record the groups that DuckDB finds."""
    confusion = engine.confusion(str(made.letters), made.truth)
    known, unknown = scores(confusion, made.causes)
    with capsys.disabled():
        print(f"\nspark, known causes:   {known}\nspark, unknown causes: {unknown}")  # noqa: T201
    assert known.causes == KNOWN_CAUSES
    assert known.precision >= 0.98
    assert known.recall >= 0.98
    assert confusion == DuckDbEngine().confusion(str(made.letters), made.truth)


def test_both_engines_give_the_same_groups(
    engine: SparkEngine, made: Generated, tmp_path: Path
) -> None:
    """Triage agrees in every figure that is exact, and nearly where it is not."""
    source = str(made.letters)
    spark = engine.triage(source, output=f"{tmp_path}/groups")
    duck = DuckDbEngine().triage(source)
    assert exact(spark) == exact(duck)
    assert (spark.ran.records, spark.ran.outliers) == (duck.ran.records, duck.ran.outliers)
    for one, two in zip(spark.groups[:200], duck.groups[:200], strict=True):
        assert one.keys == pytest.approx(two.keys, rel=0.15, abs=3)
        assert one.tenants == pytest.approx(two.tenants, rel=0.15, abs=2)
    assert pq.read_table(tmp_path / "groups").num_rows == spark.groups_total


def test_both_engines_give_the_same_trends(engine: SparkEngine, made: Generated) -> None:
    """Every hour, every unusual time, every deploy."""
    found = engine.trends(str(made.letters))
    assert found.anomalies
    assert found.effects
    assert replace(found, ran=NOBODY) == replace(
        DuckDbEngine().trends(str(made.letters)), ran=NOBODY
    )


def test_both_engines_give_the_same_blast_radius(engine: SparkEngine, made: Generated) -> None:
    """Every entity, tenant and value."""
    worth = Dimension(place=str(made.customers))
    assert replace(engine.blast_radius(str(made.letters), dimension=worth), ran=NOBODY) == replace(
        DuckDbEngine().blast_radius(str(made.letters), dimension=worth), ran=NOBODY
    )


def test_spark_gives_the_fingerprints_of_the_vectors(engine: SparkEngine, tmp_path: Path) -> None:
    """The contract of every engine, through the executors."""
    rows = []
    for number, vector in enumerate(VECTORS):
        chain = [
            {"type": one["type"], "text": one["text"],
             "frames": [dict(zip(("module", "function", "in_app"), frame, strict=True))
                        for frame in one.get("frames", [])]}
            for one in vector["chain"]
        ]  # fmt: skip
        also = [{"type": name, "text": ""} for name in vector.get("also", ())]
        failure = {"chain": chain, "explicit": vector.get("explicit"), "also": also}
        own = dict.fromkeys(records.NAMES) | {"dlq_id": f"{number:02}", "clock_outlier": False}
        rows.append(own | {"envelope": json.dumps({"failure": failure})})
    table = pa.Table.from_pylist(rows, schema=records.arrow_schema())
    pq.write_table(table, tmp_path / "vectors.parquet")
    for answers in (engine, DuckDbEngine()):
        found = answers.triage(str(tmp_path / "vectors.parquet"))
        assert {one.fingerprint for one in found.groups} == {one["fingerprint"] for one in VECTORS}
        assert found.ran.undated == len(VECTORS)


def test_a_scope_means_the_same_to_both(engine: SparkEngine, made: Generated) -> None:
    """Every filter at once, and one that nothing passes."""
    middle = made.deploys[0].at
    scope = Scope(topic="tax.orders", tenant="tenant-01", state="pending", since=middle,
                  until=middle + 10 * 86400)  # fmt: skip
    one, two = (each.triage(str(made.letters), scope) for each in (engine, DuckDbEngine()))
    assert one.ran.records == two.ran.records > 0
    assert exact(one) == exact(two)
    nothing = Scope(topic="nothing")
    assert engine.triage(str(made.letters), nothing).groups == ()
    assert engine.trends(str(made.letters), nothing).hourly == ()
    assert engine.blast_radius(str(made.letters), nothing).entities == 0


def test_poison_patterns_are_what_the_failed_payloads_have_in_common(
    engine: SparkEngine, made: Generated
) -> None:
    """A currency, a country and a missing field, each with its lift; the others have none."""
    found = poison_patterns(engine, str(made.letters), str(made.healthy))
    assert found.ran.records == made.records
    told: dict[str, set[tuple[str, str, str]]] = {}
    for one in found.patterns:
        if one.path != "$.customer":  # the hot key is a pattern where chance favours it
            told.setdefault(f"{one.consumer_group} {one.title.split(':')[0]}", set()).add(
                (one.path, one.what, one.value)
            )
    assert told["tax ValueError"] == {("$.currency", "value", "CHF")}
    assert told["tax decimal.InvalidOperation"] == {("$.country", "value", "CH")}
    assert told["tax KeyError"] == {("$.vat", "missing", "")}
    assert not any(name.endswith(("TimeoutError", "JSONDecodeError")) for name in told)
    money = next(one for one in found.patterns if one.path == "$.currency")
    assert (money.failed, round(money.healthy, 2)) == (1.0, pytest.approx(1 / 8, abs=0.02))
    assert money.lift == pytest.approx(8, rel=0.15)


def test_a_healthy_sample_that_is_none_is_refused(
    engine: SparkEngine, made: Generated, tmp_path: Path
) -> None:
    """Nothing can be held against nothing."""
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "odd.parquet")
    with pytest.raises(ConfigurationError, match="has no column payload, but body"):
        poison_patterns(engine, str(made.letters), str(tmp_path / "odd.parquet"))


def test_schema_usage_tells_what_occurs_and_what_may_go(
    engine: SparkEngine, tmp_path: Path
) -> None:
    """Types, versions and fields with counts, first and last; what was last seen long ago."""
    day = 86_400_000_000
    rows = []
    for number in range(40):
        old = number < 10
        payload = {"total": 1, "legacy": "x"} if old else {"total": 1.5, "vat": None}
        own = dict.fromkeys(records.NAMES) | {
            "dlq_id": f"{number:02}", "type": "Order", "schema_ref": "1" if old else "2",
            "payload": json.dumps(payload).encode() if number else b"\xff",
            "failed_at": 1_790_000_000_000_000 + number * day, "clock_outlier": False,
        }  # fmt: skip
        rows.append(own)
    pq.write_table(
        pa.Table.from_pylist(rows, schema=records.arrow_schema()), tmp_path / "usage.parquet"
    )
    found = schema_usage(engine, str(tmp_path / "usage.parquet"), unused_days=20)
    by = {(one.version, one.path, one.kind): one for one in found.fields}
    assert found.ran.records == 40
    assert (by["1", "", "event"].count, by["2", "", "event"].count) == (10, 30)
    assert by["1", "$.legacy", "string"].count == 9
    assert by["1", "$.legacy", "string"].share == 0.9
    assert by["1", "$", "not JSON"].count == 1
    assert by["2", "$.vat", "null"].first == 1_790_000_000 + 10 * 86400
    assert by["2", "$.total", "number"].last == 1_790_000_000 + 39 * 86400
    assert {one.version for one in found.fields if one.unused} == {"1"}


def by_type(failure: Failure) -> Fingerprint:
    """Return a fingerprint of rules that are coarser."""
    return fingerprint([], explicit=failure.root.type)


def test_groups_are_written_back_as_the_store_itself_would(
    engine: SparkEngine, tmp_path: Path
) -> None:
    """Letters that older rules put together are parted; figures, map and audit are right."""
    who = Operator(actor="ada", reason="new rules")
    stores = []
    for name in ("spark", "plain"):
        store = open_database(f"sqlite:///{tmp_path}/{name}.db")
        create_tables(store)
        letters = [letter(n, failed(ValueError("a") if n % 2 else KeyError(f"k{n % 3}")))
                   for n in range(30)]  # fmt: skip
        DeadLetterStore(store).put_all(letters)
        regroup(store, who, fingerprint=by_type)
        stores.append(store)
    spark, plain = stores
    moved = write_back(engine, str(spark.url), str(spark.url), who)
    expected = regroup(plain, who)
    assert moved == expected

    def told(store: Any) -> list[Any]:
        return [(one.group_id, one.pending, one.total, one.state, one.title)
                for one in FailureGroups(store).listed(limit=1000)]  # fmt: skip

    assert told(spark) == told(plain)
    with spark.connect() as db:
        assert {(old, new): n for old, new, n in moves(db)}.items() >= moved.items()
        acts = list(db.execute(select(audit.c.action).order_by(audit.c.seq)).scalars())
    assert acts.count("regroup") == 2
    assert write_back(engine, str(spark.url), str(spark.url), who) == {}
    for store in stores:
        store.dispose()


def test_a_password_does_not_travel_to_the_tasks(engine: SparkEngine) -> None:
    """Secrets are named, never written into what Spark ships."""
    with pytest.raises(ConfigurationError, match="its secret would be in Spark's plan"):
        write_back(engine, "parquet:x", "postgresql+psycopg://u:pw@localhost/db",
                   Operator(actor="ada", reason="x"))  # fmt: skip


def test_spark_names_files_that_it_cannot_read(
    engine: SparkEngine, made: Generated, tmp_path: Path
) -> None:
    """Broken, foreign, absent, and a dimension table in which an entity is twice."""
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(ConfigurationError, match="cannot be read as"):
        engine.triage(str(tmp_path / "bad.parquet"))
    pq.write_table(pa.table({"name": ["x"]}), tmp_path / "foreign.parquet")
    with pytest.raises(ConfigurationError, match="holds no dead letters: it has no field dlq_id"):
        engine.trends(str(tmp_path / "foreign.parquet"))
    with pytest.raises(ConfigurationError, match="nothing at that path"):
        engine.blast_radius(str(tmp_path / "nowhere"))
    whole = pq.read_table(made.customers)
    pq.write_table(pa.concat_tables([whole, whole.slice(0, 2)]), tmp_path / "twice.parquet")
    twice = Dimension(place=str(tmp_path / "twice.parquet"))
    with pytest.raises(ConfigurationError, match=r"entity_ref is not unique \(cust-000000, cust"):
        engine.blast_radius(str(made.letters), EVERYTHING, dimension=twice)
