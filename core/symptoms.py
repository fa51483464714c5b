"""What an error of a common library says about itself: status, code, SQLSTATE."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from holdfast.errors import Remedy

if TYPE_CHECKING:
    from collections.abc import Callable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NETWORK = frozenset(
    getattr(errno, name)
    for name in _words(
        "EAGAIN EADDRNOTAVAIL ECONNABORTED ECONNREFUSED ECONNRESET EHOSTDOWN EHOSTUNREACH EINTR "
        "EMFILE ENETDOWN ENETRESET ENETUNREACH ENFILE ENOBUFS ENOTCONN EPIPE ESHUTDOWN ETIMEDOUT"
    )
    if hasattr(errno, name)
)
_WAITABLE_STATUS = frozenset({408, 425, 429})
_ACCESS_STATUS = frozenset({401, 403, 407})  # as gRPC's UNAUTHENTICATED: not the message's fault
_GRPC = {
    **dict.fromkeys(
        ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED"),
        Remedy.RETRY,
    ),
    **dict.fromkeys(
        (
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "FAILED_PRECONDITION",
            "OUT_OF_RANGE",
            "DATA_LOSS",
        ),
        Remedy.DEAD_LETTER,
    ),
    **dict.fromkeys(("PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"), Remedy.FIX),
}
_AWS_THROTTLING = _words(
    "BandwidthLimitExceeded EC2ThrottledException LimitExceededException PriorRequestNotComplete "
    "ProvisionedThroughputExceededException RequestLimitExceeded RequestThrottled "
    "RequestThrottledException RequestTimeout RequestTimeoutException SlowDown "
    "ThrottledException Throttling ThrottlingException TooManyRequestsException "
    "TransactionInProgressException"
)
_AWS_ACCESS = _words(
    "AccessDenied AccessDeniedException ExpiredToken ExpiredTokenException "
    "InvalidClientTokenId SignatureDoesNotMatch UnrecognizedClientException"
)
_SQLSTATES = {  # by the longest prefix
    "08": Remedy.RETRY,  # connection
    "25006": Remedy.RETRY,  # read only: this server is no longer the primary
    "40": Remedy.RETRY,  # serialization failure, deadlock
    "53": Remedy.RETRY,  # out of resources
    "55P03": Remedy.RETRY,  # lock not available
    "57": Remedy.RETRY,  # cancelled, shutting down
    "58": Remedy.RETRY,  # system error
    "22": Remedy.DEAD_LETTER,  # data
    "23": Remedy.DEAD_LETTER,  # integrity
    "28": Remedy.FIX,  # authorisation
    "3D": Remedy.FIX,  # no such database
    "42": Remedy.FIX,  # syntax, unknown table or column
}
_MYSQL = {
    **dict.fromkeys((1044, 1045, 1049, 1054, 1142, 1143, 1146), Remedy.FIX),
    **dict.fromkeys((1205, 1213), Remedy.RETRY),
}
_SQLITE_ERROR = 1


def by_status(status: object) -> Remedy | None:
    """Return the remedy for an HTTP *status*."""
    if not isinstance(status, int) or status < 400:
        return None
    if status >= 500 or status in _WAITABLE_STATUS:
        return Remedy.RETRY
    return Remedy.FIX if status in _ACCESS_STATUS else Remedy.DEAD_LETTER


def http_status(error: Any) -> object:
    """Return the HTTP status that *error* reports, wherever its library keeps it."""
    response = getattr(error, "response", None)
    for holder, name in (
        (response, "status_code"),
        (error, "status_code"),
        (error, "status"),
        (error, "code"),
    ):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None


def by_http(error: Any) -> Remedy | None:
    """Return the remedy for the HTTP status that *error* reports."""
    return by_status(http_status(error))


def by_errno(error: Any) -> Remedy | None:
    """Return RETRY for the operating system errors that networks cause."""
    return Remedy.RETRY if error.errno in _NETWORK else None


def by_grpc_code(error: Any) -> Remedy | None:
    """Return the remedy for the status code of a gRPC call."""
    code = getattr(error, "code", None)
    code = code() if callable(code) else code
    return _GRPC.get(getattr(code, "name", ""))


def by_aws_code(error: Any) -> Remedy | None:
    """Return the remedy for what an AWS service answered."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return None
    code = response.get("Error", {}).get("Code")
    if code in _AWS_THROTTLING:
        return Remedy.RETRY
    if code in _AWS_ACCESS:
        return Remedy.FIX
    return by_status(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))


def _by_sqlstate(error: Any) -> Remedy | None:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not isinstance(state, str):
        return None
    return _SQLSTATES.get(state) or _SQLSTATES.get(state[:2])


def by_database_code(otherwise: Remedy | None) -> Callable[[Any], Remedy | None]:
    """Return a rule that asks the database's own code, then falls back on the class."""

    def rule(error: Any) -> Remedy | None:
        known = _by_sqlstate(error)
        if known is not None:
            return known
        if getattr(error, "sqlite_errorcode", None) == _SQLITE_ERROR:
            return Remedy.FIX  # no such table, a syntax error: locks have codes of their own
        number = error.args[0] if getattr(error, "args", ()) else None
        if isinstance(number, int) and number in _MYSQL:
            return _MYSQL[number]
        return otherwise

    return rule


def by_driver_code(otherwise: Remedy | None) -> Callable[[Any], Remedy | None]:
    """Return a rule that asks the driver's error inside an SQLAlchemy error first."""
    own = by_database_code(otherwise)

    def rule(error: Any) -> Remedy | None:
        return own(error.orig) if getattr(error, "orig", None) is not None else otherwise

    return rule
