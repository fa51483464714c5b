"""How much is read at a time."""

from __future__ import annotations

from holdfast.publishing import MOST_BYTES, BatchSizer, fitting


def test_a_portion_grows_to_what_was_asked_for_while_rows_are_small() -> None:
    """A few batches after the start it is whole."""
    sizer, asked = BatchSizer(2000), []
    for _ in range(6):
        asked.append(sizer.rows)
        sizer.came(sizer.rows, sizer.rows * 300)
    assert asked == [16, 64, 256, 1024, 2000, 2000]


def test_a_portion_shrinks_as_soon_as_rows_are_large() -> None:
    """Down to one row, never to none."""
    sizer = BatchSizer(2000)
    sizer.came(16, 16 << 20)
    assert sizer.rows == 16
    sizer.came(16, 64 << 20)
    assert sizer.rows == 4
    sizer.came(1, 10 * MOST_BYTES)
    assert sizer.rows == 1
    sizer.came(0, 0)
    assert sizer.rows == 1


def test_what_fits_is_taken_in_order_and_always_one() -> None:
    """A row that is larger than everything allowed goes alone."""
    assert fitting([(5, None), (7, MOST_BYTES), (9, 1)]) == [5, 7]
    assert fitting([(5, 10 * MOST_BYTES), (7, 1)]) == [5]
    assert fitting([]) == []
