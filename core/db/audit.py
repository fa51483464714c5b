"""The audit trail: append-only, each row sealed by the hash of the one before it.

What an operator or Holdfast itself did, to events, keys, circuits or dead letters, stands here
with actor, account and reason, never with payloads. There is one trail for all of it; the areas
tell by the beginning of an action what it was about, and dead letters have none. `verify`
finds the first row that was changed, removed, added or moved, and a cut end, for the head of the
chain is kept apart. Somebody who may write both tables can forge a whole new chain: keep the
head that `verify` returns elsewhere now and then, and check against it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    MetaData,
    Table,
    delete,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.text import cut, document, plain
from holdfast.db.transactions import committed, transact
from holdfast.db.types import Document, name
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

ORIGIN = "0" * 64
"""What the first row has for the hash of the row before it."""
OUTBOX, KEYS, SAGAS, LETTERS = "outbox.", "keys.", "saga.", ""
"""The areas: parked events, held keys and circuits, sagas, dead letters."""
PRUNE = "audit.prune"
_END, _BASE = "audit", "base"
_MOST_SUBJECT = 600
_BATCH = 1_000
_encode = msgspec.json.Encoder(order="deterministic").encode
_WHO = {
    "postgresql": "SELECT session_user",
    "mysql": "SELECT user()",
    "mariadb": "SELECT user()",
}


def audit_tables(metadata: MetaData) -> tuple[Table, Table]:
    """Return the trail and its heads as tables of *metadata*; every package shares the two."""
    trail = Table(
        "holdfast_audit",
        metadata,
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("at", name(32), nullable=False),
        Column("actor", name(255), nullable=False),
        Column("action", name(32), nullable=False),
        Column("subject", name(_MOST_SUBJECT), nullable=False),
        Column("reason", Document, nullable=False),
        Column("detail", Document, nullable=False),
        Column("previous", name(64), nullable=False),
        Column("hash", name(64), nullable=False),
    )
    heads = Table(
        "holdfast_audit_head",
        metadata,
        Column("name", name(16), primary_key=True),
        Column("seq", BigInteger, nullable=False),
        Column("hash", name(64), nullable=False),
    )
    event.listen(heads, "after_create", lambda _, db, **__: _begin(db))
    return trail, heads


metadata = MetaData()
audit, head = audit_tables(metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who acts and why; nothing is done without both."""

    actor: str
    reason: str
    ticket: str = ""
    account: str = ""
    """Who it is to the system, whatever the actor is said to be."""

    def __post_init__(self) -> None:
        if not self.actor.strip():
            raise ConfigurationError("the actor is empty: say who does this, with --actor")
        if not self.reason.strip():
            raise ConfigurationError("the reason is empty: say why this is done, with --reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
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

    @property
    def moment(self) -> datetime:
        """When it was done."""
        return datetime.fromisoformat(self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The end of the trail as it was once: keep it where nobody can change it."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"

    @classmethod
    def parse(cls, written: str) -> Head:
        """Return the head that *written* says, as SEQ:HASH."""
        seq, _, hash_ = written.strip().partition(":")
        if not (seq.isascii() and seq.isdigit() and len(seq) <= 18 and len(hash_) == len(ORIGIN)):
            raise ConfigurationError(
                f"head {written!r}: write SEQ:HASH, as  audit --verify  shows it"
            )
        return cls(seq=int(seq), hash=hash_.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `verify` found: the chain is whole when `broken` is None."""

    checked: int
    head: str
    seq: int = 0
    """The number of the last row, which `head` is the hash of."""
    broken: int | None = None
    """The number of the first row that does not fit."""
    why: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every row is as it was written."""
        return self.broken is None


class Audit:
    """Writes the trail about one *area*; `append` joins the transaction of the act itself."""

    def __init__(self, area: str = LETTERS, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._area = area
        self._clock = clock

    def append(
        self,
        db: Connection,
        operator: Operator,
        action: str,
        subject: str,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write one entry and return its number.

        The head of the chain stays locked until the caller commits, so that entries follow
        one another: append last in the transaction, and keep it short.
        """
        more = dict(detail or {})
        if operator.ticket:
            more["ticket"] = operator.ticket
        if operator.account:
            more["account"] = operator.account
        if (who := _session_user(db)) is not None:
            more["database_user"] = who
        at = self._clock.now().isoformat(timespec="microseconds")
        done = f"{self._area}{action}"
        return append_row(db, at, operator.actor, done, subject, operator.reason, more)

    def record(
        self,
        engine: Engine,
        operator: Operator,
        action: str,
        subject: str,
        detail: dict[str, Any] | None = None,
    ) -> int:
        """Write one entry in a transaction of its own; `DependencyDown` if the database is away."""
        return committed(
            engine,
            lambda db: self.append(db, operator, action, subject, detail),
            clock=self._clock,
        )

    def prune(self, engine: Engine, days: float, operator: Operator) -> int:
        """Delete the rows at the beginning that are older than *days*; return how many.

        That is an entry itself, which says where the trail begins now.
        """
        before = self._before(days)

        def act(db: Connection) -> int:
            _locked_head(db)
            last = _last_before(db, before)
            if last is None:
                return 0
            gone = db.execute(delete(audit).where(audit.c.seq <= last.seq)).rowcount
            db.execute(delete(head).where(head.c.name == _BASE))
            db.execute(insert(head), {"name": _BASE, "seq": last.seq, "hash": last.hash})
            detail = {"entries": gone, "before": before, "up_to": last.seq, "hash": last.hash}
            Audit(clock=self._clock).append(db, operator, PRUNE, "audit", detail)
            return gone

        return transact(engine, act, clock=self._clock)

    def prunable(self, engine: Engine, days: float) -> int:
        """Return how many rows `prune` would delete now."""
        before = self._before(days)
        with engine.connect() as db:
            last = _last_before(db, before)
            if last is None:
                return 0
            old = select(func.count()).select_from(audit).where(audit.c.seq <= last.seq)
            return int(db.execute(old).scalar_one())

    def _before(self, days: float) -> str:
        if not days >= 1:
            raise ConfigurationError(f"keep {days} days: keep at least 1")
        return (self._clock.now() - timedelta(days=days)).isoformat(timespec="microseconds")


def _last_before(db: Connection, before: str) -> Any:
    """Return the last row of the beginning of the trail in which all rows are older."""
    first = db.execute(select(func.min(audit.c.seq)).where(audit.c.at >= before)).scalar()
    old = select(audit.c.seq, audit.c.hash).order_by(audit.c.seq.desc()).limit(1)
    return db.execute(old if first is None else old.where(audit.c.seq < first)).first()


def append_row(
    db: Connection,
    at: str,
    actor: str,
    action: str,
    subject: str,
    reason: str,
    detail: dict[str, Any],
) -> int:
    """Seal one row to the end of the chain and return its number."""
    seq, previous = _locked_head(db)
    row = {
        "seq": seq + 1,
        "at": at,
        "actor": cut(actor),
        "action": cut(action, 32),
        "subject": cut(subject, _MOST_SUBJECT),
        "reason": plain(reason),
        "detail": document(detail),
        "previous": previous,
    }
    row["hash"] = sealed(row)
    db.execute(insert(audit), row)
    db.execute(update(head).where(head.c.name == _END).values(seq=row["seq"], hash=row["hash"]))
    return seq + 1


def entries(
    db: Connection,
    *,
    limit: int = 100,
    subject: str | None = None,
    actor: str | None = None,
    area: str | None = None,
) -> list[AuditEntry]:
    """Return the latest entries, newest first, whose subject has that part.

    With *area* only those about it, and their actions without its name.
    """
    latest = select(audit).order_by(audit.c.seq.desc()).limit(limit)
    if subject is not None:
        latest = latest.where(audit.c.subject.contains(subject, autoescape=True))
    if actor is not None:
        latest = latest.where(audit.c.actor == actor)
    if area:
        latest = latest.where(audit.c.action.startswith(area, autoescape=True))
    elif area == LETTERS:
        for other in (OUTBOX, KEYS, SAGAS):
            latest = latest.where(~audit.c.action.startswith(other, autoescape=True))
    return [
        AuditEntry(
            **{
                **row,
                "action": row["action"].removeprefix(area or ""),
                "detail": msgspec.json.decode(row["detail"]),
            }
        )
        for row in db.execute(latest).mappings()
    ]


def verify(db: Connection, kept: Head | None = None) -> Verdict:
    """Walk the chain from where it begins to the head that is kept apart.

    With *kept*, a head of before, the row of that number must still have that hash. Entries
    that are appended meanwhile are not looked at: the last row is looked up before the head,
    and an entry brings both, so the head is never behind it.
    """
    last = db.execute(select(func.max(audit.c.seq))).scalar() or 0
    heads = {row.name: row for row in db.execute(select(head))}
    if _END not in heads:
        why = "the trail has neither rows nor a head" if not last else "the trail has no head"
        return Verdict(checked=0, head=ORIGIN, broken=1, why=f"{why}: it was emptied")
    seq, hash_ = heads[_END].seq, heads[_END].hash
    base = heads.get(_BASE)
    first, previous = (0, ORIGIN) if base is None else (base.seq, base.hash)
    found = _walked(db, first, previous, max(seq, last), kept)
    if not found.is_whole:
        return found
    if seq != found.seq or hash_ != found.head:
        number = min(seq + 1, found.seq + 1) if seq < found.seq else found.seq + 1
        why = f"the chain ends at row {found.seq}, but its head says row {seq}"
        return replace(found, broken=number, why=why)
    if base is not None and not _is_told(db, base):
        why = f"rows up to {base.seq} were removed, and no entry says so"
        return replace(found, broken=base.seq, why=why)
    return found


def sealed(row: dict[str, Any]) -> str:
    """Return the hash of *row*, which covers all its content and the hash before it."""
    content = {name: value for name, value in row.items() if name != "hash"}
    return hashlib.sha256(_encode(content)).hexdigest()


def _walked(db: Connection, first: int, previous: str, end: int, kept: Head | None) -> Verdict:
    """Return the verdict on the rows behind *first* up to *end*."""
    expected = first + 1
    wrong = _contradiction(kept, first, previous)
    if kept is not None and kept.seq < first:
        wrong = f"row {kept.seq} was pruned: check against a head of row {first} or later"
    rest = select(audit).where(audit.c.seq <= end).order_by(audit.c.seq).limit(_BATCH)
    query = rest  # from the very first: a row before number 1 was added by somebody else
    while not wrong:
        rows = db.execute(query).mappings().all()
        for row in rows:
            wrong = _flaw(dict(row), expected, previous)
            wrong = wrong or _contradiction(kept, expected, row["hash"])
            if wrong:
                break
            previous, expected = row["hash"], expected + 1
        if wrong or len(rows) < _BATCH:
            break
        query = rest.where(audit.c.seq >= expected)
    if not wrong and kept is not None and kept.seq >= expected:
        wrong = f"the chain ends at row {expected - 1}, but row {kept.seq} was there"
    checked = Verdict(checked=expected - 1 - first, head=previous, seq=expected - 1)
    return replace(checked, broken=expected, why=wrong) if wrong else checked


def _contradiction(kept: Head | None, seq: int, hash_: str) -> str:
    if kept is None or kept.seq != seq or kept.hash == hash_:
        return ""
    return f"row {seq} is not the one whose hash was kept elsewhere: the chain was made anew"


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


def _is_told(db: Connection, base: Any) -> bool:
    """Whether an entry says that the rows up to *base* were pruned."""
    told = select(audit.c.detail).where(audit.c.action == PRUNE).order_by(audit.c.seq.desc())
    return any(
        (detail["up_to"], detail["hash"]) == (base.seq, base.hash)
        for detail in map(msgspec.json.decode, db.execute(told).scalars())
    )


def _locked_head(db: Connection) -> tuple[int, str]:
    query = select(head.c.seq, head.c.hash).where(head.c.name == _END).with_for_update()
    row = db.execute(query).first()
    if row is None:
        _begin(db)
        row = db.execute(query).one()
    return row.seq, row.hash


def _begin(db: Connection) -> None:
    """Give the trail its head: without one it counts as emptied."""
    known = select(head.c.seq).where(head.c.name == _END)
    if db.execute(known).first() is not None:
        return
    try:
        with db.begin_nested():
            db.execute(insert(head), {"name": _END, "seq": 0, "hash": ORIGIN})
    except IntegrityError:  # somebody else was quicker
        return


def _session_user(db: Connection) -> str | None:
    """Return who the database says that this is, whatever the command says."""
    asked = _WHO.get(db.dialect.name)
    return None if asked is None else str(db.execute(text(asked)).scalar_one())
