"""Handing out the messages of owned lanes, in order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from holdfast.brokers.redis.wire import decoded
from holdfast.errors import HoldfastError
from holdfast.ports import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.brokers.redis.lane import LaneState
    from holdfast.brokers.redis.ledger import Entry, Ledger
    from holdfast.clock import Clock


class Dispenser:
    """Hands out what waits and is due, then what is new; a key's messages never overtake."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._receipts = itertools.count(1)
        self._turn = 0
        self.rung = "0-0"
        """The last ring of the group's bell that was seen."""
        self.is_rung = False
        """Whether the bell was rung since, or a lane turned out to be lost."""

    def hand_out(self, lanes: list[LaneState], limit: int) -> list[Delivery]:
        """Return at most *limit* deliveries of *lanes*, each lane first in its turn."""
        self._turn += 1
        first = self._turn % max(len(lanes), 1)
        lanes = lanes[first:] + lanes[:first]
        batch: list[Delivery] = []
        try:
            clear = self._take_due(lanes, limit, batch)
            if clear and len(batch) < limit:
                self._take_new(clear, limit - len(batch), batch)
            elif not batch:
                self.is_rung |= self._ledger.is_rung(self.rung)
        except HoldfastError:
            self._take_back(lanes, batch)
            raise
        return batch

    def _take_due(
        self, lanes: Sequence[LaneState], limit: int, batch: list[Delivery]
    ) -> list[LaneState]:
        """Hand out what waits and is due; return the lanes in which none of it is left."""
        now = self._clock.monotonic()
        wanted: dict[str, list[str]] = {}
        clear = [state for state in lanes if not state.waiting]
        for state in lanes:
            if state.waiting and limit > 0:
                wanted[state.keys.stream] = due = state.due(now, limit)
                limit -= len(due)
                if limit > 0 and not state.is_full:
                    clear.append(state)
        if any(wanted.values()):
            news = self._ledger.again(wanted, lanes)
            self.is_rung |= news.is_rung
            for state, entries in news.entries:
                batch += [self._launch(state, e, state.waiting[e[0]].count) for e in entries]
        return [s for s in clear if s.waiting.keys().isdisjoint(wanted.get(s.keys.stream, ()))]

    def _take_new(self, lanes: Sequence[LaneState], limit: int, batch: list[Delivery]) -> None:
        now = self._clock.monotonic()
        news = self._ledger.read(lanes, limit, self.rung)
        self.is_rung |= news.is_rung
        for state, entries in news.entries:
            if held := state.held_keys(now):
                self._take_around(state, entries, held, batch)
            else:
                batch += [self._launch(state, entry, 1) for entry in entries]

    def _take_around(
        self, state: LaneState, entries: list[Entry], held: set[bytes], batch: list[Delivery]
    ) -> None:
        """Hand out *entries*, but let those of *held* keys wait behind the earlier one."""
        behind: dict[str, int] = {}
        for entry in entries:
            key, _, _ = decoded(entry[1])
            if key in held:
                behind[entry[0]] = 1
                state.wait(entry[0], 0.0, 1, key)
            else:
                batch.append(self._launch(state, entry, 1))
        if behind:
            self._ledger.park(state, behind)

    def _launch(self, state: LaneState, entry: Entry, count: int) -> Delivery:
        position, fields = entry
        key, body, headers = decoded(fields)
        delivery = Delivery(
            lane=state.lane,
            position=position,
            key=key,
            body=body,
            headers=headers,
            timestamp=int(position.partition("-")[0]) / 1000,
            count=count,
            epoch=state.epoch,
            receipt=next(self._receipts),
        )
        state.launch(delivery)
        return delivery

    def _take_back(self, lanes: Sequence[LaneState], batch: Sequence[Delivery]) -> None:
        """Keep what nobody will get from this call: it is pending in Redis, blamelessly."""
        states = {state.lane: state for state in lanes}
        for delivery in batch:
            states[delivery.lane].land(str(delivery.position), 0.0, delivery.count or 1)
