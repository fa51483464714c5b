"""Edits: a dead letter gets a new revision with a stored difference; the original stays."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.audit import Audit
from holdfast.dlq.replay.handlers import Named, load
from holdfast.dlq.replay.letters import messages
from holdfast.dlq.replay.marks import NAMES
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import NotNow
from holdfast.dlq.rows import PENDING, header_text
from holdfast.dlq.schema import message as letters
from holdfast.dlq.schema import revision
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError, HoldfastError, InvalidMessage, NotFound
from holdfast.headers import Headers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.message import Message

_MOST_DIFFERENCE = 20_000
_LOCKED = frozenset(NAMES)
_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
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

    def applied(self, message: Message) -> bytes | None:
        """Return the new payload of *message*."""
        try:
            body = None if message.payload is None else msgspec.json.decode(message.payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = message.payload
        result = self.function(body)
        if result is None or isinstance(result, bytes):
            return result
        return msgspec.json.encode(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one edit did."""

    dlq_id: str
    revision: int
    difference: str


class Edits:
    """Makes revisions; never of a message that a live plan has claimed."""

    def __init__(self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine = engine
        self._clock = clock
        self._audit = Audit(clock=clock)

    def edit(
        self, dlq_id: str, change: Edit, warrant: Warrant, *, handler: Named | None = None
    ) -> Change:
        """Store *change* as the next revision of *dlq_id*; a replay sends the latest one."""

        def work(db: Connection) -> Change:
            number, before = self._current(db, dlq_id)
            after = _changed(before, change)
            _validate(after, handler)
            made = self._store(db, dlq_id, number + 1, before, after, ("", warrant))
            detail = {"revision": made.revision}
            self._audit.append(db, warrant, "edit", dlq_id, detail)
            return made

        return committed(self._engine, work, clock=self._clock)

    def preview(
        self, dlq_ids: Sequence[str], transform: Transform, *, handler: Named | None = None
    ) -> tuple[list[Change], list[tuple[str, str]]]:
        """Return sampled differences and what would fail, writing nothing."""
        samples: list[Change] = []
        failures: list[tuple[str, str]] = []
        with self._engine.connect() as db:
            for dlq_id, before in messages(db, dlq_ids).items():
                try:
                    after = before.with_(payload=transform.applied(before))
                    _validate(after, handler)
                except Exception as error:  # noqa: BLE001 - somebody else's function
                    failures.append((dlq_id, f"{type(error).__name__}: {error}"))
                    continue
                if len(samples) < _SAMPLES and after.payload != before.payload:
                    text = difference(before, after)
                    samples.append(Change(dlq_id=dlq_id, revision=0, difference=text))
        return samples, failures

    def transform(
        self,
        dlq_ids: Sequence[str],
        transform: Transform,
        warrant: Warrant,
        *,
        handler: Named | None = None,
    ) -> int:
        """Store what *transform* makes of each; all or none, with one audit entry."""
        _, failures = self.preview(dlq_ids, transform, handler=handler)
        if failures:
            dlq_id, why = failures[0]
            raise InvalidMessage(
                f"{transform} fails on {len(failures)} of {len(dlq_ids)} messages, first on "
                f"{dlq_id}: {why}; nothing was changed"
            )

        def work(db: Connection) -> int:
            count = 0
            for dlq_id in dlq_ids:
                number, before = self._current(db, dlq_id)
                after = before.with_(payload=transform.applied(before))
                if after.payload != before.payload:
                    source = (str(transform), warrant)
                    self._store(db, dlq_id, number + 1, before, after, source)
                    count += 1
            detail = {"transform": str(transform), "count": count}
            self._audit.append(db, warrant, "transform", f"{len(dlq_ids)} messages", detail)
            return count

        return committed(self._engine, work, clock=self._clock)

    def revisions(self, dlq_id: str) -> list[dict[str, Any]]:
        """Return the edits of *dlq_id*, oldest first, without payloads."""
        names = ("revision", "difference", "transform", "actor", "reason", "made_at")
        query = select(*(revision.c[name] for name in names)).where(revision.c.dlq_id == dlq_id)
        with self._engine.connect() as db:
            return [dict(row) for row in db.execute(query.order_by("revision")).mappings()]

    def _current(self, db: Connection, dlq_id: str) -> tuple[int, Message]:
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
        return row.revision, messages(db, [dlq_id])[dlq_id]

    def _store(
        self,
        db: Connection,
        dlq_id: str,
        number: int,
        before: Message,
        after: Message,
        source: tuple[str, Warrant],
    ) -> Change:
        transform, warrant = source
        text = difference(before, after)
        row = {
            "dlq_id": dlq_id,
            "revision": number,
            "payload": after.payload,
            "headers": header_text(after.headers),
            "difference": text,
            "transform": transform,
            "actor": warrant.actor[:255],
            "reason": warrant.reason,
            "made_at": self._clock.now().timestamp(),
        }
        db.execute(insert(revision), row)
        db.execute(update(letters).where(letters.c.dlq_id == dlq_id).values(revision=number))
        return Change(dlq_id=dlq_id, revision=number, difference=text)


def difference(before: Message, after: Message) -> str:
    """Return what changed, line by line; JSON is laid out first, other bytes are told by size."""
    lines = difflib.unified_diff(_lines(before), _lines(after), "before", "after", lineterm="", n=2)
    text = "\n".join(lines)
    return text if len(text) <= _MOST_DIFFERENCE else f"{text[:_MOST_DIFFERENCE]}\n… (cut)"


def _lines(message: Message) -> list[str]:
    headers = [f"{name}: {_shown(value)}" for name, value in message.headers]
    payload = message.payload
    if payload is None:
        return [*headers, "(tombstone)"]
    try:
        body = msgspec.json.format(payload, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = _shown(payload)
    return [*headers, *body.splitlines()]


def _shown(value: bytes | None) -> str:
    if value is None:
        return "(none)"
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"({len(value)} bytes: {value[:64].hex()}…)"


def _changed(before: Message, change: Edit) -> Message:
    payload = before.payload if change.payload is None else change.payload
    if payload is not None and not change.force and _is_json(before.payload):
        try:
            msgspec.json.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidMessage(
                f"the new payload is no JSON ({error}) and the old one was: fix it, or --force"
            ) from error
    headers = before.headers.without(change.without)
    return before.with_(payload=payload, headers=headers.with_(Headers(change.headers)))


def _is_json(payload: bytes | None) -> bool:
    try:
        msgspec.json.decode(payload or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _validate(message: Message, handler: Named | None) -> None:
    if handler is None:
        return
    try:
        handler.decode(message.payload)
    except HoldfastError as error:
        raise InvalidMessage(f"{handler.name} would refuse the new payload: {error}") from error
