"""What a consumer can be told of a delivery."""

from __future__ import annotations

ACK = b"+ACK"
NAK = b"-NAK"
TERM = b"+TERM"
PROGRESS = b"+WPI"
Answer = tuple[str, bytes]
"""What to tell the server of a delivery: its reply subject, and one of the words above."""


def nak_after(seconds: float) -> bytes:
    """Return the word that gives a message back for *seconds*."""
    return b'%s {"delay": %d}' % (NAK, seconds * 1_000_000_000)
