"""Free loopback ports."""

import random
import socket

HOST = "127.0.0.1"
# Below Linux's ephemeral range: no outgoing connection takes the port while its server is down.
_CANDIDATES = range(20_000, 32_000)


def free_port() -> int:
    """Return a loopback port nobody listens on, which stays free while its server restarts."""
    while True:
        port = random.choice(_CANDIDATES)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
