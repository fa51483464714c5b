"""Parked messages: what waits behind a dead letter of its key, and how operators let it go on."""
