"""A group in Redis: one owner a lane, fair shares, little movement.

A lane is owned under a lease that its owner renews while it polls. All times are the
server's own, as expiries of keys. What an owner does is checked against the lane's epoch,
not against the lease: a late owner is harmless, and one that nobody replaced goes on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.groups.assignment import decide
from holdfast.brokers.groups.member import GroupChange
from holdfast.brokers.redis import scripts
from holdfast.brokers.redis.connection import Command, RedisConnection, evaluation, uptime
from holdfast.brokers.redis.lane import RedisLane
from holdfast.ports import Lane

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from holdfast.brokers.groups.member import Subscription
    from holdfast.brokers.redis.broker import Keys, RedisTopics
    from holdfast.brokers.redis.lane import LaneStore
    from holdfast.clock import Clock

_look = msgspec.msgpack.Decoder(tuple[str, list[tuple[str, str]]]).decode
_owners = msgspec.msgpack.Decoder(list[str]).decode


class RedisGroup:
    """One member's place in its group."""

    def __init__(
        self,
        link: RedisConnection,
        keys: Keys,
        topics: RedisTopics,
        ledger: LaneStore,
        subscription: Subscription,
        clock: Clock,
    ) -> None:
        self.session = subscription.session
        self.rung = "0-0"
        """The last ring of the group's bell that was seen."""
        self.is_rung = False
        """Whether the bell was rung since, or a lane turned out to be lost."""
        self.is_in_doubt = False
        """Whether the server may have other entries pending than we know of."""
        self._member = subscription.member
        self._group = subscription.group
        self._wanted = json.dumps(sorted(subscription.topics))
        self._keys = keys
        self._own_keys = keys.group(subscription.group)
        self._link = link
        self._topics = topics
        self._ledger = ledger
        self._clock = clock
        self._connected = 0
        self._seen = 0
        self._spare_until = 0.0

    @property
    def bell(self) -> str:
        """The stream that has something new when the group has changed."""
        return self._own_keys.bell

    def has_news(self) -> bool:
        """Whether the bell was rung, or the server may have forgotten what it did last."""
        return self.is_rung or self._connected != self._link.connected

    def look(self, mine: Mapping[Lane, RedisLane]) -> GroupChange[RedisLane]:
        """Stay alive, bury the dead, and take what is free and should be ours."""
        spare = self._spares_the_silent(self._clock.monotonic())
        rung, members, lost = self._renew(mine, spare)
        lanes = self._lanes(sorted(frozenset().union(*members.values())))
        decision = decide(self._member, mine.keys() - lost, self._owners(lanes, spare), members)
        acquired = self._take(sorted(decision.take), spare)
        self.rung, self.is_rung = rung, False
        # A server that crashed may have forgotten what it did last.
        self.is_in_doubt |= self._connected != self._link.connected
        self._connected = self._link.connected
        return GroupChange(
            acquired=acquired, surplus=decision.surplus, lost=decision.lost.union(lost)
        )

    def enter(self, lane: Lane, claim: RedisLane) -> RedisLane:
        """Learn what is pending in a lane that was taken; its last owner may have died with it."""
        del lane
        self._ledger.load(claim, blame=True)
        return claim

    def forget(self, states: Collection[RedisLane]) -> None:
        """Hold nothing but the states themselves."""

    def free(self, states: Collection[RedisLane]) -> None:
        """Put back what is not settled, without blame; the next owner can take the lanes."""
        commands: list[Command] = []
        for state in states:
            held = {position: d.count or 1 for position, d in state.flying.items()}
            commands += self._ledger.parking(state, held)
            keys = (state.keys.lease, state.keys.state)
            commands.append(evaluation(scripts.FREE, keys, state.token))
        ring = ("XADD", self.bell, "MAXLEN", 1, "*", "by", self._member)
        self._link.calls([*commands, ring])

    def leave(self, states: Collection[RedisLane]) -> None:
        """Free the lanes and go away at once."""
        if states:
            self.free(states)
        if self._connected:
            self._link.call(*evaluation(scripts.LEAVE, self._own_keys, self._member))

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
        self, mine: Mapping[Lane, RedisLane], spare: bool
    ) -> tuple[str, dict[str, frozenset[str]], set[Lane]]:
        session = round(self.session * 1000)
        look = evaluation(
            scripts.LOOK, self._own_keys, self._member, self._wanted, session, int(spare)
        )
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
        all_keys = [self._keys.lane(lane, self._group) for lane in lanes]
        keys = [key for k in all_keys for key in (k.state, k.lease)]
        answer = self._link.call(*evaluation(scripts.OWNERS, keys, int(spare)))
        return {lane: owner or None for lane, owner in zip(lanes, _owners(answer), strict=True)}

    def _take(self, lanes: Iterable[Lane], spare: bool) -> dict[Lane, RedisLane]:
        """Take those of *lanes* that are still free; the server checks it."""
        session = round(self.session * 1000)
        keys = {lane: self._keys.lane(lane, self._group) for lane in lanes}
        epochs = self._link.calls(
            [
                evaluation(
                    scripts.TAKE, (k.stream, k.state, k.lease),
                    self._member, self._group, session, int(spare),
                )
                for k in keys.values()
            ]
        )  # fmt: skip
        return {
            lane: RedisLane(lane, keys[lane], int(epoch), self._member)
            for lane, epoch in zip(keys, epochs, strict=True)
            if epoch
        }
