"""The history of the dead-letter tables, as Alembic revisions of the branch `dlq`."""
