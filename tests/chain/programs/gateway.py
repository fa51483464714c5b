"""What both consumers depend on: a bug until it is fixed, a passing failure, an outage."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ["SWITCHES"])
FIXED, DOWN = FOLDER / "fixed", FOLDER / "gateway-is-down"


def call(flaw: str, attempt: int) -> None:
    """Do what the *flaw* of an order makes of it at this *attempt*."""
    if DOWN.exists():
        raise ConnectionError("the gateway does not answer")
    if flaw == "poison" and not FIXED.exists():
        raise ValueError("the handler has a bug")
    if flaw == "passing" and attempt == 1:
        raise TimeoutError("the gateway was slow")
