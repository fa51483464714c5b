"""Run by Alembic; what to run on comes from `holdfast.cli.migrations.history`."""

from __future__ import annotations

from alembic import context

given = context.config.attributes
context.configure(**given["configure"])
with context.begin_transaction():
    context.run_migrations()
