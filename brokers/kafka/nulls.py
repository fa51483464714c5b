"""Null header values where the client refuses to write them.

Kafka has null header values, and so does librdkafka. kafka-python reads them but writes
none, so through it a null is written empty, and a last header `holdfast-nulls` lists the
places of the nulls among all headers, from 0 and comma-separated: `7,9`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.headers import Pair

NULLS = "holdfast-nulls"


def hidden(pairs: Iterable[Pair]) -> list[tuple[str, bytes]]:
    """Return *pairs* without a null, and where the nulls were."""
    written: list[tuple[str, bytes]] = []
    places = []
    for place, (name, value) in enumerate(pairs):
        if value is None:
            places.append(b"%d" % place)
        written.append((name, b"" if value is None else value))
    if places:
        written.append((NULLS, b",".join(places)))
    return written


def restored(headers: Sequence[Pair]) -> Sequence[Pair]:
    """Return *headers*, whose last one is `NULLS`, as they were; nonsense is left alone."""
    *pairs, (_, places) = headers
    try:
        nulls = {int(place) for place in (places or b"").split(b",")}
    except ValueError:
        return headers
    if any(place >= len(pairs) or pairs[place][1] for place in nulls):
        return headers
    return [
        (name, None) if place in nulls else (name, value)
        for place, (name, value) in enumerate(pairs)
    ]
