"""Break a promise: an open circuit counts as a failed attempt."""

from holdfast.consumer.performer import Performer
from holdfast.consumer.work import Verdict, Work
from holdfast.errors import CircuitOpen

down = Performer._down


def blaming(self: Performer, work: Work, error: BaseException) -> Verdict:
    """Hold the outage against the message."""
    if isinstance(error, CircuitOpen):
        return self._again(work, error)
    return down(self, work, error)


Performer._down = blaming  # type: ignore[method-assign]
