"""Encrypted fields of a message that is edited: they are encrypted in what is stored, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select

from holdfast.columns import cut
from holdfast.dlq.fields import changed
from holdfast.dlq.redaction import within
from holdfast.dlq.schema import subject_key
from holdfast.dlq.vault import is_sealed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

    from holdfast.dlq.letter import Governance
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message


class Secrets:
    """Keeps what is encrypted in the store encrypted; outside of transactions, for it reads."""

    def __init__(self, engine: Engine, vault: Vault | None) -> None:
        self._engine = engine
        self._vault = vault

    def opened(
        self, payload: bytes | None, governance: Governance, message_id: str
    ) -> bytes | None:
        """Return *payload* as a function may see it: readable with the vault, else as it is."""
        if self._vault is None or not governance.sealed:
            return payload
        subject = governance.subject or ""
        return self._vault.open(payload, governance.sealed, subject, message_id=message_id)

    def sealed(self, after: Message, before: bytes | None, governance: Governance) -> bytes | None:
        """Return the payload of *after* as it may be stored in place of *before*.

        New values of encrypted fields are encrypted too, which takes the vault. Only those
        of a subject that was forgotten are not: there is no key any more.
        """
        payload = after.payload
        if within(payload, governance.sealed) != governance.sealed:
            raise ConfigurationError(
                "the new payload is not JSON, so its encrypted fields cannot be told apart: give "
                "JSON, or discard the message"
            )
        old = _values(before, governance.sealed)
        new = _values(payload, governance.sealed)
        fresh = [path for path in new if path not in old or new[path] != old[path]]
        if not fresh:
            return payload
        for path in fresh:
            if is_sealed(new[path]):
                raise ConfigurationError(
                    f"the encrypted field {path} was changed: leave it as it is, or put its new "
                    "value there in full"
                )
        if self._is_forgotten(governance.subject or ""):
            return payload
        if self._vault is None:
            raise ConfigurationError(
                f"{', '.join(fresh)}: encrypted in this message, so the new value must be too; "
                "give the vault's master key, by --master-key-file"
            )
        subject = governance.subject or ""
        return self._vault.seal(payload, tuple(fresh), subject, message_id=after.id)[0]

    def _is_forgotten(self, subject: str) -> bool:
        query = select(subject_key.c.wrapped).where(subject_key.c.subject == cut(subject))
        with self._engine.connect() as db:
            row = db.execute(query).first()
        return row is not None and row.wrapped is None


def _values(payload: bytes | None, paths: tuple[str, ...]) -> dict[str, bytes]:
    """Return the values at *paths* by their place, as they are written."""
    found: list[bytes] = []

    def look(value: bytes) -> bytes:
        found.append(value)
        return value

    _, places = changed(payload, paths, look)
    return dict(zip(places, found, strict=True))
