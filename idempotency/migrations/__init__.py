"""The history of the idempotency tables, as Alembic revisions of the branch `idempotency`."""
