"""What an error of Redis or redis-py means, in the terms that state the remedy."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING

from holdfast.errors import BrokerDown, ConfigurationError, HoldfastError
from holdfast.extras import driver
from holdfast.urls import mask

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLUSTER = "Redis Cluster is not supported: name a single server or its primary"

# Inside a script older servers put their own words before the code, so it is searched for.
_WORDS: tuple[tuple[str, type[HoldfastError], str], ...] = (
    (r"\bOOM\b|maxmemory", BrokerDown,
     "the server is out of memory (maxmemory) and takes no writes: prune topics, or give it more"),
    (r"\bREADONLY\b|read only replica", BrokerDown,
     "the server is a read-only replica: name the primary, or wait until the failover is over"),
    (r"\bMISCONF\b", BrokerDown, "the server cannot write to its disk and takes no writes"),
    (r"\bNOREPLICAS\b|not enough good replicas", BrokerDown,
     "the server has fewer replicas than min-replicas-to-write asks for"),
    (r"\bMASTERDOWN\b|\bLOADING\b|loading the dataset|\bBUSY\b|\bTRYAGAIN\b", BrokerDown,
     "the server is not ready"),
    (r"max number of clients", BrokerDown, "the server takes no more clients (maxclients)"),
    (r"NOSCRIPT|No matching script", BrokerDown,
     "the server has forgotten its scripts; they are loaded again with the next call"),
    (r"\bNOGROUP\b|requires the key to exist|no such key", BrokerDown,
     "somebody deleted a stream or a group; what is needed is made again with the next poll"),
    (r"\bWRONGTYPE\b", ConfigurationError,
     "a key of this topic or group is used by something else: choose another name or prefix"),
    (r"DB index is out of range|invalid DB index", ConfigurationError,
     "the server has no database of this number"),
    (r"\bMOVED\b|\bASK\b|CROSSSLOT|CLUSTERDOWN", ConfigurationError, _CLUSTER),
    (r"unknown command|unknown subcommand|cmsgpack", ConfigurationError,
     "the server is too old or lacks scripts: use Redis 6.2 or later, or Valkey"),
    (r"invalid bulk length|invalid multibulk length", ConfigurationError,
     "a message exceeds what the server takes (proto-max-bulk-len): lower max_message"),
)  # fmt: skip
_REFUSED = tuple((re.compile(words), kind, meaning) for words, kind, meaning in _WORDS)


def translation(error: Exception, name: str) -> HoldfastError:
    """Return what *error* from the server *name* means; nothing was acknowledged."""
    kinds = driver("redis.exceptions", extra="redis")
    text = mask(str(error))
    if isinstance(error, kinds.AuthenticationError | kinds.AuthorizationError):
        return ConfigurationError(f"{name} refuses these credentials: {text}")
    if isinstance(error, kinds.NoPermissionError) or "NOPERM" in text:
        return ConfigurationError(f"{name} does not let this user do that: {text}")
    if isinstance(error, kinds.AskError | kinds.ClusterCrossSlotError):
        return ConfigurationError(f"{name}: {_CLUSTER} ({text})")
    for pattern, kind, meaning in _REFUSED:
        if pattern.search(text):
            return kind(f"{name}: {meaning} ({text})")
    if isinstance(error, kinds.InvalidResponse):
        return ConfigurationError(
            f"{name} does not speak the Redis protocol, or only over TLS (rediss://): {text}"
        )
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)) or "SSL" in text:
        return ConfigurationError(
            f"{name} cannot be reached over TLS; check its certificate, or write redis:// if "
            f"it speaks plain: {text}"
        )
    if isinstance(error, kinds.ConnectionError | kinds.TimeoutError | OSError):
        return BrokerDown(f"{name} does not answer: {text}")
    return ConfigurationError(f"{name} refuses: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
