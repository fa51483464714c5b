"""What every test of the kit works with: fresh topics, members, and ways to look."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.ids import new_id
from holdfast.message import Message
from holdfast.ports import Ordering
from holdfast.testing.conformance.recording import (
    STEP,
    Chronicle,
    RecordedMember,
    Recorder,
    WaitDeadline,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from holdfast.ports import Broker, Lane, Published, Sink, Source
    from holdfast.testing.conformance.hooks import Hooks

FENCE = b"fence "
"""Starts the bodies of messages that mark the end of what could still come."""


class ConformanceStage:
    """One test's topics, groups and members; nothing is shared with another test."""

    def __init__(self, hooks: Hooks, broker: Broker, *, url: str | None, folder: Path) -> None:
        self.hooks = hooks
        self.broker = broker
        self.caps = broker.caps
        self.clock = hooks.clock
        self.url = url
        self.folder = folder
        self.chronicle = Chronicle()
        self.exclusive = (
            self.caps.ordering is Ordering.PARTITION if hooks.exclusive is None else hooks.exclusive
        )
        self._numbers = itertools.count(1)
        self._name = f"kit-{new_id().replace('-', '')[-16:]}"
        self.group = f"{self._name}-group"
        self.members: list[RecordedMember] = []
        self._sinks: list[Sink] = []
        self._keys: dict[str, dict[bytes | None, None]] = {}
        self._partitions: dict[str, int] = {}

    def close(self) -> None:
        """Close whatever is still open."""
        for member in self.members:
            if member.is_open:
                with suppress(HoldfastError):
                    member.close()
        for sink in self._sinks:
            sink.close()

    # -- topics and messages -----------------------------------------------------------

    def topic(self, *, partitions: int | None = None) -> str:
        """Return a new topic, of which the stage's group knows."""
        topic = f"{self._name}-{next(self._numbers)}"
        self._partitions[topic] = self.hooks.lanes if partitions is None else partitions
        self.broker.create_topic(topic, partitions=self._partitions[topic])
        self._introduce(topic, self.group)
        return topic

    def unknown_topic(self) -> str:
        """Return the name of a topic that does not exist."""
        return f"{self._name}-unknown-{next(self._numbers)}"

    def another_group(self, topic: str) -> str:
        """Return a new group, which gets the messages of *topic* from now on at the latest."""
        group = f"{self._name}-group-{next(self._numbers)}"
        self._introduce(topic, group)
        return group

    def _introduce(self, topic: str, group: str) -> None:
        # A broker that keeps no log stores messages only for the groups it knows.
        if not self.caps.late_groups:
            self.broker.create_group(topic, group)

    def sink(self) -> Sink:
        """Return a new sink."""
        sink = self.broker.sink(**self.hooks.sink_settings)
        self._sinks.append(sink)
        return sink

    def publish(self, topic: str, *bodies: bytes, key: bytes | None = None) -> list[Message]:
        """Store *bodies*, all with *key*, or else each with a key of its own."""
        messages = [Message.new(topic, body, key=body if key is None else key) for body in bodies]
        self.send(*messages)
        return messages

    def send(self, *messages: Message) -> list[Published]:
        """Store *messages*."""
        sink = self._sinks[0] if self._sinks else self.sink()
        results = sink.publish(messages)
        assert [result.error for result in results] == [None] * len(messages)
        for message in messages:
            self._keys.setdefault(message.topic, {})[message.key] = None
        return results

    # -- members -------------------------------------------------------------------------

    def member(
        self,
        *topics: str,
        group: str | None = None,
        on_revoked: Callable[[set[Lane]], None] | None = None,
    ) -> RecordedMember:
        """Return a new member of *group*, or of the stage's own."""
        name, group = f"member {next(self._numbers)}", self.group if group is None else group
        listener = Recorder(name, self.chronicle, on_revoked)
        source = self.hooks.source(self.broker, topics, group=group, listener=listener)
        return self.adopt(source, name=name, group=group)

    def adopt(
        self, source: Source, *, name: str = "adopted", group: str | None = None
    ) -> RecordedMember:
        """Return the member that *source* is, to be closed with the stage."""
        group = self.group if group is None else group
        member = RecordedMember(name, group, source, self.clock, self.hooks.settle_in)
        self.members.append(member)
        return member

    def abandon(self, member: RecordedMember) -> None:
        """Make *member* vanish as if its process had been killed."""
        owned = member.source.assignment()
        member.is_open = False
        self.hooks.abandon(self.broker, member.source)
        self.chronicle.heard.append((member.name, "died", owned))

    def until(self, condition: Callable[[], object], *members: RecordedMember, what: str) -> None:
        """Let *members* poll in turn until *condition* holds."""
        deadline = WaitDeadline(self.hooks.settle_in)
        while not condition():
            deadline.check(
                what, {m.name: (m.bodies, sorted(m.source.assignment())) for m in members}
            )
            for member in members:
                member.poll()

    def share(self, topic: str, *members: RecordedMember) -> None:
        """Let *members* poll until all lanes of *topic* have come to rest among them."""

        def is_shared() -> bool:
            parts = [member.source.assignment() for member in members]
            if not self.exclusive:
                return all(parts)
            owned, sizes = frozenset().union(*parts), list(map(len, parts))
            # While one has two more than another, a lane is still to change hands.
            fair = max(sizes) - min(sizes) <= 1
            return fair and sum(sizes) == len(owned) == self._partitions[topic]

        self.until(is_shared, *members, what=f"{len(members)} member(s) share the lanes")

    # -- looking -------------------------------------------------------------------------

    def leftovers(self, topic: str) -> list[bytes | None]:
        """Return the bodies that the group has not settled, after all its members closed.

        A closed member's messages are free at once, so a new member gets them before the
        fences that are published now, or soon after where there is no order.
        """
        for member in self.members:
            if member.is_open and member.group == self.group:
                member.close()
        fences = {b"%s%d" % (FENCE, next(self._numbers)): key for key in self._keys.get(topic, {})}
        self.send(*(Message.new(topic, body, key=key) for body, key in fences.items()))
        last = self.member(topic)
        deadline = WaitDeadline(self.hooks.settle_in)
        while not fences.keys() <= set(last.bodies):
            deadline.check("the fences come", last.bodies)
            last.accept(*last.poll())
        last.accept(*last.idle(self.hooks.quiet if self.caps.ordering is Ordering.NONE else STEP))
        return [body for body in last.bodies if body not in fences]
