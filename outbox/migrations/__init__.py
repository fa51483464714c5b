"""The history of the outbox tables, as Alembic revisions of the branch `outbox`."""
