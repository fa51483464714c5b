"""One attempt at a message: decided without I/O, run once for runtime, own loop and batches.

In comes a message that is admitted and whose turn it is; out goes what becomes of it: settled,
tried again later, given back. Nothing is settled before its effect or its dead letter is durable.
"""
