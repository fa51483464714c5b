"""The page on change data capture shows code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import create_engine

from holdfast.outbox.wal import drop_slot
from holdfast.testing import wait_until

if TYPE_CHECKING:
    import pytest

    from tests.servers import Postgres

PAGE = Path(__file__).parents[2] / "docs" / "cdc.md"
PRINTED = "postgresql+psycopg://shop@localhost/shop"


def test_the_code_of_the_page_runs(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks run one after the other; only the database is another one."""
    monkeypatch.chdir(tmp_path)
    url = postgres.database("cdc_docs")
    page = PAGE.read_text()
    assert PRINTED in page
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "cdc"}
    try:
        for block in blocks:
            exec(compile(block.replace(PRINTED, url), "cdc.md", "exec"), names)  # noqa: S102
        assert names["names"] == {1: "Ada"}
    finally:
        engine = create_engine(url)
        dropped = wait_until(lambda: drop_slot(engine, "holdfast_cdc_shop"), what="the slot ends")
        engine.dispose()
    assert dropped
