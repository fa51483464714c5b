"""What a replay would do, before anything is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.item_state import ItemState
from holdfast.dlq.replay.letters import WITHHELD, open_messages
from holdfast.dlq.replay.plan import Rate
from holdfast.dlq.replay.target import target_topic
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Engine

    from holdfast.dlq.protection.vault import Vault
    from holdfast.dlq.replay.plan import ReplayOptions
    from holdfast.dlq.replay.selection import LetterRef
    from holdfast.dlq.replay.simulation import Named
    from holdfast.dlq.replay.survey import Manifest

_CHUNK = 500
_ASIDES = 20
ASSUMED = Rate(500.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The report of a dry run."""

    count: int
    hash: str
    high_water: int
    by_group: dict[str, int]
    """Messages by failure group, the largest first."""
    by_fingerprint: dict[str, int]
    by_version: dict[str, int]
    by_tenant: dict[str, int]
    keys: int
    targets: dict[str, int]
    canary: int
    oldest_seconds: float | None
    dedup_window: float | None
    """For how many seconds the consumers remember what they handled, the shortest; None: for
    ever, or it is not known here."""
    beyond_window: int
    """Messages older than that: a duplicate of these cannot be told. They are held unless the
    terms say otherwise."""
    aside: dict[str, int]
    conflicts: int
    """Messages held for the order of their keys: one before them is open, or one after them
    was handled."""
    aside_examples: tuple[tuple[str, str], ...]
    claimed_elsewhere: dict[str, int]
    valid: int | None
    invalid: int | None
    """None unless a handler was given to check payloads against."""
    invalid_example: str | None
    unread: int | None
    """Payloads that were not checked: they have encrypted fields that could not be opened."""
    seconds: float | None
    """How long it takes at the rate; without one, at the rate assumed."""
    assumed_rate: float | None
    """The messages per second of that; None where a rate was given."""
    needs_approval: bool


def dry_run(
    engine: Engine,
    manifest: Manifest,
    terms: ReplayOptions,
    *,
    handler: Named | None = None,
    vault: Vault | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> DryRun:
    """Return what sending *manifest* would mean; nothing is written or sent."""
    letters, is_free = manifest.letters, terms.rate.per_second is None
    everything = manifest.everything
    ages = _ages(letters, clock.now().timestamp())
    checked = None if handler is None else _check(engine, letters, handler, vault)
    return DryRun(
        count=len(letters),
        hash=manifest.hash,
        high_water=manifest.high_water,
        by_group=dict(Counter(letter.failure_group for letter in letters).most_common()),
        by_fingerprint=dict(Counter(letter.fingerprint or "" for letter in letters)),
        by_version=dict(Counter(letter.version or "(unknown)" for letter in letters)),
        by_tenant=dict(Counter(letter.tenant or "(none)" for letter in letters).most_common(20)),
        keys=len({letter.key_hash for letter in letters if letter.key is not None}),
        targets=dict(
            Counter(target_topic(letter.topic, letter.group, terms.to_topic) for letter in letters)
        ),
        canary=min(terms.policy.canary, len(letters)),
        oldest_seconds=max(ages, default=None),
        dedup_window=None if terms.memory is None else terms.memory.shortest(everything),
        beyond_window=0 if terms.memory is None else len(terms.memory.forgotten(everything)),
        aside=dict(Counter(state.value for _, state, _ in manifest.aside)),
        conflicts=sum(state is ItemState.HELD for _, state, _ in manifest.aside),
        aside_examples=tuple((letter.dlq_id, why) for letter, _, why in manifest.aside[:_ASIDES]),
        claimed_elsewhere=manifest.claimed_elsewhere,
        valid=None if checked is None else checked.valid,
        invalid=None if checked is None else checked.invalid,
        invalid_example=None if checked is None else checked.example,
        unread=None if checked is None else checked.unread,
        seconds=(ASSUMED if is_free else terms.rate).seconds_for(len(letters)),
        assumed_rate=ASSUMED.per_second if is_free else None,
        needs_approval=len(letters) > terms.approve_above,
    )


def _ages(letters: Sequence[LetterRef], now: float) -> list[float]:
    # A clock that runs ahead elsewhere makes no message younger than new.
    return [max(0.0, now - at.timestamp()) for letter in letters if (at := letter.event_at)]


@dataclass(slots=True)
class _Checked:
    """What a handler would say to the payloads."""

    valid: int = 0
    invalid: int = 0
    unread: int = 0
    example: str | None = None


def _check(
    engine: Engine, letters: Sequence[LetterRef], handler: Named, vault: Vault | None
) -> _Checked:
    found = _Checked()
    ids = [letter.dlq_id for letter in letters]
    for start in range(0, len(ids), _CHUNK):
        opened = open_messages(engine, ids[start : start + _CHUNK], vault)
        found.unread += len(opened.closed)
        for dlq_id, message in opened.messages.items():
            try:
                handler.decode(message.payload)
            except HoldfastError as error:
                found.invalid += 1
                # What a decoder says may quote the value, and that may be a secret.
                words = WITHHELD if dlq_id in opened.secret else str(error)
                found.example = found.example or f"{dlq_id}: {words}"
            else:
                found.valid += 1
    return found
