"""What may be sent again: the message as it was, never a masked or redacted view of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.dlq.letter import DeadLetter
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message


class NotReplayable(ConfigurationError):
    """What is stored is not what was sent; nothing was sent."""


def restored(letter: DeadLetter, vault: Vault | None = None, *, edited: bool = False) -> Message:
    """Return the message of *letter* with its sealed fields opened.

    *edited* says that an edit has put redacted fields back. `NotReplayable` when the bytes
    would not be the original's: redacted, sealed without a *vault*, forgotten, or of a
    newer envelope than this version reads.
    """
    governance = letter.governance
    if letter.newer is not None:
        raise NotReplayable(
            f"{letter.dlq_id} has an envelope of version {letter.schema_version}: upgrade "
            "Holdfast to replay it"
        )
    if governance.redacted and not edited:
        raise NotReplayable(
            f"{letter.dlq_id} lacks the redacted fields {', '.join(governance.redacted)}: put "
            "them back with  holdfast dlq edit  first, or discard it"
        )
    if not governance.sealed:
        return letter.message
    if vault is None:
        raise NotReplayable(
            f"{letter.dlq_id} has encrypted fields ({', '.join(governance.sealed)}): give the "
            "vault's master key to replay it"
        )
    payload = vault.open(letter.message.payload, governance.sealed, governance.subject or "")
    return letter.message.with_(payload=payload)
