"""Dead letters: captured whole, grouped by cause, triaged, and replayed safely."""
