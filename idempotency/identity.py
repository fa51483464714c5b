"""What a consumer, a message and its content are called in the tables: short, fixed, bytes."""

from __future__ import annotations

import hashlib

from holdfast.ids import derived_id
from holdfast.message import SOURCE_END

KEY_BYTES = 16
DIGEST_BYTES = 8
_UUID_LENGTH, _HEX_LENGTH = 36, 32
_blake2b = hashlib.blake2b
_TOMBSTONE = _blake2b(digest_size=DIGEST_BYTES, person=b"tombstone").digest()
UNCOMPARED = bytes(DIGEST_BYTES)
"""Stands for content that is not to be compared: the user's key says what is the same."""


def consumer_key(consumer: str) -> int:
    """Return the number of *consumer*: it follows from the name, so nobody has to hand it out."""
    digest = _blake2b(consumer.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def message_key(identity: str) -> bytes:
    """Return the 16 bytes of a message's *identity*: a UUID's own, or a digest.

    A UUID keeps its order, also behind a source: rows that are written together lie together.
    """
    _, end, message_id = identity.rpartition(SOURCE_END)
    if end:
        digest = _blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
        ordered = _uuid(message_id)
        return digest if ordered is None else ordered[: KEY_BYTES // 2] + digest[KEY_BYTES // 2 :]
    known = _uuid(identity)
    if known is not None:
        return known
    return _blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def _uuid(message_id: str) -> bytes | None:
    """Return the bytes of a UUID in its plain spelling, None for any other text."""
    if len(message_id) == _UUID_LENGTH and message_id[8] == "-" == message_id[13]:
        digits = message_id.replace("-", "")
        if len(digits) == _HEX_LENGTH:
            try:
                found = bytes.fromhex(digits)
            except ValueError:
                return None
            # Upper case is another id, and fromhex skips blanks.
            return found if found.hex() == digits else None
    return None


def content_digest(payload: bytes | None) -> bytes:
    """Return the digest by which other content under the same id is noticed."""
    if payload is None:
        return _TOMBSTONE  # not the same as an empty payload
    return _blake2b(payload, digest_size=DIGEST_BYTES).digest()


def idempotency_key(consumer: str, message_id: str) -> str:
    """Return the key to hand to an external API: the same on every attempt at this message."""
    return derived_id("idempotency", consumer, message_id)
