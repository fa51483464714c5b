"""The relay: committed rows come in, messages that the broker took go out, and then the rows go.

An engine moves them one step at a time, at least once and in order per key; `Relay` keeps it
going through outages, and `RelayService` puts database, broker, probes and metrics around it.
"""
