"""Retries that know when to stop: policies, budgets, deadlines and whom to blame."""

from holdfast.backoff import Backoff, Jitter
from holdfast.callable_module import make_callable
from holdfast.classification import Rules, classify
from holdfast.clock import checkpoint, remaining
from holdfast.errors import AttemptTimeout, Remedy, ResultRejected
from holdfast.retry.asked import AskedToWait
from holdfast.retry.budget import Budget, BudgetSpent
from holdfast.retry.layer import Retry, RetryPolicy, retry
from holdfast.retry.timeout import Timeout, timeout

__all__ = [
    "AskedToWait",
    "AttemptTimeout",
    "Backoff",
    "Budget",
    "BudgetSpent",
    "Jitter",
    "Remedy",
    "ResultRejected",
    "Retry",
    "RetryPolicy",
    "Rules",
    "Timeout",
    "checkpoint",
    "classify",
    "remaining",
    "retry",
    "timeout",
]

make_callable(__name__)
