"""Which adapter answers for which URL."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, UnknownScheme
from holdfast.urls import BrokerUrl

if TYPE_CHECKING:
    from holdfast.ports import Broker

GROUP = "holdfast.brokers"
"""Entry-point group: name = URL scheme, object = a callable (url: BrokerUrl, **native)."""


def connect(url: str, **native: Any) -> Broker:
    """Return the broker at *url*; *native* settings reach its client library untouched.

    A scheme such as `kafka+confluent` is looked up whole, then by the part before the
    plus. Nothing is sent until a sink or a source is asked for, so a wrong address shows
    there; a wrong scheme, a malformed URL or a missing extra shows here.
    """
    parsed = BrokerUrl.parse(url)
    known = _adapters()
    point = known.get(parsed.scheme) or known.get(parsed.scheme.partition("+")[0])
    if point is None:
        raise UnknownScheme(parsed.scheme, sorted(known))
    broker: Broker = _load(point)(parsed, **native)
    return broker


def schemes() -> list[str]:
    """Return the URL schemes that some installed adapter answers for."""
    return sorted(_adapters())


def _adapters() -> dict[str, EntryPoint]:
    return _adapters_on(tuple(sys.path))


@lru_cache(maxsize=4)  # every distribution on the path is read for it
def _adapters_on(_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"broker adapter {point.name!r} ({point.value}) cannot be loaded: {error}"
        ) from error
