"""Retries that know when to stop: run me with `python examples/retry.py`.

A virtual clock stands in for the real one, so that the waits take no time.
"""

from __future__ import annotations

from holdfast import (
    Backoff,
    Budget,
    Jitter,
    PoisonMessage,
    Remedy,
    Rules,
    Transient,
    remaining,
    retry,
    timeout,
)
from holdfast.testing import VirtualClock


class CardDeclined(Exception):
    """The bank said no; asking again will not change its mind."""


answers: list[Exception | str] = []


@retry(
    Backoff(first=0.2, ceiling=30, attempts=5, jitter=Jitter.NONE),
    deadline=60,
    budget=Budget.named("payment-gateway", ratio=0.2, per_second=10),
    classify=Rules({CardDeclined: Remedy.DEAD_LETTER}),
)
@timeout(5)
def charge(order: str) -> str:
    answer = answers.pop(0)
    if isinstance(answer, Exception):
        raise answer
    return f"{order}: {answer}, {remaining():.0f} s were left"


def show(title: str, *script: Exception | str) -> None:
    """Charge once, while the gateway answers as *script* says."""
    answers[:] = script
    clock = VirtualClock(auto=True)
    start = clock.monotonic()
    try:
        outcome = charge.with_clock(clock)("order 17")
    except Exception as error:  # noqa: BLE001 - shown to the reader
        outcome = f"{type(error).__name__}: {error}"
    used = len(script) - len(answers)
    print(f"{title}: {outcome} [{used} attempt(s), {clock.monotonic() - start:.1f} s]")


show("passing failure", ConnectionError("reset"), TimeoutError(), "paid")
show("poison", PoisonMessage("no amount"), "never asked")
show("declined", CardDeclined("no"), "never asked")
show("unknown error", *[KeyError("amount")] * 9)
show("asked to wait too long", Transient("busy", retry_after=120), "never asked")
print(charge.explain())
