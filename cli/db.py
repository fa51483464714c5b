"""`holdfast db`: the tables in a database."""

from typing import Annotated

import typer
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from holdfast.cli.display import print_json, print_table, say
from holdfast.cli.exits import EXIT_NOT_FOUND
from holdfast.cli.options import AnyDatabase, Config, Database, Json
from holdfast.db.engine import open_database
from holdfast.errors import ConfigurationError
from holdfast.urls import mask

app = typer.Typer(help="Create and upgrade Holdfast's tables.", no_args_is_help=True)


@app.command(epilog="Example: holdfast db upgrade --database sqlite:///shop.db")
def upgrade(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Bring the tables to the newest version; safe to run again, and by several at once.

    Holdfast keeps its own version table, so your application's Alembic is not touched.
    """
    from holdfast.cli.migrations import Migrations  # Alembic is slow to import

    engine = open_database(database)
    moved = Migrations(engine).upgrade()
    engine.dispose()
    if as_json:
        print_json([{"branch": branch.name, "revision": branch.has} for branch in moved])
        return
    for branch in moved:
        say(f"{branch.name}: now at {branch.has}")
    if not moved:
        say("nothing to do: the tables are up to date")


@app.command(epilog="Example: holdfast db current --database sqlite:///shop.db || echo pending")
def current(*, config: Config = None, database: Database, as_json: Json = False) -> None:
    """Show which version the tables have; exit with 1 when an upgrade is pending."""
    from holdfast.cli.migrations import Migrations

    engine = open_database(database)
    branches = Migrations(engine).branches()
    engine.dispose()
    if as_json:
        print_json([{"branch": b.name, "revision": b.has, "newest": b.newest} for b in branches])
    else:
        rows = [
            (b.name, b.has or "none", b.newest, "" if b.is_current else "run holdfast db upgrade")
            for b in branches
        ]
        print_table(("tables", "revision", "newest", ""), rows)
    if not all(branch.is_current for branch in branches):
        raise SystemExit(EXIT_NOT_FOUND)


@app.command(epilog="Example: holdfast db sql --dialect postgresql > holdfast.sql")
def sql(
    *,
    config: Config = None,
    dialect: Annotated[
        str | None, typer.Option(help="postgresql, mysql, mariadb or sqlite.")
    ] = None,
    database: AnyDatabase = None,
    since: Annotated[
        str | None, typer.Option(help="Leave out everything up to this revision.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the statements instead of running them, for a DBA to review; connects nowhere.

    The dialect is named, or taken from the URL of the database.
    """
    from holdfast.cli.migrations import ddl

    if dialect is None and database is None:
        raise ConfigurationError("give --dialect or --database: the statements differ")
    kind = _dialect(str(database)) if dialect is None else dialect
    script = ddl(kind, since=since)
    if as_json:
        print_json({"dialect": kind, "sql": script})
    else:
        typer.echo(script, nl=False)


def _dialect(database: str) -> str:
    try:
        return make_url(database).get_backend_name()
    except ArgumentError as error:
        raise ConfigurationError(f"{mask(database)!r} is not a database URL") from error
