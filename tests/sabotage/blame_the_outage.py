"""Break a promise: an open circuit counts as a failed attempt."""

from holdfast.classification import classify
from holdfast.consumer.attempt import outcome
from holdfast.errors import CircuitOpen, Remedy


def blaming(error: BaseException) -> Remedy:
    """Hold the outage against the message."""
    return Remedy.RETRY if isinstance(error, CircuitOpen) else classify(error)


outcome.classify = blaming  # type: ignore[attr-defined]
