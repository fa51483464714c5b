"""Whether a server that cannot be reached would answer with, or without, TLS.

Redis does not say: in plain it waits for the end of what it takes for a command, over TLS it
just hangs up. Without a second try such a mistake looks like an outage.
"""

from __future__ import annotations

import socket
import ssl

_SECONDS = 2.0


def mismatch(host: str, port: int, *, is_tls: bool) -> str | None:
    """Return how the URL must change for the server at *host* to answer; None if not by this."""
    try:
        with socket.create_connection((host, port), _SECONDS) as plain:
            plain.settimeout(_SECONDS)
            if is_tls:
                return "write redis://, it speaks plain" if _speaks_plain(plain) else None
            return "write rediss://, it speaks TLS only" if _speaks_tls(plain) else None
    except OSError:
        return None


def _speaks_plain(connection: socket.socket) -> bool:
    connection.sendall(b"PING\r\n")
    return connection.recv(1) in (b"+", b"-")


def _speaks_tls(connection: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nothing is sent: only the fact of an answer matters
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(connection):
        return True
