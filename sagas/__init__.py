"""Orchestrated sagas that always end: completed, compensated, or parked for a human.

What comes in is a definition, a start in the caller's transaction, and replies from the broker;
what goes out are commands through the outbox. Each step is done or undone, never both, never
neither, whatever crashes, comes twice, or comes late.
"""

from holdfast.sagas.choreography import Reactions
from holdfast.sagas.definition import Saga
from holdfast.sagas.engine import SagaResult, Sagas, SagaTimeout
from holdfast.sagas.graph import Graph, InvalidSaga, Node, NodeKind
from holdfast.sagas.locks import ResourceLocked, is_locked, lock_resource, unlock_resource
from holdfast.sagas.orchestrator import DuplicateSaga, StartedSaga
from holdfast.sagas.participant import Participant, StepFailed, participant
from holdfast.sagas.schema import create_tables, metadata
from holdfast.sagas.state_machine import InvalidTransition, StateMachine
from holdfast.sagas.timers import TimerWorker, WorkerTerms
from holdfast.sagas.versions import CannotMigrate, DefinitionChanged, UnknownVersion
from holdfast.sagas.wire import current_step

__all__ = [
    "CannotMigrate",
    "DefinitionChanged",
    "DuplicateSaga",
    "Graph",
    "InvalidSaga",
    "InvalidTransition",
    "Node",
    "NodeKind",
    "Participant",
    "Reactions",
    "ResourceLocked",
    "Saga",
    "SagaResult",
    "SagaTimeout",
    "Sagas",
    "StartedSaga",
    "StateMachine",
    "StepFailed",
    "TimerWorker",
    "UnknownVersion",
    "WorkerTerms",
    "create_tables",
    "current_step",
    "is_locked",
    "lock_resource",
    "metadata",
    "participant",
    "unlock_resource",
]
