"""How long consumers remember what they handled: whether what is older was, nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.dlq.replay.manifest import Candidate

_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The windows of the consumers' dedup, by their names there: the group and the handler."""

    windows: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds; None: for ever."""
    otherwise: float | None = None
    """For consumers that are not among them, as their memory is elsewhere; None: nothing is known,
    or they have none."""
    clock: Clock = SYSTEM_CLOCK

    def window(self, letter: Candidate) -> float | None:
        """Return for how long the consumer of *letter* remembers; None: for ever, or unknown."""
        return self.windows.get(f"{letter.group}/{letter.handler}", self.otherwise)

    def shortest(self, letters: Iterable[Candidate]) -> float | None:
        """Return the shortest window of the consumers of *letters*."""
        known = (self.window(letter) for letter in letters)
        return min((one for one in known if one is not None), default=None)

    def forgotten(self, letters: Iterable[Candidate]) -> dict[str, str]:
        """Return which of *letters* are older than that, and what it means.

        A row of dedup is not older than its message: within the window it is there.
        """
        now = self.clock.now().timestamp()
        found = {}
        for letter in letters:
            window, at = self.window(letter), letter.event_at
            if window is not None and at is not None and now - at.timestamp() > window:
                found[letter.dlq_id] = (
                    f"its event is {(now - at.timestamp()) / _DAY:.1f} days old, its consumer "
                    f"remembers {window / _DAY:g} days: whether it was handled cannot be told "
                    "(--beyond-window sends it all the same)"
                )
        return found
