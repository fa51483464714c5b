"""The history of the saga tables, as Alembic revisions of the branch `sagas`."""
