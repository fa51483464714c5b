"""The history of the consumer tables, as Alembic revisions of the branch `consumer`."""
