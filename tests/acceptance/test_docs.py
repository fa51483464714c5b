"""The documents tell the truth."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_capability_table_is_what_the_adapters_declare() -> None:
    """Run `python docs/render.py` after changing an adapter's Caps."""
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    page = render.PAGE.read_text()
    assert page == render.page()
    for name in render.SHOWN:
        assert f" {name} |" in page
