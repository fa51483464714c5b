"""A circuit opens, probes and closes: run me with `python examples/circuit.py`."""

from __future__ import annotations

from holdfast import Breaker, CircuitOpen, CircuitPolicy, LastCalls, circuit
from holdfast.circuit import StateChanged
from holdfast.testing import VirtualClock

clock = VirtualClock()
policy = CircuitPolicy(minimum_calls=4, window=LastCalls(10), open_seconds=30, permits=2)
gateway = Breaker("payment-gateway", policy, clock=clock)
gateway.listen(
    lambda event: (
        print(f"  now {type(event.after).__name__}") if isinstance(event, StateChanged) else None
    )
)
is_up = True


@circuit("payment-gateway", breaker=gateway)
def charge(order: int) -> str:
    if not order:
        raise ValueError("no such order")  # bad data, not an outage
    if not is_up:
        raise ConnectionError("gateway is down")
    return "paid"


def ask(order: int) -> str:
    try:
        return charge(order)
    except CircuitOpen as error:
        return f"not asked, wait {error.retry_after:.0f} s"
    except (ConnectionError, ValueError) as error:
        return str(error)


print("bad orders:", {ask(0) for _ in range(9)})
is_up = False
print("outage:")
print(" ", [ask(17) for _ in range(4)][-1])
print(" ", ask(17))
clock.advance(30)
print("still down after 30 s:")
print(" ", ask(17))
clock.advance(30)
is_up = True
print("up again:")
print(" ", ask(17), "and", ask(18))
