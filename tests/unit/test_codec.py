"""Codecs: what a handler asks for is what it gets, or a failure that says where."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import JsonCodec, is_json, payload_annotation
from holdfast.errors import ConfigurationError, DecodeFailed, InvalidMessage, PoisonMessage

if TYPE_CHECKING:
    from collections import OrderedDict

codec = JsonCodec()


class LineStruct(msgspec.Struct):
    price: int


class OrderStruct(msgspec.Struct):
    items: list[LineStruct]


@dataclass
class LineClass:
    price: int


@dataclass
class OrderClass:
    items: list[LineClass]


class LineDict(TypedDict):
    price: int


class OrderDict(TypedDict):
    items: list[LineDict]


class LineModel(pydantic.BaseModel):
    price: int = pydantic.Field(alias="unitPrice")


class OrderModel(pydantic.BaseModel):
    items: list[LineModel]


class Unknown:
    """A class that JSON knows nothing of."""


ORDERS: list[tuple[Any, Any, bytes]] = [
    (OrderStruct, OrderStruct([LineStruct(7)]), b'{"items":[{"price":7}]}'),
    (OrderClass, OrderClass([LineClass(7)]), b'{"items":[{"price":7}]}'),
    (OrderDict, {"items": [{"price": 7}]}, b'{"items":[{"price":7}]}'),
    (OrderModel, OrderModel(items=[LineModel(unitPrice=7)]), b'{"items":[{"unitPrice":7}]}'),
]


@pytest.mark.parametrize(("kind", "order", "written"), ORDERS)
def test_a_value_of_each_kind_is_written_and_read_back(
    kind: Any, order: object, written: bytes
) -> None:
    """Structs, dataclasses, typed dicts and pydantic models all travel as JSON."""
    assert codec.encode(order) == (written, "application/json")
    assert codec.decoder_for(kind)(written) == order
    assert codec.decoder_for(list[kind])(b"[" + written + b"]") == [order]


@pytest.mark.parametrize("kind", [OrderStruct, OrderClass, OrderDict])
def test_a_wrong_field_is_poison_and_its_position_is_named(kind: Any) -> None:
    """The position leads straight to the field."""
    with pytest.raises(DecodeFailed, match="Expected `int`, got `str`") as caught:
        codec.decoder_for(kind)(b'{"items":[{"price":1},{"price":2},{"price":"x"}]}')
    assert caught.value.position == "$.items[2].price"
    assert isinstance(caught.value, PoisonMessage)


def test_a_wrong_field_of_a_pydantic_model_has_the_same_notation() -> None:
    """Operators see one notation whatever library validates."""
    body = b'{"items":[{"unitPrice":1},{"unitPrice":"x"},{}]}'
    with pytest.raises(DecodeFailed, match=r"valid integer.*and 1 more") as caught:
        codec.decoder_for(OrderModel)(body)
    assert caught.value.position == "$.items[1].unitPrice"
    with pytest.raises(DecodeFailed) as caught:
        codec.decoder_for(list[OrderModel])(b"[" + body + b"]")
    assert caught.value.position == "$[0].items[1].unitPrice"


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b"", "end"),
        (b'{"a": ', "end"),
        (b'{"a": x}', "byte 6"),
        (b'{"a": NaN}', "byte 6"),
        (b'{"a": "\xff"}', "byte 7"),
        (b"\xff", "byte 0"),
        (b'{"a": 1} {}', "byte 10"),
        (b"[" * 100_000, "$"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "$.a"),
        (b'{"a": 1e999}', "$.a"),
        (b"[]", "$"),
    ],
)
def test_what_is_no_json_object_fails_cleanly(body: bytes, position: str) -> None:
    """Truncated, binary, endless or huge input ends in a dead letter, never in a crash."""
    with pytest.raises(DecodeFailed) as caught:
        codec.decoder_for(dict[str, Any])(body)
    assert caught.value.position.replace("[...]", ".a") == position


@pytest.mark.parametrize(
    ("body", "position"),
    [
        (b'{"items": x}', "line 1 column 11"),
        (b"\xff", "line 1 column 1"),
        (b"[" * 100_000, None),
        (b'{"items":[{"unitPrice":' + b"9" * 5_000 + b"}]}", None),
    ],
)
def test_what_is_no_json_fails_cleanly_for_pydantic_too(body: bytes, position: str | None) -> None:
    """A model's decoder fails in the same way."""
    with pytest.raises(DecodeFailed) as caught:
        codec.decoder_for(OrderModel)(body)
    assert position in (None, caught.value.position)


@given(st.binary(), st.sampled_from([OrderStruct, OrderClass, OrderModel, dict, list, str, Any]))
def test_a_decoder_raises_nothing_but_decode_failed(body: bytes, kind: Any) -> None:
    """Whatever bytes arrive, the outcome is a value or a dead letter."""
    try:
        codec.decoder_for(kind)(body)
    except DecodeFailed as error:
        assert error.position  # noqa: PT017 - not raising is as good


@pytest.mark.parametrize("kind", [OrderStruct, OrderModel, dict, list[int], bytes, str])
def test_a_tombstone_needs_an_optional_annotation(kind: Any) -> None:
    """Only a handler that says so gets deletions."""
    assert codec.decoder_for(kind | None)(None) is None
    with pytest.raises(DecodeFailed, match=r"tombstone .*annotate `.* \| None`"):
        codec.decoder_for(kind)(None)


def test_an_optional_annotation_still_reads_values() -> None:
    """None in the annotation does not switch validation off."""
    assert codec.decoder_for(OrderStruct | None)(b'{"items":[]}') == OrderStruct([])
    assert codec.decoder_for(OrderModel | None)(b'{"items":[]}') == OrderModel(items=[])
    assert codec.decoder_for(OrderModel | None)(b"null") is None
    assert codec.decoder_for(OrderStruct | None)(b"null") is None
    assert codec.decoder_for(bytes | None)(b"\xff") == b"\xff"
    with pytest.raises(DecodeFailed):
        codec.decoder_for(OrderStruct | None)(b"[]")


def test_bytes_and_text_travel_as_they_are() -> None:
    """They are no JSON, and their content types say so."""
    assert codec.encode(b"\xff") == (b"\xff", "application/octet-stream")
    assert codec.encode("é") == ("é".encode(), "text/plain; charset=utf-8")
    assert codec.decoder_for(bytes)(b"\xff") == b"\xff"
    assert codec.decoder_for(str)("é".encode()) == "é"
    with pytest.raises(DecodeFailed, match="UTF-8"):
        codec.decoder_for(str)(b"a\xff")


def test_none_is_a_tombstone() -> None:
    """No payload is not an empty payload."""
    assert codec.encode(None) == (None, None)
    assert codec.encode(b"") == (b"", "application/octet-stream")


@pytest.mark.parametrize("kind", [Any, object, None])
def test_an_open_annotation_takes_any_json_and_tombstones(kind: Any) -> None:
    """A handler that does not care gets plain Python values."""
    decode = codec.decoder_for(kind)
    assert decode(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert decode(None) is None


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner), max_leaves=8
)


@given(st.dictionaries(st.text("abc"), trees))
def test_plain_values_survive_the_journey(value: dict[str, Any]) -> None:
    """Dicts and lists of plain values come back equal."""
    assert codec.decoder_for(dict)(codec.encode(value)[0]) == value


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [1, {"b": Unknown()}]}, "$.a[1].b", "Unknown"),
        (OrderStruct([LineStruct(Unknown())]), "$.items[0].price", "Unknown"),  # type: ignore[arg-type]
        (OrderClass([LineClass(10**5_000)]), "$.items[0].price", "int"),
        ([1, (2, 3j)], "$[1][1]", "complex"),
        ({"a": "\ud800"}, "$.a", "str"),
        ({(1, 2): 3}, "$", "dict"),
        ("\ud800", "$", "str"),
        (Unknown(), "$", "Unknown"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_path_and_type(
    value: object, path: str, kind: str
) -> None:
    """The error names the culprit inside the value, and the fix."""
    with pytest.raises(InvalidMessage, match="convert it first, or pass bytes") as caught:
        codec.encode(value)
    assert str(caught.value).startswith(f"{path} is a {kind} ")


class Priced(pydantic.BaseModel):
    price: float


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"lines": [{"price": 1.5}, {"price": float("nan")}]}, r"\$\.lines\[1\]\.price is nan"),
        ([float("inf")], r"\$\[0\] is inf"),
        ({"one": Priced(price=float("-inf"))}, r"\$\.one\.price is -inf"),
        (float("nan"), r"\$ is nan"),
    ],
)
def test_what_is_no_number_is_refused_instead_of_written_as_null(value: Any, path: str) -> None:
    """An amount of NaN must not become an amount that is missing."""
    with pytest.raises(InvalidMessage, match=path):
        codec.encode(value)
    assert codec.encode({"price": None})[0] == b'{"price":null}'


def test_a_value_that_contains_itself_is_refused() -> None:
    """A cycle ends in an error, not in a crash."""
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(InvalidMessage, match=r"\$\[0\]"):
        codec.encode(cycle)


def test_a_pydantic_model_inside_a_plain_value_is_written() -> None:
    """Lists of models and models in dicts need no conversion."""
    assert codec.encode({"line": LineModel(unitPrice=Decimal(7))})[0] == b'{"line":{"unitPrice":7}}'


@pytest.mark.parametrize("kind", [Unknown, Unknown | None, OrderStruct | LineStruct, 7])
def test_an_annotation_that_cannot_be_decoded_is_refused_at_once(kind: Any) -> None:
    """The mistake shows when the handler is registered, not when the first message comes."""
    with pytest.raises(ConfigurationError, match="annotate with a msgspec Struct"):
        codec.decoder_for(kind)


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json; charset=utf-8", True),
        ("a/b+JSON", True),
        ("text/plain", False),
        (None, False),
    ],
)
def test_json_is_known_by_its_content_type(content_type: str | None, expected: bool) -> None:
    """Suffix and parameters count, case does not."""
    assert is_json(content_type) is expected


def bill(order: OrderStruct | None, session: OrderedDict[str, int]) -> None:
    """Handle an order; only type checkers can resolve the second annotation."""


class Handlers:
    def method(self, order: list[OrderStruct]) -> None: ...

    def __call__(self, order: OrderClass) -> None: ...


@functools.wraps(bill)
def wrapped(*args: object) -> None: ...


def test_the_annotation_of_the_first_parameter_is_found() -> None:
    """Strings are resolved, and other parameters need not be resolvable."""
    assert payload_annotation(bill) == OrderStruct | None
    assert payload_annotation(wrapped) == OrderStruct | None
    assert payload_annotation(functools.partial(bill, session=None)) == OrderStruct | None
    assert payload_annotation(Handlers().method) == list[OrderStruct]
    assert payload_annotation(Handlers()) is OrderClass


def test_a_bare_first_parameter_has_no_annotation() -> None:
    """Functions without one are left to the default."""
    assert payload_annotation(lambda order: order) is None
    assert payload_annotation(lambda: None) is None
    assert payload_annotation(lambda *orders: None) is None
    assert payload_annotation(lambda *, order: None) is None


def test_a_class_the_handler_closes_over_is_found() -> None:
    """A local class is resolved when the handler uses it."""

    class Local(msgspec.Struct):
        price: int

    def handle(order: Local) -> Local:
        return Local(order.price)

    assert payload_annotation(handle) is Local


def test_a_local_class_that_cannot_be_resolved_is_an_error_that_says_how_to_fix_it() -> None:
    """Guessing would hand the handler an unchecked dict."""

    class Local(msgspec.Struct):
        price: int

    def handle(order: Local) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'Local' of 'order' in .*handle.* module level"):
        payload_annotation(handle)


@pytest.mark.programs
def test_pydantic_is_imported_only_for_its_own_models() -> None:
    """Users without it lack nothing."""
    program = (
        "import sys; from holdfast.codec import JsonCodec; "
        "JsonCodec().decoder_for(dict)(JsonCodec().encode({})[0]); print('pydantic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.strip() == b"False"
