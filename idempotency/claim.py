"""Claims: which of some messages are new to a consumer, asked and remembered in one statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.db.sql import executed, statements
from holdfast.errors import PoisonMessage
from holdfast.idempotency.identity import KEY_BYTES, UNCOMPARED, consumer_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection, Dialect
    from sqlalchemy.orm import Session


class IdempotencyConflict(PoisonMessage):
    """A message id that was handled before comes with other content: one of the two is wrong.

    `known` and `given` are the digests of what was handled and of what came now.
    """

    def __init__(self, consumer: str, message_id: str, *, known: str, given: str) -> None:
        super().__init__(
            f"message {message_id} was handled by {consumer} with other content: digest "
            f"{known} then, {given} now; a producer uses one id for two messages"
        )
        self.consumer = consumer
        self.message_id = message_id
        self.known = known
        self.given = given


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is to be claimed: the key, the digest of the content, and the id for people."""

    key: bytes
    digest: bytes
    id: str
    identity: str = ""
    """What an outside effect is known by: source and id, or the user's key."""
    whole: bytes = b""
    """The digest of all its content where fields are hidden: never stored by this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The answer for one message: new, handled before, or in conflict with what was."""

    is_new: bool
    result: bytes | None = None
    conflict: IdempotencyConflict | None = None
    twin: int | None = None
    """The place of the first of several copies in the same batch; this is a later one."""
    carried: tuple[int, ...] = ()
    """Where it was claimed as well, for processes of an earlier version."""

    def __bool__(self) -> bool:
        """Whether the message is new."""
        return self.is_new


NEW = Claim(is_new=True)


def claim(
    session: Session | Connection,
    consumer: str,
    wanted: Sequence[ClaimRequest],
    *,
    hopeful: bool = False,
) -> list[Claim]:
    """Claim *wanted* for *consumer* in the caller's transaction; one answer for each, in order.

    A rival that handles one of them right now is waited for: if it commits, the answer is
    "handled before", if it rolls back, the message is ours. With *hopeful*, PostgreSQL is
    told that all are new, which costs half; if one is not, `IntegrityError` ends the
    transaction, which must hold nothing else yet.
    """
    if not wanted:
        return []
    first: dict[bytes, int] = {}
    for place, item in enumerate(wanted):
        first.setdefault(item.key, place)
    number = consumer_key(consumer)
    # Sorted, so that two batches with the same messages never wait for each other.
    ordered = [wanted[first[key]] for key in sorted(first)]
    fresh = _insert(session, number, ordered, hopeful=hopeful)
    if fresh is None and len(first) == len(wanted):
        return [NEW] * len(wanted)
    old = [] if fresh is None else [key for key in first if key not in fresh]
    known = _recall(session, number, old) if old else {}
    return [
        _answer(consumer, item, place, wanted[first[item.key]], first[item.key], known)
        for place, item in enumerate(wanted)
    ]


def agrees(known: bytes, item: ClaimRequest) -> bool:
    """Whether *known* is a digest of the content of *item*, or it is not meant to be compared."""
    return known in (item.digest, item.whole) or UNCOMPARED in (known, item.digest)


def inserted(
    session: Session | Connection, number: int, wanted: list[ClaimRequest]
) -> set[bytes] | None:
    """Claim *wanted*, in the order of their keys; return the keys that are new, None for all."""
    return _insert(session, number, wanted, hopeful=False)


def recalled(
    session: Session | Connection, number: int, keys: list[bytes]
) -> dict[bytes, tuple[bytes, Any]]:
    """Return digest and result of those of *keys* that are remembered."""
    return _recall(session, number, keys)


def known(session: Session | Connection, consumer: str, item: ClaimRequest) -> Claim | None:
    """Return what is remembered of *item*, None if it was not handled yet; claims nothing."""
    found = _recall(session, consumer_key(consumer), [item.key])
    return _answer(consumer, item, 0, item, 0, found) if found else None


def unclaim(session: Session | Connection, consumer: str, keys: Iterable[bytes]) -> None:
    """Take claims back: the messages were not handled after all."""
    unclaim_number(session, consumer_key(consumer), keys)


def unclaim_number(session: Session | Connection, number: int, keys: Iterable[bytes]) -> None:
    """Take claims back of the consumer with this *number*; in order, so that rivals take turns."""
    ordered = sorted(set(keys))
    if ordered:
        sql, packed = _packed(session, ordered)
        executed(session, sql["unclaim"], {"consumer": number, **packed})


def keep_result(session: Session | Connection, consumer: str, key: bytes, result: bytes) -> None:
    """Store what the handler returned beside its claim, for the duplicates to come."""
    sql = statements("holdfast.idempotency", _dialect(session).name)
    values = {"consumer": consumer_key(consumer), "message": key, "result": result}
    executed(session, sql["keep_result"], values)


def _answer(
    consumer: str,
    item: ClaimRequest,
    place: int,
    original: ClaimRequest,
    at: int,
    known: dict[bytes, tuple[bytes, bytes | None]],
) -> Claim:
    before = known.get(item.key)
    if before is None and place == at:
        return NEW
    digest, result = (original.digest, None) if before is None else before
    conflict = None
    if not agrees(digest, item):
        conflict = IdempotencyConflict(
            consumer, item.id, known=digest.hex(), given=item.digest.hex()
        )
    twin = at if before is None else None
    return Claim(is_new=False, result=result, conflict=conflict, twin=twin)


def _insert(
    session: Any, number: int, wanted: list[ClaimRequest], *, hopeful: bool
) -> set[bytes] | None:
    """Insert what is new; return the new keys, None when all are."""
    dialect = _dialect(session)
    sql = statements("holdfast.idempotency", dialect.name)
    if dialect.name == "postgresql":
        packed = b"".join([item.key + item.digest for item in wanted])
        values = {"consumer": number, "packed": packed, "last": len(wanted) - 1}
        if hopeful:
            executed(session, sql["claim_hopefully"], values)
            return None
        count, fresh = executed(session, sql["claim"], values).one()
        return None if count == len(wanted) else _split(bytes(fresh or b""))
    if dialect.name == "sqlite":
        packed = b"".join([item.key + item.digest for item in wanted])
        values = {"consumer": number, "packed": packed, "last": len(wanted) - 1}
        fresh = set(executed(session, sql["claim"], values).scalars())
    elif getattr(dialect, "is_mariadb", False):
        fresh = set(session.execute(sql["claim_returning"], _mysql(number, wanted)).scalars())
    else:
        fresh = _insert_mysql(session, number, wanted)
    return None if len(fresh) == len(wanted) else fresh


def _insert_mysql(session: Any, number: int, wanted: list[ClaimRequest]) -> set[bytes]:
    """Insert where the server tells only how many rows were new: MySQL has no RETURNING.

    What is known beforehand is left out. If a rival then commits in between, the rows are
    taken back and inserted one by one.
    """
    sql = statements("holdfast.idempotency", "mysql")
    known = _recall(session, number, [item.key for item in wanted])
    rest = [item for item in wanted if item.key not in known]
    if not rest:
        return set()
    session.execute(sql["savepoint"])
    if session.execute(sql["claim"], _mysql(number, rest)).rowcount == len(rest):
        session.execute(sql["release"])
        return {item.key for item in rest}
    session.execute(sql["rollback"])
    session.execute(sql["release"])
    return {
        item.key
        for item in rest
        if session.execute(sql["claim"], _mysql(number, [item])).rowcount == 1
    }


def _mysql(number: int, wanted: list[ClaimRequest]) -> dict[str, Any]:
    pairs = [(item.key.hex(), item.digest.hex()) for item in wanted]
    return {"consumer": number, "packed": msgspec.json.encode(pairs).decode()}


def _recall(session: Any, number: int, keys: list[bytes]) -> dict[bytes, tuple[bytes, Any]]:
    sql, packed = _packed(session, sorted(keys))
    rows = executed(session, sql["recall"], {"consumer": number, **packed})
    return {bytes(key): (bytes(digest), result) for key, digest, result in rows}


def _packed(session: Any, keys: list[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the statements and *keys* as the one parameter that they take apart."""
    name = _dialect(session).name
    sql = statements("holdfast.idempotency", name)
    if name in ("mysql", "mariadb"):
        return sql, {"packed": msgspec.json.encode([key.hex() for key in keys]).decode()}
    return sql, {"packed": b"".join(keys), "last": len(keys) - 1}


def _split(packed: bytes) -> set[bytes]:
    return {packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)}


def _dialect(session: Any) -> Dialect:
    bind = session.get_bind() if hasattr(session, "get_bind") else session
    dialect: Dialect = bind.dialect
    return dialect
