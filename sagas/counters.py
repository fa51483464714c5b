"""What this process counts of sagas, for Prometheus."""

from prometheus_client import REGISTRY

from holdfast.metrics import Instruments, counter

LATE = counter(
    "holdfast_saga_late_replies",
    "Replies that came when their saga no longer waited for them; written down, never dropped",
    "saga",
)
LATE_REPLIES = Instruments(REGISTRY).counter(LATE)
