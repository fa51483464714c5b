"""What to do about an error that somebody else raised.

What an error of a common library says about itself: status, code, SQLSTATE.

Rules for the errors of common libraries, matched by name: none of them is imported.

A rule is a `Remedy`, or a function that looks into the error. It is found along the
inheritance of the error's class, the most derived class first, by the root of its module
and its name: `requests.exceptions.ConnectTimeout` asks for `requests.ConnectTimeout`, then
for `requests.ConnectionError`, and so on up to `builtins.OSError`.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, HoldfastError, Remedy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


if TYPE_CHECKING:
    Rule = Remedy | Callable[[Any], Remedy | None] | None

_DRIVERS = (
    "aiomysql aiosqlite asyncpg duckdb mariadb MySQLdb mysql oracledb psycopg psycopg2 pymysql "
    "pyodbc sqlite3"
)


def rule_for(kind: type[BaseException]) -> Rule:
    """Return the rule for errors of *kind*, None when there is none."""
    return _rule_for(kind)  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=1024)
def _rule_for(kind: type[BaseException]) -> Rule:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        name = f"{root}.{base.__name__}"
        if name in _RULES:
            return _RULES[name]
    return None


def _url_error(error: Any) -> Remedy | None:
    reason = getattr(error, "reason", None)
    if not isinstance(reason, Exception):
        return Remedy.RETRY
    rule = rule_for(type(reason))
    return rule(reason) if callable(rule) else rule


def _under(root: str, names: str, rule: Rule) -> Iterable[tuple[str, Rule]]:
    return ((f"{root}.{name}", rule) for name in names.split())


def _dbapi(root: str, make: Callable[[Remedy | None], Rule]) -> Iterable[tuple[str, Rule]]:
    yield from _under(root, "OperationalError InterfaceError", make(Remedy.RETRY))
    yield from _under(root, "PostgresConnectionError", make(Remedy.RETRY))
    yield from _under(root, "IntegrityError DataError", make(Remedy.DEAD_LETTER))
    yield from _under(root, "ProgrammingError NotSupportedError", make(Remedy.FIX))
    yield from _under(root, "DBAPIError DatabaseError PostgresError Error", make(None))


_RETRY, _DEAD, _FIX = Remedy.RETRY, Remedy.DEAD_LETTER, Remedy.FIX
_RULES: dict[str, Rule] = dict(
    [
        *_under("builtins", "ConnectionError TimeoutError EOFError", _RETRY),
        *_under("builtins", "OSError", by_errno),
        *_under("builtins", "UnicodeError", _DEAD),
        *_under("builtins", "ImportError NameError NotImplementedError SyntaxError", _FIX),
        *_under("json", "JSONDecodeError", _DEAD),
        *_under("msgspec", "DecodeError ValidationError", _DEAD),
        *_under("pydantic_core", "ValidationError", _DEAD),
        *_under("pydantic", "ValidationError", _DEAD),
        *_under("marshmallow", "ValidationError", _DEAD),
        *_under("jsonschema", "ValidationError", _DEAD),
        *_under("socket", "gaierror herror", _RETRY),
        *_under("ssl", "SSLCertVerificationError", _FIX),
        *_under("ssl", "SSLError", _RETRY),
        *_under("http", "HTTPException", _RETRY),
        *_under("urllib", "HTTPError", by_http),
        *_under("urllib", "URLError", _url_error),
        *_under("urllib3", "MaxRetryError ProtocolError TimeoutError HTTPError", _RETRY),
        *_under("urllib3", "LocationValueError", _FIX),
        *_under("concurrent", "CancelledError", Remedy.RELEASE),
        # A gateway that answers with a page of HTML is at fault, not the message.
        *_under("requests", "ConnectionError Timeout ChunkedEncodingError JSONDecodeError", _RETRY),
        *_under("requests", "HTTPError", by_http),
        *_under("requests", "SSLError InvalidHeader InvalidProxyURL", _FIX),
        *_under("requests", "InvalidURL MissingSchema InvalidSchema TooManyRedirects", _DEAD),
        *_under("httpx", "TimeoutException NetworkError ProxyError RemoteProtocolError", _RETRY),
        *_under("httpx", "HTTPStatusError", by_http),
        *_under("httpx", "UnsupportedProtocol LocalProtocolError", _FIX),
        *_under("httpx", "InvalidURL TooManyRedirects", _DEAD),
        *_under("httpcore", "TimeoutException NetworkError RemoteProtocolError", _RETRY),
        *_under("aiohttp", "ClientConnectionError ClientPayloadError ServerTimeoutError", _RETRY),
        *_under("aiohttp", "ClientResponseError", by_http),
        *_under("aiohttp", "InvalidURL", _DEAD),
        *_under("grpc", "RpcError", by_grpc_code),
        *_under("botocore", "ClientError", by_aws_code),
        *_under("botocore", "HTTPClientError ConnectionError ConnectionClosedError", _RETRY),
        *_under("botocore", "NoCredentialsError PartialCredentialsError NoRegionError", _FIX),
        *_under("botocore", "ParamValidationError", _DEAD),
        *_under("redis", "ConnectionError TimeoutError BusyLoadingError TryAgainError", _RETRY),
        *_under("redis", "AuthenticationError NoPermissionError", _FIX),
        *_under("pymongo", "AutoReconnect NetworkTimeout WTimeoutError", _RETRY),
        *_under("pymongo", "DuplicateKeyError", _DEAD),
        *_under("sqlalchemy", "TimeoutError DisconnectionError StaleDataError", _RETRY),
        *_under("sqlalchemy", "PendingRollbackError", _RETRY),
        *_dbapi("sqlalchemy", by_driver_code),
        *(pair for driver in _DRIVERS.split() for pair in _dbapi(driver, by_database_code)),
    ]
)


Classify = Callable[[Any], Remedy | None]
"""Returns the remedy of an error; None means that it does not know."""


def classify(error: BaseException) -> Remedy:
    """Return the remedy for *error*; one that nobody knows may pass when tried again."""
    remedy = recognise(error)
    return Remedy.RETRY if remedy is None else remedy


def recognise(error: BaseException) -> Remedy | None:
    """Return the remedy for *error*, None when nothing is known about it.

    What the error declares itself comes first, then the rules for common libraries, which
    match class names along the inheritance: no library is imported for it.
    """
    remedy = declared(error)
    if remedy is not None:
        return remedy
    if isinstance(error, BaseExceptionGroup):
        return _of_group(error)
    if not isinstance(error, Exception):
        return Remedy.RELEASE  # the process or the task is told to end: nobody is to blame
    rule = rule_for(type(error))
    return rule(error) if callable(rule) else rule


def check_classify(classify: Classify | None, decorator: str) -> None:
    """Refuse what cannot judge errors, before there is one."""
    if classify is not None and (not callable(classify) or isinstance(classify, type)):
        raise ConfigurationError(
            f"{decorator}(classify={classify!r}): pass a function of the error that returns a "
            "Remedy or None, or Rules({ErrorType: Remedy.RETRY, …})"
        )


def declared(error: BaseException) -> Remedy | None:
    """Return the remedy that *error* carries: `HoldfastError.remedy` or `__holdfast_remedy__`."""
    remedy = getattr(error, "__holdfast_remedy__", None)
    if remedy is None:
        return error.remedy if isinstance(error, HoldfastError) else None
    try:
        return Remedy(remedy)
    except ValueError:
        return None  # nonsense from elsewhere must not hide the error itself


@dataclass(frozen=True, slots=True)
class Rules:
    """A classification of your own: error types or predicates, asked in the order given.

    `Rules({CardDeclined: Remedy.DEAD_LETTER, lambda e: "busy" in str(e): Remedy.RETRY})`
    What no rule matches goes to *otherwise*.
    """

    rules: Mapping[type[BaseException] | Callable[[BaseException], bool], Remedy]
    otherwise: Classify = recognise

    def __post_init__(self) -> None:
        for condition, remedy in self.rules.items():
            if not callable(condition) or not isinstance(remedy, Remedy):
                raise ConfigurationError(
                    f"Rules({{{condition!r}: {remedy!r}}}): map error types or predicates to Remedy"
                )

    def __call__(self, error: BaseException) -> Remedy | None:
        """Return the remedy of the first rule that matches *error*."""
        for condition, remedy in self.rules.items():
            if isinstance(condition, type):
                if isinstance(error, condition):
                    return remedy
            elif condition(error):
                return remedy
        found: Remedy | None = self.otherwise(error)
        return found


_GRAVEST = (
    Remedy.FIX,
    Remedy.DEAD_LETTER,
    Remedy.RELEASE,
    Remedy.PAUSE,
)


def _of_group(group: BaseExceptionGroup[BaseException]) -> Remedy | None:
    """Return the gravest remedy: a group may be retried only if every member may."""
    remedies = {recognise(error) for error in group.exceptions}
    for remedy in _GRAVEST:
        if remedy in remedies:
            return remedy
    return None if None in remedies else Remedy.RETRY
