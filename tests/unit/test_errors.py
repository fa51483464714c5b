"""Errors: the type states the remedy, the text names the fix."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
import re
from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast
from holdfast import errors
from holdfast.errors import HoldfastError, Remedy

ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HoldfastError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_states_a_remedy(kind: type[HoldfastError]) -> None:
    """Whoever catches one knows what to do without a list of types."""
    assert isinstance(kind.remedy, Remedy)
    assert kind.__doc__


def test_the_drawn_hierarchy_is_the_real_one() -> None:
    """The picture at the top of the module names each class, its parent and its remedy."""
    lines = (errors.__doc__ or "").splitlines()
    drawn = [
        found for line in lines if (found := re.match(r"([│├└─ ]*)(\w+)(?: +([A-Z_]+) )?", line))
    ]
    parents: dict[int, str] = {}
    seen = {}
    for found in drawn:
        name, depth = found[2], len(found[1]) // 4
        if not hasattr(errors, name):
            continue
        kind = getattr(errors, name)
        parents[depth] = name
        seen[name] = kind
        if depth:
            assert kind.__bases__[0].__name__ == parents[depth - 1]
        if found[3]:
            assert kind.remedy is Remedy[found[3]]
    assert set(seen.values()) == set(ALL)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (errors.MissingExtra("kafka", "kafka"), "pip install 'holdfast[kafka]'"),
        (errors.UnknownScheme("kafak", ["kafka", "memory"]), "known: kafka, memory"),
        (errors.UnknownTopic("orders", "create it"), "'orders' does not exist: create it"),
        (errors.Unsupported("delay", "Kafka", "park it"), "Kafka cannot delay: park it"),
        (errors.MessageTooLarge(11, 10), "send a reference, or raise the limit"),
        (errors.DecodeFailed("expected int", "$.items[2].price"), "(at $.items[2].price)"),
    ],
)
def test_the_text_names_the_fix(error: HoldfastError, fix: str) -> None:
    """A reader of the log needs no manual."""
    assert fix in str(error)


def test_errors_carry_their_facts() -> None:
    """Code reads attributes, not texts."""
    assert errors.DecodeFailed("expected int", "$.a").position == "$.a"
    assert errors.MessageTooLarge(11, 10).limit == 10
    assert errors.Transient("busy", retry_after=2.5).retry_after == 2.5
    assert errors.Transient("busy").retry_after is None


def test_an_outage_is_not_poison() -> None:
    """A broker that does not answer is nobody's fault: pause, do not dead-letter."""
    assert errors.BrokerDown("gone").remedy is Remedy.PAUSE
    assert not issubclass(errors.DependencyDown, errors.PoisonMessage)


def test_a_refused_message_is_also_a_value_error() -> None:
    """Callers that know nothing of Holdfast catch it as they catch any bad value."""
    assert issubclass(errors.InvalidMessage, ValueError)


def _every_kind() -> list[type[HoldfastError]]:
    """Return every error of the package, those of its adapters included."""
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.endswith("__main__") and ".migrations" not in module.name:
            importlib.import_module(module.name)
    found, new = set(), {HoldfastError}
    while new:
        found |= new
        new = {kind for parent in new for kind in parent.__subclasses__()} - found
    return sorted((k for k in found if k.__module__.startswith("holdfast")), key=str)


def _made(kind: type[HoldfastError]) -> HoldfastError:
    """Return one with each of its facts given."""
    facts: dict[str, Any] = {
        "retry_at": datetime(2026, 1, 2, tzinfo=UTC),
        "retry_after": 1.5,
        "seconds": 2.5,
        "size": 7,
        "limit": 5,
        "attempts": 3,
        "known": ["a", "b"],
        "result": {"a": 1},
    }
    if not inspect.isfunction(kind.__init__):
        return kind("what happened")
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in list(inspect.signature(kind).parameters.values()):
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        value = facts.get(parameter.name, _some(str(parameter.annotation), parameter.name))
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    return kind(*positional, **named)


def _some(annotation: str, name: str) -> Any:
    for start, value in (
        ("int", 3), ("float", 1.5), ("bool", True), ("bytes", b"x"), ("dict", {"code": 5}),
        ("Answer", {"code": 5, "description": "d"}), ("list", [name]), ("tuple", (name,)),
        ("Sequence", (name,)), ("Iterable", [name]), ("Mapping", {name: 1}), ("set", {name}),
        ("frozenset", frozenset({name})), ("datetime", datetime(2026, 1, 2, tzinfo=UTC)),
    ):  # fmt: skip
        if annotation.startswith(start):
            return value
    return name


def _same(one: HoldfastError, other: HoldfastError) -> bool:
    return (
        type(one) is type(other)
        and str(one) == str(other)
        and one.args == other.args
        and vars(one) == vars(other)
        and one.remedy is other.remedy
    )


def test_every_error_survives_copying_and_pickling() -> None:
    """With its text, its facts and its notes: Spark and multiprocessing send errors about."""
    kinds = _every_kind()
    assert len(kinds) > len(ALL)
    for kind in kinds:
        error = _made(kind)
        error.add_note("seen at 3 a.m.")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert _same(pickle.loads(pickle.dumps(error, protocol)), error), kind  # noqa: S301
        assert _same(copy.copy(error), error), kind
        assert _same(copy.deepcopy(error), error), kind


def _fail(limit: int) -> None:
    raise errors.MessageTooLarge(limit + 1, limit)


def test_an_error_of_another_process_is_the_same_error() -> None:
    """A pool raises what its worker raised; it does not hang or complain about arguments."""
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(1) as pool, pytest.raises(errors.MessageTooLarge) as caught:
        pool.apply(_fail, (5,))
    assert (caught.value.size, caught.value.limit) == (6, 5)
