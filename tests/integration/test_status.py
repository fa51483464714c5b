"""`holdfast status` knows the whole: each trouble of a real database, and what it cannot see."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from holdfast import Message
from holdfast.brokers import connect
from holdfast.brokers.doctor import judged_copies
from holdfast.consumer.doctor import judged_lag
from holdfast.consumer.lag import LaneLag
from holdfast.consumer.schema import circuit, held_key
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.dlq import DeadLetterStore
from holdfast.dlq.replay import Plans, ReplayOptions, Selection, StopPolicy, freeze
from holdfast.findings import Severity
from holdfast.idempotency import Inbox
from holdfast.outbox import Outbox
from holdfast.outbox import create_tables as create_outbox
from holdfast.ports import BrokerPowers, Lane, LaneProgress, TopicSettings
from holdfast.sagas.schema import saga
from holdfast.status import Examination, LookBounds, SchemaVersion, examine
from holdfast.testing import wait_until
from tests.dead_letters import letter
from tests.migrated import migrated
from tests.shell import shell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine

    from holdfast.findings import Finding
    from tests.servers import Kafka, Postgres

PATIENT = LookBounds(seconds=120.0)
ADA = Operator(actor="ada", reason="fixed")


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open an empty database of each kind, with all tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(request.param).database("status")
    engine = open_database(url)
    migrated(engine)
    yield engine
    engine.dispose()


def bad(found: Examination) -> dict[str, list[Finding]]:
    """Return what is not well, by check; slots are the server's, and other tests leave some."""
    named: dict[str, list[Finding]] = {}
    for one in found.findings:
        if one.severity and one.check != "slots":
            named.setdefault(one.check, []).append(one)
    return named


def test_an_empty_database_has_nothing_wrong(shop: Engine) -> None:
    """All of its parts are named, and no complaint is made of what was never used."""
    found = examine(shop, bounds=PATIENT)
    assert bad(found) == {}
    assert found.tables is not None
    assert found.tables.parts == ("outbox", "inbox", "consumer", "dead letters", "sagas")
    assert found.tables.absent == ()


def trouble(engine: Engine) -> None:
    """Let something be wrong in every part."""
    with Session(engine) as session, session.begin():
        Outbox().add(session, {"n": 1}, topic="orders", key="k")
        Inbox(window="14d").claim(session, "billing/orders", "1")
    store = DeadLetterStore(engine)
    store.put_all([letter(number) for number in range(3)])
    freeze(engine, Selection(topic="orders"), ReplayOptions(policy=StopPolicy()), ADA)
    key = {"grp": "billing", "topic": "orders", "key_hash": "a" * 64, "key": b"ada", "parked": 2,
           "since": 1000.0, "until": 0.0}  # fmt: skip
    kept = {"id": "s-1", "type": "order", "version": 1, "hash": "h", "business_key": "o-1",
            "active_key": "o-1", "status": "parked", "progress": b"{}", "data": b"{}",
            "start_digest": "d", "revision": 1, "started_at": 1000.0, "changed_at": 1000.0,
            "deadline_at": 2000.0}  # fmt: skip
    with engine.begin() as db:
        db.execute(insert(held_key).values(**key, dlq_id="dead", due=None))
        db.execute(
            insert(held_key).values(**{**key, "key_hash": "b" * 64}, dlq_id=None, due=1000.0)
        )
        db.execute(insert(circuit).values(name="bank", version=1, is_open=1, until=0.0))
        db.execute(insert(saga).values(**kept))


def test_each_trouble_is_named_with_the_command_that_mends_it(shop: Engine) -> None:
    """Whatever part it is in; the most urgent part comes first."""
    trouble(shop)
    found = examine(shop, bounds=PATIENT)
    named = bad(found)
    fixes = {check: [str(one.fix) for one in some] for check, some in named.items()}
    assert set(named) == {"relays", "dead letters", "replays", "keys", "circuits", "sagas"}
    assert "holdfast relay" in fixes["relays"][0]
    assert "holdfast dlq groups" in fixes["dead letters"][0]
    (plan,) = Plans(shop).latest()
    assert f"holdfast dlq plans resume {plan.short}" in fixes["replays"][0]
    assert "holdfast keys list" in fixes["keys"][0]
    assert "holdfast consume" in fixes["keys"][1]
    assert "holdfast circuits close bank" in fixes["circuits"][0]
    assert ["--status parked" in fixes["sagas"][0], "--overdue" in fixes["sagas"][1]] == [True] * 2
    order = [area.severity for area in found.areas]
    assert order == sorted(order, reverse=True)
    assert found.severity is Severity.CRITICAL  # events wait, and no relay is at work


def test_a_database_of_one_part_is_no_complaint(tmp_path: Path) -> None:
    """A service has an outbox and no more; whatever is here must be here whole."""
    engine = open_database(f"sqlite:///{tmp_path}/service.db")
    create_outbox(engine)
    found = examine(engine, bounds=PATIENT)
    assert found.tables is not None
    assert found.tables.parts == ("outbox",)
    assert bad(found) == {}
    with engine.begin() as db:
        db.execute(text("DROP TABLE holdfast_outbox_parked"))
    (missing,) = bad(examine(engine, bounds=PATIENT))["tables"]
    assert "holdfast_outbox_parked" in missing.text
    assert "holdfast db upgrade" in str(missing.fix)
    engine.dispose()


def test_an_old_schema_is_named(shop: Engine) -> None:
    """Before a newer program finds out at night."""
    old = SchemaVersion(part="dlq", has="dlq_0001", newest="dlq_0010")
    (found,) = bad(examine(shop, bounds=PATIENT, versions=lambda _: [old]))["schema"]
    assert (found.severity, "holdfast db upgrade" in str(found.fix)) == (Severity.CRITICAL, True)


def test_what_may_not_be_read_is_named_and_the_rest_is_seen(postgres: Postgres) -> None:
    """A role without rights on one table sees the others; there is no traceback."""
    engine = open_database(postgres.database("status_rights"))
    migrated(engine)
    with engine.begin() as db:
        db.execute(text("DROP ROLE IF EXISTS onlooker"))
        db.execute(text("CREATE ROLE onlooker LOGIN"))
        db.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO onlooker"))
        db.execute(text("REVOKE SELECT ON holdfast_saga FROM onlooker"))
    role = open_database(engine.url.set(username="onlooker").render_as_string(hide_password=False))
    found = examine(role, bounds=PATIENT)
    unseen = [one for one in found.findings if one.severity is Severity.UNSEEN]
    assert [one.check for one in unseen] == ["sagas"]
    assert "permission denied" in unseen[0].text
    assert "dead letters" in {one.check for one in found.findings if not one.severity}
    role.dispose()
    with engine.begin() as db:
        db.execute(text("DROP OWNED BY onlooker"))
        db.execute(text("DROP ROLE onlooker"))
    engine.dispose()


@pytest.mark.chaos
def test_a_look_that_hangs_is_given_up_and_the_rest_is_seen(postgres: Postgres) -> None:
    """Somebody has locked a table; the answer comes all the same, and says what is missing."""
    engine = open_database(postgres.database("status_locked"))
    migrated(engine)
    with engine.begin() as db:
        db.execute(text("LOCK TABLE holdfast_saga IN ACCESS EXCLUSIVE MODE"))
        found = examine(engine, bounds=LookBounds(seconds=30.0))
    unseen = [one for one in found.findings if one.severity is Severity.UNSEEN]
    assert "sagas" in [one.check for one in unseen]
    assert all("within 30 s" in one.text for one in unseen)
    assert all("--within" in str(one.fix) for one in unseen)
    wait_until(lambda: not _looking(), what="the look that hung comes to its end")
    engine.dispose()


def _looking() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-look")]


def test_a_broker_that_is_down_is_named_and_the_database_is_seen(tmp_path: Path) -> None:
    """And so the other way round; the exit code says that something is down."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    migrated(engine)
    engine.dispose()
    words = ("--within", "60s", "--json")
    urls = {"HOLDFAST_DATABASE": "sqlite:///shop.db", "HOLDFAST_BROKER": "redis://127.0.0.1:1/0"}
    done = shell("status", *words, cwd=tmp_path, **urls)
    told = json.loads(done.stdout)
    assert (done.returncode, told["areas"][0]["area"], told["severity"]) == (3, "broker", "down")
    assert "dead letters" in [area["area"] for area in told["areas"]]
    down = {"HOLDFAST_DATABASE": "mysql+pymysql://u:hunter2@127.0.0.1:1/shop",
            "HOLDFAST_BROKER": "memory:"}  # fmt: skip
    done = shell("doctor", *words, cwd=tmp_path, **down)
    told = json.loads(done.stdout)
    assert done.returncode == 3
    assert [one["check"] for one in told if one["severity"] == "down"] == ["database"]
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("driver", ["kafka", "confluent"])
def test_the_copies_of_a_topic_are_looked_at(kafka: Kafka, tmp_path: Path, driver: str) -> None:
    """On one broker one copy is no complaint; the figures are told by both clients."""
    url = f"{kafka.url}?driver={driver}" if driver == "confluent" else kafka.url
    broker = connect(url)
    broker.create_topic(f"status-{driver}", partitions=3)
    powers = BrokerPowers.of(broker)
    kept = powers.settings([f"status-{driver}", "status-nobody"])
    assert powers.servers() == 1
    broker.close()
    one = kept[f"status-{driver}"]
    assert (set(kept), one.replicas, one.in_sync) == ({f"status-{driver}"}, 1, 1)
    assert one.least_in_sync == 1


def _judged(**kept: Any) -> list[Severity]:
    servers = kept.pop("servers", 3)
    return [one.severity for one in judged_copies("orders", TopicSettings(**kept), servers)]


def test_copies_are_judged_by_what_a_lost_broker_takes_with_it() -> None:
    """One copy among several brokers, one that suffices, none that may be missing, too few."""
    assert _judged(replicas=3, in_sync=3, least_in_sync=2) == []
    assert _judged(replicas=1, in_sync=1, least_in_sync=1, servers=1) == []
    assert _judged(replicas=1, in_sync=1, least_in_sync=1) == [Severity.WARNING]
    assert _judged(replicas=3, in_sync=3, least_in_sync=1) == [Severity.WARNING]
    assert _judged(replicas=3, in_sync=3, least_in_sync=3) == [Severity.WARNING]
    assert _judged(replicas=3, in_sync=1, least_in_sync=2) == [Severity.CRITICAL]


def test_a_group_that_nobody_reads_for_is_named(tmp_path: Path) -> None:
    """Its lag is told by the broker; the group is known from the inbox."""
    engine = open_database(f"sqlite:///{tmp_path}/shop.db")
    migrated(engine)
    with Session(engine) as session, session.begin():
        Inbox(window="14d").claim(session, "billing/orders", "1")
    url = f"sqlite:///{tmp_path}/broker.db"
    broker = connect(url)
    broker.create_topic("orders")
    broker.create_group("orders", "billing")
    sink = broker.sink()
    sink.publish([Message.new("orders", b"{}", key=f"k{number}") for number in range(3)])
    sink.close()
    broker.close()
    (found,) = bad(examine(engine, broker=url, bounds=PATIENT))["lag"]
    engine.dispose()
    assert (found.facts["lag"], found.severity) == (3, Severity.WARNING)
    assert "nobody is a member" in found.text
    assert "holdfast lag --group billing" in str(found.fix)


def test_lag_that_retention_will_delete_is_critical() -> None:
    """Before it is gone: with the time that is left, and the topic."""
    lane = LaneLag(
        lane=Lane("orders", 0), progress=LaneProgress(unsettled=5), seconds=6.5 * 86400,
        change=None, members=1, retention=7 * 86400.0, verdict=None,
    )  # fmt: skip
    (found,) = judged_lag("billing", [lane])
    assert found.severity is Severity.CRITICAL
    assert "retention deletes it from orders in 12 h" in found.text
    (fine,) = judged_lag("billing", [replace(lane, seconds=60.0)])
    assert fine.severity is Severity.OK
    lost = replace(lane, seconds=60.0, progress=LaneProgress(unsettled=5, deleted=2))
    assert [one.severity for one in judged_lag("billing", [lost])][1:] == [Severity.CRITICAL]
