"""An inbox in Redis, for teams without a database: the weaker promise of leases."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError
from holdfast.extras import driver
from holdfast.idempotency.claim import ClaimRequest, IdempotencyConflict, agrees
from holdfast.idempotency.former import bare_key
from holdfast.idempotency.identity import UNCOMPARED, consumer_key
from holdfast.idempotency.inbox import DEFAULT_WINDOW
from holdfast.idempotency.lease import Handled, InProgress, Lease, LeaseLost, LeaseMemory
from holdfast.ids import new_id
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from holdfast.idempotency.former import FormerScopes

_TAKE = """
local known = redis.call('HMGET', KEYS[1], 'done', 'until', 'token', 'digest', 'result', 'nonce')
if known[1] then return {'done', known[4], known[5] or ''} end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if known[6] == ARGV[2] then return {'lease', known[3]} end
for place = 2, #KEYS do
    local before = redis.call('HMGET', KEYS[place], 'done', 'digest', 'result', 'until')
    local same = before[2] == ARGV[4] or before[2] == ARGV[5] or ARGV[4] == ARGV[5]
    if before[1] and same then return {'done', before[2], before[3] or ''} end
    if not before[1] and before[4] and tonumber(before[4]) > now then
        return {'busy', tostring(tonumber(before[4]) - now)}
    end
end
if known[2] and tonumber(known[2]) > now then
    return {'busy', tostring(tonumber(known[2]) - now)}
end
local token = time[1] * 1000000 + time[2]
if known[3] and token <= tonumber(known[3]) then token = tonumber(known[3]) + 1 end
token = string.format('%.0f', token)
redis.call('HSET', KEYS[1], 'until', string.format('%.0f', now + ARGV[1]), 'token', token,
    'nonce', ARGV[2])
if ARGV[3] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return {'lease', token}
"""
_RENEW = """
local known = redis.call('HMGET', KEYS[1], 'token', 'done', 'until')
if known[1] ~= ARGV[1] or known[2] or not known[3] then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'until', string.format('%.0f', now + ARGV[2]))
if ARGV[3] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
"""
_COMPLETE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'done', '1', 'digest', ARGV[2], 'result', ARGV[3])
redis.call('HDEL', KEYS[1], 'until', 'nonce')
if ARGV[4] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[4])
else redis.call('PERSIST', KEYS[1]) end
return 1
"""
_FREE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'until', 'nonce')
return 1
"""


class RedisInbox(LeaseMemory):
    """A `LeaseStore` in Redis: duplicates are absorbed, and one worker at a time has a message.

    **Weaker than a database**: the effect and its memory are not one transaction. A crash
    between the two repeats the effect, and a failover of a Redis that replicates
    asynchronously may forget what it had acknowledged. Hand `attempt.idempotency_key` to
    the other side. A handled message is remembered for *window*.
    """

    def __init__(
        self,
        url: str,
        *,
        window: Duration | None = DEFAULT_WINDOW,
        prefix: str = "holdfast:inbox",
        **native: Any,
    ) -> None:
        self._remember(window)
        self._prefix = prefix
        self._formerly: dict[str, FormerScopes] = {}
        self._name = mask(str(url))
        redis = driver("redis", extra="redis")
        native = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0, **native}
        try:
            self._client = redis.Redis.from_url(url, **native)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{self._name!r} is not a Redis URL: write redis://host:6379/0"
            ) from error
        self._errors = driver("redis.exceptions", extra="redis").RedisError
        self._take, self._renew, self._complete, self._free = (
            self._client.register_script(text) for text in (_TAKE, _RENEW, _COMPLETE, _FREE)
        )

    @property
    def window(self) -> float | None:
        """How long a handled message is remembered, in seconds; None for ever."""
        return self._window

    def with_window(self, window: Duration | None) -> Self:
        """Return the same store that remembers handled messages for *window*."""
        other = copy.copy(self)
        other._remember(window)
        return other

    def succeed(self, consumer: str, formerly: FormerScopes) -> None:
        """Have *consumer* take over what earlier versions remember under other names."""
        self._formerly[consumer] = formerly

    def _remember(self, window: Duration | None) -> None:
        self._window = None if window is None else in_seconds(window, of="window")
        self._kept = "" if self._window is None else str(max(1, int(self._window * 1000)))

    def take(self, consumer: str, wanted: ClaimRequest, seconds: float) -> Lease | Handled:
        """Take the message unless it is handled or another's lease lasts."""
        if self.window is not None and seconds > self.window:
            raise ConfigurationError(
                f"a lease of {seconds:g} s outlives the memory of the inbox, window="
                f"{self.window:g} s: another worker could take the message meanwhile; use a "
                "longer window"
            )
        # The nonce lets a repeated request, whose answer was lost, find its own lease.
        digests = [wanted.digest, UNCOMPARED]
        arguments = [_milliseconds(seconds), new_id(), self._kept, *digests]
        answer = self._run(self._take, consumer, wanted, arguments, self._former(consumer, wanted))
        match answer[0]:
            case b"done":
                return _handled(consumer, wanted, bytes(answer[1]), bytes(answer[2]))
            case b"busy":
                raise InProgress(consumer, wanted.id, float(answer[1]) / 1000)
        return Lease(consumer=consumer, wanted=wanted, token=int(answer[1]), seconds=seconds)

    def renew(self, lease: Lease) -> bool:
        """Make *lease* last from now; False if another has taken over."""
        arguments = [lease.token, _milliseconds(lease.seconds), self._kept]
        return bool(self._run(self._renew, lease.consumer, lease.wanted, arguments) == 1)

    def complete(self, lease: Lease, result: bytes | None) -> None:
        """Remember the message as handled; a lease that another took over is refused."""
        arguments = [lease.token, lease.wanted.digest, result or b"", self._kept]
        if self._run(self._complete, lease.consumer, lease.wanted, arguments) != 1:
            raise LeaseLost(lease.consumer, lease.wanted.id)

    def free(self, lease: Lease) -> None:
        """Let the next attempt begin at once; the token is kept, so it goes on growing."""
        self._run(self._free, lease.consumer, lease.wanted, [lease.token])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _former(self, consumer: str, wanted: ClaimRequest) -> list[str]:
        """Return where earlier versions remember the message: under the bare id, by old names."""
        known = self._formerly.get(consumer)
        names = [consumer, *(() if known is None else known.scopes)]
        own = self._key(consumer, wanted.key)
        keys = dict.fromkeys(self._key(name, bare_key(wanted)) for name in names)
        return [key for key in keys if key != own]

    def _key(self, consumer: str, key: bytes) -> str:
        number = consumer_key(consumer).to_bytes(8, "big", signed=True).hex()
        return f"{self._prefix}:{number}:{key.hex()}"

    def _run(
        self,
        script: Callable[..., Any],
        consumer: str,
        wanted: ClaimRequest,
        arguments: list[Any],
        former: Sequence[str] = (),
    ) -> Any:
        try:
            return script(keys=[self._key(consumer, wanted.key), *former], args=arguments)
        except (self._errors, OSError) as error:
            from holdfast.brokers.redis.errors import translation  # needs the driver

            raise translation(error, self._name) from error


def _handled(consumer: str, wanted: ClaimRequest, digest: bytes, result: bytes) -> Handled:
    if not agrees(digest, wanted):
        raise IdempotencyConflict(
            consumer, wanted.id, known=digest.hex(), given=wanted.digest.hex()
        )
    return Handled(result=result or None)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
