"""Message headers: ordered, multi-valued, binary safe, immutable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidMessage

if TYPE_CHECKING:
    from typing import Self

HeaderValue = bytes | None
Pair = tuple[str, HeaderValue]
HeaderInput = Mapping[str, "str | bytes | None"] | Iterable[tuple[str, "str | bytes | None"]]

_LONGEST_NAME = 255  # what AMQP allows; the tightest of the brokers served


class Headers:
    """An ordered list of (name, bytes) pairs; names may repeat, values may be None.

    Built from a mapping or pairs, text is stored as UTF-8 and bad names or values are
    refused. What arrived from a broker is kept as it is (`Headers.received`).
    """

    __slots__ = ("_pairs",)
    _pairs: tuple[Pair, ...]

    def __init__(self, source: HeaderInput = ()) -> None:
        pairs: Any = source.items() if isinstance(source, Mapping) else source
        if isinstance(pairs, str | bytes):
            raise _shapeless(source)
        try:
            self._pairs = tuple([_checked(name, value) for name, value in pairs])
        except InvalidMessage:
            raise
        except (TypeError, ValueError) as error:
            raise _shapeless(source) from error

    @classmethod
    def received(cls, pairs: Iterable[Pair]) -> Self:
        """Keep *pairs* exactly as a broker delivered them, without any check."""
        headers = cls.__new__(cls)
        headers._pairs = tuple(pairs)
        return headers

    def get(self, name: str) -> HeaderValue:
        """Return the last value of *name*, or None."""
        for own, value in reversed(self._pairs):
            if own == name:
                return value
        return None

    def text(self, name: str) -> str | None:
        """Return the last value of *name* as text; undecodable bytes are replaced."""
        value = self.get(name)
        return None if value is None else value.decode("utf-8", "replace")

    def all(self, name: str) -> list[HeaderValue]:
        """Return every value of *name*, in order."""
        return [value for own, value in self._pairs if own == name]

    def with_(self, extra: HeaderInput) -> Headers:
        """Return a copy in which *extra* replaces the headers of the same names."""
        added = Headers(extra)
        names = {name for name, _ in added}
        return Headers.received((*(p for p in self._pairs if p[0] not in names), *added))

    def without(self, names: Iterable[str]) -> Headers:
        """Return a copy that lacks *names*."""
        gone = set(names)
        return Headers.received(p for p in self._pairs if p[0] not in gone)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs, in order."""
        return self._pairs

    @property
    def size(self) -> int:
        """Bytes of all names and values."""
        return sum(len(name.encode()) + len(value or b"") for name, value in self._pairs)

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __contains__(self, name: object) -> bool:
        return any(own == name for own, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Headers) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"Headers({list(self._pairs)!r})"


def _shapeless(source: object) -> InvalidMessage:
    return InvalidMessage(
        f"headers are a {type(source).__name__} that is no mapping and no list of pairs: write "
        "headers={'name': 'value'}"
    )


def _checked(name: object, value: object) -> Pair:
    if not isinstance(name, str) or not name:
        raise InvalidMessage(f"header name {name!r}: use a non-empty string")
    if not (name.isascii() and name.isprintable()) or ":" in name or " " in name:
        raise InvalidMessage(f"header name {name!r}: use printable ASCII without space or colon")
    if len(name) > _LONGEST_NAME:
        raise InvalidMessage(f"header name {name[:20]!r}… has {len(name)} characters, at most 255")
    if value is None or isinstance(value, bytes):
        return name, value
    if isinstance(value, str):
        try:
            return name, value.encode()
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"header {name!r} is no UTF-8 text: pass bytes") from error
    raise InvalidMessage(
        f"header {name!r} has a {type(value).__name__}: pass str, bytes or None, e.g. str(value)"
    )


EMPTY = Headers()
