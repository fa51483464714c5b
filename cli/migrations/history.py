"""Which revisions there are, which a database has, and how it gets the rest."""

from __future__ import annotations

import io
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from holdfast.consumer.schema import metadata as consumer_metadata
from holdfast.dlq.store.schema import metadata as dlq_metadata
from holdfast.errors import ConfigurationError
from holdfast.idempotency import metadata as idempotency_metadata
from holdfast.outbox import metadata as outbox_metadata
from holdfast.sagas.schema import metadata as sagas_metadata
from holdfast.tracing.schema import metadata as tracing_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import MetaData
    from sqlalchemy.engine import Connection, Engine

VERSION_TABLE = "holdfast_alembic_version"
"""A table of our own, so that the application's Alembic and ours never meet."""

PACKAGES: dict[str, MetaData] = {
    "holdfast.consumer.migrations": consumer_metadata,
    "holdfast.dlq.migrations": dlq_metadata,
    "holdfast.idempotency.migrations": idempotency_metadata,
    "holdfast.outbox.migrations": outbox_metadata,
    "holdfast.sagas.migrations": sagas_metadata,
    "holdfast.tracing.migrations": tracing_metadata,
}
"""Where the revisions of each branch are, and the tables they must lead to."""

DIALECTS = ("postgresql", "mysql", "mariadb", "sqlite")
_LOCK = 0x686F6C64  # "hold": one upgrade at a time
_LOCK_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The tables of one package: the revision they have and the newest there is."""

    name: str
    has: str | None
    newest: str

    @property
    def is_current(self) -> bool:
        """Whether nothing is left to upgrade."""
        return self.has == self.newest


class Migrations:
    """The schema of Holdfast's tables in one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def upgrade(self) -> list[Branch]:
        """Bring every table to its newest revision; return the branches that moved.

        Several upgrades at once take turns. PostgreSQL and SQLite get all or nothing;
        MySQL commits each statement, and an upgrade that broke off is simply run again.
        """
        with self._engine.connect() as db, _alone(db):
            before = self._branches(db)
            _run(_config({"connection": db, "version_table": VERSION_TABLE}), "heads")
            after = self._branches(db)
        return [new for old, new in zip(before, after, strict=True) if old != new]

    def branches(self) -> list[Branch]:
        """Return where each package's tables stand."""
        with self._engine.connect() as db:
            return self._branches(db)

    def _branches(self, db: Connection) -> list[Branch]:
        script = ScriptDirectory.from_config(_config({}))
        context = MigrationContext.configure(db, opts={"version_table": VERSION_TABLE})
        try:
            has = {_label(script, head): head for head in context.get_current_heads()}
        except CommandError as error:
            raise ConfigurationError(
                f"the database has a revision that this version does not know ({error}): "
                "install the Holdfast version that made it, or a newer one"
            ) from error
        newest = {_label(script, head): head for head in script.get_heads()}
        return [
            Branch(name=name, has=has.get(name), newest=head)
            for name, head in sorted(newest.items())
        ]


def ddl(dialect: str, *, since: str | None = None) -> str:
    """Return the statements for a DBA to run, after revision *since* or from nothing."""
    if dialect not in DIALECTS:
        raise ConfigurationError(f"dialect {dialect!r}: use one of {', '.join(DIALECTS)}")
    written = io.StringIO()
    config = _config(
        {"dialect_name": dialect, "version_table": VERSION_TABLE, "literal_binds": True},
        output=written,
    )
    _run(config, "heads" if since is None else f"{since}:heads", sql=True)
    return written.getvalue()


def _run(config: Config, revision: str, *, sql: bool = False) -> None:
    try:
        command.upgrade(config, revision, sql=sql)
    except CommandError as error:
        raise ConfigurationError(f"no upgrade to {revision!r}: {error}") from error


def _config(configure: dict[str, Any], *, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output, attributes={"configure": configure})
    folders = [str(files(package)) for package in PACKAGES]
    config.set_main_option("script_location", _literal(str(files("holdfast.cli.migrations"))))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", _literal("\n".join(folders)))
    return config


def _literal(path: str) -> str:
    return path.replace("%", "%%")  # ConfigParser would interpolate it


def _label(script: ScriptDirectory, revision: str) -> str:
    found = script.get_revision(revision)
    labels: Sequence[str] = sorted(found.branch_labels) if found is not None else ()
    return labels[0] if labels else revision


@contextmanager
def _alone(db: Connection) -> Iterator[None]:
    """Open a transaction and keep other upgrades out until it has committed."""
    match db.dialect.name:
        case "postgresql":
            with db.begin():
                db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
                yield
        case "mysql" | "mariadb":
            with _named_lock(db), db.begin():
                yield
        case _:  # SQLite: one writer at a time
            with db.begin():
                yield


@contextmanager
def _named_lock(db: Connection) -> Iterator[None]:
    name = {"lock": f"holdfast-{_LOCK}"}
    got = db.execute(text("SELECT GET_LOCK(:lock, :most)"), {**name, "most": _LOCK_SECONDS})
    if not got.scalar():
        raise ConfigurationError(
            f"another upgrade has been running for {_LOCK_SECONDS} s: see SHOW PROCESSLIST"
        )
    db.commit()
    try:
        yield
    finally:
        with suppress(DBAPIError):  # a connection that is gone has given the lock up
            db.execute(text("SELECT RELEASE_LOCK(:lock)"), name)
            db.commit()
