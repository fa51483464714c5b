"""Fingerprints: the same problem is one group, in every engine, on any text."""

from __future__ import annotations

import json
import time
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.dlq.capture import fingerprint as rules
from holdfast.dlq.capture.fingerprint import (
    Error,
    FrameCall,
    fingerprint,
    own_calls,
    parameterised,
    shape,
)

VECTORS = json.loads(files("holdfast.dlq").joinpath("vectors.json").read_text())


def errors(chain: list[dict[str, object]]) -> list[Error]:
    """Return a chain as the vectors write it."""
    return [
        Error(str(e["type"]), str(e["text"]), [FrameCall(*f) for f in e.get("frames", [])])  # type: ignore[attr-defined]
        for e in chain
    ]


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=lambda v: v["name"])
def test_every_engine_gives_these_fingerprints(vector: dict[str, object]) -> None:
    """The vectors are the contract; a change of the algorithm needs a new version."""
    found = fingerprint(
        errors(vector["chain"]),  # type: ignore[arg-type]
        explicit=vector.get("explicit"),  # type: ignore[arg-type]
        also=vector.get("also", ()),  # type: ignore[arg-type]
    )
    assert found.by == vector["by"]
    assert found.text == vector["group_text"]
    assert found.value == vector["fingerprint"]
    assert VECTORS["algorithm"] == found.algorithm == rules.ALGORITHM


@pytest.mark.parametrize("vector", VECTORS["texts"], ids=lambda v: v["text"][:40])
def test_every_engine_parameterises_these_texts(vector: dict[str, str]) -> None:
    """What varies is replaced by its kind."""
    assert parameterised(vector["text"]) == vector["parameterised"]


@pytest.mark.parametrize("vector", VECTORS["shapes"], ids=lambda v: v["payload"][:40])
def test_every_engine_gives_these_shapes(vector: dict[str, str]) -> None:
    """Paths and types count, values do not."""
    assert shape(vector["payload"].encode()) == vector["shape"]


def test_line_numbers_and_values_do_not_part_a_group() -> None:
    """A frame counts by module and function; with own frames the text does not count."""
    frames = [FrameCall("shop.bill", "charge", True)]
    one = fingerprint([Error("ValueError", "order 17 is bad", frames)])
    other = fingerprint([Error("ValueError", "order 18 is worse", frames)])
    assert one.value == other.value
    assert one.by == "stack"


def test_the_root_cause_counts_not_the_wrapper_alone() -> None:
    """Two causes under one wrapper are two problems."""
    wrapper = Error("app.Failed", "failed", [FrameCall("app", "run", True)])
    one = fingerprint([Error("KeyError", "a", [FrameCall("app", "get", True)]), wrapper])
    other = fingerprint([Error("TypeError", "b", [FrameCall("app", "get", True)]), wrapper])
    assert one.value != other.value


def test_a_recursion_counts_once_however_deep() -> None:
    """Direct recursion, and two functions that call each other."""
    down = [FrameCall("m", "down", True)]
    ping = [FrameCall("m", "ping", True), FrameCall("m", "pong", True)]
    assert own_calls(down * 50) == own_calls(down)
    assert own_calls(ping * 50) == own_calls(ping)


def test_library_frames_do_not_count() -> None:
    """A new version of a library does not split a group."""
    own = FrameCall("shop", "bill", True)
    one = fingerprint([Error("E", "", [own, FrameCall("lib.v1", "send", False)])])
    other = fingerprint([Error("E", "", [own, FrameCall("lib.v2", "post", False)])])
    assert one.value == other.value


def test_an_explicit_fingerprint_wins() -> None:
    """The program knows best."""
    frames = [FrameCall("shop", "bill", True)]
    one = fingerprint([Error("A", "x", frames)], explicit="card declined")
    other = fingerprint([Error("B", "y")], explicit="card declined")
    assert one.value == other.value
    assert one.by == "explicit"


@settings(deadline=None)
@given(st.text(max_size=2000))
def test_any_text_is_parameterised_once_and_for_all(text: str) -> None:
    """Nothing makes it fail, the result is bounded, and equal texts stay equal."""
    masked = parameterised(text)
    assert len(masked) <= rules.MOST_MASKED
    assert parameterised(text) == masked


@settings(deadline=None)
@given(st.integers(min_value=0), st.uuids(), st.ip_addresses(v=4), st.datetimes())
def test_ids_addresses_and_times_do_not_part_a_group(
    number: int, identity: object, address: object, moment: object
) -> None:
    """The same sentence with other values is the same text."""
    said = f"order {number} ({identity}) from {address} failed at {moment.isoformat()}"  # type: ignore[attr-defined]
    assert parameterised(said) == "order <n> (<uuid>) from <ip> failed at <time>"


@settings(deadline=None)
@given(st.binary(max_size=500))
def test_any_payload_has_a_shape(payload: bytes) -> None:
    """Not UTF-8, not JSON, deeply nested: all have one."""
    assert len(shape(payload)) == 16


BOMBS = [
    "a" * 1_000_000,
    "0" * 1_000_000,
    "a@" * 500_000,
    "1.2.3." * 300_000,
    "http://" * 200_000,
    "0-0-" * 300_000,
    "'" * 1_000_000,
    "a:" * 500_000,
    "f" * 63 + "-" * 1_000_000,
    " \t" * 500_000,
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda b: b[:8])
def test_hostile_text_costs_no_more_than_its_first_characters(bomb: str) -> None:
    """The text is cut before any expression sees it, and each expression is bounded."""
    rules._parameterised.cache_clear()
    start = time.process_time()
    for salt in range(20):
        parameterised(f"{salt} {bomb}")
    assert time.process_time() - start < 2.0  # 20 texts; a backtracking one would take minutes


def test_nested_payloads_do_not_exhaust_the_stack() -> None:
    """A JSON bomb has a shape, too."""
    assert shape(b"[" * 100_000) == shape(b"[" * 100_000)
    assert shape(b'{"a":' * 5_000 + b"1" + b"}" * 5_000)
