"""Replay plans: a frozen manifest, sent carefully, confirmed by the consumer."""
