"""Origin: what is the same for every failure of one consumer, and how it protects data."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.dlq.letter import Governance
from holdfast.dlq.redaction import SCRUBBED, Redaction, within
from holdfast.errors import ConfigurationError
from holdfast.scrubbing import clean

if TYPE_CHECKING:
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

log = logging.getLogger("holdfast.dlq")
_MOST_NAME = 255
UNKNOWN = "(unknown)"
"""The subject of fields in messages that do not say whose they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What is the same for every failure of one consumer: who it is, and how it protects data.

    *tenant*, *entity* and *subject* name the header, or with a leading `$.` the payload
    field, that says whose message it is. *fields* are encrypted by the *vault* with the
    subject's own key; with that of `(unknown)` in a message that does not say. A payload that
    is not JSON is encrypted whole, or removed where there are only fields to redact.
    """

    service_version: str = ""
    git_sha: str = ""
    host: str = ""
    broker: str = ""
    tenant: str | None = None
    entity: str | None = None
    subject: str | None = None
    redaction: Redaction = SCRUBBED
    vault: Vault | None = None
    fields: tuple[str, ...] = ()
    commutative: bool = False
    """Whether the handler's messages of one key may take effect in any order."""
    retention: float | None = None
    """Seconds after its failure from which on a message may go, once it is closed; None: as
    long after its closing as the store says."""

    def __post_init__(self) -> None:
        if self.fields and self.vault is None:
            raise ConfigurationError("fields are to be encrypted, but no vault holds the keys")
        if self.fields and self.subject is None:
            raise ConfigurationError("fields are encrypted per subject: say where it is, subject=…")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The paths whose values are removed or encrypted."""
        return self.redaction.paths + self.fields

    def over(self, other: Origin) -> Origin:
        """Return this origin with what *other* says wherever it says nothing itself."""
        silent = {
            field.name: getattr(other, field.name)
            for field in fields(self)
            if getattr(self, field.name) == field.default
        }
        return replace(self, **silent)


NOWHERE = Origin()


def is_opaque(payload: bytes | None, origin: Origin) -> bool:
    """Whether *payload* holds fields to hide that cannot be told apart."""
    return within(payload, origin.hidden) != origin.hidden


def protected(message: Message, origin: Origin) -> tuple[Message, Governance]:
    """Return *message* as it may be kept, and what was done to it."""
    known = _Fields(message)
    subject = known.find(origin.subject)
    payload = message.payload
    redacted: tuple[str, ...] = ()
    sealed: tuple[str, ...] = ()
    opaque = is_opaque(payload, origin)
    if opaque:
        log.warning("message %s is not JSON, its fields cannot be told apart: all of it is %s",
                    message.id, "encrypted" if origin.fields else "removed")  # fmt: skip
    if not (opaque and origin.fields):  # what a key can open is better than nothing
        payload, redacted = origin.redaction.apply(payload)
    if origin.vault is not None and origin.fields:
        # A message that lacks its subject is just the kind that fails: it has secrets too.
        whose = UNKNOWN if subject is None else subject
        payload, sealed, gone = origin.vault.seal_or_remove(
            payload, origin.fields, whose, made=message.time, message_id=message.id
        )
        redacted += gone
        if subject is None and sealed:
            log.warning("message %s does not say whose it is (%s): its fields are encrypted for %s",
                        message.id, origin.subject, UNKNOWN)  # fmt: skip
            subject = UNKNOWN
    if payload is not message.payload:
        message = message.with_(payload=payload)
    return message, Governance(
        tenant=known.find(origin.tenant),
        entity_ref=known.find(origin.entity),
        subject=subject,
        redacted=redacted,
        sealed=sealed,
    )


class _Fields:
    """Looks up what a header or a payload field says; decodes the payload at most once."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self._body: Any = None

    def find(self, name: str | None) -> str | None:
        """Return the text of *name*, or None."""
        if name is None:
            return None
        if not name.startswith("$."):
            text = self._message.headers.text(name)
            return None if text is None else clean(text)[:_MOST_NAME]
        if self._body is None:
            self._body = {}
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._body = msgspec.json.decode(self._message.payload or b"{}")
        value = self._body
        for part in name[2:].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return None if value is None else clean(str(value))[:_MOST_NAME]
