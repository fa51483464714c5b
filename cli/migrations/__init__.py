"""One Alembic environment for the tables of every Holdfast package."""

from holdfast.cli.migrations.history import Branch, Migrations, ddl

__all__ = ["Branch", "Migrations", "ddl"]
