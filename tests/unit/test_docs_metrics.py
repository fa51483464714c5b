"""The page on metrics lists every metric there is, with its kind, its labels and its meaning."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import holdfast
from holdfast.metrics import MetricDefinition, catalogue

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `((?:holdfast|messaging)_\w+)` \| (.+) \|$", re.MULTILINE)


def declared() -> list[MetricDefinition]:
    """Return what all modules of the product declare."""
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        path = module.name.split(".")
        if "migrations" not in path and path[1:2] != ["testing"] and _declares(module.name):
            importlib.import_module(module.name)
    return [one for one in catalogue() if not one.name.startswith("holdfast_trial")]


def _declares(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    text = Path(spec.origin).read_text()
    return "holdfast.metrics import" in text


def listed() -> dict[str, str]:
    """Return the rows of the lists of series, by name."""
    whole = PAGE[PAGE.index("## By the messaging conventions") :]
    return dict(ROW.findall(whole))


def test_every_metric_is_listed_as_it_is_declared() -> None:
    """Whoever builds a dashboard finds what there is; nothing that is gone is listed."""
    wanted = {}
    for one in declared():
        labels = ", ".join(f"`{label}`" for label in one.label_names)
        about = one.help.rstrip(".")
        first = (
            [f"`{one.otel_name}`", labels]
            if one.otel
            else [one.kind.value, labels, one.across.value]
        )
        wanted[one.series] = " | ".join([*first, about])
    assert listed() == wanted
    assert len(wanted) > 70


def test_no_label_holds_an_id() -> None:
    """Each value of a label is a series, which a server keeps for weeks."""
    names = {label for one in declared() for label in one.label_names}
    assert {name for name in names if re.search(r"(^|_)id$|key|correlation|trace", name)} == set()


def test_names_are_unlike_for_opentelemetry_too() -> None:
    """Two metrics of one name would be one instrument."""
    names = [one.otel_name for one in declared()]
    assert len(set(names)) == len(names)


def test_the_examples_run() -> None:
    """As they stand."""
    codes = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert codes
    for code in codes:
        exec(compile(code, "docs/metrics.md", "exec"), {})  # noqa: S102
