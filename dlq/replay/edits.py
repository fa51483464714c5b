"""Edits: a dead letter gets a new revision with a stored difference; the original stays.

What changed between two revisions of a message, for people to read.

Encrypted fields of a message that is edited: they are encrypted in what is stored, too.

One edit as an operator asks for it.

Transforms: functions with a version that repair many payloads at once.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.audit import Audit
from holdfast.db.text import cut, plain
from holdfast.db.transactions import committed
from holdfast.dlq.protection.redaction import changed, holds_credentials, within
from holdfast.dlq.protection.vault import is_sealed
from holdfast.dlq.replay.letters import WITHHELD, Stored, stored
from holdfast.dlq.replay.plan import NotNow
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.simulation import load
from holdfast.dlq.store.rows import PENDING
from holdfast.dlq.store.schema import message as letters
from holdfast.dlq.store.schema import revision, subject_key
from holdfast.errors import ConfigurationError, HoldfastError, InvalidMessage, NotFound
from holdfast.headers import REPLAY_MARKS, Headers
from holdfast.scrubbing import REDACTED
from holdfast.stored_message import header_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.db.audit import Operator
    from holdfast.dlq.letter import Governance
    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.simulation import Named
    from holdfast.message import Message


_MOST_DIFFERENCE = 20_000


def difference(before: Message, after: Message) -> str:
    """Return what changed, line by line; JSON is laid out first, other bytes are told by size."""
    old, new = _lines(before, after, "before"), _lines(after, before, "after")
    lines = difflib.unified_diff(old, new, "before", "after", lineterm="", n=2)
    text = "\n".join(lines)
    return text if len(text) <= _MOST_DIFFERENCE else f"{text[:_MOST_DIFFERENCE]}\n… (cut)"


def _lines(message: Message, other: Message, when: str) -> list[str]:
    kept = set(other.headers)
    headers = [
        f"{name}: {_readable(name, value, '' if (name, value) in kept else f' ({when})')}"
        for name, value in message.headers
    ]
    payload = message.payload
    if payload is None:
        return [*headers, "(tombstone)"]
    try:
        body = msgspec.json.format(payload, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _shown(payload)
    return [*headers, *body.splitlines()]


def _readable(name: str, value: bytes | None, change: str) -> str:
    """Return the value of a header; of credentials only that they changed."""
    if not value or not holds_credentials(name):
        return _shown(value)
    return f"{REDACTED}{change}"


def _shown(value: bytes | None) -> str:
    if value is None:
        return "(none)"
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes: {value[:64].hex()}…)"


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


_SAMPLES = 5
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one edit did."""

    dlq_id: str
    revision: int
    difference: str


@dataclass(frozen=True, slots=True)
class _Draft:
    """A revision to be stored if the message is as it was when it was read."""

    revision: int
    before: Message
    after: Message


class Edits:
    """Makes revisions; never of a message that a live plan has claimed.

    What is encrypted in the store stays so in every revision and difference; the *vault* is
    needed to change such a field.
    """

    def __init__(
        self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK, vault: Vault | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)
        self._secrets = Secrets(engine, vault)

    def edit(
        self, dlq_id: str, change: LetterEdit, operator: Operator, *, handler: Named | None = None
    ) -> Change:
        """Store *change* as the next revision of *dlq_id*; a replay sends the latest one."""
        found = self._read([dlq_id]).get(dlq_id)
        if found is None:
            raise NotFound(f"no dead letter {dlq_id}")
        draft = self._drafted(found, change.applied_to(found.message), handler)

        def work(db: Connection) -> Change:
            made = self._store(db, dlq_id, draft, ("", operator))
            self._audit.append(db, operator, "edit", dlq_id, {"revision": made.revision})
            return made

        return committed(self._engine, work, clock=self._clock)

    def preview(
        self,
        dlq_ids: Sequence[str],
        transform: Transform,
        *,
        handler: Named | None = None,
        observe: Callable[[int], object] = lambda _done: None,
    ) -> tuple[list[Change], list[tuple[str, str]]]:
        """Return sampled differences and what would fail, writing nothing."""
        drafts, failures = self._transformed(dlq_ids, transform, handler, observe)
        samples = [
            Change(dlq_id=dlq_id, revision=0, difference=difference(draft.before, draft.after))
            for dlq_id, draft in list(drafts.items())[:_SAMPLES]
        ]
        return samples, failures

    def transform(
        self,
        dlq_ids: Sequence[str],
        transform: Transform,
        operator: Operator,
        *,
        handler: Named | None = None,
        observe: Callable[[int], object] = lambda _done: None,
    ) -> int:
        """Store what *transform* makes of each; all or none, with one audit entry."""
        drafts, failures = self._transformed(dlq_ids, transform, handler, observe)
        if failures:
            dlq_id, why = failures[0]
            raise InvalidMessage(
                f"{transform} fails on {len(failures)} of {len(dlq_ids)} messages, first on "
                f"{dlq_id}: {why}; nothing was changed"
            )

        def work(db: Connection) -> int:
            for dlq_id, draft in drafts.items():
                self._store(db, dlq_id, draft, (str(transform), operator))
            detail = {"transform": str(transform), "count": len(drafts)}
            self._audit.append(db, operator, "transform", f"{len(dlq_ids)} messages", detail)
            return len(drafts)

        return committed(self._engine, work, clock=self._clock)

    def revisions(self, dlq_id: str) -> list[dict[str, Any]]:
        """Return the edits of *dlq_id*, oldest first, without payloads."""
        names = ("revision", "difference", "transform", "actor", "reason", "made_at")
        query = select(*(revision.c[name] for name in names)).where(revision.c.dlq_id == dlq_id)
        with self._engine.connect() as db:
            return [dict(row) for row in db.execute(query.order_by("revision")).mappings()]

    def _read(self, dlq_ids: Sequence[str]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for start in range(0, len(dlq_ids), _CHUNK):
            with self._engine.connect() as db:
                found |= stored(db, dlq_ids[start : start + _CHUNK])
        return found

    def _transformed(
        self,
        dlq_ids: Sequence[str],
        transform: Transform,
        handler: Named | None,
        observe: Callable[[int], object],
    ) -> tuple[dict[str, _Draft], list[tuple[str, str]]]:
        """Return what changes by the ids, and what fails."""
        drafts: dict[str, _Draft] = {}
        failures: list[tuple[str, str]] = []
        for done, (dlq_id, one) in enumerate(self._read(dlq_ids).items(), 1):
            observe(done)
            payload, is_secret = one.message.payload, bool(one.governance.sealed)
            try:
                readable = self._secrets.opened(payload, one.governance, one.message.id)
                after = transform.applied(readable)
                if after == readable:
                    continue
                drafts[dlq_id] = self._drafted(one, one.message.with_(payload=after), handler)
            except HoldfastError as error:
                failures.append((dlq_id, str(error)))
            except Exception as error:  # noqa: BLE001 - somebody else's function
                words = WITHHELD if is_secret else error
                failures.append((dlq_id, f"{type(error).__name__}: {words}"))
        return drafts, failures

    def _drafted(self, one: Stored, after: Message, handler: Named | None) -> _Draft:
        """Return *after* as it may be stored, once *handler* takes it."""
        _validate(after, handler, is_secret=bool(one.governance.sealed))
        payload = self._secrets.sealed(after, one.message.payload, one.governance)
        return _Draft(one.revision, one.message, after.with_(payload=payload))

    def _store(
        self, db: Connection, dlq_id: str, draft: _Draft, source: tuple[str, Operator]
    ) -> Change:
        self._require_free(db, dlq_id, draft.revision)
        transform, operator = source
        text, number = difference(draft.before, draft.after), draft.revision + 1
        row = {
            "dlq_id": dlq_id,
            "revision": number,
            "payload": draft.after.payload,
            "headers": header_text(draft.after.headers),
            "difference": plain(text),
            "transform": transform,
            "actor": cut(operator.actor),
            "reason": plain(operator.reason),
            "made_at": self._clock.now().timestamp(),
        }
        db.execute(insert(revision), row)
        db.execute(update(letters).where(letters.c.dlq_id == dlq_id).values(revision=number))
        return Change(dlq_id=dlq_id, revision=number, difference=text)

    def _require_free(self, db: Connection, dlq_id: str, number: int) -> None:
        where = letters.c.dlq_id == dlq_id
        query = select(letters.c.revision, letters.c.state).where(where).with_for_update()
        row = db.execute(query).first()
        if row is None:
            raise NotFound(f"no dead letter {dlq_id}")
        if row.state != PENDING:
            raise NotNow(f"dead letter {dlq_id} is {row.state}: only pending ones are edited")
        claimed = db.execute(select(item.c.plan_id).where(item.c.live == dlq_id)).scalar()
        if claimed is not None:
            raise NotNow(f"plan {claimed[-8:]} has claimed {dlq_id}: abort it, then edit")
        if row.revision != number:
            raise NotNow(
                f"somebody else has edited {dlq_id} meanwhile: look at it, then edit again"
            )


def _validate(message: Message, handler: Named | None, *, is_secret: bool) -> None:
    if handler is None:
        return
    try:
        handler.decode(message.payload)
    except HoldfastError as error:
        words = WITHHELD if is_secret else error
        raise InvalidMessage(f"{handler.name} would refuse the new payload: {words}") from error


_LOCKED = frozenset(REPLAY_MARKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterEdit:
    """A change of one dead letter; what is None stays as it is."""

    payload: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    force: bool = False
    """Take a payload that is no JSON although the original was."""

    def __post_init__(self) -> None:
        if self.payload is None and not self.headers and not self.without:
            raise ConfigurationError("the edit changes nothing: give a payload or headers")
        for name in (*(name for name, _ in self.headers), *self.without):
            if name.lower() in _LOCKED or name.startswith(("ce_", "ce-", "cloudEvents")):
                raise ConfigurationError(f"header {name!r} is locked: it is part of the identity")

    def applied_to(self, before: Message) -> Message:
        """Return *before* with the change; a payload that stops being JSON is refused."""
        payload = before.payload if self.payload is None else self.payload
        if payload is not None and not self.force and _is_json(before.payload):
            try:
                msgspec.json.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidMessage(
                    f"the new payload is no JSON ({error}) and the old one was: fix it, or --force"
                ) from error
        headers = before.headers.without(self.without)
        return before.with_(payload=payload, headers=headers.with_(Headers(self.headers)))


def _is_json(payload: bytes | None) -> bool:
    try:
        msgspec.json.decode(payload or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """A pure function by name and version that makes new payloads: `shop.fixes:cents@2`."""

    name: str
    version: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, text: str) -> Transform:
        """Return the function `module:function@version`; the version may be its attribute."""
        name, _, version = text.partition("@")
        function = load(name)
        version = version or str(getattr(function, "__version__", ""))
        if not version:
            raise ConfigurationError(
                f"{text!r} has no version: write {name}@1, so that the stored edits say what made "
                "them"
            )
        return cls(name=name, version=version, function=function)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def applied(self, payload: bytes | None) -> bytes | None:
        """Return the new payload for *payload*."""
        body: Any = payload
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = None if payload is None else msgspec.json.decode(payload)
        result = self.function(body)
        if result is None or isinstance(result, bytes):
            return result
        return msgspec.json.encode(result)
