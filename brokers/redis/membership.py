"""Who owns which lane of a group: one owner each, fair shares, little movement.

A lane is owned under a lease that its owner renews while it polls. All times are the
server's own, as expiries of keys. What an owner does is checked against the lane's epoch,
not against the lease: a late owner is harmless, and one that nobody replaced goes on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.balance import balance
from holdfast.brokers.redis import scripts
from holdfast.brokers.redis.lane import LaneState
from holdfast.brokers.redis.link import Command, Link, evaluation
from holdfast.brokers.redis.server import uptime
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.brokers.redis.keys import Keys
    from holdfast.brokers.redis.topics import Topics

_look = msgspec.msgpack.Decoder(tuple[str, list[tuple[str, str]]]).decode
_owners = msgspec.msgpack.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a member must do after it looked at its group."""

    rung: str
    """The last ring of the group's bell that it has seen."""
    acquired: list[LaneState]
    """Lanes that are now ours."""
    surrender: frozenset[Lane]
    """Lanes of ours that somebody else should have: settle their work, then free them."""
    lost: frozenset[Lane]
    """Lanes that were ours and are not any more."""


class Membership:
    """One member's place in its group."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        topics: Topics,
        group: str,
        wanted: Sequence[str],
        session: float,
        member: str,
    ) -> None:
        self.group = group
        self.member = member
        self.session = session
        self._wanted = json.dumps(sorted(wanted))
        self.keys = keys.group(group)
        self._all_keys = keys
        self._link = link
        self._topics = topics
        self._seen = 0
        self._spare_until = 0.0

    def look(self, mine: Mapping[Lane, LaneState], now: float) -> Verdict:
        """Stay alive, bury the dead, and take what is free and should be ours."""
        spare = self._spares_the_silent(now)
        rung, members, lost = self._renew(mine, spare)
        lanes = self._lanes(sorted(frozenset().union(*members.values())))
        owners = self._owners(lanes, spare)
        target = balance(owners, members)
        ours = {lane for lane, owner in target.items() if owner == self.member}
        kept = mine.keys() - lost
        free = [lane for lane in lanes if owners[lane] in (None, self.member)]
        return Verdict(
            rung=rung,
            acquired=self._take([lane for lane in free if lane in ours - kept], spare),
            surrender=frozenset(kept - ours),
            lost=frozenset(lost),
        )

    def parting(self, state: LaneState) -> Command:
        """Return the command by which a lane is free for its next owner."""
        return evaluation(scripts.FREE, (state.keys.lease, state.keys.state), state.token)

    def ring(self) -> Command:
        """Return the command that makes the other members look."""
        return ("XADD", self.keys.bell, "MAXLEN", 1, "*", "by", self.member)

    def leave(self) -> None:
        """Go away at once; lanes must have been freed before."""
        self._link.call(*evaluation(scripts.LEAVE, self.keys, self.member))

    # -- the steps of a look -------------------------------------------------------------

    def _spares_the_silent(self, now: float) -> bool:
        """Whether others' silence may be the server's fault, so that nobody is taken for dead.

        After a failure of the server all are silent alike, and the first to come back must
        not bury the others: their messages would count a failure that was none of theirs.
        """
        self._link.connect()
        if self._seen != self._link.connected:
            is_back, known = self._seen > 0, uptime(self._link)
            self._seen = self._link.connected
            up = 0.0 if is_back else self.session if known is None else known
            self._spare_until = now + self.session - up
        return now < self._spare_until

    def _renew(
        self, mine: Mapping[Lane, LaneState], spare: bool
    ) -> tuple[str, dict[str, frozenset[str]], set[Lane]]:
        session = round(self.session * 1000)
        look = evaluation(scripts.LOOK, self.keys, self.member, self._wanted, session, int(spare))
        renewals = [
            evaluation(scripts.RENEW, (s.keys.lease, s.keys.state), s.token, s.member, session)
            for s in mine.values()
        ]
        answer, *renewed = self._link.calls([look, *renewals])
        rung, rows = _look(answer)
        lost = {lane for lane, is_ours in zip(mine, renewed, strict=True) if not is_ours}
        return rung, {name: frozenset(json.loads(topics)) for name, topics in rows}, lost

    def _lanes(self, topics: Sequence[str]) -> list[Lane]:
        counts = self._topics.known(topics)
        return [Lane(topic, number) for topic in topics for number in range(counts.get(topic, 0))]

    def _owners(self, lanes: Sequence[Lane], spare: bool) -> dict[Lane, str | None]:
        all_keys = [self._all_keys.lane(lane, self.group) for lane in lanes]
        keys = [key for k in all_keys for key in (k.state, k.lease)]
        answer = self._link.call(*evaluation(scripts.OWNERS, keys, int(spare)))
        return {lane: owner or None for lane, owner in zip(lanes, _owners(answer), strict=True)}

    def _take(self, lanes: Sequence[Lane], spare: bool) -> list[LaneState]:
        session = round(self.session * 1000)
        all_keys = [self._all_keys.lane(lane, self.group) for lane in lanes]
        epochs = self._link.calls(
            [
                evaluation(
                    scripts.TAKE, (k.stream, k.state, k.lease),
                    self.member, self.group, session, int(spare),
                )
                for k in all_keys
            ]
        )  # fmt: skip
        return [
            LaneState(lane, keys, int(epoch), self.member)
            for lane, keys, epoch in zip(lanes, all_keys, epochs, strict=True)
            if epoch
        ]
