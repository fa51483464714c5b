"""Rules for the errors of common libraries, matched by name: none of them is imported.

A rule is a `Remedy`, or a function that looks into the error. It is found along the
inheritance of the error's class, the most derived class first, by the root of its module
and its name: `requests.exceptions.ConnectTimeout` asks for `requests.ConnectTimeout`, then
for `requests.ConnectionError`, and so on up to `builtins.OSError`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from holdfast.errors import Remedy
from holdfast.symptoms import (
    by_aws_code,
    by_database_code,
    by_driver_code,
    by_errno,
    by_grpc_code,
    by_http,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
