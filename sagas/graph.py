"""The graph of a saga: named steps and what must come before them, checked as a whole.

A graph holds no functions and no data: it is all that the transitions, the model checker and
the diagram need to know about a saga.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from holdfast.backoff import Backoff
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ONCE = Backoff(attempts=1)
"""The retry policy of a step that is tried a single time."""


class InvalidSaga(ConfigurationError):
    """A saga's definition cannot be run; the message names the step and the fix."""

    def __init__(self, saga: str, problem: str) -> None:
        super().__init__(f"saga {saga!r}: {problem}")
        self.saga = saga
        self.problem = problem


class NodeKind(StrEnum):
    """What a step does when its turn comes."""

    LOCAL = "local"
    """Runs in the engine's own transaction."""
    COMMAND = "command"
    """Sends a command and waits for the reply."""
    SIGNAL = "signal"
    """Waits until somebody signals."""
    TIMER = "timer"
    """Waits for a while."""
    CHOICE = "choice"
    """Picks one of several cases by the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """How a step is compensated: by a command of its own or in the engine's transaction."""

    name: str
    kind: NodeKind
    topic: str | None = None
    timeout: float | None = None
    retry: Backoff = ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One named step; `timeout` is of one attempt, `deadline` of all attempts together."""

    name: str
    kind: NodeKind
    after: frozenset[str] = frozenset()
    when: tuple[tuple[str, str], ...] = ()
    """The cases of choices that it belongs to; it is skipped unless all of them were chosen."""
    topic: str | None = None
    timeout: float | None = None
    deadline: float | None = None
    retry: Backoff = ONCE
    pivot: bool = False
    undo: Undo | None = None
    is_harmless: bool = False
    """Whether it was said that there is nothing to undo."""
    cases: tuple[str, ...] = ()

    @property
    def has_effect(self) -> bool:
        """Whether it may change something in the world."""
        return self.kind in (NodeKind.LOCAL, NodeKind.COMMAND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The steps of one version of a saga, in an order in which they may run."""

    saga: str
    version: int
    nodes: Mapping[str, Node]
    deadline: float | None = None
    pivot: str | None = None
    ancestors: Mapping[str, frozenset[str]] = field(repr=False)
    """For each step all that must have ended before it begins."""
    descendants: Mapping[str, frozenset[str]] = field(repr=False)
    hash: str = ""
    """What the shape of the saga comes to: another shape under the same version is refused."""

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def is_behind_pivot(self, name: str) -> bool:
        """Whether *name* runs only once there is no way back."""
        return self.pivot is not None and self.pivot in self.ancestors[name]


def build(
    saga: str, version: int, nodes: Iterable[Node], *, deadline: float | None = None
) -> Graph:
    """Return the graph of *nodes*, or raise `InvalidSaga` with what is wrong and how to mend it."""
    named = {node.name: node for node in nodes}
    if not named:
        raise InvalidSaga(saga, "it has no steps: add one, e.g. with @saga.command(topic)")
    _check_references(saga, named)
    ordered = {name: named[name] for name in _sorted(saga, named)}
    ancestors = _closure(ordered)
    descendants: dict[str, set[str]] = {name: set() for name in ordered}
    for name, before in ancestors.items():
        for earlier in before:
            descendants[earlier].add(name)
    pivots = [node.name for node in ordered.values() if node.pivot]
    graph = Graph(
        saga=saga,
        version=version,
        nodes=ordered,
        deadline=deadline,
        pivot=pivots[0] if pivots else None,
        ancestors=ancestors,
        descendants={name: frozenset(after) for name, after in descendants.items()},
        hash=_hash(saga, ordered.values()),
    )
    _check_choices(graph)
    _check_pivot(graph, pivots)
    for node in graph:
        _check_undo(graph, node)
        _check_end(graph, node)
    return graph


def _check_references(saga: str, nodes: Mapping[str, Node]) -> None:
    for node in nodes.values():
        for other in sorted(node.after):
            if other not in nodes:
                raise InvalidSaga(
                    saga,
                    f"step {node.name!r} comes after {other!r}, which is no step; there are: "
                    f"{', '.join(nodes)}",
                )


def _sorted(saga: str, nodes: Mapping[str, Node]) -> list[str]:
    """Return the names so that each comes after all that it waits for; first as written."""
    placed: dict[str, None] = {}
    waiting = dict(nodes)
    while waiting:
        ready = [name for name, node in waiting.items() if node.after <= placed.keys()]
        if not ready:
            raise InvalidSaga(
                saga,
                f"steps wait for each other in a circle: {' → '.join(_cycle(waiting))}; "
                "remove one after=",
            )
        placed[ready[0]] = None
        del waiting[ready[0]]
    return list(placed)


def _cycle(waiting: Mapping[str, Node]) -> list[str]:
    """Return one circle among steps none of which can ever begin."""
    walk = [next(iter(waiting))]
    while True:
        earlier = next(name for name in sorted(waiting[walk[-1]].after) if name in waiting)
        if earlier in walk:
            circle = [*walk[walk.index(earlier) :], earlier]
            return circle[::-1]
        walk.append(earlier)


def _closure(nodes: Mapping[str, Node]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for name, node in nodes.items():  # in topological order
        found[name] = node.after.union(*(found[earlier] for earlier in node.after))
    return found


def _check_choices(graph: Graph) -> None:
    for node in graph:
        chosen: dict[str, str] = {}
        for choice, case in node.when:
            cases = graph[choice].cases
            if case not in cases:
                raise InvalidSaga(
                    graph.saga,
                    f"step {node.name!r} can never run: {choice!r} does not choose {case!r}, "
                    f"only {', '.join(map(repr, cases))}",
                )
            if chosen.setdefault(choice, case) != case:
                raise InvalidSaga(
                    graph.saga,
                    f"step {node.name!r} can never run: {choice!r} would have to choose "
                    f"{chosen[choice]!r} and {case!r} at once",
                )
            if choice not in graph.ancestors[node.name]:
                raise InvalidSaga(
                    graph.saga,
                    f"step {node.name!r} belongs to a case of {choice!r}, but may run before it: "
                    f"add {choice!r} to its after=",
                )


def _check_pivot(graph: Graph, pivots: list[str]) -> None:
    if len(pivots) > 1:
        raise InvalidSaga(
            graph.saga, f"{' and '.join(map(repr, pivots))} are pivots: there is one point of no "
            "return at most"
        )  # fmt: skip
    if graph.pivot is None:
        return
    pivot = graph[graph.pivot]
    if not pivot.has_effect:
        raise InvalidSaga(
            graph.saga, f"the pivot {pivot.name!r} is a {pivot.kind}: only a local step or a "
            "command can be the point of no return"
        )  # fmt: skip
    if pivot.when:
        raise InvalidSaga(
            graph.saga, f"the pivot {pivot.name!r} is inside of a branch, and a saga that does not "
            "take it would have none: move it out of when()"
        )  # fmt: skip
    related = graph.ancestors[pivot.name] | graph.descendants[pivot.name] | {pivot.name}
    for node in graph:
        if node.name not in related:
            raise InvalidSaga(
                graph.saga,
                f"step {node.name!r} runs beside the pivot {pivot.name!r}, so nobody could say "
                "whether it may still be undone: let it come before or after the pivot",
            )


def _check_undo(graph: Graph, node: Node) -> None:
    if not node.has_effect:
        return
    if graph.is_behind_pivot(node.name):
        if node.undo is not None:
            raise InvalidSaga(
                graph.saga,
                f"step {node.name!r} comes after the pivot {graph.pivot!r} and is never undone: "
                f"remove compensate={node.undo.name!r}",
            )
        if node.retry.attempts == 1:
            raise InvalidSaga(
                graph.saga,
                f"step {node.name!r} comes after the pivot {graph.pivot!r} and can only go "
                "forward: give it a retry, e.g. retry=Backoff()",
            )
    elif node.undo is None and not node.is_harmless and not node.pivot:
        before = f" comes before the pivot {graph.pivot!r} and" if graph.pivot else ""
        raise InvalidSaga(
            graph.saga,
            f"step {node.name!r}{before} has no compensation: name one with compensate=…, or say "
            "compensate=None if there is nothing to undo",
        )


def _check_end(graph: Graph, node: Node) -> None:
    """Refuse a step that could wait for ever."""
    if node.kind is not NodeKind.SIGNAL or node.timeout is not None or node.deadline is not None:
        return
    if graph.deadline is None or graph.is_behind_pivot(node.name):
        raise InvalidSaga(
            graph.saga,
            f"step {node.name!r} would wait for ever if nobody signals: give it a timeout, e.g. "
            'timeout="3d"',
        )


def _hash(saga: str, nodes: Iterable[Node]) -> str:
    """Return the hash of what running instances depend on; waits and retries may change."""
    shape = [
        [
            node.name, node.kind.value, sorted(node.after), sorted(node.when), node.topic,
            node.pivot, sorted(node.cases),
            None if node.undo is None else [node.undo.name, node.undo.kind.value, node.undo.topic],
        ]
        for node in sorted(nodes, key=lambda node: node.name)
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode([saga, shape])).hexdigest()[:16]
