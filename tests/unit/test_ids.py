"""Ids: unique, ordered by creation, and derived where they must repeat."""

from __future__ import annotations

import sys
import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.ids import NAMESPACE, Uuid7, derived_id, new_id

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Jumping(SystemClock):
    """A wall clock that shows a given moment."""

    moment: datetime = START

    def now(self) -> datetime:
        """Return the moment that was set."""
        return self.moment


def zeros(count: int) -> bytes:
    return bytes(count)


@given(st.lists(st.integers(-100_000, 100_000), max_size=50))
def test_ids_increase_however_the_clock_jumps(jumps: list[int]) -> None:
    """A clock running backwards or standing still does not disturb the order."""
    clock = Jumping()
    ids = Uuid7(clock)
    made = [ids()]
    for milliseconds in jumps:
        clock.moment += timedelta(milliseconds=milliseconds)
        made.append(ids())
    assert made == sorted(set(made))


def test_more_ids_than_a_millisecond_counts_stay_ordered() -> None:
    """The counter runs over into the time instead of wrapping around."""
    ids = Uuid7(Jumping())
    made = [ids() for _ in range(10_000)]
    assert made == sorted(set(made))


@given(
    st.datetimes(START.replace(year=1971, tzinfo=None), timezones=st.just(UTC)),
    st.binary(min_size=8, max_size=8),
)
def test_an_id_is_a_uuid_of_version_7(moment: datetime, entropy: bytes) -> None:
    """Any UUID library reads version, variant and millisecond from it."""
    made = uuid.UUID(Uuid7(Jumping(moment), lambda _: entropy)())
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert abs((made.int >> 80) - moment.timestamp() * 1000) <= 1


def test_injected_time_and_entropy_make_ids_repeatable() -> None:
    """Two runs of one scenario have the same ids."""
    first, second = Uuid7(Jumping(), zeros), Uuid7(Jumping(), zeros)
    assert first() == second() == "019b76da-a800-7000-8000-000000000000"
    assert first() == second() == "019b76da-a800-7001-8000-000000000000"


def test_threads_never_share_an_id() -> None:
    """One source serves all threads, and not by luck of the random part."""
    ids, made = Uuid7(Jumping(), zeros), list[str]()
    threads = [
        threading.Thread(target=lambda: made.extend([ids() for _ in range(5_000)]))
        for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set(made)) == 20_000


def test_the_default_source_reads_the_machine() -> None:
    """Ids of one process differ and are ordered."""
    assert new_id() < new_id()


def test_a_derived_id_follows_from_its_parts() -> None:
    """The same coordinates give the same id, other ones another."""
    assert derived_id("orders", "0", "7") == derived_id("orders", "0", "7")
    assert derived_id("orders", "0", "7") != derived_id("orders", "07")
    assert uuid.UUID(derived_id("orders")).version == 5


def test_a_derived_id_is_a_uuid_of_version_5() -> None:
    """As the standard library makes it, so that what is stored stays what it was."""
    for n in range(200):
        parts = ("idempotency", f"group/{n}", "é")
        assert derived_id(*parts) == str(uuid.uuid5(NAMESPACE, "\x1f".join(parts)))
