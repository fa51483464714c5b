"""What the consumer says about replayed messages: confirmed, or failed again.

Both are part of the consumer's own transaction: an outcome is true or it is not there.

Messages of a plan that cannot be sent: set aside, with what follows of their keys.

The outcome of a replay as a message, from a consumer that does not write to the store.

It travels on the dead-letter topic of the group: behind the letters of its key, to the
collector that stores those. A consumer whose own database holds the plan needs none of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec
from sqlalchemy import bindparam, or_, select, update

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.db.text import MOST_TEXT, cut
from holdfast.db.transactions import committed
from holdfast.dlq.letter import dlq_topic
from holdfast.dlq.metrics import METRICS
from holdfast.dlq.replay.admission import ReplayStanding, standings
from holdfast.dlq.replay.item_state import WAITING, ItemState
from holdfast.dlq.replay.schema import item, plan
from holdfast.dlq.store.closing import SYSTEM, close
from holdfast.dlq.store.rows import CONFIRMED, fingerprint_of, is_of
from holdfast.dlq.store.schema import message as stored
from holdfast.headers import ReplayHeaders, is_id
from holdfast.message import Message

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.letter import DeadLetter
    from holdfast.dlq.replay.plan import ReplayPlan
    from holdfast.dlq.replay.reading import ReplayRefusal


log = logging.getLogger("holdfast.dlq.replay")
_REASON = "handled by the group when it was replayed"


def confirmed(connection: Connection, message: Message, *, clock: Clock = SYSTEM_CLOCK) -> bool:
    """Note that the group has handled *message*, now or before; nothing for ordinary ones.

    Call it in the transaction of the message's effects, also when dedup found them there.
    False if this database knows neither its plan nor its letter: they are in a store
    elsewhere, which is to be told after the commit (`reports.report_of`).
    """
    return not confirmed_all(connection, (message,), clock=clock)


def confirmed_all(
    connection: Connection, messages: Iterable[Message], *, clock: Clock = SYSTEM_CLOCK
) -> set[str]:
    """Confirm many at once, in one transaction; return which letters are not known here."""
    by_plan: dict[str, dict[str, str | None]] = {}
    for message in messages:
        if message.is_replay and (marks := ReplayHeaders.of(message.headers)) is not None:
            by_plan.setdefault(marks.plan, {})[marks.dlq_id] = message.id
    unknown: set[str] = set()
    for plan_id, handled in sorted(by_plan.items()):
        rest = set(handled) - confirm(connection, plan_id, handled, clock=clock)
        if rest:
            unknown |= _unknown(connection, plan_id, sorted(rest))
    return unknown


def confirm(
    connection: Connection,
    plan_id: str,
    handled: Mapping[str, str | None],
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> set[str]:
    """Note which letters of one plan were *handled*, each as what message; return them.

    Only those that the plan has, and as the message that the letter holds: marks are only
    headers, which anybody may write. A message that is not told (None) is not compared.
    """
    query = (
        select(item.c.dlq_id, stored.c.message_id, stored.c.exact)
        .outerjoin(stored, stored.c.dlq_id == item.c.dlq_id)
        .where(item.c.plan_id == plan_id, item.c.dlq_id.in_(sorted(handled)))
    )
    ids = set()
    for row in connection.execute(query).mappings():
        dlq_id, kept = row["dlq_id"], row["message_id"]
        told = handled[dlq_id]
        if told is None or kept is None or is_of(row, told):
            ids.add(dlq_id)
        else:
            log.warning("message %s was handled as letter %s of plan %s, which is message %s: "
                        "that confirms nothing", told, dlq_id, plan_id, kept)  # fmt: skip
    if not ids:
        return ids
    done = {
        "state": ItemState.CONFIRMED,
        "live": None,
        "note": None,
        "settled_at": clock.now().timestamp(),
    }
    # Also one that was held back or failed before: what happened last is what is true.
    connection.execute(
        update(item).where(item.c.plan_id == plan_id, item.c.dlq_id.in_(sorted(ids))).values(**done)
    )
    actor = f"plan {plan_id}"
    closed = close(connection, ids, CONFIRMED, actor=actor, reason=_REASON, clock=clock)
    if closed:
        again = {"replay_count": stored.c.replay_count + 1}
        connection.execute(update(stored).where(stored.c.dlq_id.in_(closed)).values(**again))
    METRICS.replayed.labels("confirmed").inc(len(ids))
    return ids


def handled_after_all(connection: Connection, dlq_id: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Close the letter *dlq_id*, whose own message came again by itself and was handled.

    In the transaction of its effects: a replay would repeat them once dedup has forgotten.
    """
    reason = "its message came again, and was handled"
    close(connection, [dlq_id], CONFIRMED, actor=SYSTEM, reason=reason, clock=clock)
    done = {"state": ItemState.CONFIRMED, "live": None, "note": reason,
            "settled_at": clock.now().timestamp()}  # fmt: skip
    connection.execute(update(item).where(item.c.live == dlq_id).values(**done))


def _unknown(connection: Connection, plan_id: str, dlq_ids: list[str]) -> set[str]:
    """Return which of *dlq_ids* are neither in the plan nor in the store of this database."""
    planned = select(item.c.dlq_id).where(item.c.plan_id == plan_id, item.c.dlq_id.in_(dlq_ids))
    kept = select(stored.c.dlq_id).where(stored.c.dlq_id.in_(dlq_ids))
    known = {*connection.execute(planned).scalars(), *connection.execute(kept).scalars()}
    return set(dlq_ids) - known


def held_back(connection: Connection, messages: Iterable[Message]) -> set[str]:
    """Return the identities of *messages* that must not be handled: acknowledge them, no more.

    An earlier message of their key failed again in the same replay; or their claim has ended:
    the plan was aborted, the letter closed, or another copy handled. They have not become
    dead letters anew: those that are so still a later replay brings in order. Ask right before
    each is handled, in the transaction of its effects.
    """
    replayed = [message for message in messages if message.is_replay]
    found = standings(connection, [(message, message.topic) for message in replayed])
    stays = (ReplayStanding.HELD, ReplayStanding.DONE, ReplayStanding.OVER)
    return {message.identity for message, one in zip(replayed, found, strict=True) if one in stays}


def failed_again(
    connection: Connection, letter: DeadLetter, *, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Note that the replayed *letter* failed once more; nothing for one that no replay sent.

    What the plan has of the same key after it is held back, also what is on its way
    (`held_back`): it must not overtake this one. Not if the handler is commutative.
    """
    plan_id = letter.lineage.replay_id
    if plan_id is None:
        return
    own = (item.c.plan_id == plan_id) & (item.c.dlq_id == letter.dlq_id)
    row = connection.execute(select(item.c.position, item.c.key_hash).where(own)).first()
    if row is None:
        return  # a plan of another database, or one that was pruned
    now = clock.now().timestamp()
    failed = {
        "state": ItemState.FAILED_AGAIN,
        "live": None,
        "again": fingerprint_of(letter.failure).value,
        "settled_at": now,
    }
    connection.execute(
        update(item).where(own, item.c.state != ItemState.CONFIRMED).values(**failed)
    )
    METRICS.replayed.labels("failed_again").inc()
    if letter.culprit.commutative or _is_commutative(connection, plan_id):
        return
    words = f"an earlier message of its key failed again ({letter.dlq_id})"
    _hold_back(
        connection, plan_id, [{"key": row.key_hash, "number": row.position, "words": words}], now
    )


def _hold_back(
    db: Connection, plan_id: str, behind: Sequence[dict[str, object]], now: float
) -> None:
    """Hold what the plan has of each `key` after its `number`, and say why in `words`.

    Also what is on its way: the consumer asks before it handles (`held_back`).
    """
    hold = (
        update(item)
        .where(
            item.c.plan_id == plan_id,
            item.c.key_hash == bindparam("key"),
            item.c.position > bindparam("number"),
            or_(*(item.c.state == state for state in sorted(WAITING))),  # one statement for many
        )
        .values(state=ItemState.HELD, live=None, note=bindparam("words"), settled_at=now)
    )
    db.execute(hold, behind)


def _is_commutative(connection: Connection, plan_id: str) -> bool:
    from holdfast.dlq.replay.plan import StopPolicy

    text = connection.execute(select(plan.c.policy).where(plan.c.id == plan_id)).scalar()
    return text is not None and msgspec.json.decode(text, type=StopPolicy).commutative


_ROWS = 500  # per statement


def set_aside(
    db: Connection, plan: ReplayPlan, refused: Sequence[ReplayRefusal], clock: Clock
) -> None:
    """Settle *refused* with the reasons; hold what the plan has of their keys after them.

    A commutative handler does not mind what follows.
    """
    now = clock.now().timestamp()
    skip = (
        update(item)
        .where(item.c.plan_id == plan.id, item.c.position == bindparam("number"))
        .values(state=bindparam("into"), live=None, note=bindparam("words"), settled_at=now)
    )
    db.execute(
        skip,
        [
            {"number": r.number, "into": r.state.value, "words": cut(r.words, MOST_TEXT)}
            for r in refused
        ],
    )
    stuck = [one for one in refused if one.holds]
    if plan.policy.commutative or not stuck:
        return
    note = "an earlier message of its key was refused ({})"
    firsts: list[dict[str, object]] = [
        {"key": key, "number": one.number, "words": note.format(one.dlq_id)}
        for key, one in _first_of_keys(db, plan.id, stuck).items()
    ]
    _hold_back(db, plan.id, firsts, now)


def _first_of_keys(
    db: Connection, plan_id: str, refused: Sequence[ReplayRefusal]
) -> dict[str, ReplayRefusal]:
    by_number = {one.number: one for one in refused}
    numbers = sorted(by_number)
    found: dict[str, ReplayRefusal] = {}
    for start in range(0, len(numbers), _ROWS):
        chosen = item.c.position.in_(numbers[start : start + _ROWS])
        query = select(item.c.position, item.c.key_hash).where(item.c.plan_id == plan_id, chosen)
        for number, key in db.execute(query.order_by(item.c.position)):
            found.setdefault(key, by_number[number])
    return found


OUTCOME: Final = "x-dlq-outcome"
_CONFIRMED = "confirmed"
_MOST = 10_000  # bytes; a message id may be long


class ReplayReport(msgspec.Struct, frozen=True):
    """Which letter of which plan was handled, and as what message."""

    plan: str
    dlq_id: str
    message_id: str | None = None


def report_of(message: Message) -> Message | None:
    """Return what to publish once the replayed *message* was handled; None for other messages."""
    marks = ReplayHeaders.of(message.headers)
    if marks is None:
        return None
    return Message.new(
        dlq_topic(marks.topic, marks.group),
        msgspec.json.encode(ReplayReport(marks.plan, marks.dlq_id, message.id)),
        key=message.key,
        type="holdfast.replay.confirmed",
        headers={OUTCOME: _CONFIRMED},
        content_type="application/json",
    )


def report_in(message: Message) -> ReplayReport | None:
    """Return the report that *message* of a dead-letter topic is; None if it is none."""
    payload = message.payload or b""
    if message.headers.text(OUTCOME) != _CONFIRMED or len(payload) > _MOST:
        return None
    try:
        report = msgspec.json.decode(payload, type=ReplayReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return report if is_id(report.plan) and is_id(report.dlq_id) else None


def enter(
    engine: Engine, reports: Iterable[ReplayReport], *, clock: Clock = SYSTEM_CLOCK
) -> list[ReplayReport]:
    """Enter *reports* in the store; one that was entered before changes nothing.

    Return those about a plan or a letter of it that the store does not have: they close
    nothing.
    """
    by_plan: dict[str, list[ReplayReport]] = {}
    for report in reports:
        by_plan.setdefault(report.plan, []).append(report)

    def write(db: Connection) -> list[ReplayReport]:
        unknown = []
        for plan_id, some in sorted(by_plan.items()):
            handled = {report.dlq_id: report.message_id for report in some}
            known = confirm(db, plan_id, handled, clock=clock)
            unknown += [report for report in some if report.dlq_id not in known]
        return unknown

    return committed(engine, write, clock=clock)
