"""The page on testing: its five examples pass, and each fails when the handler is broken."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import ConfigurationError, HandlerEnding
from holdfast.testing import assert_idempotent

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHOP = next(code for name, code in BLOCKS if name == "shop")
EXAMPLES = [code for name, code in BLOCKS if name == "test_bill"]


@pytest.fixture
def shop() -> Iterator[types.ModuleType]:
    """Yield an empty module that handlers can be defined in."""
    module = types.ModuleType("shop_of_the_page")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def run(shop: types.ModuleType, example: str, *, code: str = SHOP) -> None:
    """Run one *example* against the shop as *code* has it."""
    names: dict[str, Any] = vars(shop)
    names.update(assert_idempotent=assert_idempotent, HandlerEnding=HandlerEnding)
    exec(compile(code, "shop.py", "exec"), names)  # noqa: S102 - our own page
    exec(compile(example, "test_bill.py", "exec"), names)  # noqa: S102
    (name,) = re.findall(r"^def (test_\w+)", example, re.MULTILINE)
    names[name]()


def again_and_again(shop: types.ModuleType, example: str, code: str) -> None:
    """Run it until it fails: jitter may hide a wait that is too long."""
    for _ in range(20):
        run(shop, example, code=code)


def test_the_page_has_five_examples() -> None:
    """As many as it says."""
    assert len(EXAMPLES) == 5
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("number", range(5))
def test_an_example_of_the_page_passes(shop: types.ModuleType, number: int) -> None:
    """As a reader would paste it."""
    run(shop, EXAMPLES[number])


@pytest.mark.parametrize(
    ("number", "right", "wrong"),
    [
        (0, "cents=order.cents)\n    )", "cents=0)\n    )"),
        (0, 'topic="bills"', 'topic="bill"'),
        (1, "@idempotent\n", ""),
        (2, "attempts=4", "attempts=2"),
        (2, "first=1", "first=8"),
        (3, "    if order.cents <= 0:", "    if order.cents < -5:"),
        (4, '@circuit("gateway")', '@circuit("other")'),
    ],
)
def test_an_example_fails_when_the_handler_is_wrong(
    shop: types.ModuleType, number: int, right: str, wrong: str
) -> None:
    """What is broken is seen: these tests are worth writing."""
    assert right in SHOP
    broken = SHOP.replace(right, wrong)
    with pytest.raises((AssertionError, ConfigurationError)):
        again_and_again(shop, EXAMPLES[number], broken)
