"""From the broker to the scheduler: poll, decode, and ask the database what is known.

Deliveries come in, works whose start is marked go out. Messages are acknowledged here and
nowhere else, after their transaction has committed.
"""
