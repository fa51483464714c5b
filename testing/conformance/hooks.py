"""What an adapter tells the kit about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from holdfast.clock import SYSTEM_CLOCK, Clock
from holdfast.ports import BrokerPowers
from holdfast.testing.conformance.stage import ConformanceStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from holdfast.ports import Broker, Listener, Source


_EXPIRES = "waits_until_something_expires"
Test = TypeVar("Test", bound="Callable[..., None]")


def waits_for_expiry(test: Test) -> Test:
    """Mark a *test* of the kit that waits until a lease or a session has run out."""
    setattr(test, _EXPIRES, True)
    return test


class Hooks:
    """Settings and hooks of the kit; an adapter's test class overrides what it must."""

    url: Any = None
    """How another process reaches the broker: a string here, or a fixture of this name.

    None, for a broker within this process: members then die by the hook `abandon`.
    """
    lanes: int = 4
    """Partitions to create for a topic."""
    exclusive: bool | None = None
    """Whether a lane belongs to one member at a time; None: if `ordering` is PARTITION."""
    settle_in: float = 60.0
    """Seconds within which a redelivery or a rebalance must have happened."""
    session: float | None = None
    """Seconds without a poll after which a member is taken for dead, as the settings have it.

    None where the broker does not notice silence.
    """
    quiet: float = 0.2
    """Seconds without a delivery after which the kit believes that none will come."""
    clock: Clock = SYSTEM_CLOCK
    """The broker's clock, for lower bounds; a virtual one must be `auto`."""
    source_settings: ClassVar[Mapping[str, Any]] = {}
    """Native settings of every source, which JSON can carry to another process.

    Leases and sessions of about a second make the kit quick where it waits for their end (see
    `expires`); everywhere else they should be long: a loaded machine that stands still for a
    moment loses its messages between two polls, and the kit reports it.
    """
    sink_settings: ClassVar[Mapping[str, Any]] = {}
    """Native settings of every sink."""

    @pytest.fixture
    def expires(self, request: pytest.FixtureRequest) -> bool:
        """Whether the test waits for the end of a lease or session: only then make them short."""
        return getattr(request.function, _EXPIRES, False)

    @pytest.fixture
    def broker(self) -> Broker:
        """Return the broker under test, for a fresh or a shared server."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture `broker` that returns the broker under test"
        )

    @pytest.fixture
    def stage(
        self, broker: Broker, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[ConformanceStage]:
        """Yield what the tests of the kit work with; everything it opens is closed after."""
        own = type(self).url
        url = own if own is None or isinstance(own, str) else request.getfixturevalue("url")
        stage = ConformanceStage(self, broker, url=url, folder=tmp_path)
        yield stage
        stage.close()

    def source(
        self,
        broker: Broker,
        topics: Sequence[str],
        *,
        group: str,
        listener: Listener | None = None,
    ) -> Source:
        """Return a new member of *group*."""
        return broker.source(topics, group=group, listener=listener, **self.source_settings)

    def abandon(self, broker: Broker, source: Source) -> None:
        """Make *source* vanish as if its process had been killed."""
        if not BrokerPowers.of(broker).abandon(source):
            raise NotImplementedError(
                f"{type(self).__name__} must set `url`, so that members can be killed with "
                "their processes, or override `abandon`"
            )

    def break_publishing(self, broker: Broker) -> AbstractContextManager[object] | None:
        """Return a context in which *broker* cannot be reached; None if that cannot be made."""
        del broker
        return None

    def dead_letters(self, broker: Broker, topic: str, group: str) -> list[bytes | None]:
        """Return the bodies in the broker's own dead-letter place for *group*."""
        del broker, topic, group
        raise NotImplementedError(
            f"{type(self).__name__} declares native_dlq and must override `dead_letters`"
        )
