"""What a replay would do, before anything is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.dlq.replay.letters import messages
from holdfast.dlq.replay.target import target_topic
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import Connection

    from holdfast.dlq.replay.freezing import Manifest
    from holdfast.dlq.replay.handlers import Named
    from holdfast.dlq.replay.manifest import Candidate
    from holdfast.dlq.replay.plan import Terms

_CHUNK = 500
_ASIDES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The report of a dry run."""

    count: int
    hash: str
    high_water: int
    by_fingerprint: dict[str, int]
    by_version: dict[str, int]
    by_tenant: dict[str, int]
    keys: int
    targets: dict[str, int]
    canary: int
    oldest_seconds: float | None
    dedup_window: float
    beyond_window: int
    """Messages older than the consumer remembers: it could not tell a duplicate of these."""
    aside: dict[str, int]
    aside_examples: tuple[tuple[str, str], ...]
    claimed_elsewhere: dict[str, int]
    valid: int | None
    invalid: int | None
    """None unless a handler was given to check payloads against."""
    invalid_example: str | None
    seconds: float | None
    """How long it takes at the rate; None when only the broker decides."""
    needs_approval: bool


def dry_run(
    db: Connection,
    manifest: Manifest,
    terms: Terms,
    *,
    dedup_window: float = 14 * 86400.0,
    handler: Named | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> DryRun:
    """Return what sending *manifest* would mean; nothing is written or sent."""
    letters = manifest.letters
    ages = _ages(letters, clock.now().timestamp())
    valid, invalid, example = (
        (None, None, None) if handler is None else _check(db, letters, handler)
    )
    return DryRun(
        count=len(letters),
        hash=manifest.hash,
        high_water=manifest.high_water,
        by_fingerprint=dict(Counter(letter.fingerprint or "" for letter in letters)),
        by_version=dict(Counter(letter.version or "(unknown)" for letter in letters)),
        by_tenant=dict(Counter(letter.tenant or "(none)" for letter in letters).most_common(20)),
        keys=len({letter.key_hash for letter in letters if letter.key is not None}),
        targets=dict(
            Counter(target_topic(letter.topic, letter.group, terms.to_topic) for letter in letters)
        ),
        canary=min(terms.policy.canary, len(letters)),
        oldest_seconds=max(ages, default=None),
        dedup_window=dedup_window,
        beyond_window=sum(age > dedup_window for age in ages),
        aside=dict(Counter(state.value for _, state, _ in manifest.aside)),
        aside_examples=tuple((letter.dlq_id, why) for letter, _, why in manifest.aside[:_ASIDES]),
        claimed_elsewhere=manifest.claimed_elsewhere,
        valid=valid,
        invalid=invalid,
        invalid_example=example,
        seconds=terms.rate.seconds_for(len(letters)),
        needs_approval=len(letters) > terms.approve_above,
    )


def _ages(letters: Sequence[Candidate], now: float) -> list[float]:
    # A clock that runs ahead elsewhere makes no message younger than new.
    return [max(0.0, now - at.timestamp()) for letter in letters if (at := letter.event_at)]


def _check(
    db: Connection, letters: Sequence[Candidate], handler: Named
) -> tuple[int, int, str | None]:
    valid, invalid, example = 0, 0, None
    ids = [letter.dlq_id for letter in letters]
    for start in range(0, len(ids), _CHUNK):
        for dlq_id, message in messages(db, ids[start : start + _CHUNK]).items():
            try:
                handler.decode(message.payload)
            except HoldfastError as error:
                invalid += 1
                example = example or f"{dlq_id}: {error}"
            else:
                valid += 1
    return valid, invalid, example
