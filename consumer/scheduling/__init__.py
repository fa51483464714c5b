"""What is in hand and when it runs.

Admitted works come in and go to the workers in the order of their keys; what is settled is
collected for the poller. No later message of a key runs before an earlier one is done with.
"""
