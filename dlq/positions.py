"""Positions as brokers give them: numbers that can be compared, or names that cannot."""

from __future__ import annotations

import re

# An offset (`17`), or the parts of a stream entry's or a ledger's (`1700000000000-2`).
_NUMBERS = re.compile(r"\d{1,30}(?:[-:.]\d{1,30}){0,4}", re.ASCII)
_NUMBER = re.compile(r"\d{1,30}", re.ASCII)


def place_of(position: int | str | None) -> tuple[int, ...] | None:
    """Return what *position* sorts by within its lane; None where it is only a name."""
    if position is None or isinstance(position, int):
        return None if position is None else (position,)
    if _NUMBERS.fullmatch(position) is None:
        return None
    return tuple(int(number) for number in _NUMBER.findall(position))


def is_newer(position: int | str | None, other: int | str | None) -> bool | None:
    """Whether *position* comes after *other* in one lane; None where nobody can tell."""
    mine, its = place_of(position), place_of(other)
    return None if mine is None or its is None else mine > its
