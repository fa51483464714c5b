"""A declared flow: which event leads to which, and within what time.

Services that react to each other's events have no program that says what should happen next. A
flow says it, for people and for `holdfast saga trace`; nothing runs by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError
from holdfast.ids import require_name

if TYPE_CHECKING:
    from collections.abc import Iterator

EventType = str | type
"""An event by its type: the class that is published, or its name."""


class InvalidFlow(ConfigurationError):
    """A flow that cannot be right; it names the event and the fix."""

    def __init__(self, flow: str, what: str) -> None:
        super().__init__(f"flow {flow!r}: {what}")
        self.flow = flow


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """After an event, one of *any_of* is expected within so many seconds."""

    after: str
    any_of: tuple[str, ...]
    within_seconds: float

    def __str__(self) -> str:
        return f"{self.after} leads to {' or '.join(self.any_of)}"


class Flow:
    """Which events follow each other when all goes well, or as well as it may.

    ```python
    order = (
        Flow("order", start=OrderPlaced)
        .leads(OrderPlaced, to=(PaymentProcessed, PaymentFailed), within="10m")
        .leads(PaymentProcessed, to=InventoryReserved, within="5m")
        .leads(PaymentProcessed, to=CustomerNotified, within="1h")
    )
    ```
    Of several in *to* one is enough; what must come as well has a line of its own. Each line
    begins with an event that the lines above lead to. Events that lead back to themselves are an
    `InvalidFlow`: services would react to each other for ever.
    """

    def __init__(self, name: str, *, start: EventType) -> None:
        self.name = require_name(name, "Flow(name)")
        self.start = _type_name(self.name, start)
        self.expectations: tuple[Expectation, ...] = ()

    def leads(
        self, event: EventType, *, to: EventType | tuple[EventType, ...], within: Duration
    ) -> Flow:
        """Return the flow in which *event* leads to one of *to* within that time."""
        after = _type_name(self.name, event)
        several = to if isinstance(to, tuple | list) else (to,)
        any_of = tuple(_type_name(self.name, one) for one in several)
        if not any_of:
            raise InvalidFlow(self.name, f"{after!r} leads to nothing: name what it leads to")
        if after not in self.types:
            raise InvalidFlow(
                self.name,
                f"nothing leads to {after!r} yet: write the line that does above, or start with it",
            )
        for one in any_of:
            if circle := self._way(one, after):
                raise InvalidFlow(
                    self.name,
                    f"{' → '.join((after, *circle))} is a circle: its services would react to each "
                    "other for ever; let one of these events be another one",
                )
        new = Expectation(
            after=after, any_of=any_of, within_seconds=in_seconds(within, of="within")
        )
        longer = Flow(self.name, start=self.start)
        longer.expectations = (*self.expectations, new)
        return longer

    @property
    def types(self) -> tuple[str, ...]:
        """Every event of the flow, in the order of the lines."""
        found = dict.fromkeys((self.start,))
        for one in self.expectations:
            found |= dict.fromkeys(one.any_of)
        return tuple(found)

    def after(self, type_: str) -> Iterator[Expectation]:
        """Yield what is expected after an event of *type_*."""
        return (one for one in self.expectations if one.after == type_)

    def diagram(self) -> str:
        """Return the flow as a Mermaid flowchart."""
        ids = {name: f"e{number}" for number, name in enumerate(self.types)}
        lines = ["flowchart TD", *(f'    {ids[one]}("{_text(one)}")' for one in self.types)]
        for one in self.expectations:
            kind = "-->" if len(one.any_of) == 1 else "-.->"
            within = f"{one.within_seconds:g} s"
            lines += [f'    {ids[one.after]} {kind}|"{within}"| {ids[to]}' for to in one.any_of]
        return "\n".join(lines) + "\n"

    def _way(self, start: str, end: str) -> tuple[str, ...]:
        """Return the events from *start* to *end*, both included; nothing if there is no way."""
        ways: list[tuple[str, ...]] = [(start,)]
        seen = {start}
        while ways:
            way = ways.pop(0)
            if way[-1] == end:
                return way
            for one in self.after(way[-1]):
                fresh = [to for to in one.any_of if to not in seen]
                seen.update(fresh)
                ways += [(*way, to) for to in fresh]
        return ()

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, start={self.start!r})"


def _type_name(flow: str, event: EventType) -> str:
    name = event.__name__ if isinstance(event, type) else event
    if not isinstance(name, str) or not name:
        raise InvalidFlow(flow, f"{event!r} is no event: name its type, or pass its class")
    return name


def _text(name: str) -> str:
    return "".join(char if char.isalnum() or char in " _-." else f"#{ord(char)};" for char in name)
