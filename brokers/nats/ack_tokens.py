"""What a consumer can be told of a delivery."""

from __future__ import annotations

ACK = b"+ACK"
NAK = b"-NAK"
TERM = b"+TERM"
PROGRESS = b"+WPI"
Answer = tuple[str, bytes]
"""What to tell the server of a delivery: its reply subject, and one of the words above."""


_DOTS = 8  # in a reply subject; one that names its domain has more


def tokens(reply: str) -> list[str]:
    """Return count, position, number, time and more of a delivery's reply subject.

    It is $JS.ACK.<stream>.<consumer>.<count>.<position>.<number>.<time>.<more>.
    """
    if reply.count(".") == _DOTS:
        return reply.rsplit(".", 5)[1:]
    return reply.split(".")[6:11]  # with domain and account before, and no meaning behind


def nak_after(seconds: float) -> bytes:
    """Return the word that gives a message back for *seconds*."""
    return b'%s {"delay": %d}' % (NAK, seconds * 1_000_000_000)
