"""Protection: what of a letter may be seen, and by whom."""
