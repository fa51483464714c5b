"""Free loopback ports."""

import random
import socket

HOST = "127.0.0.1"
# Below Linux's ephemeral range: no outgoing connection takes the port while its server is down.
_CANDIDATES = range(20_000, 32_000)
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a loopback port nobody listens on, and which no other test run will choose.

    It stays claimed while its server is down, until this process ends.
    """
    while True:
        port = random.choice(_CANDIDATES)
        if _is_claimed(port) and _is_free(port):
            return port


def _is_claimed(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX)
    try:
        # An abstract address has one owner on this machine, and goes with it.
        claim.bind(f"\0holdfast-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
