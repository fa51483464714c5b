"""Capture: a failed message and its error become a dead letter."""
