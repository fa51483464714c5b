"""The dead letters as a replay reads them: candidates without payloads, then whole messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import and_, case, exists, func, select

from holdfast.db.engine import reading
from holdfast.dlq.letter import Governance
from holdfast.dlq.protection.vault import opened
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import LetterRef
from holdfast.dlq.store.rows import LetterEnvelope, message_of, moment
from holdfast.dlq.store.schema import message, revision
from holdfast.errors import ConfigurationError
from holdfast.stored_message import headers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.selection import Selection
    from holdfast.message import Message

_MESSAGE = tuple(
    message.c[name]
    for name in (
        "dlq_id", "message_id", "topic", "type", "source", "message_key", "payload", "headers",
        "event_at", "correlation_id", "causation_id", "content_type", "schema_ref", "traceparent",
        "exact",
    )
)  # fmt: skip
_envelope = msgspec.json.Decoder(LetterEnvelope).decode
# The envelope is long, and only that of a data subject can name encrypted fields.
_ENVELOPE = case((message.c.subject.is_not(None), message.c.envelope)).label("envelope")
WITHHELD = "(its words are withheld: the message has encrypted fields)"
"""In place of an error's text that might quote what is encrypted in the store."""
_CANDIDATE = tuple(
    message.c[name]
    for name in (
        "dlq_id", "topic", "consumer_group", "lane", "position", "message_key", "fingerprint",
        "service_version", "tenant", "replay_count", "replayable", "revision", "event_at", "seq",
        "group_id", "handler", "retries",
    )
)  # fmt: skip


def high_water(db: Connection) -> int:
    """Return the number of the newest dead letter: what comes later is not part of a plan."""
    return db.execute(select(func.max(message.c.seq))).scalar() or 0


def candidates(
    db: Connection, selection: Selection, *, below: int, claimed: bool = False
) -> Iterator[Any]:
    """Yield rows of dead letters in *selection* up to number *below*, the *claimed* too if so."""
    found = select(*_CANDIDATE).where(*selection.where(), message.c.seq <= below)
    if not claimed:
        found = found.where(~exists().where(item.c.live == message.c.dlq_id))
    yield from db.execute(found.execution_options(yield_per=5000))


def claims(db: Connection, selection: Selection) -> dict[str, int]:
    """Return how many of *selection* are claimed by which plan."""
    claimed = (
        select(item.c.plan_id, func.count())
        .join(message, item.c.live == message.c.dlq_id)
        .where(*selection.where())
        .group_by(item.c.plan_id)
    )
    return {plan_id: count for plan_id, count in db.execute(claimed)}  # noqa: C416 - Rows


def candidate(row: Any) -> LetterRef:
    """Return *row* as a candidate."""
    return LetterRef(
        dlq_id=row.dlq_id,
        topic=row.topic,
        group=row.consumer_group,
        partition=-1 if row.lane is None else row.lane,
        position="" if row.position is None else row.position,
        key=None if row.message_key is None else bytes(row.message_key),
        fingerprint=row.fingerprint,
        version=row.service_version,
        tenant=row.tenant,
        replays=row.replay_count - row.retries,
        event_at=moment(row.event_at),
        seq=row.seq,
        failure_group=row.group_id,
        handler=row.handler,
    )


def named(db: Connection, dlq_ids: Sequence[str]) -> list[LetterRef]:
    """Return the dead letters with these ids as candidates."""
    found = select(*_CANDIDATE).where(message.c.dlq_id.in_(dlq_ids))
    return [candidate(row) for row in db.execute(found)]


def messages(db: Connection, dlq_ids: Sequence[str]) -> dict[str, Message]:
    """Return the messages in their latest revision, by the ids of their dead letters.

    Encrypted fields stay encrypted.
    """
    return {row.dlq_id: _message(row) for row in _rows(db, dlq_ids)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A message in its latest revision, as it is kept."""

    message: Message
    revision: int
    governance: Governance


def stored(db: Connection, dlq_ids: Sequence[str]) -> dict[str, Stored]:
    """Return the messages with what an edit must know, by the ids of their dead letters."""
    return {
        row.dlq_id: Stored(
            message=_message(row),
            revision=row.edited or 0,
            governance=Governance() if row.envelope is None else _envelope(row.envelope).governance,
        )
        for row in _rows(db, dlq_ids)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Messages as a handler would get them; none of them is ever shown to anybody."""

    messages: dict[str, Message]
    secret: frozenset[str]
    """The ids of those with fields that are encrypted in the store."""
    closed: dict[str, str]
    """Why others cannot be read, by id."""


def open_messages(engine: Engine, dlq_ids: Sequence[str], vault: Vault | None) -> Opened:
    """Return the messages in their latest revision with their encrypted fields opened."""
    with reading(engine).connect() as db:
        rows = list(_rows(db, dlq_ids))
    found: dict[str, Message] = {}
    secret: set[str] = set()
    closed: dict[str, str] = {}
    for row in rows:
        message = _message(row)
        if row.envelope is not None:
            governance = _envelope(row.envelope).governance
            try:
                payload = opened(message.payload, governance, vault, message.id)
            except ConfigurationError as error:
                closed[row.dlq_id] = str(error)
                continue
            if payload is not message.payload:
                secret.add(row.dlq_id)
                message = message.with_(payload=payload)
        found[row.dlq_id] = message
    return Opened(messages=found, secret=frozenset(secret), closed=closed)


def _rows(db: Connection, dlq_ids: Sequence[str]) -> Iterable[Any]:
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    return db.execute(
        select(
            *_MESSAGE,
            revision.c.revision.label("edited"),
            revision.c.payload.label("edited_payload"),
            revision.c.headers.label("edited_headers"),
            _ENVELOPE,
        )
        .outerjoin(revision, latest)
        .where(message.c.dlq_id.in_(dlq_ids))
    )


def _message(row: Any) -> Message:
    found = message_of(row._mapping)
    if row.edited is None:
        return found
    payload = row.edited_payload
    return found.with_(
        payload=None if payload is None else bytes(payload), headers=headers_of(row.edited_headers)
    )
