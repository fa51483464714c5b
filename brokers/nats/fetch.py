"""Messages on their way from the server to their handlers.

What comes from the server: requests for messages, and the messages themselves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.brokers.nats.ack_tokens import tokens
from holdfast.errors import BrokerDown

if TYPE_CHECKING:
    from collections.abc import Collection

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from holdfast.brokers.nats.ack_tokens import Answer
    from holdfast.brokers.nats.acks import AckSender
    from holdfast.brokers.nats.connection import Connection
    from holdfast.brokers.nats.jetstream import JetStream
    from holdfast.brokers.nats.lane import NatsLane
    from holdfast.clock import Clock


class Arrival(msgspec.Struct, eq=False, gc=False):
    """A message that came, and is not yet handed out."""

    position: int
    number: int
    """The consumer's own number of this delivery."""
    count: int
    more: int
    """How many messages the server still has for this lane."""
    reply: str
    stored: float
    lease_until: float
    content: Any
    """The client library's message."""


class PullFlight(msgspec.Struct, eq=False, gc=False):
    """A message handed out and not yet settled."""

    reply: str
    lease_until: float
    arrival: Arrival
    """As it came."""
    keep_until: float = float("-inf")
    """Until when the lease is to be renewed."""
    key: bytes | None = None


@dataclass(slots=True)
class Pull:
    """A request for messages that the server has not yet fulfilled."""

    id: int
    left: int
    until: float


_NANO = 1_000_000_000
_GRACE = 2.0  # seconds after its end within which a request's answer may still come
_NONE = "404"  # no messages
_NORMAL = (_NONE, "408")  # time is up
_PASSING = ("Message Size Exceeds MaxBytes", "Batch Completed", "Server Shutdown")
_RIVAL = "Requests Pending"  # somebody else asks for this lane's messages
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Line:
    """The subscription that one lane's messages come by."""

    state: NatsLane
    inbox: str
    subscription: Any
    patience: float

    async def drain(self, _: Client) -> None:
        """End the subscription once everything has come that was sent by it."""
        await asyncio.wait_for(self.subscription.drain(), self.patience)

    async def cut(self, _: Client) -> None:
        """End the subscription, whatever is on its way."""
        await self.subscription.unsubscribe()


class PullIntake:
    """Asks for messages and sorts what comes to its lanes; used by one thread.

    Every lane has a subscription of its own, so that it can be closed alone, with everything
    that was on its way still arriving.
    """

    def __init__(
        self, connection: Connection, courier: AckSender, jetstream: JetStream, clock: Clock
    ) -> None:
        self._connection = connection
        self._courier = courier
        self._prefix = jetstream.prefix
        self._timeout = jetstream.timeout
        self._clock = clock
        self._lines: dict[int, _Line] = {}
        self._tokens = itertools.count(1)
        self._pulls = itertools.count(1)
        self._arrived: deque[tuple[int, float, Msg]] = deque()
        self._is_ringing = False

    def reconnected(self) -> None:
        """Forget the lines of the old connection, and whatever they still bring."""
        self._lines.clear()
        self._is_ringing = False

    def open(self, state: NatsLane) -> None:
        """Let messages of a lane come in."""
        token = next(self._tokens)

        async def subscribe(client: Client) -> _Line:
            async def hear(message: Msg) -> None:
                self._arrived.append((token, self._clock.monotonic(), message))
                if not self._is_ringing:  # once for all that was read from the socket together
                    self._is_ringing = True
                    self._connection.later(self._ring)

            inbox = client.new_inbox()
            subscription = await client.subscribe(f"{inbox}.*", cb=hear)
            return _Line(state, inbox, subscription, self._timeout)

        self._lines[token] = self._connection.run(subscribe)

    def close(self, state: NatsLane) -> None:
        """Take nothing more in for a lane, but all that was on its way."""
        for token, line in list(self._lines.items()):
            if line.state is state:
                self._connection.run(line.drain)
                self.absorb()
                del self._lines[token]

    def abandon(self, state: NatsLane) -> None:
        """Take nothing more in for a lane that is ours no more."""
        for token, line in list(self._lines.items()):
            if line.state is state:
                del self._lines[token]
                with suppress(BrokerDown):  # then the line is gone already
                    self._connection.run(line.cut)

    def ask(self, credit: int, seconds: float, paused: Collection[Any]) -> None:
        """Ask the server for what the lanes lack to have *credit* messages each."""
        now = self._clock.monotonic()
        for line in self._lines.values():
            state = line.state
            if state.lane not in paused and (count := state.wants(credit, now)) > 0:
                self._pull(line, count, seconds, now)

    def _pull(self, line: _Line, count: int, seconds: float, now: float) -> None:
        state = line.state
        number = next(self._pulls)
        request: dict[str, Any] = {"batch": count}
        if state.gathers or seconds <= 0:
            request["no_wait"] = True
        else:
            request["expires"] = round(seconds * _NANO)
        state.pull = Pull(number, count, now + seconds + _GRACE)
        subject = f"{self._prefix}.CONSUMER.MSG.NEXT.{state.stream}.{state.consumer}"
        self._courier.send(subject, _encode(request), f"{line.inbox}.{number}")

    def absorb(self) -> None:
        """Hand what came to its lanes, and tell the server what they say to it."""
        answers: dict[int, list[Answer]] = {}
        now = self._clock.monotonic()
        while self._arrived:
            token, at, message = self._arrived.popleft()
            line = self._lines.get(token)
            if line is None:
                continue
            if message.reply:
                answer = line.state.arrive(_arrival(message, at + line.state.lease), now)
                if answer is not None:
                    answers.setdefault(token, []).append(answer)
            else:
                _end_of_pull(line.state, message, now)
        for words in answers.values():
            self._courier.tell(words)

    def _ring(self) -> None:
        self._is_ringing = False
        self._connection.bell.set()


def _arrival(message: Msg, lease_until: float) -> Arrival:
    reply = message.reply
    count, position, number, time, more = tokens(reply)
    return Arrival(
        int(position),
        int(number),
        int(count),
        int(more),
        reply,
        int(time) / _NANO,
        lease_until,
        message,
    )


def _end_of_pull(state: NatsLane, message: Msg, now: float) -> None:
    """Note why the server sends no more for a request: mostly there is none, or time is up."""
    number = message.subject.rpartition(".")[2]
    if state.pull is None or str(state.pull.id) != number:
        return
    state.pull = None
    state.more = 0
    headers = message.headers or {}
    status, why = headers.get("Status", ""), headers.get("Description", "")
    if status in _NORMAL or why in _PASSING:
        if state.gathers and why == _RIVAL:
            state.hold(now)
        elif state.gathers:
            state.nothing_comes(now)
        elif status == _NONE:
            state.all_came()
    else:
        state.trouble = f"{status} {why}".strip()
