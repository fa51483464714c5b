"""How topics and groups are called on the server.

A stream, a consumer or a subject token may not hold dots, spaces, wildcards or slashes, so
every byte but ASCII letters, digits, `-` and `_` is written as `=` and two hex digits:
`orders.eu` is stream `orders=2Eeu` with subjects `orders=2Eeu.0`, `orders=2Eeu.1`, … No two
names share a token, and `name_of` gets the name back.
"""

from __future__ import annotations

import re

from holdfast.errors import ConfigurationError

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_OTHER = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")
_TAKEN = ("KV_", "OBJ_")  # streams of the server's own key-value and object stores
_LONGEST = 255


def token(name: str) -> str:
    """Return *name* as one token, legal and unique wherever the server wants one."""
    if _PLAIN.fullmatch(name) and not name.startswith(_TAKEN):
        result = name
    elif name.startswith(_TAKEN):
        result = f"={ord(name[0]):02X}" + _OTHER.sub(_escape, name[1:])
    else:
        result = _OTHER.sub(_escape, name)
    if not 0 < len(result) <= _LONGEST:
        raise ConfigurationError(
            f"name {name[:40]!r} takes {len(result)} characters on NATS: use 1 to {_LONGEST}"
        )
    return result


def name_of(written: str) -> str:
    """Return the name that `token` wrote as *written*."""
    return _ESCAPED.sub(_unescape, written)


def subject(topic: str, partition: int) -> str:
    """Return the subject that holds one lane of *topic*."""
    return f"{token(topic)}.{partition}"


def consumer(group: str, partition: int, seeks: int) -> str:
    """Return the durable consumer of *group* for one lane, a new one after each seek."""
    suffix = f"_{partition}" if seeks == 0 else f"_{partition}~{seeks}"
    name = token(group) + suffix
    if len(name) > _LONGEST:
        raise ConfigurationError(f"group {group[:40]!r} is too long for NATS: shorten it")
    return name


def _escape(match: re.Match[str]) -> str:
    return "".join(f"={byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def _unescape(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("=", "")).decode("utf-8", "surrogatepass")
