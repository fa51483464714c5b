"""What an entity may become: a table of transitions, asked in any handler or step."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.errors import ConfigurationError, PoisonMessage
from holdfast.ids import require_name
from holdfast.sagas.diagram import mermaid_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

T = TypeVar("T", bound=str)


class InvalidTransition(PoisonMessage):
    """An entity cannot become what a message wants; no retry will help."""

    def __init__(self, machine: str, before: str, after: str, allowed: Collection[str]) -> None:
        may = f"only {', '.join(sorted(allowed))}" if allowed else "nothing any more"
        super().__init__(f"{machine} cannot go from {before} to {after}: it may become {may}")
        self.machine = machine
        self.before = before
        self.after = after
        self.allowed = tuple(sorted(allowed))


class StateMachine(Generic[T]):
    """The states of an entity and the ways between them.

    ```python
    order = StateMachine("order", start="placed", transitions={
        "placed": {"paid", "cancelled"}, "paid": {"shipped", "cancelled"},
        "shipped": {"delivered"}, "delivered": set(), "cancelled": set(),
    })
    row.status = order.move(row.status, "paid")
    ```
    States are texts, those of a `StrEnum` for instance. Every state has a line of its own, and
    can be reached from the *start*.
    """

    def __init__(self, name: str, *, start: T, transitions: Mapping[T, Collection[T]]) -> None:
        self.name = require_name(name, "StateMachine(name)")
        self.start = start
        self._ways = {state: frozenset(after) for state, after in transitions.items()}
        if start not in self._ways:
            raise ConfigurationError(f"{name}: start={_word(start)!r} has no line of its own")
        for state, after in self._ways.items():
            if unknown := sorted(_word(one) for one in after - self._ways.keys()):
                raise ConfigurationError(
                    f"{name}: {_word(state)!r} leads to {unknown[0]!r}, which has no line of its "
                    "own: add it, with an empty set if it is an end"
                )
        if lost := sorted(_word(one) for one in self._ways.keys() - self._reachable()):
            raise ConfigurationError(f"{name}: {lost[0]!r} cannot be reached from {_word(start)!r}")

    def move(self, before: T, after: T) -> T:
        """Return *after*, if the entity may become that, or raise `InvalidTransition`."""
        ways = self._ways.get(before)
        if ways is None:
            raise InvalidTransition(
                self.name, f"{_word(before)} (no state of it)", _word(after), ()
            )
        if after not in ways:
            raise InvalidTransition(
                self.name, _word(before), _word(after), [_word(one) for one in ways]
            )
        return after

    def may(self, before: T, after: T) -> bool:
        """Whether the entity may go from *before* to *after*."""
        return after in self._ways.get(before, ())

    def allowed(self, before: T) -> frozenset[T]:
        """Return what the entity may become."""
        return self._ways.get(before, frozenset())

    def diagram(self) -> str:
        """Return the states as a Mermaid state diagram."""
        ids = {state: f"s{number}" for number, state in enumerate(self._ways)}
        lines = ["stateDiagram-v2"]
        lines += [f"    {ids[one]}: {mermaid_text(_word(one))}" for one in self._ways]
        lines.append(f"    [*] --> {ids[self.start]}")
        for state, after in self._ways.items():
            lines += [f"    {ids[state]} --> {way}" for way in sorted(ids[one] for one in after)]
            if not after:
                lines.append(f"    {ids[state]} --> [*]")
        return "\n".join(lines) + "\n"

    def _reachable(self) -> set[T]:
        found, new = {self.start}, [self.start]
        while new:
            ways = self._ways[new.pop()] - found
            found |= ways
            new += ways
        return found


def _word(state: str) -> str:
    return str(state.value) if isinstance(state, Enum) else str(state)
