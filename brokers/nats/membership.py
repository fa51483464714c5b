"""One member's part in its group: reads and compare-and-sets of the group's value."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.brokers.nats import group as groups
from holdfast.brokers.nats.faults import (
    MESSAGE_NOT_FOUND,
    STREAM_EXISTS,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    Refusal,
)
from holdfast.brokers.nats.group import Group, Me, Ownership, Verdict
from holdfast.brokers.nats.jetstream import moment
from holdfast.brokers.nats.names import token
from holdfast.errors import BrokerDown, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.brokers.nats.jetstream import JetStream
    from holdfast.clock import Clock
    from holdfast.ports import Lane

T = TypeVar("T")

BUCKET = "holdfast"
STREAM = f"KV_{BUCKET}"
_JUMP = 0.1  # a step of the clock by this part of a session counts as a jump
_MOST_TRIES = 50  # against rivals; each failure means that one of them succeeded

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Group).decode


class GroupStore:
    """Where groups are kept."""

    def __init__(self, jetstream: JetStream, replicas: int) -> None:
        self._js = jetstream
        self._replicas = replicas

    def server_time(self) -> float:
        """Return the server's time; the bucket exists after this."""
        try:
            answer = self._js.ask(f"STREAM.INFO.{STREAM}")
        except Refusal as refusal:
            if refusal.number != STREAM_NOT_FOUND:
                raise refusal.translated() from refusal
            self._create()
            return self.server_time()
        if "ts" not in answer:
            raise ConfigurationError("this NATS server is too old: use 2.10 or newer")
        return moment(answer["ts"])

    def read(self, name: str) -> tuple[Group, int]:
        """Return the group and its revision; a group that nobody joined has revision 0."""
        body = {"last_by_subj": subject(name)}
        try:
            message = self._js.ask(f"STREAM.MSG.GET.{STREAM}", body)["message"]
        except Refusal as refusal:
            if refusal.number in {MESSAGE_NOT_FOUND, STREAM_NOT_FOUND}:
                return Group(), 0
            raise refusal.translated() from refusal
        return _decode(b64decode(message.get("data", "")) or b"{}"), int(message["seq"])

    def write(self, name: str, group: Group, revision: int) -> bool:
        """Store *group* unless somebody else did since *revision*; return whether it is stored."""
        expected = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            self._js.store(subject(name), _encode(group), expected)
        except Refusal as refusal:
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
        except Refusal as refusal:
            if refusal.number != STREAM_EXISTS:
                raise refusal.translated() from refusal


class Membership:
    """A member that is alive until `alive_until` of the monotonic clock, and no longer.

    Until then nobody else owns its lanes. After it, `renew` tells which ones are left.
    """

    def __init__(self, store: GroupStore, group: str, me: Me, clock: Clock) -> None:
        self.group = group
        self.generation = -1
        self.alive_until = float("-inf")
        self._store = store
        self._me = me
        self._clock = clock
        self._offset: float | None = None
        self._learned = self._spare_until = self._asked = float("-inf")

    @property
    def name(self) -> str:
        """This member's name in the group."""
        return self._me.name

    @property
    def has_joined(self) -> bool:
        """Whether the group knows us."""
        return self.generation >= 0

    @property
    def beat_due(self) -> bool:
        """Whether it is time to tell the others that we live."""
        return self.alive_until - self._clock.monotonic() <= self._me.session * 2 / 3

    @property
    def is_alive(self) -> bool:
        """Whether our lanes are ours without asking."""
        return self._clock.monotonic() < self.alive_until

    def reconnected(self) -> None:
        """Learn the time of the server we are connected to now.

        Also while the connection lasts: a clock may be set, and this machine may have slept.
        What fits to the answer is kept, for an answer may be late. After a jump all times in
        the group are off until their members have renewed them, so nobody is buried for a
        session: a clock step is no crash.
        """
        before = self._clock.monotonic()
        time = self._store.server_time()
        self._learned = after = self._clock.monotonic()
        known = self._offset
        least, most = time - after, time - before
        self._offset = least if known is None else min(max(known, least), most)
        if known is not None and abs(self._offset - known) > _JUMP * self._me.session:
            self._spare_until = after + self._me.session

    def entry(self, lane: Lane) -> Ownership:
        """Return what the group says of *lane* now."""
        return self._store.read(self.group)[0].owned(lane)

    def look(self, mine: frozenset[Lane]) -> Verdict:
        """Stay alive, bury the dead, and take what is free and should be ours."""

        def look(group: Group, now: float) -> Verdict:
            spare = self._clock.monotonic() < self._spare_until
            return groups.look(group, self._me, now, mine, spare=spare)

        verdict = self._change(look)
        self.alive_until = self._asked + self._me.session
        return verdict

    def renew(self) -> dict[Lane, int]:
        """Stay alive; return the lanes that are still ours, with their epochs."""

        def stay(group: Group, now: float) -> dict[Lane, int]:
            groups.stay(group, self._me, now)
            return {lane: group.owned(lane).epoch for lane in group.held_by(self.name)}

        lanes = self._change(stay)
        self.alive_until = self._asked + self._me.session
        return lanes

    def free(self, lanes: Mapping[Lane, str]) -> None:
        """Give up *lanes*; the values name the server that was told all of it."""
        self._change(lambda group, _: groups.free(group, self.name, lanes))

    def leave(self, lanes: Mapping[Lane, str]) -> None:
        """Give up *lanes* and the membership."""

        def go(group: Group, _: float) -> None:
            groups.free(group, self.name, lanes)
            groups.leave(group, self.name)

        self._change(go)
        self.alive_until = float("-inf")

    def move(self, lane: Lane, start: int | str) -> Ownership | None:
        """Put the group at *start* in *lane*, if it is still ours."""
        return self._change(lambda group, _: groups.move(group, self.name, lane, start))

    def _change(self, change: Callable[[Group, float], T]) -> T:
        """Apply *change* to the group as it is; another member's change meanwhile is kept."""
        for _ in range(_MOST_TRIES):
            age = self._clock.monotonic() - self._learned
            if self._offset is None or age >= self._me.session / 3:
                self.reconnected()
            # Taken before anything is sent: the others count from a later moment.
            self._asked = self._clock.monotonic()
            group, revision = self._store.read(self.group)
            result = change(group, self._asked + (self._offset or 0.0))
            if self._store.write(self.group, group, revision):
                self.generation = group.generation
                return result
        raise BrokerDown(f"group {self.group!r} changes too fast: {_MOST_TRIES} writes collided")


def subject(group: str) -> str:
    """Return the subject on which a group's value is kept and announced."""
    return f"$KV.{BUCKET}.{token(group)}"
