"""The wait that the other side asked for: Retry-After and its relatives."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from holdfast.classification import http_status
from holdfast.errors import DependencyDown

if TYPE_CHECKING:
    from collections.abc import Callable


class AskedToWait(DependencyDown):
    """The other side asked for a wait too long to spend in place; the message is not to blame."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the other side asked to wait, {retry_after:.0f} s: come again then")
        self.retry_after = retry_after


_ASKING = frozenset({429, 503})


def asked_wait(error: BaseException, now: Callable[[], datetime]) -> float | None:
    """Return the seconds that *error* asks to wait; None if it asks for nothing sensible.

    An attribute `retry_after` counts, and the Retry-After header of a 429 or 503 response
    as requests, httpx, aiohttp, urllib and botocore keep it, in seconds or as a date.
    """
    asked = getattr(error, "retry_after", None)
    try:
        return _seconds(_header(error) if asked is None else asked, now)
    except (ArithmeticError, ValueError):  # a number or date beyond all bounds
        return None


def _header(error: Any) -> object:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        meta = response.get("ResponseMetadata", {})
        status, headers = meta.get("HTTPStatusCode"), meta.get("HTTPHeaders")
    else:
        status, headers = http_status(error), getattr(response, "headers", None)
        headers = getattr(error, "headers", None) if headers is None else headers
    if status not in _ASKING or not hasattr(headers, "get"):
        return None
    value: object = headers.get("retry-after")
    return headers.get("Retry-After") if value is None else value


def _seconds(asked: object, now: Callable[[], datetime]) -> float | None:
    match asked:
        case timedelta():
            seconds = asked.total_seconds()
        case datetime():
            seconds = _until(asked, now())
        case bool():
            return None
        case int() | float():
            seconds = float(asked)
        case str():
            try:
                seconds = float(asked)
            except ValueError:
                return _seconds(parsedate_to_datetime(asked), now)
        case _:
            return None
    return seconds if 0 < seconds < math.inf else None


def _until(moment: datetime, now: datetime) -> float:
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (aware - now).total_seconds()
