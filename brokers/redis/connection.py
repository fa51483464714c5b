"""Whether a server that cannot be reached would answer with, or without, TLS.

Redis does not say: in plain it waits for the end of what it takes for a command, over TLS it
just hangs up. Without a second try such a mistake looks like an outage.

One connection to the server, which comes back by itself.

What a server says of itself, and what it must be for messages to be safe on it.
"""

from __future__ import annotations

import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any

from holdfast.backoff import Backoff
from holdfast.brokers.redis.errors import translation
from holdfast.brokers.redis.scripts import ALL
from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError
from holdfast.extras import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.brokers.redis.scripts import Script
    from holdfast.clock import Clock


_SECONDS = 2.0


def mismatch(host: str, port: int, *, is_tls: bool) -> str | None:
    """Return how the URL must change for the server at *host* to answer; None if not by this."""
    try:
        with socket.create_connection((host, port), _SECONDS) as plain:
            plain.settimeout(_SECONDS)
            if is_tls:
                return "write redis://, it speaks plain" if _speaks_plain(plain) else None
            return "write rediss://, it speaks TLS only" if _speaks_tls(plain) else None
    except OSError:
        return None


def _speaks_plain(connection: socket.socket) -> bool:
    connection.sendall(b"PING\r\n")
    return connection.recv(1) in (b"+", b"-")


def _speaks_tls(connection: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nothing is sent: only the fact of an answer matters
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(connection):
        return True


log = logging.getLogger("holdfast.brokers.redis")

Argument = str | bytes | int | float
Command = tuple[Argument, ...]

_DEFAULTS = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0, "socket_keepalive": True}


class RedisConnection:
    """Sends commands and returns their answers, or raises what the failure means.

    Nothing is ever sent twice: redis-py's own retries are off, since a repeated XADD would
    store a message twice. After a failure the next call connects anew, not before a delay
    that grows from failure to failure.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, clock: Clock, loads: Sequence[Script] = ALL
    ) -> None:
        self.name = name
        self.connected = 0
        """How many times a connection was made."""
        self._connection = make()
        self._loads = [("SCRIPT", "LOAD", script.text) for script in loads]
        self._clock = clock
        self._backoff = Backoff(first=0.05, ceiling=2.0)
        self._failures = 0
        self._not_before = clock.monotonic()
        self._is_up = False
        self._errors = driver("redis.exceptions", extra="redis").RedisError

    # -- asking --------------------------------------------------------------------------

    def call(self, *command: Argument) -> Any:
        """Return the answer to one command."""
        return self.calls([command])[0]

    def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers to *commands*, sent in one go; the first error is raised."""
        self.send(commands)
        return self.answers(len(commands))

    def send(self, commands: Sequence[Command]) -> None:
        """Send *commands*; `answers` must follow."""
        self.send_packed(self._connection.pack_commands(commands))

    def send_packed(self, data: Sequence[bytes]) -> None:
        """Send commands that are packed already; `answers` must follow."""
        self.connect()
        try:
            self._connection.send_packed_command(data)
        except (self._errors, OSError) as error:
            raise self._failed(error) from error

    def answers(self, count: int) -> list[Any]:
        """Return the answers to the last *count* commands sent."""
        answers: list[Any] = []
        refused: Exception | None = None
        for _ in range(count):
            try:
                answers.append(self._connection.read_response(disable_decoding=True))
            except (self._errors, OSError) as error:
                if self.socket is None:  # redis-py drops a connection it cannot go on with
                    raise self._failed(error) from error
                refused = refused or error
        if refused is not None:
            raise self._refused(refused) from refused
        if self._failures:
            log.warning("%s answers again", self.name)
            self._failures = 0
        return answers

    # -- the connection ------------------------------------------------------------------

    @property
    def socket(self) -> Any:
        """The socket, for waiting on it; None while there is no connection."""
        return self._connection._sock  # redis-py has no public way to wait on two sockets

    @property
    def pause(self) -> float:
        """Seconds until the next attempt to connect may be made; 0 while connected."""
        return 0.0 if self._is_up else max(0.0, self._not_before - self._clock.monotonic())

    def connect(self) -> None:
        """Make sure that there is a connection, once the delay after a failure is over."""
        if self._is_up and not self._has_ended():
            return
        if self.pause > 0:
            self._clock.sleep(self.pause)
        try:
            self._connection.connect()
            self._connection.send_packed_command(self._connection.pack_commands(self._loads))
            for _ in self._loads:
                self._connection.read_response()
        except (self._errors, OSError) as error:
            raise self._failed(error) from error
        self._is_up = True
        self.connected += 1

    def disconnect(self) -> None:
        """Drop the connection, and whatever is on its way with it."""
        self._is_up = False
        self._connection.disconnect()

    def _has_ended(self) -> bool:
        """Whether the server closed an idle connection; whatever follows would fail on it."""
        try:
            if self.socket is not None and not self._connection.can_read(0):
                return False
        except (self._errors, OSError):
            pass
        self.disconnect()
        return True

    def _failed(self, error: Exception) -> HoldfastError:
        """Note that the connection is gone, and return what that means."""
        meaning = translation(error, self.name)
        if isinstance(meaning, BrokerDown) and not self.connected:
            meaning = self._explained(meaning)
        self._back_off(meaning)
        return meaning

    def _refused(self, error: Exception) -> HoldfastError:
        """Return what the server's refusal means."""
        meaning = translation(error, self.name)
        if isinstance(meaning, BrokerDown):
            self._back_off(meaning)  # a fresh connection has the scripts, or finds the primary
        return meaning

    def _back_off(self, meaning: HoldfastError) -> None:
        self.disconnect()
        self._failures += 1
        delay = self._backoff.delay(self._failures) or 0.0
        self._not_before = self._clock.monotonic() + delay
        if isinstance(meaning, BrokerDown):
            log.warning("%s; next attempt in %.2f s at the earliest", meaning, delay)

    def _explained(self, meaning: HoldfastError) -> HoldfastError:
        """Return the mistake in the URL that looks like an outage, if it is one."""
        host, port = (getattr(self._connection, name, None) for name in ("host", "port"))
        if host is None or port is None:
            return meaning
        fix = mismatch(host, int(port), is_tls="SSL" in type(self._connection).__name__)
        return ConfigurationError(f"{self.name} cannot be reached: {fix}") if fix else meaning


def evaluation(script: Script, keys: Sequence[str], *arguments: Argument) -> Command:
    """Return the command that runs *script*."""
    return ("EVALSHA", script.sha, len(keys), *keys, *arguments)


def connections(url: str, native: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what makes connections to *url* with the *native* settings of redis-py."""
    redis = driver("redis", extra="redis")
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    settings = {**_DEFAULTS, "protocol": 2, "retry": retry, **native}
    try:
        pool = redis.ConnectionPool.from_url(url, **settings)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise ConfigurationError(f"redis-py does not take these settings: {error}") from error

    def make() -> Any:
        try:
            return pool.make_connection()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"redis-py does not take these settings: {error}") from error

    return make


def facts(link: RedisConnection) -> dict[str, str]:
    """Return what INFO tells; nothing where this user may not ask."""
    link.connect()
    try:
        answer = link.call("INFO")
    except ConfigurationError:
        return {}
    lines = (line.partition(b":") for line in answer.splitlines())
    return {name.decode(): value.decode() for name, separator, value in lines if separator}


def uptime(link: RedisConnection) -> float | None:
    """Return for how many seconds the server has been running; None if it does not tell."""
    seconds = facts(link).get("uptime_in_seconds")
    return None if seconds is None else float(seconds)


def check(link: RedisConnection) -> None:
    """Refuse a server that may delete messages by itself; warn of one that forgets them."""
    known = facts(link)
    policy = known.get("maxmemory_policy", "")
    if policy.startswith("allkeys") and known.get("maxmemory") != "0":
        raise ConfigurationError(
            f"{link.name} deletes any key when its memory is full, messages included "
            f"(maxmemory-policy {policy}): set it to noeviction"
        )
    if known.get("cluster_enabled") == "1":
        raise ConfigurationError(f"{link.name} is a Redis Cluster, which is not supported")
    if known.get("aof_enabled") == "0":
        log.warning(
            "%s keeps no append-only file: a crash loses messages; set appendonly yes", link.name
        )
