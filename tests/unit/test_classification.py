"""Errors of common libraries get the right remedy, though none of them is imported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
from concurrent.futures import CancelledError
from email.message import Message as MailMessage
from types import SimpleNamespace
from typing import Any

import msgspec
import psycopg.errors
import pydantic
import pytest
import sqlalchemy.exc

from holdfast import BrokerDown, PoisonMessage, Transient
from holdfast.classification import classify, recognise
from holdfast.errors import Remedy
from holdfast.retry.asked import asked_wait
from holdfast.testing import VirtualClock

RETRY, DEAD, FIX, PAUSE = Remedy.RETRY, Remedy.DEAD_LETTER, Remedy.FIX, Remedy.PAUSE


def foreign(path: str, *bases: type, **facts: Any) -> Any:
    """Return an error of a class as a library that is not installed would define it."""
    module, _, name = path.rpartition(".")
    kind = type(name, bases or (Exception,), {"__module__": module})
    error = kind("made up")
    for key, value in facts.items():
        setattr(error, key, value)
    return error


def answered(status: int, **headers: str) -> SimpleNamespace:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return SimpleNamespace(status_code=status, headers=named)


def raised(call: Any) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any error is what we want
        return error
    raise AssertionError("nothing was raised")


def wrapped(orig: Exception, kind: str) -> Exception:
    made: Exception = getattr(sqlalchemy.exc, kind)("select 1", {}, orig)
    return made


def grpc_error(code: str) -> Any:
    base = type("RpcError", (Exception,), {"__module__": "grpc"})
    return foreign("grpc._channel._InactiveRpcError", base, code=lambda: SimpleNamespace(name=code))


def aws_error(code: str, status: int) -> Any:
    base = type("ClientError", (Exception,), {"__module__": "botocore.exceptions"})
    return foreign(
        "botocore.errorfactory.SomeFault",
        base,
        response={"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
    )


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://x", status, "", MailMessage(), None)


def no_such_table() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("select * from nowhere")


KNOWN: list[tuple[BaseException, Remedy | None]] = [
    (ConnectionResetError(), RETRY),
    (TimeoutError(), RETRY),
    (OSError(errno.EHOSTUNREACH, "no route"), RETRY),
    (FileNotFoundError(errno.ENOENT, "x"), None),
    (socket.gaierror(socket.EAI_AGAIN, "dns"), RETRY),
    (ssl.SSLCertVerificationError("expired"), FIX),
    (asyncio.IncompleteReadError(b"", 3), RETRY),
    (CancelledError(), Remedy.RELEASE),
    (KeyboardInterrupt(), Remedy.RELEASE),
    (raised(b"\xff".decode), DEAD),
    (raised(lambda: json.loads("{")), DEAD),
    (raised(lambda: msgspec.json.decode(b"{")), DEAD),
    (raised(lambda: msgspec.json.decode(b'"x"', type=int)), DEAD),
    (raised(lambda: pydantic.TypeAdapter(int).validate_python("x")), DEAD),
    (NotImplementedError(), FIX),
    (ImportError(), FIX),
    (KeyError(), None),
    (http_error(503), RETRY),
    (http_error(404), DEAD),
    (urllib.error.URLError(ConnectionRefusedError()), RETRY),
    (urllib.error.URLError(ssl.SSLCertVerificationError("expired")), FIX),
    (foreign("requests.exceptions.ConnectTimeout", OSError), None),
    (foreign("requests.exceptions.Timeout", OSError), RETRY),
    (foreign("requests.exceptions.ConnectionError", OSError), RETRY),
    (foreign("requests.exceptions.SSLError", OSError), FIX),
    (foreign("requests.exceptions.HTTPError", OSError, response=answered(400)), DEAD),
    (foreign("requests.exceptions.HTTPError", OSError, response=answered(429)), RETRY),
    (foreign("requests.exceptions.HTTPError", OSError, response=answered(500)), RETRY),
    (foreign("requests.exceptions.HTTPError", OSError), None),
    (foreign("httpx.HTTPStatusError", response=answered(408)), RETRY),
    (foreign("httpx.HTTPStatusError", response=answered(425)), RETRY),
    (foreign("httpx.HTTPStatusError", response=answered(422)), DEAD),
    (foreign("httpx.HTTPStatusError", response=answered(401)), FIX),
    (foreign("requests.exceptions.HTTPError", OSError, response=answered(403)), FIX),
    (foreign("httpx.NetworkError"), RETRY),
    (foreign("aiohttp.client_exceptions.ClientResponseError", status=502), RETRY),
    (grpc_error("UNAVAILABLE"), RETRY),
    (grpc_error("INVALID_ARGUMENT"), DEAD),
    (grpc_error("UNAUTHENTICATED"), FIX),
    (grpc_error("INTERNAL"), None),
    (aws_error("ThrottlingException", 400), RETRY),
    (aws_error("InternalFailure", 500), RETRY),
    (aws_error("AccessDenied", 403), FIX),
    (aws_error("ValidationException", 400), DEAD),
    (foreign("botocore.exceptions.HTTPClientError"), RETRY),
    (psycopg.errors.SerializationFailure(), RETRY),
    (psycopg.errors.DeadlockDetected(), RETRY),
    (psycopg.errors.AdminShutdown(), RETRY),
    (psycopg.errors.UniqueViolation(), DEAD),
    (psycopg.errors.NumericValueOutOfRange(), DEAD),
    (psycopg.errors.UndefinedTable(), FIX),
    (psycopg.OperationalError("server closed the connection"), RETRY),
    (wrapped(psycopg.errors.DeadlockDetected(), "OperationalError"), RETRY),
    (wrapped(psycopg.errors.UniqueViolation(), "IntegrityError"), DEAD),
    (wrapped(psycopg.errors.SerializationFailure(), "DBAPIError"), RETRY),
    (sqlalchemy.exc.TimeoutError("pool"), RETRY),
    (wrapped(foreign("pymysql.err.OperationalError", args=(1213, "")), "OperationalError"), RETRY),
    (foreign("pymysql.err.OperationalError", args=(1045, "denied")), FIX),
    (raised(no_such_table), FIX),
    (sqlite3.IntegrityError("unique"), DEAD),
    (foreign("redis.exceptions.ConnectionError"), RETRY),
    (PoisonMessage("x"), DEAD),
    (Transient("x"), RETRY),
    (BrokerDown("x"), PAUSE),
]


@pytest.mark.parametrize(("error", "remedy"), KNOWN, ids=lambda value: repr(value)[:60])
def test_each_error_gets_its_remedy(error: BaseException, remedy: Remedy | None) -> None:
    """None: nothing is known, so a few tries."""
    assert recognise(error) is remedy
    assert classify(error) is (Remedy.RETRY if remedy is None else remedy)


def test_a_subclass_inherits_its_library_s_rule() -> None:
    """Users derive from the errors of their client."""
    base = type(foreign("requests.exceptions.Timeout", OSError))
    mine = type("GatewayTimeout", (base,), {"__module__": "shop.gateway"})
    assert recognise(mine()) is RETRY


@pytest.mark.parametrize(
    ("value", "remedy"), [(Remedy.DEAD_LETTER, DEAD), ("pause", PAUSE), ("nonsense", None)]
)
def test_an_error_can_declare_its_remedy(value: object, remedy: Remedy | None) -> None:
    """`__holdfast_remedy__` on the class or the object; nonsense there hides nothing."""
    assert recognise(foreign("shop.Declined", __holdfast_remedy__=value)) is remedy


def test_a_group_is_as_grave_as_its_gravest_member() -> None:
    """One poisoned task of many must not be retried with the others."""
    assert recognise(ExceptionGroup("", [TimeoutError(), ConnectionError()])) is RETRY
    assert recognise(ExceptionGroup("", [TimeoutError(), PoisonMessage("x")])) is DEAD
    assert recognise(ExceptionGroup("", [TimeoutError(), KeyError()])) is None
    assert recognise(BaseExceptionGroup("", [TimeoutError(), SystemExit()])) is Remedy.RELEASE


@pytest.mark.programs
def test_classifying_imports_no_library() -> None:
    """The rules are names, so a service pays only for what it uses itself."""
    code = (
        "import sys, holdfast.retry, holdfast.circuit\n"
        "from holdfast.retry import classify\n"
        "classify(ConnectionError())\n"
        "print([n for n in ('requests', 'httpx', 'grpc', 'botocore', 'psycopg', 'pydantic',"
        " 'tenacity', 'redis', 'sqlalchemy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def at(seconds: int) -> str:
    """Return the HTTP date *seconds* after the virtual clock's start."""
    return f"Tue, 01 Jan 2030 00:00:{seconds:02d} GMT"


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Transient("x", retry_after=3), 3),
        (Transient("x"), None),
        (foreign("shop.Busy", retry_after="4.5"), 4.5),
        (foreign("shop.Busy", retry_after=float("nan")), None),
        (foreign("shop.Busy", retry_after=float("inf")), None),
        (foreign("shop.Busy", retry_after=-3), None),
        (foreign("shop.Busy", retry_after=True), None),
        (foreign("shop.Busy", retry_after=[1]), None),
        (foreign("httpx.HTTPStatusError", response=answered(429, retry_after="7")), 7),
        (foreign("httpx.HTTPStatusError", response=answered(503, Retry_After=at(20))), 20),
        (foreign("httpx.HTTPStatusError", response=answered(503, retry_after="soon")), None),
        (foreign("httpx.HTTPStatusError", response=answered(500, retry_after="7")), None),
        (foreign("aiohttp.ClientResponseError", status=429, headers={"Retry-After": "2"}), 2),
        (
            foreign(
                "botocore.ClientError",
                response={
                    "ResponseMetadata": {
                        "HTTPStatusCode": 503,
                        "HTTPHeaders": {"retry-after": "9"},
                    }
                },
            ),
            9,
        ),
        (ValueError(), None),
    ],
)
def test_the_wait_that_was_asked_for_is_found(error: BaseException, seconds: float | None) -> None:
    """Seconds or a date, wherever the library keeps it; nonsense is ignored."""
    assert asked_wait(error, VirtualClock().now) == seconds
