"""Which position of the log may be confirmed: never one before which something is unfinished."""

from __future__ import annotations

from collections import deque


class Marks:
    """Counts what was received and finished, and remembers positions between them.

    The end of a transaction covers what came in it, and a keepalive covers everything sent
    before it; either may be confirmed once all that was received before it is finished.
    """

    def __init__(self) -> None:
        self.count = 0
        """How much was received."""
        self.received = 0
        """The position that the server has decoded up to, as far as we heard."""
        self._done = 0
        self._marks: deque[tuple[int, int]] = deque()

    @property
    def finished(self) -> bool:
        """Whether everything received is finished."""
        return self._done == self.count

    def mark(self, position: int) -> None:
        """Note that everything before *position* was received."""
        self.received = max(self.received, position)
        if self._marks and self._marks[-1][0] == self.count:
            self._marks[-1] = (self.count, max(position, self._marks[-1][1]))
        else:
            self._marks.append((self.count, position))

    def finish(self, upto: int) -> None:
        """Note that the first *upto* are finished."""
        self._done = upto

    def confirmed(self) -> int | None:
        """Return the position before which everything is finished, if there is a new one."""
        found = None
        while self._marks and self._marks[0][0] <= self._done:
            found = self._marks.popleft()[1]
        return found
