"""The archive: dead letters as partitioned files, each once, added to bit by bit.

In come records of any source; out come Parquet files by day and a log of states. A state is
committed whole or not at all, so a killed job or a full disk leaves the one before it.
"""
