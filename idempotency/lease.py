"""Leases: one worker at a time for a message whose effect is outside the database."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.errors import StaleDelivery
from holdfast.scrubbing import told

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.idempotency.claim import Wanted


log = logging.getLogger("holdfast.idempotency")


class InProgress(StaleDelivery):
    """Another worker is at this message right now; nobody is to blame, come again later."""

    def __init__(self, consumer: str, message_id: str, retry_after: float) -> None:
        super().__init__(
            f"message {message_id} is being handled by another worker of {consumer}; its lease "
            f"lasts {retry_after:.1f} s more"
        )
        self.consumer = consumer
        self.message_id = message_id
        self.retry_after = retry_after


class LeaseLost(StaleDelivery):
    """The lease ran out and another worker took the message over: this end of it is refused."""

    def __init__(self, consumer: str, message_id: str) -> None:
        super().__init__(
            f"the lease on message {message_id} ran out and another worker of {consumer} has "
            "taken it over: this result is refused; use a longer lease, or pass "
            "attempt.idempotency_key on so that the other side does the work once"
        )
        self.consumer = consumer
        self.message_id = message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to work on a message; *token* is greater than that of every lease before."""

    consumer: str
    wanted: Wanted
    token: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """The message was handled before, and this was its result."""

    result: bytes | None = None


class LeaseStore(Protocol):
    """Where leases and handled messages are kept; every time is measured by the store's clock."""

    def take(self, consumer: str, wanted: Wanted, seconds: float) -> Lease | Handled:
        """Return a lease that no other worker has, or what is known about a handled message.

        Raises `InProgress` while another's lease lasts, `IdempotencyConflict` for other content.
        """
        ...

    def renew(self, lease: Lease) -> bool:
        """Make *lease* last its seconds from now; False if it was freed or is another's."""
        ...

    def complete(self, lease: Lease, result: bytes | None) -> None:
        """Remember the message as handled; raises `LeaseLost` if another took it over."""
        ...

    def free(self, lease: Lease) -> None:
        """Give *lease* back after a failure, so that the next attempt need not wait."""
        ...


class Heartbeat:
    """Renews leases while their handlers run; one thread, and none while there are none."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[Lease, Callable[[Lease], bool]] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease, renew: Callable[[Lease], bool]) -> None:
        """Call *renew* at every third of the lease, until `drop` or until it says no."""
        with self._lock:
            self._kept[lease] = renew
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="holdfast-lease-heartbeat", daemon=True
                )
                self._thread.start()
        self._changed.set()

    def drop(self, lease: Lease) -> None:
        """Renew *lease* no more."""
        with self._lock:
            self._kept.pop(lease, None)
        self._changed.set()

    def _run(self) -> None:
        due: dict[Lease, float] = {}
        while True:
            now = self._clock.monotonic()
            with self._lock:
                if not self._kept:
                    self._thread = None
                    return
                kept = dict(self._kept)
                self._changed.clear()
            due = {lease: due.get(lease, now + lease.seconds / 3) for lease in kept}
            away: set[object] = set()
            for lease in [lease for lease, at in due.items() if at <= now]:
                store = getattr(kept[lease], "__self__", kept[lease])
                # A store that is away is asked once a round, or its timeouts would add up.
                if store in away or not self._renew(lease, kept[lease]):
                    away.add(store)
                    due[lease] = self._clock.monotonic() + min(1.0, lease.seconds / 10)
                else:
                    due[lease] = self._clock.monotonic() + lease.seconds / 3
            rest = min(due.values()) - self._clock.monotonic()
            if rest > 0:
                self._clock.wait(self._changed, rest)

    def _renew(self, lease: Lease, renew: Callable[[Lease], bool]) -> bool:
        """Renew *lease*, or drop it if it is another's; False if the store does not answer."""
        try:
            still = renew(lease)
        except Exception as error:  # noqa: BLE001 - it may be back before the lease ends
            log.warning(
                "the lease on message %s cannot be renewed for now; should it run out, another "
                "worker of %s may take the message over: %s",
                lease.wanted.id, lease.consumer, told(error),
            )  # fmt: skip
            return False
        with self._lock:
            is_wanted = lease in self._kept  # else it was given back meanwhile, by ourselves
        if not still and is_wanted:
            log.warning("the lease on message %s is lost to another worker of %s, this one's "
                        "result will be refused", lease.wanted.id, lease.consumer)  # fmt: skip
            self.drop(lease)
        return True
