"""Errors: the type states the remedy, the text names the fix."""

from __future__ import annotations

import re

import pytest

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
