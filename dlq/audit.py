"""The audit trail: append-only, each row sealed by the hash of the one before it.

What an operator or Holdfast itself did to dead letters stands here with actor and reason,
never with payloads. `verify` finds the first row that was changed, removed, added or moved,
and a cut end, for the head of the chain is kept apart. Somebody who may write both tables
can forge a whole new chain: keep the head that `verify` returns elsewhere now and then.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import func, insert, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.columns import cut, plain
from holdfast.dlq.rows import document
from holdfast.dlq.schema import audit, head
from holdfast.dlq.store import insert_ignoring
from holdfast.dlq.transactions import committed
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

ORIGIN = "0" * 64
"""What the first row has for the hash of the row before it."""
_CHAIN = "audit"
_MOST_SUBJECT = 600
_BATCH = 1_000
_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Warrant:
    """Who acts and why; nothing is done to dead letters without both."""

    actor: str
    reason: str
    ticket: str = ""
    account: str = ""
    """Who it is to the system, `user@host`, whatever the actor is said to be."""

    def __post_init__(self) -> None:
        if not self.actor.strip():
            raise ConfigurationError("the actor is empty: say who does this, with --actor")
        if not self.reason.strip():
            raise ConfigurationError("the reason is empty: say why this is done, with --reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the trail."""

    seq: int
    at: str
    actor: str
    action: str
    subject: str
    reason: str
    detail: dict[str, Any]
    previous: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found: the chain is whole when `broken` is None."""

    checked: int
    head: str
    broken: int | None = None
    """The number of the first row that does not fit."""
    why: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every row is as it was written."""
        return self.broken is None


class Audit:
    """Writes and checks the trail; `append` joins the transaction of the act itself."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    def append(
        self,
        db: Connection,
        warrant: Warrant,
        action: str,
        subject: str,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write one entry and return its number.

        The head of the chain stays locked until the caller commits, so that entries follow
        one another: append last in the transaction, and keep it short.
        """
        seq, previous = _locked_head(db)
        more = dict(detail or {})
        if warrant.ticket:
            more["ticket"] = warrant.ticket
        if warrant.account:
            more["account"] = warrant.account
        row = {
            "seq": seq + 1,
            "at": self._clock.now().isoformat(timespec="microseconds"),
            "actor": cut(warrant.actor),
            "action": cut(action, 32),
            "subject": cut(subject, _MOST_SUBJECT),
            "reason": plain(warrant.reason),
            "detail": document(more),
            "previous": previous,
        }
        row["hash"] = sealed(row)
        db.execute(insert(audit), row)
        db.execute(
            update(head).where(head.c.name == _CHAIN).values(seq=row["seq"], hash=row["hash"])
        )
        return seq + 1

    def record(
        self,
        engine: Engine,
        warrant: Warrant,
        action: str,
        subject: str,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write one entry in a transaction of its own."""
        return committed(
            engine,
            lambda db: self.append(db, warrant, action, subject, detail),
            clock=self._clock,
        )


def entries(
    db: Connection, *, limit: int = 100, subject: str | None = None, actor: str | None = None
) -> list[Entry]:
    """Return the latest entries, newest first, whose subject has that part."""
    latest = select(audit).order_by(audit.c.seq.desc()).limit(limit)
    if subject is not None:
        latest = latest.where(audit.c.subject.contains(subject, autoescape=True))
    if actor is not None:
        latest = latest.where(audit.c.actor == actor)
    return [
        Entry(**{**row, "detail": msgspec.json.decode(row["detail"])})
        for row in db.execute(latest).mappings()
    ]


def verify(db: Connection) -> Verdict:
    """Walk the chain from its origin to the head that was kept apart.

    Entries that are appended meanwhile are not looked at: the last row is looked up before
    the head, and an entry brings both, so the head is never behind it.
    """
    last = db.execute(select(func.max(audit.c.seq))).scalar() or 0
    end = db.execute(select(head.c.seq, head.c.hash).where(head.c.name == _CHAIN)).first()
    seq, kept = (0, ORIGIN) if end is None else (end.seq, end.hash)
    previous, expected = ORIGIN, 1
    rest = select(audit).where(audit.c.seq <= max(seq, last)).order_by(audit.c.seq).limit(_BATCH)
    query = rest  # from the very first: a row before number 1 was added by somebody else
    while True:
        rows = db.execute(query).mappings().all()
        for row in rows:
            why = _flaw(dict(row), expected, previous)
            if why:
                return Verdict(checked=expected - 1, head=previous, broken=expected, why=why)
            previous, expected = row["hash"], expected + 1
        if len(rows) < _BATCH:
            break
        query = rest.where(audit.c.seq >= expected)
    if seq != expected - 1 or kept != previous:
        number = min(seq + 1, expected) if seq < expected - 1 else expected
        why = f"the chain ends at row {expected - 1}, but its head says row {seq}"
        return Verdict(checked=expected - 1, head=previous, broken=number, why=why)
    return Verdict(checked=expected - 1, head=previous)


def sealed(row: dict[str, Any]) -> str:
    """Return the hash of *row*, which covers all its content and the hash before it."""
    content = {name: value for name, value in row.items() if name != "hash"}
    return hashlib.sha256(_encode(content)).hexdigest()


def _flaw(row: dict[str, Any], expected: int, previous: str) -> str:
    if row["seq"] < expected:
        return f"row {row['seq']} was added before row {expected}"
    if row["seq"] != expected:
        return f"row {expected} is missing: row {row['seq']} follows"
    if row["previous"] != previous:
        return f"row {expected} does not follow the row before it"
    if row["hash"] != sealed(row):
        return f"row {expected} was changed after it was written"
    return ""


def _locked_head(db: Connection) -> tuple[int, str]:
    query = select(head.c.seq, head.c.hash).where(head.c.name == _CHAIN).with_for_update()
    row = db.execute(query).first()
    if row is None:
        db.execute(insert_ignoring(db, head), {"name": _CHAIN, "seq": 0, "hash": ORIGIN})
        row = db.execute(query).one()
    return row.seq, row.hash
