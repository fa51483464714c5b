"""Ordering conflicts: a message whose key has an earlier one that this replay does not send.

The newest, or the earliest, message of a key: compared once with each letter of the key.

Which of two came first is told by their positions where they share a lane, else by the
order in which the store received them.

Is what is stored what was sent? A redacted message becomes fit when an edit fills its gaps.

Is a dead letter still needed? Not when a newer event of its key has been handled.

Two things are known: newer dead letters of the key that were replayed with success, and
ordinary events that a consumer handled while this one was dead (`holdfast.dlq.store.overtaking`).
A key that the consumer holds in quarantine has nothing newer handled by construction.

Surveying a selection: what a plan would send, in which order, and what it must not send.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from sqlalchemy import and_, case, exists, or_, select

from holdfast.db.engine import reading
from holdfast.dlq.letter import SCHEMA_VERSION
from holdfast.dlq.protection.redaction import redacted_in
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.letters import candidate, candidates, claims, high_water
from holdfast.dlq.replay.plan import NotNow
from holdfast.dlq.replay.schema import item
from holdfast.dlq.replay.selection import LetterRef, arranged, digest, in_source_order
from holdfast.dlq.store.closing import SYSTEM
from holdfast.dlq.store.overtaking import place_of
from holdfast.dlq.store.rows import CONFIRMED, PARKED, PENDING, LetterEnvelope, key_hash
from holdfast.dlq.store.schema import message, overtaken, revision
from holdfast.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy.engine import Connection, Engine

    from holdfast.dlq.replay.plan import ReplayOptions
    from holdfast.dlq.replay.selection import Selection


if TYPE_CHECKING:
    Further = Callable[[Any, Any], bool]

Key = tuple[str, str, str]
"""The topic, the group and the hash of the key."""


def by_key(letters: Iterable[LetterRef]) -> dict[Key, list[LetterRef]]:
    """Return those of *letters* that have a key, by it."""
    found: dict[Key, list[LetterRef]] = {}
    for letter in letters:
        if (name := key_hash(letter.key)) is not None:
            found.setdefault((letter.topic, letter.group, name), []).append(letter)
    return found


@dataclass(slots=True)
class _Lane:
    """The outermost rows of one lane, and where the first of them is."""

    place: tuple[int, ...] | None = None
    placed: Any = None
    unplaced: Any = None
    """Of those whose position is only a name."""
    of_all: Any = None
    """By when they were received."""


class OrderExtremes:
    """Keeps of the rows of each key only those that decide, however many there are."""

    def __init__(self, further: Further) -> None:
        self._further = further
        self._keys: dict[Key, dict[int, _Lane]] = {}

    @classmethod
    def newest(cls) -> Self:
        """Keep the last one of each key."""
        return cls(operator.gt)

    @classmethod
    def earliest(cls) -> Self:
        """Keep the first one of each key."""
        return cls(operator.lt)

    def add(self, row: Any) -> None:
        """Take *row* into account."""
        lanes = self._keys.setdefault((row.topic, row.consumer_group, row.key_hash), {})
        lane = lanes.setdefault(-1 if row.lane is None else row.lane, _Lane())
        place = place_of(row.position)
        if place is None:
            lane.unplaced = self._beyond(lane.unplaced, row)
        elif lane.place is None or self._further(place, lane.place):
            lane.place, lane.placed = place, row
        lane.of_all = self._beyond(lane.of_all, row)

    def beyond(self, letters: Mapping[Key, list[LetterRef]]) -> dict[str, Any]:
        """Return the row beyond each of *letters* that has one, by the letter's id."""
        found = {}
        for key, rows in letters.items():
            lanes = self._keys.get(key, {})
            for letter in rows if lanes else ():
                if (row := self._row(lanes, letter)) is not None:
                    found[letter.dlq_id] = row
        return found

    def _row(self, lanes: Mapping[int, _Lane], letter: LetterRef) -> Any:
        place = place_of(letter.position)
        for number, lane in lanes.items():
            rest = lane.of_all
            if number == letter.partition and place is not None:
                if lane.place is not None and self._further(lane.place, place):
                    return lane.placed
                rest = lane.unplaced
            if rest is not None and self._further(rest.seq, letter.seq):
                return rest
        return None

    def _beyond(self, known: Any, row: Any) -> Any:
        return row if known is None or self._further(row.seq, known.seq) else known


_CHUNK = 500
_FIELDS = (
    "dlq_id", "seq", "topic", "consumer_group", "lane", "position", "key_hash", "state", "group_id",
)  # fmt: skip


def behind(
    ordered: Sequence[LetterRef],
    stuck: Mapping[str, str],
    blocked: dict[str, str] | None = None,
) -> dict[str, str]:
    """Return which of *ordered* follow, in their key, one of those that are *stuck*.

    Who comes with one part of the letters after the other keeps *blocked* from part to part.
    """
    found: dict[str, str] = {}
    blocked = {} if blocked is None else blocked
    for letter in ordered:
        if letter.dlq_id in stuck:
            words = f"({letter.dlq_id}) is set aside: {stuck[letter.dlq_id]}"
            blocked.setdefault(letter.key_hash, words)
        elif (why := blocked.get(letter.key_hash)) is not None:
            found[letter.dlq_id] = _reason(why)
    return found


def elsewhere(db: Connection, selection: Selection, ordered: Sequence[LetterRef]) -> dict[str, str]:
    """Return which of *ordered* have an earlier one of their key open outside of *selection*.

    Open is what is pending, in another failure group or in a plan of somebody else, and
    what the loop cap has parked for a person.
    """
    keyed = by_key(ordered)
    hashes = sorted({name for _, _, name in keyed})
    earliest = OrderExtremes.earliest()
    for start in range(0, len(hashes), _CHUNK):
        for row in db.execute(_open(selection, hashes[start : start + _CHUNK])):
            earliest.add(row)
    found = {}
    for dlq_id, row in earliest.beyond(keyed).items():
        what = "parked" if row.state == PARKED else "pending"
        text = f"({row.dlq_id}) is {what} in group {row.group_id[:8]}: replay them"
        found[dlq_id] = _reason(f"{text} together, or close that one")
    return found


def _open(selection: Selection, hashes: Sequence[str]) -> Any:
    # Not `NOT (…)`: where a column is null that is neither true nor false.
    outside = case((and_(*selection.where()), 0), else_=1) == 1
    claimed = exists().where(item.c.live == message.c.dlq_id)
    by_cap = and_(message.c.state == PARKED, message.c.closed_by == SYSTEM)
    return select(*(message.c[name] for name in _FIELDS)).where(
        message.c.key_hash.in_(hashes),
        or_(message.c.state == PENDING, by_cap),
        or_(outside, claimed),
    )


def _reason(text: str) -> str:
    return f"an earlier message of its key {text} (--commutative if order does not matter)"


_envelope = msgspec.json.Decoder(LetterEnvelope).decode
_GAPS = (
    "the redacted fields {} are not in it: put them back with  holdfast dlq edit  first, or "
    "discard it"
)
_NEWER = "its envelope is of a newer version: upgrade Holdfast to replay it"


def unfit(db: Connection, doubtful: Sequence[str]) -> dict[str, str]:
    """Return why which of the *doubtful* letters cannot be sent as they were."""
    latest = and_(revision.c.dlq_id == message.c.dlq_id, revision.c.revision == message.c.revision)
    found: dict[str, str] = {}
    for start in range(0, len(doubtful), _CHUNK):
        query = (
            select(message.c.dlq_id, message.c.envelope, message.c.schema_version,
                   revision.c.revision, revision.c.payload.label("edited"))
            .outerjoin(revision, latest)
            .where(message.c.dlq_id.in_(doubtful[start : start + _CHUNK]))
        )  # fmt: skip
        for row in db.execute(query):
            envelope = _envelope(row.envelope)
            gaps = envelope.governance.redacted
            if row.revision is not None:
                gaps = redacted_in(None if row.edited is None else bytes(row.edited), gaps)
            if envelope.newer is not None or row.schema_version > SCHEMA_VERSION:
                found[row.dlq_id] = _NEWER
            elif gaps:
                found[row.dlq_id] = _GAPS.format(", ".join(gaps))
            elif row.revision is None:
                found[row.dlq_id] = "what is stored is not what was sent: edit it first"
    return found


_SUPERSEDED_BY = (
    "seq", "message_id", "topic", "consumer_group", "lane", "position", "key_hash", "closed_at",
)  # fmt: skip


def superseded(db: Connection, candidates: Sequence[LetterRef]) -> dict[str, str]:
    """Return which of *candidates* must be held, and by what they were superseded.

    Not those whose handler was declared commutative when they failed.
    """
    found = _by_letters(db, candidates) | _by_events(db, candidates)
    for dlq_id in commutative_among(db, found):
        del found[dlq_id]
    return found


def _by_events(db: Connection, candidates: Iterable[LetterRef]) -> dict[str, str]:
    """Return what ordinary events have overtaken."""
    topics = {letter.dlq_id: letter.topic for letter in candidates}
    found = {}
    for chunk in _chunks(sorted(topics)):
        for row in db.execute(select(overtaken).where(overtaken.c.dlq_id.in_(chunk))):
            found[row.dlq_id] = _superseded_reason(topics[row.dlq_id], row, row.handled_at)
    return found


def _by_letters(db: Connection, candidates: Iterable[LetterRef]) -> dict[str, str]:
    """Return what newer dead letters of the key, handled when replayed, have overtaken."""
    keyed = by_key(candidates)
    newest = OrderExtremes.newest()
    for chunk in _chunks(sorted({name for _, _, name in keyed})):
        handled = select(*(message.c[name] for name in _SUPERSEDED_BY)).where(
            message.c.key_hash.in_(chunk), message.c.state == CONFIRMED
        )
        for row in db.execute(handled):
            newest.add(row)
    return {
        dlq_id: _superseded_reason(row.topic, row, row.closed_at)
        for dlq_id, row in newest.beyond(keyed).items()
    }


def commutative_among(db: Connection, dlq_ids: Iterable[str]) -> list[str]:
    """Return those of *dlq_ids* whose handler was declared commutative when they failed."""
    found = []
    for chunk in _chunks(sorted(dlq_ids)):
        wanted = select(message.c.dlq_id, message.c.envelope).where(message.c.dlq_id.in_(chunk))
        found += [
            dlq_id for dlq_id, text in db.execute(wanted) if _envelope(text).culprit.commutative
        ]
    return found


def _superseded_reason(topic: str, row: Any, at: float | None) -> str:
    place = "" if row.position is None else f", {topic}/{row.lane} at {row.position}"
    when = "" if at is None else f" on {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"a newer event of its key was handled{when} (message {row.message_id}{place}): discard "
        "this one if that made it void, or replay it with --commutative if order does not matter"
    )


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK))


class AlreadyClaimed(NotNow):
    """Every message that was asked for belongs to the live plan of somebody."""


class NothingToReplay(NotFound):
    """No pending dead letter matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a plan would send, and what it would not, with the reasons."""

    letters: list[LetterRef]
    aside: list[tuple[LetterRef, ItemState, str]] = field(default_factory=list)
    high_water: int
    claimed_elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The hash over every id, in the order of sending."""
        return digest([letter.dlq_id for letter in self.everything])

    @property
    def everything(self) -> list[LetterRef]:
        """The letters to send, then those set aside."""
        return [*self.letters, *(letter for letter, _, _ in self.aside)]

    @property
    def fingerprints(self) -> list[str]:
        """The kinds of failure in it."""
        return sorted({letter.fingerprint or "" for letter in self.everything})


def survey(
    db: Connection, selection: Selection, terms: ReplayOptions, *, agreed: Manifest | None = None
) -> Manifest:
    """Return what a plan for *selection* would hold now; nothing is written.

    Of what was *agreed* upon it holds what is still there, and nothing that came since.
    """
    if selection.is_empty:
        raise ConfigurationError("nothing is selected: name a group, or filter by topic and so on")
    below = high_water(db)
    rows = list(candidates(db, selection, below=below))
    claimed = claims(db, selection)
    if not rows:
        raise _nothing(selection, claimed)
    ordered = in_source_order(candidate(row) for row in rows)
    fresh = _came_since(ordered, agreed)
    doubtful = [row.dlq_id for row in rows if not row.replayable]
    kept_back = judged(db, selection, ordered, terms, doubtful=doubtful, fresh=fresh)
    letters, aside = [], []
    for letter in ordered:
        if letter.dlq_id in fresh:
            continue
        if (found := kept_back.get(letter.dlq_id)) is None:
            letters.append(letter)
        else:
            aside.append((letter, *found))
    if agreed is not None and agreed.letters and not letters:
        raise NotNow("all of these were closed, claimed or overtaken meanwhile: look again")
    return Manifest(
        letters=arranged(letters, terms.policy.canary),
        aside=aside,
        high_water=below,
        claimed_elsewhere=claimed,
    )


def judged(
    db: Connection,
    selection: Selection,
    ordered: Sequence[LetterRef],
    terms: ReplayOptions,
    *,
    doubtful: Sequence[str],
    fresh: Mapping[str, str] = MappingProxyType({}),
    blocked: dict[str, str] | None = None,
) -> dict[str, tuple[ItemState, str]]:
    """Return which of *ordered* must not be sent, as what they are set aside, and why.

    *doubtful* are those of which what is stored may not be what was sent; *fresh* ones do not
    belong to the plan. Letters may come in parts, each key in its order: then *blocked* is kept
    from part to part.
    """
    skipped = unfit(db, doubtful)
    parked = {
        letter.dlq_id: f"replayed {letter.replays} times already"
        for letter in ordered
        if letter.replays >= terms.policy.replay_cap
    }
    old: dict[str, str] = {}
    if terms.memory is not None and not terms.beyond_window:
        old = terms.memory.forgotten(ordered)
    held = old
    if not terms.policy.commutative:
        stuck = {**fresh, **skipped, **parked, **old}
        late = behind(ordered, stuck, blocked) | elsewhere(db, selection, ordered)
        for dlq_id in commutative_among(db, late):
            del late[dlq_id]
        held = late | superseded(db, ordered) | old
    reasons = ((skipped, ItemState.SKIPPED), (parked, ItemState.PARKED), (held, ItemState.HELD))
    found: dict[str, tuple[ItemState, str]] = {}
    for some, state in reasons:  # the last of them counts
        found |= {dlq_id: (state, why) for dlq_id, why in some.items()}
    return found


def surveyed(
    engine: Engine, selection: Selection, terms: ReplayOptions, *, agreed: Manifest | None = None
) -> Manifest:
    """Return the survey of *selection* in a transaction that keeps nobody waiting."""
    with reading(engine).connect() as db:
        return survey(db, selection, terms, agreed=agreed)


def _came_since(ordered: Sequence[LetterRef], agreed: Manifest | None) -> dict[str, str]:
    """Return those of *ordered* that nobody agreed to send, and so do not belong to the plan."""
    if agreed is None:
        return {}
    known = {letter.dlq_id for letter in agreed.everything}
    return {one.dlq_id: "it came later" for one in ordered if one.dlq_id not in known}


def _nothing(selection: Selection, elsewhere: dict[str, int]) -> Exception:
    if elsewhere:
        plans = ", ".join(f"{plan_id[-8:]} ({count:,})" for plan_id, count in elsewhere.items())
        return AlreadyClaimed(
            f"everything here is claimed by another plan: {plans}; watch it with  holdfast dlq "
            "plans show, or abort it to free its messages"
        )
    what = ", ".join(f"{name}={value}" for name, value in selection.described().items())
    return NothingToReplay(
        f"no dead letter is pending under {what}: it was replayed, discarded or never there; "
        "see  holdfast dlq groups"
    )
