"""Questions about many dead letters: what failed, since when, whom it hits.

In come records (files, the SQL store, topics), out come the same answers from either engine:
DuckDB in this process, or Spark on a cluster. Fingerprints are made by the rules of `dlq/`, which
no engine writes again; anomalies and clusters are decided by the same functions.
"""
