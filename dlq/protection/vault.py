"""Field encryption with a key per data subject; forgetting the key erases the subject.

Each subject has a random AES-256 key, wrapped by the master key and kept in the database.
A sealed field is replaced by the text `sealed:v2:<base64>`, which opens only as this field of
this message; everything else of the payload stays readable, to the byte. A payload that is not
JSON is sealed whole. `forget` deletes the key: every copy of the fields, in the store, in
topics, in backups of them, is noise from then on. A subject that comes back later gets another
key, for messages that are newer than that.

What may be sent again: the message as it was, never a masked or redacted view of it.
"""

from __future__ import annotations

import hashlib
import os
from base64 import b64decode, b64encode
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sqlalchemy import select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit, Operator
from holdfast.db.sql import insert_ignoring
from holdfast.db.text import cut
from holdfast.db.transactions import committed
from holdfast.dlq.protection.redaction import changed, pattern, redacted_in, within, without_fields
from holdfast.dlq.store.schema import subject_key
from holdfast.errors import ConfigurationError
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.letter import DeadLetter, Governance
    from holdfast.message import Message


MARK: Final = "sealed:v2:"
_SEAL, _OLD_SEAL = b'"' + MARK.encode(), b'"sealed:v1:'
_SEALED = b'"sealed:v'
_NONCE = 12
_KEY_BYTES = 32


class Forgotten(ConfigurationError):
    """The subject's key is gone: its fields cannot be read any more, by anybody."""


class Vault:
    """Seals and opens fields; the master key is 32 bytes from your secret store."""

    def __init__(
        self,
        engine: Engine,
        master: bytes,
        *,
        clock: Clock = SYSTEM_CLOCK,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if len(master) != _KEY_BYTES:
            raise ConfigurationError(
                f"the master key has {len(master)} bytes: give 32 random ones, e.g. from "
                'python -c "import os; print(os.urandom(32).hex())"'
            )
        self._aead = driver("cryptography.hazmat.primitives.ciphers.aead", extra="crypto")
        self._engine = engine
        self._master = self._aead.AESGCM(master)
        self._clock = clock
        self._entropy = entropy

    def seal(
        self,
        payload: bytes | None,
        paths: tuple[str, ...],
        subject: str,
        *,
        made: datetime | None = None,
        message_id: str = "",
    ) -> tuple[bytes | None, tuple[str, ...]]:
        """Return *payload* with the fields at *paths* encrypted, and where they are.

        They open only as the fields of the message *message_id* that they are. All of it is
        encrypted if it is not JSON: its fields cannot be told apart.
        `Forgotten` if the subject was, unless the message was *made* later: then it came back.
        """
        if payload is None:
            return payload, ()
        key: list[Any] = []

        def hide(value: bytes, bound: bytes) -> bytes:
            if not key:
                key.append(self._aead.AESGCM(self._key_for(subject, made)))
            nonce = self._entropy(_NONCE)
            return _SEAL + b64encode(nonce + key[0].encrypt(nonce, value, bound)) + b'"'

        places: tuple[str, ...] = ()
        for path in within(payload, paths):
            # A star may stand for a name: bound is what a field is called, not who looks for it.
            _, found = changed(payload, (path,), lambda value: value)
            for place in found:
                bound = _bound(subject, place, message_id)
                payload, _ = changed(payload, (place,), partial(hide, bound=bound))
            places += found
        return payload, places

    def seal_or_remove(
        self,
        payload: bytes | None,
        paths: tuple[str, ...],
        subject: str,
        *,
        made: datetime,
        message_id: str = "",
    ) -> tuple[bytes | None, tuple[str, ...], tuple[str, ...]]:
        """Return *payload* with the fields sealed, or removed if the subject was forgotten."""
        try:
            return *self.seal(payload, paths, subject, made=made, message_id=message_id), ()
        except Forgotten:
            bare, gone = without_fields(payload, paths)
            return bare, (), gone

    def open(
        self,
        payload: bytes | None,
        paths: tuple[str, ...],
        subject: str,
        *,
        message_id: str = "",
    ) -> bytes | None:
        """Return *payload* with the sealed fields at *paths* readable again, for a replay.

        `Forgotten` when the subject's key is gone; what an edit has put in the place of a
        sealed field needs no key.
        """
        key: list[Any] = []

        def show(value: bytes, bound: bytes) -> bytes:
            if not value.startswith((_SEAL, _OLD_SEAL)):
                return value
            if not key:
                key.append(self._aead.AESGCM(self._known_key(subject)))
            try:
                packed = b64decode(value[len(_SEAL) : -1], validate=True)
            except ValueError as error:
                raise ConfigurationError(
                    "a sealed field was changed: edit it and put its value there in full"
                ) from error
            try:
                old = value.startswith(_OLD_SEAL)  # those are bound to the subject alone
                return self._decrypted(key[0], packed, subject.encode() if old else bound)
            except ConfigurationError:
                if self._row(subject).forgotten_at is not None:
                    raise _forgotten() from None  # this key is the one that it got later
                raise

        # What was sealed last is opened first: one field may be within another.
        for path in paths[::-1]:
            bound = _bound(subject, path, message_id)
            payload, _ = changed(payload, (path,), partial(show, bound=bound))
        return payload

    def forget(self, subject: str, operator: Operator) -> bool:
        """Delete the key of *subject*; return whether there was one."""
        return forget(self._engine, subject, operator, clock=self._clock)

    def _key_for(self, subject: str, made: datetime | None) -> bytes:
        """Return the key of *subject*, made now if it has none."""
        row = self._row(subject)
        forgotten_at = None if row is None else row.forgotten_at
        if forgotten_at is not None and made is not None and made.timestamp() <= forgotten_at:
            raise _forgotten()
        if row is None or (row.wrapped is None and made is not None):
            self._make_key(subject)
        return self._known_key(subject)

    def _make_key(self, subject: str) -> None:
        """Give *subject* a key unless somebody else was quicker."""
        own = self._entropy(_KEY_BYTES)
        nonce = self._entropy(_NONCE)
        values = {
            "wrapped": nonce + self._master.encrypt(nonce, own, subject.encode()),
            "made_at": self._clock.now().timestamp(),
        }
        new = {"subject": cut(subject), "forgotten_at": None, **values}
        bare = subject_key.c.subject == cut(subject), subject_key.c.wrapped.is_(None)

        def work(db: Connection) -> None:
            if db.execute(update(subject_key).where(*bare).values(**values)).rowcount == 0:
                db.execute(insert_ignoring(db, subject_key), new)

        committed(self._engine, work, clock=self._clock)

    def _known_key(self, subject: str) -> bytes:
        row = self._row(subject)
        if row is None:
            raise ConfigurationError(f"subject {subject!r} has no key in this database")
        if row.wrapped is None:
            raise _forgotten()
        return self._decrypted(self._master, bytes(row.wrapped), subject.encode())

    def _decrypted(self, key: Any, packed: bytes, bound: bytes) -> bytes:
        wrong = driver("cryptography.exceptions", extra="crypto").InvalidTag
        try:
            text: bytes = key.decrypt(packed[:_NONCE], packed[_NONCE:], bound)
        except (wrong, ValueError) as error:  # the latter for what is too short to be one
            raise ConfigurationError(
                "this is not the master key, or not the subject, the field or the message, that it "
                "was sealed with"
            ) from error
        return text

    def _row(self, subject: str) -> Any:
        with self._engine.connect() as db:
            query = select(subject_key).where(subject_key.c.subject == cut(subject))
            return db.execute(query).first()


def forget(
    engine: Engine, subject: str, operator: Operator, *, clock: Clock = SYSTEM_CLOCK
) -> bool:
    """Delete the key of *subject*, with an audit entry; return whether there was one.

    Needs no master key. The entry does not say who it was: only the operator's reason and
    ticket do. The digest in it has the destroyed key for its own, so nobody can try names.
    """

    def work(db: Connection) -> bool:
        where = (subject_key.c.subject == cut(subject), subject_key.c.wrapped.is_not(None))
        now = clock.now().timestamp()
        wrapped = db.execute(select(subject_key.c.wrapped).where(*where)).scalar()
        found = update(subject_key).where(*where).values(wrapped=None, forgotten_at=now)
        gone = db.execute(found).rowcount == 1
        digest = "(unknown)" if wrapped is None else _nameless(subject, bytes(wrapped))
        Audit(clock=clock).append(db, operator, "forget", digest, {"found": gone})
        return gone

    return committed(engine, work, clock=clock)


def _bound(subject: str, path: str, message_id: str) -> bytes:
    """Return what a sealed field belongs to; items of one list may change their places."""
    return msgspec.json.encode([subject, pattern(path), message_id])


def _nameless(subject: str, wrapped: bytes) -> str:
    return hashlib.blake2b(subject.encode(), key=wrapped[:64], digest_size=16).hexdigest()


def _forgotten() -> Forgotten:
    return Forgotten(
        "the subject was forgotten: its fields are gone; discard the message, or edit it"
    )


def is_sealed(payload: bytes | None) -> bool:
    """Whether anything in *payload* is sealed."""
    return payload is not None and _SEALED in payload


def masked(payload: bytes | None, paths: tuple[str, ...]) -> bytes | None:
    """Return *payload* as people may see it: sealed fields show stars. Never send this on."""
    return without_fields(payload, paths)[0]


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
