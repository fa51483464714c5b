"""What earlier versions remembered: under the handler's Python name, and by bare message ids.

Their rows stay where they are. A scope that has such predecessors asks them as well, so that
no effect happens a second time over an upgrade. While processes of both versions may run,
for a day, what it claims is written there, too: the older ones look nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from holdfast.idempotency.claim import (
    Claim,
    ClaimRequest,
    agrees,
    inserted,
    keep_result,
    recalled,
    unclaim_number,
)
from holdfast.idempotency.identity import consumer_key, message_key
from holdfast.ids import STARTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session

UPGRADE_SECONDS = 86400.0
"""How long older processes may still run beside this version."""


@dataclass(frozen=True, slots=True)
class FormerScopes:
    """How earlier versions named a scope: by group, module and name of the function."""

    group: str
    """Empty for a function that stands alone."""
    names: tuple[str, ...]
    """What the function was or may have been called, its module included."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names that are certain."""
        return tuple(f"{self.group}/{name}" if self.group else name for name in self.names)

    def has(self, scope: str) -> bool:
        """Whether *scope* was this function's, wherever its module was imported from."""
        group, slash, name = scope.rpartition("/")
        if group != self.group or bool(slash) is not bool(self.group):
            return False
        return any(name == one or _is_inside(name, one) for one in self.names)


def _is_inside(name: str, known: str) -> bool:
    """Whether *name* has the module of *known* in some package: `shop.billing.charge`."""
    return known.partition(".")[0] not in STARTED and name.endswith(f".{known}")


class FormerScope(NamedTuple):
    """Rows of an earlier version that are a scope's own as well, by the bare ids of messages."""

    number: int
    is_written: bool
    """Whether older processes may still look there: claims are written there, too."""


def carried(
    session: Session | Connection,
    consumer: str,
    former: Sequence[FormerScope],
    wanted: Sequence[ClaimRequest],
    answers: Sequence[Claim],
) -> list[Claim]:
    """Return *answers*, in which what an earlier version has handled is a duplicate.

    Nobody knows of which source an old row is. Where its content agrees it is this message;
    where not, it is one of another source.
    """
    found = list(answers)
    for one in former:
        places = [
            n for n, claim in enumerate(found) if claim.is_new and _counts(one, consumer, wanted[n])
        ]
        if not places:
            continue
        bare = {bare_key(wanted[n]): _bare(wanted[n]) for n in places}
        ordered = [bare[key] for key in sorted(bare)]
        fresh = set(bare)
        if one.is_written:
            new = inserted(session, one.number, ordered)
            fresh = fresh if new is None else new
            old = [key for key in sorted(bare) if key not in fresh]
        else:
            old = sorted(bare)
        known = recalled(session, one.number, old) if old else {}
        for n in places:
            item = wanted[n]
            key = bare_key(item)
            before = known.get(key)
            if before is None or not agrees(before[0], item):
                if one.is_written and key in fresh:
                    found[n] = replace(found[n], carried=(*found[n].carried, one.number))
                continue
            found[n] = Claim(is_new=False, result=before[1])
            if before[1] is not None:
                keep_result(session, consumer, item.key, before[1])
    return found


def known_formerly(
    session: Session | Connection, consumer: str, former: Sequence[FormerScope], item: ClaimRequest
) -> Claim | None:
    """Return what an earlier version remembers of *item*; claims nothing."""
    for one in former:
        if _counts(one, consumer, item):
            key = bare_key(item)
            before = recalled(session, one.number, [key]).get(key)
            if before is not None and agrees(before[0], item):
                return Claim(is_new=False, result=before[1])
    return None


def unclaim_carried(
    session: Session | Connection, claims: Iterable[tuple[ClaimRequest, Claim]]
) -> None:
    """Take back what `carried` has written for these claims, whose messages were not handled."""
    by_number: dict[int, list[bytes]] = {}
    for item, claim in claims:
        for number in claim.carried:
            by_number.setdefault(number, []).append(bare_key(item))
    for number, keys in sorted(by_number.items()):
        unclaim_number(session, number, keys)


def bare_key(item: ClaimRequest) -> bytes:
    """Return the key under which earlier versions knew it: by the id, whatever its source."""
    return message_key(item.id)


def _counts(former: FormerScope, consumer: str, item: ClaimRequest) -> bool:
    """Whether the row of *item* in *former* would be another than the one just claimed."""
    return former.number != consumer_key(consumer) or bare_key(item) != item.key


def _bare(item: ClaimRequest) -> ClaimRequest:
    return ClaimRequest(key=bare_key(item), digest=item.digest, id=item.id)
