"""The page on the consumer shows code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "consumer.md"


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its blocks run one after the other, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "billing"}
    for block in blocks:
        exec(compile(block, "consumer.md", "exec"), names)  # noqa: S102 - our own page
    assert "1 handled" in capsys.readouterr().out
