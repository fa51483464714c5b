"""The dead letters as a replay reads them: candidates without payloads, then whole messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import and_, case, exists, func, select

from holdfast.dlq.replay.manifest import Candidate
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.state import ItemState
from holdfast.dlq.rows import Envelope, headers_of, message_of
from holdfast.dlq.schema import message, revision
from holdfast.dlq.vault import sealed_in
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Select
    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.selection import Selection
    from holdfast.dlq.vault import Vault
    from holdfast.message import Message

_MESSAGE = tuple(
    message.c[name]
    for name in (
        "dlq_id", "message_id", "topic", "type", "source", "message_key", "payload", "headers",
        "event_at", "correlation_id", "causation_id", "content_type", "schema_ref", "traceparent",
        "consumer_group", "replay_count", "subject",
    )
)  # fmt: skip
_envelope = msgspec.json.Decoder(Envelope).decode
# The envelope is long, and only that of a data subject can name encrypted fields.
_ENVELOPE = case((message.c.subject.is_not(None), message.c.envelope)).label("envelope")
_CANDIDATE = tuple(
    message.c[name]
    for name in (
        "dlq_id", "topic", "consumer_group", "lane", "position", "message_key", "fingerprint",
        "service_version", "tenant", "replay_count", "replayable", "revision", "event_at", "seq",
        "group_id", "handler",
    )
)  # fmt: skip


def high_water(db: Connection) -> int:
    """Return the number of the newest dead letter: what comes later is not part of a plan."""
    return db.execute(select(func.max(message.c.seq))).scalar() or 0


def candidates(db: Connection, selection: Selection, *, below: int) -> Iterator[Any]:
    """Yield rows of unclaimed dead letters in *selection* up to number *below*."""
    claimed = exists().where(item.c.live == message.c.dlq_id)
    found = select(*_CANDIDATE).where(*selection.where(), message.c.seq <= below, ~claimed)
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


def candidate(row: Any) -> Candidate:
    """Return *row* as a candidate."""
    return Candidate(
        dlq_id=row.dlq_id,
        topic=row.topic,
        group=row.consumer_group,
        partition=-1 if row.lane is None else row.lane,
        position="" if row.position is None else row.position,
        key=None if row.message_key is None else bytes(row.message_key),
        fingerprint=row.fingerprint,
        version=row.service_version,
        tenant=row.tenant,
        replay_count=row.replay_count,
        event_at=datetime.fromtimestamp(row.event_at, UTC),
        seq=row.seq,
    )


class Outgoing:
    """One message of a plan on its way: its number, and whose it is."""

    __slots__ = ("count", "dlq_id", "group", "message", "position", "sealed", "subject", "unfit")

    def __init__(self, row: Any) -> None:
        fields = row._mapping
        self.position: int = row.item_position
        self.dlq_id: str = row.dlq_id
        self.group: str = row.consumer_group
        self.count: int = row.replay_count + 1
        self.message: Message = message_of(fields)
        if row.edited is not None:
            payload = row.edited_payload
            self.message = self.message.with_(
                payload=None if payload is None else bytes(payload),
                headers=headers_of(row.edited_headers),
            )
        self.subject: str = row.subject or ""
        self.sealed = () if row.envelope is None else _envelope(row.envelope).governance.sealed
        self.unfit: str | None = None
        """Why it must not be sent: what is there is not what was sent."""

    def open(self, vault: Vault | None) -> None:
        """Make sealed fields readable again; where that is not possible the message is unfit."""
        sealed = sealed_in(self.message.payload, self.sealed)
        if not sealed:
            return
        if vault is None:
            self.unfit = (
                f"it has encrypted fields ({', '.join(sealed)}): replay it with the vault's master "
                "key, by --master-key-file"
            )
            return
        try:
            payload = vault.open(self.message.payload, sealed, self.subject)
        except ConfigurationError as error:
            self.unfit = str(error)
        else:
            self.message = self.message.with_(payload=payload)


def _outgoing() -> Select[Any]:
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    return (
        select(
            item.c.position.label("item_position"),
            *_MESSAGE,
            revision.c.revision.label("edited"),
            revision.c.payload.label("edited_payload"),
            revision.c.headers.label("edited_headers"),
            _ENVELOPE,
        )
        .join(message, message.c.dlq_id == item.c.dlq_id)
        .outerjoin(revision, latest)
    )


def outgoing(db: Connection, plan_id: str, start: int, end: int) -> list[Outgoing]:
    """Return what plan *plan_id* still has to send from *start* up to before *end*, in order."""
    found = (
        _outgoing()
        .where(
            item.c.plan_id == plan_id,
            item.c.position >= start,
            item.c.position < end,
            item.c.state == ItemState.CLAIMED,
        )
        .order_by(item.c.position)
    )
    return [Outgoing(row) for row in db.execute(found)]


def settled(db: Connection, plan_id: str, start: int, end: int) -> set[int]:
    """Return the numbers from *start* up to before *end* that are not to be sent any more."""
    found = select(item.c.position).where(
        item.c.plan_id == plan_id,
        item.c.position >= start,
        item.c.position < end,
        item.c.state != ItemState.CLAIMED,
    )
    return set(db.execute(found).scalars())


def messages(db: Connection, dlq_ids: Sequence[str]) -> dict[str, Message]:
    """Return the messages as they would be replayed, by the ids of their dead letters."""
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    found = (
        select(
            message.c.seq.label("item_position"),
            *_MESSAGE,
            revision.c.revision.label("edited"),
            revision.c.payload.label("edited_payload"),
            revision.c.headers.label("edited_headers"),
            _ENVELOPE,
        )
        .outerjoin(revision, latest)
        .where(message.c.dlq_id.in_(dlq_ids))
    )
    return {row.dlq_id: Outgoing(row).message for row in db.execute(found)}
