"""The durable consumers behind a member's lanes: how they are entered, kept and left."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.brokers.nats.errors import JetStreamRefusal
from holdfast.brokers.nats.lane import AGAIN, GATHER, LanePhase, NatsLane
from holdfast.brokers.nats.streams import consumer, subject, token
from holdfast.errors import BrokerDown, ConfigurationError, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.brokers.nats.acks import AckSender
    from holdfast.brokers.nats.fetch import PullIntake
    from holdfast.brokers.nats.group import LaneEntry
    from holdfast.brokers.nats.jetstream import Answer, JetStream
    from holdfast.clock import Clock
    from holdfast.ports import Lane

log = logging.getLogger("holdfast.brokers.nats")

_NANO = 1_000_000_000


class LaneConsumers:
    """Sets up the consumer of each lane, and takes care of what is on its way from it."""

    def __init__(
        self,
        jetstream: JetStream,
        intake: PullIntake,
        courier: AckSender,
        *,
        group: str,
        lease: float,
        clock: Clock,
    ) -> None:
        self._js = jetstream
        self._intake = intake
        self._courier = courier
        self._group = group
        self._lease = lease
        self._clock = clock

    def enter(self, lane: Lane, entry: LaneEntry) -> NatsLane:
        """Start with *lane* where the group is; wait first for what a dead owner had out."""
        stream, name = token(lane.topic), consumer(self._group, lane.partition, entry.seeks)
        info = self._js.consumer(stream, name)
        if info is None:
            info = self._create(lane, entry, stream, name)
        elif info["config"].get("ack_wait") != round(self._lease * _NANO):
            info = self._agree(info["config"], stream, name)
        state = NatsLane(
            lane, entry.epoch, stream, name, self._lease, info["delivered"]["consumer_seq"]
        )
        out, now = info["num_ack_pending"], self._clock.monotonic()
        if out and entry.left and entry.left == self._server(info):
            state.gather(out, info["delivered"]["stream_seq"], now, patiently=False)
        elif out:
            log.info("%s: waiting %g s for what its last owner had out", lane, self._lease)
            state.hold(now)
        self._intake.open(state)
        return state

    def resume(self, lanes: Iterable[NatsLane]) -> None:
        """Take *lanes* over to a new connection; nothing that came before it is lost."""
        self._intake.absorb()
        self._intake.reconnected()
        for state in lanes:
            info = self._js.consumer(state.stream, state.consumer)
            if info is None:
                state.trouble = "the consumer is gone"
                continue
            delivered = info["delivered"]
            state.resume(
                delivered["consumer_seq"], delivered["stream_seq"], self._clock.monotonic()
            )
            if state.phase is LanePhase.HOLDING:
                log.info("%s: messages were lost on their way; waiting for them", state.lane)
            # A server that is behind would confirm none of these.
            self._courier.forget(partial(state.is_of, after=delivered["stream_seq"]))
            self._intake.open(state)
        self._courier.reconnected()

    def tend(self, lanes: dict[Lane, NatsLane], entries: Callable[[Lane], LaneEntry]) -> None:
        """Gather what is owed to lanes that have held, and enter those in trouble again."""
        now = self._clock.monotonic()
        for lane, state in list(lanes.items()):
            if state.is_held_until(now) and not state.gone:
                self._gather(state)
            if state.trouble and not state.gone:
                log.warning("%s: %s; entering it again", lane, state.trouble)
                if state.trouble.startswith(("400", "409 Exceeded")):
                    raise ConfigurationError(f"{lane}: NATS refuses to hand out: {state.trouble}")
                self._abandon(state)
                lanes[lane] = self.enter(lane, entries(lane))

    def _gather(self, state: NatsLane) -> None:
        self._courier.flush()  # what we settled does not count as out
        info = self._js.consumer(state.stream, state.consumer)
        if info is None:
            state.trouble = "the consumer is gone"
            return
        number, position = info["delivered"]["consumer_seq"], info["delivered"]["stream_seq"]
        now = self._clock.monotonic()
        if number != state.last:  # somebody else still gets our messages
            state.last = number
            state.hold(now)
        else:
            state.gather(info["num_ack_pending"], position, now, patiently=True)

    def move(self, old: NatsLane, entry: LaneEntry) -> NatsLane:
        """Go on in a lane where the group was moved to; what is held becomes stale."""
        old.trouble = "the group was moved"  # should the next line fail, `tend` does it again
        self._abandon(old)
        state = self.enter(old.lane, entry)
        try:
            self._js.ask(f"CONSUMER.DELETE.{old.stream}.{old.consumer}")
        except (JetStreamRefusal, BrokerDown) as error:
            log.warning("%s: consumer %s is left over: %s", old.lane, old.consumer, error)
        return state

    def leave(self, states: Iterable[NatsLane]) -> dict[Lane, str]:
        """Give everything of these lanes back, in order; return which server knows all of it.

        What was settled before is confirmed when this returns.
        """
        states = list(states)
        for state in states:
            self._intake.close(state)
            if back := state.back():
                state.left_in = self._js.connection.generation
                self._courier.tell(back)
        self._courier.flush()
        return {state.lane: self._left(state) for state in states}

    def forget(self, states: Iterable[NatsLane]) -> None:
        """Drop lanes that were left or lost."""
        for state in states:
            state.gone = True
            self._abandon(state)

    def _abandon(self, state: NatsLane) -> None:
        """Hear and say nothing more of a lane that is not ours, or not as it was."""
        self._intake.abandon(state)
        self._courier.forget(state.is_of)

    def keep_alive(self, lanes: Iterable[NatsLane]) -> None:
        """Renew the leases of what waits here, and of what its holders asked to keep."""
        now = self._clock.monotonic()
        answers = [a for s in lanes if not s.gone for a in s.renewals(now)]
        if answers:
            self._courier.mention(answers)

    def lag(self, lanes: Iterable[NatsLane]) -> dict[Lane, int]:
        """Return the unsettled messages of each lane."""
        return {
            state.lane: lag_of(self._js.consumer(state.stream, state.consumer)) for state in lanes
        }

    def end(self, lane: Lane) -> int:
        """Return the position that the next message of the topic gets."""
        try:
            state = self._js.ask(f"STREAM.INFO.{token(lane.topic)}")["state"]
        except JetStreamRefusal as refusal:
            raise refusal.translated() from refusal
        return int(state["last_seq"]) + 1

    def flush(self, lanes: Mapping[Lane, NatsLane]) -> None:
        """Return once everything settled is confirmed.

        What a server forgot when it crashed it hands out again. It is asked for here, also
        in paused lanes, and settled again.
        """
        until = self._clock.monotonic() + self._js.timeout
        bell = self._js.connection.bell
        while True:
            self._intake.absorb()
            self._courier.flush()
            behind = {lane: s for lane, s in lanes.items() if s.forgotten and not s.revoked}
            if not behind:
                return
            if self._clock.monotonic() >= until:
                forgotten = sum(len(state.forgotten) for state in behind.values())
                raise BrokerDown(
                    f"the server forgot {forgotten} settled messages when it crashed; they are "
                    "settled again as they come: poll, then flush again"
                )
            bell.clear()
            credit = GATHER + max(len(state.ready) for state in behind.values())
            self._intake.ask(credit, 0.0, lanes.keys() - behind.keys())
            self._clock.wait(bell, AGAIN)

    def _left(self, state: NatsLane) -> str:
        """Return the server that got back every delivery of the consumer, from us."""
        info = self._js.consumer(state.stream, state.consumer)
        if (
            info is None
            or state.phase is LanePhase.HOLDING
            or info["delivered"]["consumer_seq"] != state.last
            or state.left_in not in {0, self._js.connection.generation}
        ):
            return ""
        return self._server(info)

    def _server(self, info: Answer) -> str:
        """Return who keeps the consumer's memory; another name once that is lost."""
        cluster = info.get("cluster") or {}
        return str(cluster.get("leader")) if cluster.get("name") else self._js.connection.server

    def _create(self, lane: Lane, entry: LaneEntry, stream: str, name: str) -> Answer:
        config: dict[str, Any] = {
            "name": name,
            "durable_name": name,
            "description": f"Group {self._group!r} of Holdfast, lane {lane.partition}",
            "filter_subject": subject(lane.topic, lane.partition),
            "ack_policy": "explicit",
            "ack_wait": round(self._lease * _NANO),
            "max_deliver": -1,  # with a limit the server would drop messages silently
            "max_ack_pending": -1,  # with a limit delayed messages would block the others
            "replay_policy": "instant",
            "deliver_policy": "all",
        }
        if isinstance(entry.start, str):
            config |= {"deliver_policy": "by_start_time", "opt_start_time": entry.start}
        elif entry.start is not None:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, entry.start)}
        return self._put(config, stream, name, lane.topic)

    def _agree(self, config: Answer, stream: str, name: str) -> Answer:
        return self._put({**config, "ack_wait": round(self._lease * _NANO)}, stream, name, stream)

    def _put(self, config: Answer, stream: str, name: str, topic: str) -> Answer:
        try:
            return self._js.ask(
                f"CONSUMER.CREATE.{stream}.{name}.{config['filter_subject']}",
                {"stream_name": stream, "config": config},
            )
        except JetStreamRefusal as refusal:
            if refusal.code == 404:  # the stream
                raise UnknownTopic(topic, "its stream is gone; create it again") from refusal
            raise refusal.translated() from refusal


def lag_of(info: Answer | None) -> int:
    """Return the unsettled messages of a consumer."""
    return 0 if info is None else int(info["num_pending"]) + int(info["num_ack_pending"])
