"""The order of layers: checked when a function is decorated, not when a message is lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from holdfast.errors import PlanError
from holdfast.layer import REASONS, REPEATABLE, Layer

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_order(layers: Sequence[Layer], name: str) -> None:
    """Refuse an order of *layers* that would lose or repeat messages, and show the right one."""
    for outer, inner in itertools.pairwise(layers):
        if outer.stage == inner.stage and outer.stage in REPEATABLE:
            continue
        if outer.stage == inner.stage:
            raise PlanError(f"{name}() has {outer.label} twice: keep one of them")
        if outer.stage > inner.stage:
            raise PlanError(_wrong_order(layers, outer, inner, name))


def _wrong_order(layers: Sequence[Layer], outer: Layer, inner: Layer, name: str) -> str:
    reason = REASONS.get((outer.stage, inner.stage))
    right = sorted(layers, key=lambda layer: layer.stage)
    return (
        f"{name}(): {outer.label} stands outside {inner.label}"
        + (f", so {reason}" if reason else "")
        + ".\nStack them in this order, outermost first:\n"
        + "\n".join(f"    {layer.label}" for layer in right)
    )
