"""The store of dead letters: tables, groups, counts, retention."""
