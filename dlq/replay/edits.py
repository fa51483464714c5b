"""Edits: a dead letter gets a new revision with a stored difference; the original stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut, plain
from holdfast.dlq.audit import Audit
from holdfast.dlq.replay.differences import difference
from holdfast.dlq.replay.letters import WITHHELD, Stored, stored
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.secrets import Secrets
from holdfast.dlq.replay.state import NotNow
from holdfast.dlq.rows import PENDING, header_text
from holdfast.dlq.schema import message as letters
from holdfast.dlq.schema import revision
from holdfast.dlq.transactions import committed
from holdfast.errors import HoldfastError, InvalidMessage, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.audit import Warrant
    from holdfast.dlq.replay.edit import Edit
    from holdfast.dlq.replay.handlers import Named
    from holdfast.dlq.replay.transforms import Transform
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

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
        self, dlq_id: str, change: Edit, warrant: Warrant, *, handler: Named | None = None
    ) -> Change:
        """Store *change* as the next revision of *dlq_id*; a replay sends the latest one."""
        found = self._read([dlq_id]).get(dlq_id)
        if found is None:
            raise NotFound(f"no dead letter {dlq_id}")
        draft = self._drafted(found, change.applied_to(found.message), handler)

        def work(db: Connection) -> Change:
            made = self._store(db, dlq_id, draft, ("", warrant))
            self._audit.append(db, warrant, "edit", dlq_id, {"revision": made.revision})
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
        warrant: Warrant,
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
                self._store(db, dlq_id, draft, (str(transform), warrant))
            detail = {"transform": str(transform), "count": len(drafts)}
            self._audit.append(db, warrant, "transform", f"{len(dlq_ids)} messages", detail)
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
        self, db: Connection, dlq_id: str, draft: _Draft, source: tuple[str, Warrant]
    ) -> Change:
        self._require_free(db, dlq_id, draft.revision)
        transform, warrant = source
        text, number = difference(draft.before, draft.after), draft.revision + 1
        row = {
            "dlq_id": dlq_id,
            "revision": number,
            "payload": draft.after.payload,
            "headers": header_text(draft.after.headers),
            "difference": plain(text),
            "transform": transform,
            "actor": cut(warrant.actor),
            "reason": plain(warrant.reason),
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
