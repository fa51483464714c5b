"""Handlers as they are written: what one asks for, and one tried without a consumer."""
