"""Let the kit give up soon: with a broken promise, what it waits for does not come."""

from holdfast.testing.conformance import BrokerConformance

BrokerConformance.settle_in = 3.0
