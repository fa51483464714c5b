"""The migrations lead to the tables that the code expects, on every database."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, column, table, text, update
from sqlalchemy.orm import Session

from holdfast.brokers import connect
from holdfast.cli.migrations import Migrations, ddl, history
from holdfast.cli.migrations.history import PACKAGES, VERSION_TABLE
from holdfast.db.audit import Operator
from holdfast.db.engine import open_database
from holdfast.db.tables import MissingTables, missing_tables
from holdfast.dlq import DeadLetterStore, capture
from holdfast.dlq.replay import ReplayOptions, Selection, Sender, StopPolicy, freeze
from holdfast.errors import ConfigurationError
from holdfast.idempotency import create_tables as create_inbox_tables
from holdfast.message import Message
from holdfast.outbox import LeaseEngine, Outbox, Relay, create_tables
from holdfast.outbox.schema import metadata as outbox_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy.engine import Engine, Row

    from tests.servers import Postgres


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "mariadb-by-name"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Open a fresh and empty database of each kind."""
    kind = request.param.partition("-")[0]
    if kind == "sqlite":
        url = f"sqlite:///{tmp_path}/fresh.db"
    else:
        url = request.getfixturevalue(kind).database("migrations")
    if request.param == "mariadb-by-name":
        url = url.replace("mysql+", "mariadb+")
    engine = open_database(url)
    yield engine
    engine.dispose()


def differences(engine: Engine) -> list[object]:
    """Compare the database with the tables in the code, as `alembic revision` would."""
    both = MetaData()
    for metadata in PACKAGES.values():
        for one in metadata.tables.values():
            if one.name not in both.tables:  # the audit trail is everybody's
                one.to_metadata(both)
    options = {"compare_type": True, "compare_server_default": True}
    with engine.connect() as db:
        context = MigrationContext.configure(db, opts={**options, "version_table": VERSION_TABLE})
        return list(compare_metadata(context, both))


def test_the_migrations_make_exactly_the_tables_of_the_code(database: Engine) -> None:
    """No column, type or index differs after an upgrade."""
    moved = Migrations(database).upgrade()
    assert "outbox" in {branch.name for branch in moved}
    assert len(moved) == len(PACKAGES)
    assert differences(database) == []


def test_an_upgrade_run_again_does_nothing(database: Engine) -> None:
    """Deployments may run it each time."""
    migrations = Migrations(database)
    assert not any(branch.is_current for branch in migrations.branches())
    migrations.upgrade()
    assert migrations.upgrade() == []
    assert all(branch.is_current for branch in migrations.branches())


def test_a_difference_is_noticed(database: Engine) -> None:
    """The comparison that the first test trusts is not blind."""
    Migrations(database).upgrade()
    with database.begin() as db:
        db.execute(text("DROP TABLE holdfast_audit_head"))
        db.execute(text("ALTER TABLE holdfast_outbox_relay ADD COLUMN extra INTEGER"))
    assert {difference[0] for difference in differences(database)} == {"add_table", "remove_column"}  # type: ignore[index]


def test_tables_that_were_created_without_migrations_are_adopted(database: Engine) -> None:
    """Who began with `create_tables` can go over to migrations without losing an event."""
    create_tables(database)
    create_inbox_tables(database)
    with Session(database) as session, session.begin():
        Outbox().add(session, {"n": 1}, topic="orders", key="k")
    Migrations(database).upgrade()
    assert differences(database) == []
    with database.connect() as db:
        assert db.execute(text("SELECT count(*) FROM holdfast_outbox")).scalar_one() == 1


def test_the_version_of_the_application_is_left_alone(database: Engine) -> None:
    """The application's own `alembic_version` is neither read nor written."""
    with database.begin() as db:
        db.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        db.execute(text("INSERT INTO alembic_version VALUES ('their-own')"))
    Migrations(database).upgrade()
    with database.connect() as db:
        assert db.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == [
            "their-own"
        ]


def test_upgrades_at_the_same_time_take_turns(database: Engine) -> None:
    """Several pods that start at once all succeed, and one does the work."""
    moved: list[int] = []
    start = threading.Barrier(4)

    def upgrade() -> None:
        start.wait()
        moved.append(len(Migrations(database).upgrade()))

    threads = [threading.Thread(target=upgrade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == [0, 0, 0, len(PACKAGES)]
    assert differences(database) == []


def test_the_printed_statements_make_the_same_tables(database: Engine) -> None:
    """A DBA who runs `holdfast db sql` gets what an upgrade makes, and needs none after it."""
    script = ddl(database.dialect.name)
    statements = [part.strip() for part in script.split(";\n")]
    with database.begin() as db:
        for statement in statements:
            lines = [line for line in statement.splitlines() if not line.startswith("--")]
            if (body := "\n".join(lines).strip()) and body not in ("BEGIN", "COMMIT", "COMMIT;"):
                db.exec_driver_sql(body.removesuffix(";"))
    assert differences(database) == []
    assert Migrations(database).upgrade() == []


def test_a_relay_without_tables_says_what_to_run(database: Engine) -> None:
    """The sidecar's error names the command; nothing waits for a table that never comes."""
    broker = connect("memory:")
    sink = broker.sink()
    with pytest.raises(MissingTables, match="holdfast db upgrade"):
        Relay(LeaseEngine(database, sink)).run()
    with database.connect() as db:
        assert "holdfast_outbox" in missing_tables(db, outbox_tables)
    sink.close()
    broker.close()


def test_a_revision_from_the_future_is_refused(database: Engine) -> None:
    """An older Holdfast does not touch tables that a newer one made."""
    Migrations(database).upgrade()
    with database.begin() as db:
        newer = "SET version_num = 'outbox_9999' WHERE version_num LIKE 'outbox%'"
        db.execute(text(f"UPDATE {VERSION_TABLE} {newer}"))
    with pytest.raises(ConfigurationError, match="newer"):
        Migrations(database).upgrade()
    with pytest.raises(ConfigurationError, match="newer"):
        Migrations(database).branches()


def test_postgres_vacuums_the_hot_table_by_a_fixed_number(postgres: Postgres) -> None:
    """A backlog of millions does not put the vacuum off, and no numbers are cached."""
    database = open_database(postgres.database("vacuumed"))
    Migrations(database).upgrade()
    with database.connect() as db:
        query = "SELECT reloptions FROM pg_class WHERE relname = 'holdfast_outbox'"
        options = db.execute(text(query)).scalar_one()
        cached = db.execute(text("SELECT cache_size FROM pg_sequences")).scalars().all()
    database.dispose()
    assert "autovacuum_vacuum_scale_factor=0" in options
    assert "autovacuum_vacuum_threshold=5000" in options
    assert set(cached) == {1}


def test_numbers_are_never_used_twice_on_sqlite(tmp_path: Path) -> None:
    """The order of events would break if a deleted row's number came back."""
    database = open_database(f"sqlite:///{tmp_path}/counted.db")
    Migrations(database).upgrade()
    with database.connect() as db:
        made = db.execute(text("SELECT sql FROM sqlite_master WHERE name = 'holdfast_outbox'"))
        assert "AUTOINCREMENT" in made.scalar_one()
    database.dispose()


def test_an_unknown_dialect_is_refused() -> None:
    """The error lists the databases that are supported."""
    with pytest.raises(ConfigurationError, match="postgresql, mysql, mariadb, sqlite"):
        ddl("oracle")


def test_a_downgrade_is_refused_before_anything_is_dropped(database: Engine) -> None:
    """The tables may hold events that nobody has published yet."""
    Migrations(database).upgrade()
    with Session(database) as session, session.begin():
        Outbox().add(session, {"n": 1}, topic="orders", key="k")
    with database.connect() as db:
        config = history._config({"connection": db, "version_table": VERSION_TABLE})
        with pytest.raises(ConfigurationError, match="holdfast relay --once"):
            command.downgrade(config, "outbox@base")
    with database.connect() as db:
        assert missing_tables(db, outbox_tables) == []
        assert db.execute(text("SELECT count(*) FROM holdfast_outbox")).scalar() == 1


def test_a_replay_plan_under_way_goes_on_after_the_upgrade(
    database: Engine, tmp_path: Path
) -> None:
    """Its items get the numbers of their letters, and what was sent is not sent again."""
    Migrations(database).upgrade()
    letters = [
        capture(Message.new("orders", b"{}", key="k", ids=lambda n=n: f"m-{n}"),
                ValueError("bad"), group="billing", handler="shop.bill")
        for n in range(3)
    ]  # fmt: skip
    DeadLetterStore(database).put_all(letters)
    terms = ReplayOptions(policy=StopPolicy(canary=0, ramp=(), patience=0.01))
    who = Operator(actor="ada", reason="fixed")
    plan = freeze(database, Selection(consumer_group="billing"), terms, who).plan
    before = _rewound(database, plan.id)
    Migrations(database).upgrade()
    with database.connect() as db:
        assert db.execute(text("SELECT seq FROM holdfast_replay_item ORDER BY position")).all() == (
            before
        )
    assert differences(database) == []
    broker = connect(f"sqlite:///{tmp_path}/broker.db")
    broker.create_topic("orders", partitions=1)
    assert Sender(database, broker).run(plan.id).kind == "unconfirmed"
    source = broker.source(["orders.billing.replay"], group="billing")
    assert [delivery.message.id for delivery in source.poll(10, 5.0)] == ["m-1", "m-2"]
    source.close()
    broker.close()


def _rewound(database: Engine, plan_id: str) -> list[Row[Any]]:
    """Make the tables those of dlq_0003, with one item sent; return the numbers of the letters."""
    with database.begin() as db:
        numbers = db.execute(text("SELECT seq FROM holdfast_replay_item ORDER BY position")).all()
        db.execute(
            text("UPDATE holdfast_replay_plan SET sent = 1, state = 'running' WHERE id = :id"),
            {"id": plan_id},
        )
        operations = Operations(MigrationContext.configure(db))
        item = "holdfast_replay_item"
        operations.create_index(f"{item}_state", item, ["plan_id", "state"])
        operations.drop_index(f"{item}_state_sent", item)
        operations.drop_column(item, "seq")
        operations.drop_index("holdfast_dlq_message_correlation", "holdfast_dlq_message")
        operations.drop_column("holdfast_dlq_message", "exact")
        versions = table(VERSION_TABLE, column("version_num"))
        ours = versions.c.version_num.startswith("dlq_")
        assert db.execute(update(versions).where(ours).values(version_num="dlq_0003")).rowcount == 1
    return list(numbers)


@pytest.mark.parametrize("branch", ["consumer", "dlq", "idempotency", "sagas", "tracing"])
def test_every_branch_refuses_a_downgrade(tmp_path: Path, branch: str) -> None:
    """Each says what would be lost and what to do instead."""
    database = open_database(f"sqlite:///{tmp_path}/d.db")
    Migrations(database).upgrade()
    with database.connect() as db:
        config = history._config({"connection": db, "version_table": VERSION_TABLE})
        with pytest.raises(ConfigurationError, match="by hand"):
            command.downgrade(config, f"{branch}@base")
    database.dispose()
