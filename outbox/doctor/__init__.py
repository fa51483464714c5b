"""What is wrong with an outbox, and what to do about it."""

from holdfast.findings import Finding, Severity
from holdfast.outbox.doctor.context import Limits
from holdfast.outbox.doctor.doctor import Doctor

__all__ = ["Doctor", "Finding", "Limits", "Severity"]
