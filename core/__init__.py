"""Holdfast: no message lost, no effect twice, order per key, every failure replayable.

What services use is here: `from holdfast import Consumer, Outbox, idempotent, retry`. Each name is
loaded when it is asked for, so that `import holdfast` alone costs next to nothing. What authors of
broker adapters need is in `holdfast.ports`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.backoff import Backoff, Jitter
    from holdfast.brokers import connect, schemes
    from holdfast.circuit import Breaker, CircuitPolicy, LastCalls, LastSeconds, circuit
    from holdfast.classification import Rules, classify
    from holdfast.clock import Clock, SystemClock, checkpoint, remaining
    from holdfast.codec import Codec, JsonCodec
    from holdfast.consumer import (
        Attempt,
        Batches,
        Consumer,
        HandlerEnding,
        HandlerOutcome,
        Order,
        Settings,
    )
    from holdfast.db.engine import open_database
    from holdfast.dlq import (
        CaptureSettings,
        DeadLetter,
        DeadLetterStore,
        DeadLetterTopic,
        Redaction,
        dead_letter,
    )
    from holdfast.effects import effect
    from holdfast.errors import (
        AttemptTimeout,
        BrokerDown,
        CircuitOpen,
        ConfigurationError,
        DecodeFailed,
        DependencyDown,
        FencedOff,
        HoldfastError,
        InvalidMessage,
        InvalidUrl,
        MessageTooLarge,
        MissingExtra,
        NotFound,
        PlanError,
        PoisonMessage,
        Remedy,
        ResultRejected,
        StaleDelivery,
        Transient,
        UnknownGroup,
        UnknownScheme,
        UnknownTopic,
        Unsupported,
    )
    from holdfast.headers import Headers
    from holdfast.idempotency import (
        DatabaseLeases,
        IdempotencyConflict,
        Inbox,
        LastWriteWins,
        RedisInbox,
        VersionGate,
        idempotency_key,
        idempotent,
    )
    from holdfast.ids import derived_id, new_id
    from holdfast.message import Message, carry, current_message, handling
    from holdfast.outbox import Event, Outbox
    from holdfast.pipeline import Handler
    from holdfast.retry import Budget, BudgetSpent, retry, timeout
    from holdfast.sagas import Participant, Saga, Sagas
    from holdfast.upcast import upcast

    __version__: str

__all__ = [
    "Attempt",
    "AttemptTimeout",
    "Backoff",
    "Batches",
    "Breaker",
    "BrokerDown",
    "Budget",
    "BudgetSpent",
    "CaptureSettings",
    "CircuitOpen",
    "CircuitPolicy",
    "Clock",
    "Codec",
    "ConfigurationError",
    "Consumer",
    "DatabaseLeases",
    "DeadLetter",
    "DeadLetterStore",
    "DeadLetterTopic",
    "DecodeFailed",
    "DependencyDown",
    "Event",
    "FencedOff",
    "Handler",
    "HandlerEnding",
    "HandlerOutcome",
    "Headers",
    "HoldfastError",
    "IdempotencyConflict",
    "Inbox",
    "InvalidMessage",
    "InvalidUrl",
    "Jitter",
    "JsonCodec",
    "LastCalls",
    "LastSeconds",
    "LastWriteWins",
    "Message",
    "MessageTooLarge",
    "MissingExtra",
    "NotFound",
    "Order",
    "Outbox",
    "Participant",
    "PlanError",
    "PoisonMessage",
    "Redaction",
    "RedisInbox",
    "Remedy",
    "ResultRejected",
    "Rules",
    "Saga",
    "Sagas",
    "Settings",
    "StaleDelivery",
    "SystemClock",
    "Transient",
    "UnknownGroup",
    "UnknownScheme",
    "UnknownTopic",
    "Unsupported",
    "VersionGate",
    "__version__",
    "carry",
    "checkpoint",
    "circuit",
    "classify",
    "connect",
    "current_message",
    "dead_letter",
    "derived_id",
    "effect",
    "handling",
    "idempotency_key",
    "idempotent",
    "new_id",
    "open_database",
    "remaining",
    "retry",
    "schemes",
    "timeout",
    "upcast",
]

_MODULES = {
    "backoff": "Backoff Jitter",
    "brokers": "connect schemes",
    "circuit": "Breaker CircuitPolicy LastCalls LastSeconds circuit",
    "classification": "Rules classify",
    "clock": "Clock SystemClock checkpoint remaining",
    "codec": "Codec JsonCodec",
    "consumer": "Attempt Batches Consumer HandlerEnding HandlerOutcome Order Settings",
    "db.engine": "open_database",
    "dlq": "CaptureSettings DeadLetter DeadLetterStore DeadLetterTopic Redaction dead_letter",
    "effects": "effect",
    "errors": (
        "AttemptTimeout BrokerDown CircuitOpen ConfigurationError DecodeFailed DependencyDown "
        "FencedOff HoldfastError InvalidMessage InvalidUrl MessageTooLarge MissingExtra "
        "NotFound PlanError PoisonMessage Remedy ResultRejected StaleDelivery Transient "
        "UnknownGroup UnknownScheme UnknownTopic Unsupported"
    ),
    "headers": "Headers",
    "idempotency": (
        "DatabaseLeases IdempotencyConflict Inbox LastWriteWins RedisInbox VersionGate "
        "idempotency_key idempotent"
    ),
    "ids": "derived_id new_id",
    "message": "Message carry current_message handling",
    "outbox": "Event Outbox",
    "pipeline": "Handler",
    "retry": "Budget BudgetSpent retry timeout",
    "sagas": "Participant Saga Sagas",
    "upcast": "upcast",
}
"""Where each name is; the packages named `circuit`, `retry` and `upcast` can be called, too."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        found: object = version("holdfast")
    elif name in _MODULE_OF:
        from importlib import import_module

        module = import_module(f"holdfast.{_MODULE_OF[name]}")
        found = module if name == _MODULE_OF[name] else getattr(module, name)
    else:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
