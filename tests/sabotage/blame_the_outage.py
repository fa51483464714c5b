"""Break a promise: an open circuit counts as a failed attempt."""

from holdfast.consumer.judge import Judge
from holdfast.consumer.work import Verdict, Work
from holdfast.errors import CircuitOpen

down = Judge.down


def blaming(self: Judge, work: Work, error: BaseException) -> Verdict:
    """Hold the outage against the message."""
    if isinstance(error, CircuitOpen):
        return self._again(work, error)
    return down(self, work, error)


Judge.down = blaming  # type: ignore[method-assign]
