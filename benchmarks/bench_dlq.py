"""Dead letters: what a capture costs, fingerprints per second, a million pending at a glance."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sqlalchemy import insert, text

from figures import Figure, Goal, compare, rate
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore, capture, create_tables
from holdfast.dlq.capture.fingerprint import Error, FrameCall, fingerprint
from holdfast.dlq.store.closing import look_around
from holdfast.dlq.store.groups import FailureGroups, newest, verdicts
from holdfast.dlq.store.rows import fingerprint_of, row_of
from holdfast.dlq.store.schema import message
from holdfast.dlq.store.stats import stats
from holdfast.message import Message
from tests.servers import Postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Engine

    from holdfast.dlq import DeadLetter

BODY = b'{"order": 17, "customer": "c-9", "lines": [{"sku": "a", "n": 2}], "note": "%s"}' % (
    b"x" * 200
)
MILLION = 1_000_000
GROUPS = 200
FIGURES = "figures folded"
_COLUMNS = ", ".join(column.name for column in message.columns if column.name != "seq")


def figures() -> Iterator[Figure]:
    """Measure on a PostgreSQL of our own."""
    yield fingerprints(with_frames=True)
    yield fingerprints(with_frames=False)
    with Postgres() as postgres:
        engine = open_database(postgres.database("bench"))
        create_tables(engine)
        yield capture_cost(engine)
        for folded in (True, False):
            fill(engine, folded=folded)
            told = FIGURES if folded else "no change folded yet, the worst case"
            yield glance("groups", lambda: FailureGroups(engine).listed(), told)
            yield glance("stats", lambda: stats(engine), told)
        yield glance("show", lambda: shown(engine), told)
        engine.dispose()


def shown(engine: Engine) -> None:
    """Look at one group: its figures, newest message and verdicts, and what failed around it."""
    one = FailureGroups(engine).find(f"group{GROUPS - 1}")
    with engine.connect() as db:
        newest(db, one.group_id)
        verdicts(db, one.group_id)
        look_around(db, one.group_id)


def failed(number: int) -> DeadLetter:
    """Return a captured failure of a handler a few calls deep."""

    def charge() -> None:
        raise ValueError(f"order {number} is bad")

    def bill() -> None:
        charge()

    made = Message.new("orders", BODY, key=f"c-{number}")
    try:
        bill()
    except ValueError as error:
        return capture(made, error, group="billing", handler="shop.bill")
    raise AssertionError


def capture_cost(engine: Engine) -> Figure:
    """Measure a whole dead-lettering against a plain insert of the same row."""
    count = 300
    home = DeadLetterStore(engine)
    letters = [failed(n) for n in range(count)]
    rows = [row_of(one, fingerprint_of(one.failure), now=0.0) for one in letters]
    ready = iter(range(1_000_000_000))

    def ours() -> None:
        for n in range(count):
            home.put(failed(n))

    def plain() -> float:
        finished = [{**row, "dlq_id": f"plain-{next(ready)}"} for row in rows]

        def work() -> None:
            for row in finished:
                with engine.begin() as db:
                    db.execute(insert(message), row)

        return 1e6 / rate(work, count)

    return compare(
        "dead letters: capture and store",
        ours=lambda: 1e6 / rate(ours, count),
        peer=plain,
        unit="µs per letter",
        goal=Goal(at_most=2),
        detail="PostgreSQL, one commit each; ours takes the exception apart, fingerprints, groups, "
        "triages and counts; the peer inserts the finished row",
    )


def fingerprints(*, with_frames: bool) -> Figure:
    """Measure fingerprints per second of one core, on texts that are all different."""
    library, own = (
        FrameCall("holdfast.pipeline", "run", False),
        FrameCall("shop.bill", "bill", True),
    )
    frames = [library] * 4 + [own, FrameCall("shop.bill", "charge", True)] if with_frames else []
    count = 20_000

    def once(start: int) -> float:
        chains = [
            [Error("ValueError", f"order {n} of c-{n * 7} at 10.0.0.{n % 255} is bad", frames)]
            for n in range(start, start + count)
        ]
        before = time.process_time()
        for chain in chains:
            fingerprint(chain)
        return count / (time.process_time() - before)

    starts = iter(range(0, 1_000_000_000, count))
    kind = "by frames" if with_frames else "by parameterised text"
    return compare(
        f"dead letters: fingerprints {kind}",
        ours=lambda: once(next(starts)),
        peer=lambda: 50_000.0,
        unit="per second of CPU",
        goal=Goal(at_least=1),
        detail="one core, every text different; the peer is the goal of 50,000/s",
    )


def glance(name: str, look: Callable[[], object], told: str) -> Figure:
    """Measure one look at a million pending messages."""

    def seconds() -> float:
        start = time.perf_counter()
        look()
        return time.perf_counter() - start

    look()
    return compare(
        f"dead letters: {name} at a million pending, {told.split(',')[0]}",
        ours=seconds,
        peer=lambda: 1.0,
        unit="s",
        goal=Goal(at_most=1),
        detail=f"PostgreSQL, 1M pending messages in {GROUPS} groups, {told}; the peer is 1 s",
    )


def fill(engine: Engine, *, folded: bool) -> None:
    """Make a million pending messages by statements that run in the server."""
    with engine.begin() as db:
        for table in ("message", "group", "change", "hour", "hit"):
            db.execute(text(f"TRUNCATE holdfast_dlq_{table}"))
    DeadLetterStore(engine).put(failed(1))
    values = {
        "dlq_id": "'00000000-0000-0000-0000-' || lpad(n::text, 12, '0')",
        "message_id": "'id-' || n",
        "group_id": f"'group' || (n % {GROUPS})",
        "key_hash": "md5((n % 200000)::text)",
        "stored_at": "extract(epoch FROM now()) - n % 86400",
        "state": "CASE WHEN n % 50 = 0 THEN 'parked' ELSE 'pending' END",
        "last_failed_at": "extract(epoch FROM now()) - n % 86400",
        "due_at": "CASE WHEN n % 20 = 0 THEN extract(epoch FROM now()) + n % 7200 - 3600 END",
        "tenant": "'t' || (n % 20)",
    }
    columns = ", ".join(
        values.get(name.strip(), f"m.{name.strip()}") for name in _COLUMNS.split(",")
    )
    every = "generate_series(1, :many) AS n"
    fields = ", ".join(
        {"group_id": "'group' || n", "title": "'problem ' || n"}.get(c, f"g.{c}")
        for c in _group_columns()
    )
    with engine.begin() as db:
        db.execute(
            text(
                f"INSERT INTO holdfast_dlq_message ({_COLUMNS}) SELECT {columns} "  # noqa: S608
                f"FROM holdfast_dlq_message m, {every}"
            ),
            {"many": MILLION},
        )
        db.execute(
            text(
                f"INSERT INTO holdfast_dlq_group ({', '.join(_group_columns())}) "  # noqa: S608
                f"SELECT {fields} FROM holdfast_dlq_group g, {every}"
            ),
            {"many": GROUPS - 1},
        )
        db.execute(text("UPDATE holdfast_dlq_group SET group_id = 'group0'"
                        " WHERE group_id NOT LIKE 'group%'"))  # fmt: skip
        db.execute(text("DELETE FROM holdfast_dlq_change"))
        for statement in (FOLDED, COUNTED, HITS) if folded else (UNFOLDED,):
            db.execute(text(statement))
    if folded:  # after a burst nobody has had the time for that
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.execute(text("VACUUM ANALYZE"))


UNFOLDED = """
INSERT INTO holdfast_dlq_change (group_id, kind, n, at, key_hash, tenant, version)
SELECT group_id, 'arrived', 1, stored_at, key_hash, tenant, service_version
FROM holdfast_dlq_message
UNION ALL SELECT group_id, 'parked', 1, stored_at, NULL, NULL, NULL
FROM holdfast_dlq_message WHERE state = 'parked'
"""
FOLDED = """
INSERT INTO holdfast_dlq_hour (group_id, hour, arrived, closed)
SELECT group_id, floor(stored_at / 3600)::int, count(*), 0 FROM holdfast_dlq_message GROUP BY 1, 2
"""
COUNTED = """
UPDATE holdfast_dlq_group g SET arrived = s.n, parked = s.aside
FROM (SELECT group_id, count(*) AS n, sum((state = 'parked')::int) AS aside
      FROM holdfast_dlq_message GROUP BY 1) s
WHERE s.group_id = g.group_id
"""
HITS = """
INSERT INTO holdfast_dlq_hit (group_id, kind, value)
SELECT group_id, 'key', key_hash FROM (
    SELECT group_id, key_hash, row_number() OVER (PARTITION BY group_id ORDER BY key_hash) AS place
    FROM (SELECT DISTINCT group_id, key_hash FROM holdfast_dlq_message) AS hit) AS placed
WHERE place <= 1000
UNION SELECT DISTINCT group_id, 'tenant', tenant FROM holdfast_dlq_message
WHERE tenant IS NOT NULL
"""


def _group_columns() -> list[str]:
    from holdfast.dlq.store.schema import group

    return [column.name for column in group.columns]
