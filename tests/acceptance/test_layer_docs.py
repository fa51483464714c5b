"""The pages on capabilities show code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "page",
    [
        "outbox.md",
        "brokers.md",
        "retry.md",
        "circuit.md",
        "idempotency.md",
        "dead-letters.md",
        "replay.md",
        "correlation.md",
        "payloads.md",
        "topics.md",
    ],
)
def test_the_code_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks run one after the other, as a reader would paste them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # noqa: S102 - our own page
