"""The page about sagas tells the truth: its programs run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "sagas.md"


def test_the_programs_of_the_page_run_one_after_the_other(capsys: Any) -> None:
    """Each begins where the one before has ended, as a reader does."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)  # noqa: S102 - our page
    assert capsys.readouterr().out.startswith("flowchart TD")
    assert len(blocks) >= 2
