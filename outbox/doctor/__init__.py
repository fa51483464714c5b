"""What is wrong with an outbox, and what to do about it."""

from holdfast.outbox.doctor.examination import Doctor
from holdfast.outbox.doctor.finding import Finding, Limits, Severity

__all__ = ["Doctor", "Finding", "Limits", "Severity"]
