"""The history of the table of lineage, as Alembic revisions of the branch `tracing`."""
