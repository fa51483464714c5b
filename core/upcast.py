"""Upcasting: old events are brought to the newest version before they are decoded.

The version of a message is, in this order:

1. its extension `schemaversion` (header `ce_schemaversion`), an integer;
2. the end of its `schema` reference: `2`, `v2`, `order-placed:2`, `…/order-placed/v2` or
   `…;version=2` (also after `?` and `&`);
3. 1, when it has neither.

A reference that ends otherwise is refused rather than guessed, for types with upcasters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.callable_module import make_callable
from holdfast.cloudevents import PREFIXES
from holdfast.codec import failure
from holdfast.errors import ConfigurationError, DecodeFailed, HoldfastError

if TYPE_CHECKING:
    from holdfast.message import Message

Step = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns an event of one version as an event of the next."""

_EXPLICIT = tuple(f"{prefix}schemaversion" for prefix in PREFIXES)
_VERSION = re.compile(r"\d{1,9}")
_REFERENCE = re.compile(r"(?:v?|[^/]*:v?|.*/v|.*[;?&]version=)(\d{1,9})")

_event = msgspec.json.Decoder(dict[str, Any]).decode


class Upcasters:
    """Upcasters by event type, chained from any registered version to the newest."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, Step]] = {}
        self._latest: dict[str, int] = {}
        self.types: set[str] = set()
        """Types of events that `apply` may change or refuse; it returns all others as they are."""

    def upcast(self, type: str, from_version: int) -> Callable[[Step], Step]:  # noqa: A002
        """Register the decorated function: it takes version *from_version*, returns the next."""
        if from_version < 1:
            raise ConfigurationError(f"from_version {from_version}: versions count from 1")
        steps = self._steps.setdefault(type, {})
        self.types.add(type)

        def register(step: Step) -> Step:
            if from_version in steps:
                raise ConfigurationError(
                    f"{type!r} has two upcasters from version {from_version}, "
                    f"{_name(steps[from_version])} and {_name(step)}: remove one"
                )
            steps[from_version] = step
            return step

        return register

    def declare_latest(self, type: str, version: int) -> None:  # noqa: A002
        """Refuse messages of *type* that are newer than *version* instead of trying them."""
        if version < 1:
            raise ConfigurationError(f"version {version}: versions count from 1")
        self._latest[type] = version
        self.types.add(type)

    def apply(self, message: Message) -> Message:
        """Return *message* in the newest version; one that needs no step is not decoded."""
        kind, payload = message.type, message.payload
        steps, declared = self._steps.get(kind), self._latest.get(kind)
        if payload is None or (steps is None and declared is None):
            return message
        version = version_of(message)
        if declared is not None and version > declared:
            raise DecodeFailed(
                f"{kind!r} of version {version} is newer than {declared}: "
                "deploy a consumer that knows it and replay",
                f"version {version}",
            )
        newest = max(steps or (0,)) + 1 if declared is None else declared
        if version >= newest:
            return message
        raised = _climbed(kind, steps or {}, range(version, newest), payload)
        return _relabelled(message, newest).with_(payload=raised)


def version_of(message: Message) -> int:
    """Return the schema version of *message* by the rule above."""
    for name in _EXPLICIT:
        if (text := message.headers.text(name)) is not None:
            if _VERSION.fullmatch(text):
                return int(text)
            raise DecodeFailed(f"schemaversion {text!r} is not an integer", name)
    if message.schema is None:
        return 1
    if found := _REFERENCE.fullmatch(message.schema):
        return int(found[1])
    raise DecodeFailed(
        f"schema {message.schema!r} names no version: end it in /v2 or set ce_schemaversion",
        "schema",
    )


def _climbed(kind: str, steps: dict[int, Step], versions: range, payload: bytes) -> bytes:
    try:
        event = _event(payload)
    except (ValueError, RecursionError) as error:
        raise failure(error, payload) from error
    for version in versions:
        if (step := steps.get(version)) is None:
            raise DecodeFailed(
                f"no upcaster from version {version}: add @upcast({kind!r}, {version}) and replay",
                f"version {version}",
            )
        event = _stepped(step, version, event)
    try:
        return msgspec.json.encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DecodeFailed(f"the upcast event is not JSON: {error}", "$") from error


def _stepped(step: Step, version: int, event: dict[str, Any]) -> dict[str, Any]:
    try:
        raised: object = step(event)
    except HoldfastError:
        raise  # it states its own remedy
    except Exception as error:
        reason = f"upcaster {_name(step)} failed: {type(error).__name__}: {error}"
        raise DecodeFailed(reason, f"version {version}") from error
    if not isinstance(raised, dict):
        reason = f"upcaster {_name(step)} returned {type(raised).__name__}: return the dict"
        raise DecodeFailed(reason, f"version {version}")
    return raised


def _relabelled(message: Message, version: int) -> Message:
    """Return *message* with *version* wherever its own was written, so that this ends."""
    found = None if message.schema is None else _REFERENCE.fullmatch(message.schema)
    if found:
        message = message.with_(schema=f"{found.string[: found.start(1)]}{version}")
    if found and not any(name in message.headers for name in _EXPLICIT):
        return message
    headers = message.headers.without(_EXPLICIT)
    return message.with_(headers=headers.with_({"ce_schemaversion": str(version)}))


def _name(step: Step) -> str:
    return getattr(step, "__qualname__", repr(step))


default = Upcasters()
"""The upcasters that every consumer applies unless told otherwise."""

upcast = default.upcast

make_callable(__name__)
