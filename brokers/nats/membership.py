"""One member's part in its group: reads and compare-and-sets of the group's value."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.brokers.nats import group as groups
from holdfast.brokers.nats.errors import (
    MESSAGE_NOT_FOUND,
    STREAM_EXISTS,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    JetStreamRefusal,
)
from holdfast.brokers.nats.group import GroupRecord
from holdfast.brokers.nats.jetstream import moment
from holdfast.brokers.nats.streams import token
from holdfast.errors import BrokerDown, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from holdfast.brokers.groups.member import GroupChange, Subscription
    from holdfast.brokers.nats.connection import Connection
    from holdfast.brokers.nats.consumers import LaneConsumers
    from holdfast.brokers.nats.group import LaneEntry
    from holdfast.brokers.nats.jetstream import JetStream
    from holdfast.brokers.nats.lane import NatsLane
    from holdfast.clock import Clock
    from holdfast.ports import Lane

T = TypeVar("T")

BUCKET = "holdfast"
STREAM = f"KV_{BUCKET}"
_JUMP = 0.1  # a step of the clock by this part of a session counts as a jump
_MOST_TRIES = 50  # against rivals; each failure means that one of them succeeded


class _Announced(msgspec.Struct):
    generation: int = -1


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(GroupRecord).decode
_announced = msgspec.json.Decoder(_Announced).decode


class GroupBucket:
    """Where groups are kept."""

    def __init__(self, jetstream: JetStream, replicas: int) -> None:
        self._js = jetstream
        self._replicas = replicas

    def server_time(self) -> float:
        """Return the server's time; the bucket exists after this."""
        try:
            answer = self._js.ask(f"STREAM.INFO.{STREAM}")
        except JetStreamRefusal as refusal:
            if refusal.number != STREAM_NOT_FOUND:
                raise refusal.translated() from refusal
            self._create()
            return self.server_time()
        if "ts" not in answer:
            raise ConfigurationError("this NATS server is too old: use 2.10 or newer")
        return moment(answer["ts"])

    def read(self, name: str) -> tuple[GroupRecord, int]:
        """Return the group and its revision; a group that nobody joined has revision 0."""
        body = {"last_by_subj": subject(name)}
        try:
            message = self._js.ask(f"STREAM.MSG.GET.{STREAM}", body)["message"]
        except JetStreamRefusal as refusal:
            if refusal.number in {MESSAGE_NOT_FOUND, STREAM_NOT_FOUND}:
                return GroupRecord(), 0
            raise refusal.translated() from refusal
        return _decode(b64decode(message.get("data", "")) or b"{}"), int(message["seq"])

    def write(self, name: str, group: GroupRecord, revision: int) -> bool:
        """Store *group* unless somebody else did since *revision*; return whether it is stored."""
        expected = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            self._js.store(subject(name), _encode(group), expected)
        except JetStreamRefusal as refusal:
            if refusal.number in WRONG_LAST_SEQUENCE:
                return False
            raise refusal.translated() from refusal
        return True

    def _create(self) -> None:
        config = {
            "name": STREAM,
            "description": "Consumer groups of Holdfast: members and the lanes they own",
            "subjects": [f"$KV.{BUCKET}.>"],
            "max_msgs_per_subject": 1,
            "storage": "file",
            "discard": "new",
            "num_replicas": self._replicas,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
        }
        try:
            self._js.ask(f"STREAM.CREATE.{STREAM}", config)
        except JetStreamRefusal as refusal:
            if refusal.number != STREAM_EXISTS:
                raise refusal.translated() from refusal


class NatsGroup:
    """A member that is alive until `alive_until` of the monotonic clock, and no longer.

    Until then nobody else owns its lanes. After it, `fence` tells which ones are left.
    """

    def __init__(
        self,
        bucket: GroupBucket,
        consumers: LaneConsumers,
        subscription: Subscription,
        topics: Mapping[str, int],
        clock: Clock,
    ) -> None:
        self.session = subscription.session
        self.alive_until = float("-inf")
        self._me = subscription
        self._topics = topics
        self._bucket = bucket
        self.consumers = consumers
        self.clock = clock
        self._generation = self._heard = -1
        self._offset: float | None = None
        self._learned = self._spare_until = self._asked = float("-inf")

    @property
    def has_joined(self) -> bool:
        """Whether the group knows us."""
        return self._generation >= 0

    # -- the store of a group ------------------------------------------------------------

    def has_news(self) -> bool:
        """Whether a change of the group was heard of that we have not seen."""
        return self._heard > self._generation

    def look(self, mine: Mapping[Lane, NatsLane]) -> GroupChange[LaneEntry]:
        """Stay alive, bury the dead, and take what is free and should be ours."""
        heard = self._heard
        kept = frozenset(lane for lane, state in mine.items() if not state.gone)

        def look(group: GroupRecord, now: float) -> GroupChange[LaneEntry]:
            spare = self.clock.monotonic() < self._spare_until
            return groups.look(group, self._me, self._topics, now, kept, spare=spare)

        change = self._change(look)
        self.alive_until = self._asked + self.session
        if self._heard == heard:  # else there is news since, worth another look
            self._heard = self._generation
        return replace(change, lost=change.lost | (mine.keys() - kept))

    def enter(self, lane: Lane, claim: LaneEntry) -> NatsLane:
        """Start with *lane* where the group is."""
        return self.consumers.enter(lane, claim)

    def forget(self, states: Collection[NatsLane]) -> None:
        """Hear and say nothing more of lanes that are ours no more."""
        self.consumers.forget(states)

    def free(self, states: Collection[NatsLane]) -> None:
        """Give back what is not settled, in order; the next owner can take the lanes."""
        left = self._left(states)
        self._change(lambda group, _: groups.free(group, self._me.member, left))
        self.consumers.forget(states)

    def leave(self, states: Collection[NatsLane]) -> None:
        """Give back the lanes and the membership."""
        left = self._left(states)

        def go(group: GroupRecord, _: float) -> None:
            groups.free(group, self._me.member, left)
            groups.leave(group, self._me.member)

        self._change(go)
        self.alive_until = float("-inf")
        self.consumers.forget(states)

    def _left(self, states: Collection[NatsLane]) -> dict[Lane, str]:
        for state in states:
            state.revoked = True
        return self.consumers.leave(states)

    # -- what NATS needs beside ----------------------------------------------------------

    def reconnected(self, connection: Connection, lanes: Collection[NatsLane]) -> None:
        """Take *lanes* over to a new connection, and listen for news of the group there."""
        self.consumers.resume(lanes)
        self._learn_time()

        async def hear(message: Msg) -> None:
            """Note a change of the group: its value is published, too."""
            generation = _announced(message.data or b"{}").generation
            if generation > self._heard:
                self._heard = generation
                connection.bell.set()

        async def listen(client: Client) -> None:
            await client.subscribe(subject(self._me.group), cb=hear)

        connection.run(listen)

    def fence(self, lanes: Mapping[Lane, NatsLane]) -> None:
        """Make sure that what is settled next is ours to settle; what is not is marked gone."""
        if not self.has_joined or self.clock.monotonic() < self.alive_until:
            return

        def stay(group: GroupRecord, now: float) -> dict[Lane, int]:
            groups.stay(group, self._me, now)
            return {lane: group.owned(lane).epoch for lane in group.held_by(self._me.member)}

        epochs = self._change(stay)
        self.alive_until = self._asked + self.session
        for lane, state in lanes.items():
            state.gone = state.gone or epochs.get(lane) != state.epoch

    def entry(self, lane: Lane) -> LaneEntry:
        """Return what the group says of *lane* now."""
        return self._bucket.read(self._me.group)[0].owned(lane)

    def move(self, lane: Lane, start: int | str) -> LaneEntry | None:
        """Put the group at *start* in *lane*, if it is still ours."""
        return self._change(lambda group, _: groups.move(group, self._me.member, lane, start))

    def _learn_time(self) -> None:
        """Learn the time of the server we are connected to now.

        Also while the connection lasts: a clock may be set, and this machine may have slept.
        What fits to the answer is kept, for an answer may be late. After a jump all times in
        the group are off until their members have renewed them, so nobody is buried for a
        session: a clock step is no crash.
        """
        before = self.clock.monotonic()
        time = self._bucket.server_time()
        self._learned = after = self.clock.monotonic()
        known = self._offset
        least, most = time - after, time - before
        self._offset = least if known is None else min(max(known, least), most)
        if known is not None and abs(self._offset - known) > _JUMP * self.session:
            self._spare_until = after + self.session

    def _change(self, change: Callable[[GroupRecord, float], T]) -> T:
        """Apply *change* to the group as it is; another member's change meanwhile is kept."""
        for _ in range(_MOST_TRIES):
            age = self.clock.monotonic() - self._learned
            if self._offset is None or age >= self.session / 3:
                self._learn_time()
            # Taken before anything is sent: the others count from a later moment.
            self._asked = self.clock.monotonic()
            group, revision = self._bucket.read(self._me.group)
            result = change(group, self._asked + (self._offset or 0.0))
            if self._bucket.write(self._me.group, group, revision):
                self._generation = group.generation
                return result
        raise BrokerDown(
            f"group {self._me.group!r} changes too fast: {_MOST_TRIES} writes collided"
        )


def subject(group: str) -> str:
    """Return the subject on which a group's value is kept and announced."""
    return f"$KV.{BUCKET}.{token(group)}"
