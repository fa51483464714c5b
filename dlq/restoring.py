"""What may be sent again: the message as it was, never a masked or redacted view of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.dlq.redaction import redacted_in
from holdfast.dlq.vault import is_sealed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.dlq.letter import DeadLetter, Governance
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message


class NotReplayable(ConfigurationError):
    """What is stored is not what was sent; nothing was sent."""


def restored(letter: DeadLetter, vault: Vault | None = None, *, edited: bool = False) -> Message:
    """Return the message of *letter* with its sealed fields opened.

    *edited* says that an edit may have put redacted fields back. `NotReplayable` when the bytes
    would not be the original's: redacted, sealed without a *vault*, forgotten, or of a
    newer envelope than this version reads.
    """
    governance = letter.governance
    if letter.newer is not None:
        raise NotReplayable(
            f"{letter.dlq_id} has an envelope of version {letter.schema_version}: upgrade "
            "Holdfast to replay it"
        )
    gaps = governance.redacted
    if edited:
        gaps = redacted_in(letter.message.payload, gaps)
    if gaps:
        raise NotReplayable(
            f"{letter.dlq_id} lacks the redacted fields {', '.join(gaps)}: put "
            "them back with  holdfast dlq edit  first, or discard it"
        )
    payload = opened(letter.message.payload, governance, vault, letter.message.id)
    if payload is letter.message.payload:
        return letter.message
    return letter.message.with_(payload=payload)


def opened(
    payload: bytes | None, governance: Governance, vault: Vault | None, message_id: str
) -> bytes | None:
    """Return the *payload* of a message with its sealed fields readable; the same if it has none.

    `NotReplayable` when that takes a *vault*, `Forgotten` when the subject's key is gone.
    """
    if not governance.sealed or not is_sealed(payload):
        return payload
    fields = ", ".join(governance.sealed)
    if vault is None:
        raise NotReplayable(
            f"it has encrypted fields ({fields}): give the vault's master key, by --master-key-file"
        )
    readable = vault.open(
        payload, governance.sealed, governance.subject or "", message_id=message_id
    )
    if is_sealed(readable):
        raise NotReplayable(
            f"not every encrypted field was found again ({fields}): put the values in with  "
            "holdfast dlq edit  first, or discard it"
        )
    return readable
