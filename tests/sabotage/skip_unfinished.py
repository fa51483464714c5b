"""Break a promise: the watermark follows the highest finished offset."""

from holdfast.watermark import Watermark


def careless(self: Watermark) -> int | None:
    """Return the offset after the highest, whatever is unfinished below it."""
    return None if self._highest < 0 else self._highest + 1


Watermark.position = careless  # type: ignore[method-assign]
