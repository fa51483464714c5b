"""Spark jobs over dead letters: what outgrows one machine.

In comes a source of dead letters (files, the SQL store, a topic), out come archives, analyses
and replays, all by way of one record schema (`records`). Every job is partitioned, collects
nothing on the driver but its summary, and can be run again after any crash.
"""
