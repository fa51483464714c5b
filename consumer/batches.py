"""Micro-batches: how many messages share one transaction, and how long one waits for company."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How a handler's messages are put together.

    While one batch runs the next one fills, so that without *wait* nobody waits for company
    and batches grow with the load by themselves.
    """

    size: int = 100
    """The most messages of one transaction."""
    wait: float = 0.0
    """Seconds that a message waits for company when nothing else runs."""
    whole: bool = False
    """Whether the handler takes a list of payloads, instead of being called for each."""

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ConfigurationError(f"batch size={self.size!r}: use a number from 1 up")
        if not 0 <= self.wait < float("inf"):
            raise ConfigurationError(f"batch wait={self.wait!r}: use seconds from 0 up")

    @classmethod
    def of(cls, given: Batches | int | None) -> Batches | None:
        """Return what `Consumer.on(batch=…)` means."""
        if given is None or isinstance(given, Batches):
            return given
        return cls(size=given)

    def describe(self) -> str:
        """Say it in a line for `explain()`."""
        shape = "one call for all" if self.whole else "one call for each"
        wait = f", up to {self.wait:g} s of waiting for company" if self.wait else ""
        return f"in one transaction up to {self.size} messages{wait}, {shape}"
