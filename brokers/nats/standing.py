"""A member's standing in its group: which lanes are its own, and what the listener hears."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.brokers.nats.membership import subject
from holdfast.errors import ConfigurationError, StaleDelivery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from holdfast.brokers.nats.connection import Connection
    from holdfast.brokers.nats.holding import Holding
    from holdfast.brokers.nats.membership import Membership
    from holdfast.ports import Lane, Listener, Position


class _Announced(msgspec.Struct):
    generation: int = -1


_announced = msgspec.json.Decoder(_Announced).decode


class Standing:
    """Keeps the membership, takes and gives up lanes, and tells the listener."""

    def __init__(
        self,
        connection: Connection,
        membership: Membership,
        holding: Holding,
        listener: Listener | None,
    ) -> None:
        self.membership = membership
        self.holding = holding
        self._connection = connection
        self._listener = listener
        self._heard = -1
        self._announced: set[Lane] = set()

    def reconnected(self) -> None:
        """Take the lanes over to a new connection, and listen for news of the group there."""
        self.holding.resume()
        self.membership.reconnected()
        self._connection.run(self._listen)

    def keep(self) -> None:
        """Stay a member; take, give up or lose lanes as the group has it now."""
        is_due = self.membership.beat_due or self._heard > self.membership.generation
        if is_due and (surrender := self._look()):
            self._give_up(surrender)
            self._look()
        self.holding.tend(self.membership.entry)

    def fence(self) -> None:
        """Make sure that what is settled next is ours to settle; what is not is marked gone."""
        if self.membership.has_joined and not self.membership.is_alive:
            epochs = self.membership.renew()
            for lane, state in self.holding.lanes.items():
                state.gone = state.gone or epochs.get(lane) != state.epoch

    def seek(self, lane: Lane, start: Position | None) -> None:
        """Move the group in *lane* to a sequence of its stream, or to a time in RFC 3339."""
        state = self.holding.lanes.get(lane)
        if state is None or state.gone:
            raise ConfigurationError(
                f"cannot seek in {lane}: it is not assigned to this member; owned now: "
                f"{sorted(self.holding.lanes) or 'nothing, poll first'}"
            )
        if not isinstance(start, str):
            end = self.holding.end(lane)
            if start is None or not 0 <= start <= end:
                raise ConfigurationError(f"cannot seek to offset {start}: use 0 to {end}")
        entry = self.membership.move(lane, start)
        if entry is None:
            raise StaleDelivery(f"{lane} belongs to another member by now")
        self.holding.move(lane, entry)

    def leave(self) -> None:
        """Give up all lanes and the membership."""
        if not self.membership.has_joined:
            return
        lanes = [lane for lane, state in self.holding.lanes.items() if not state.gone]
        self._give_up(lanes, leave=True)

    def lost(self, lanes: Iterable[Lane]) -> None:
        """Tell the listener that *lanes* are gone."""
        if (news := sorted(lanes)) and self._listener is not None:
            self._listener.lost(news)

    def _look(self) -> frozenset[Lane]:
        lanes, heard = self.holding.lanes, self._heard
        verdict = self.membership.look(frozenset(n for n, s in lanes.items() if not s.gone))
        if self._heard == heard:  # else there is news since, worth another look
            self._heard = self.membership.generation
        lost = verdict.lost | {lane for lane, state in lanes.items() if state.gone}
        self.holding.forget(lost)
        self.lost(lost)
        self._announced -= lost
        for lane, entry in verdict.acquired.items():
            self.holding.enter(lane, entry)
        self._announce()
        return verdict.surrender

    def _announce(self) -> None:
        """Tell the listener of the lanes that it has not heard of, from an earlier try even."""
        lanes = self.holding.lanes.items()
        news = sorted(n for n, s in lanes if n not in self._announced and not s.revoked)
        self._announced.update(news)
        if news and self._listener is not None:
            self._listener.assigned(news)

    def _give_up(self, lanes: Iterable[Lane], *, leave: bool = False) -> None:
        """Let the listener settle, then give the rest back and free the lanes."""
        states = self.holding.lanes
        news = sorted(lane for lane in lanes if not states[lane].revoked)
        if news and self._listener is not None:
            self._listener.revoked(news)
        for lane in news:
            states[lane].revoked = True
        left = self.holding.leave(lanes)
        self._announced.difference_update(lanes)
        if leave:
            self.membership.leave(left)
        else:
            self.membership.free(left)
        self.holding.forget(lanes)

    async def _listen(self, client: Client) -> None:
        """Hear of every change of the group at once: its value is published, too."""

        async def hear(message: Msg) -> None:
            generation = _announced(message.data or b"{}").generation
            if generation > self._heard:
                self._heard = generation
                self._connection.bell.set()

        await client.subscribe(subject(self.membership.group), cb=hear)
