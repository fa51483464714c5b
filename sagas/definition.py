"""A saga as it is written: named steps over a typed state, in the order in which they run.

What is written here is only looked at: a `Saga` becomes a checked `Graph` when it is first
used, and the functions stay as they are, to be called in tests like any other.
"""

from __future__ import annotations

import inspect
import typing
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from holdfast.backoff import Backoff
from holdfast.codec import Decoder, JsonCodec, payload_annotation, resolved
from holdfast.durations import Duration, in_seconds
from holdfast.errors import ConfigurationError
from holdfast.ids import require_name
from holdfast.outbox import Outbox
from holdfast.sagas.coroutines import FoldDecorator, LocalDecorator, wants_async_session
from holdfast.sagas.diagram import mermaid
from holdfast.sagas.graph import ONCE, Graph, InvalidSaga, Node, NodeKind, Undo, build
from holdfast.sagas.layout import Block
from holdfast.sagas.orchestrator import start
from holdfast.sagas.versions import Migration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from holdfast.sagas.orchestrator import StartedSaga

S = TypeVar("S")
C = TypeVar("C")
P = TypeVar("P")

RETRY = Backoff(first=1.0, ceiling=60.0, attempts=5)
"""How often a step is tried unless told otherwise."""
UNDO_RETRY = Backoff(first=1.0, ceiling=300.0, attempts=20)
"""How often a compensation is tried before a human is asked."""
_OUTBOX = Outbox(source="saga")
TIMEOUT: typing.Final = "60s"
"""How long a reply is waited for unless told otherwise."""


class UndoOptions(TypedDict, total=False):
    """What a compensation takes: how long one attempt may take, and how often it is tried."""

    timeout: Duration
    retry: Backoff | None


class StepOptions(UndoOptions, total=False):
    """What a step takes.

    *compensate* names the compensation, or is None where there is nothing to undo. *timeout* is
    that of one attempt, *deadline* that of all of them. *retry* None tries once. With *pivot*
    there is no way back once the step is done. *after* places the step by hand.
    """

    compensate: str | Callable[..., object] | None
    deadline: Duration
    pivot: bool
    after: str | Callable[..., object] | tuple[str | Callable[..., object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """What a step calls: `run` when its turn comes, `fold` with what came back."""

    run: Callable[..., Any]
    fold: Callable[..., Any] | None = None
    decode: Decoder | None = None
    """Turns the payload of a reply or signal into what `fold` takes."""
    is_awaited: bool = False
    """Whether `run` takes an `AsyncSession`."""


class Saga(Generic[S]):
    """A long transaction of named steps, each of which can be undone until the pivot is passed.

    *state* is what the saga carries from step to step: a msgspec Struct, a dataclass or a
    pydantic model. *version* names this shape: instances finish with the version that they
    began with. Before the pivot, a saga that is not through by its *deadline* is compensated.
    Replies come back on the topic *replies*.
    """

    def __init__(
        self,
        name: str,
        *,
        state: type[S],
        version: int = 1,
        deadline: Duration | None = None,
        replies: str | None = None,
    ) -> None:
        self.name = require_name(name, "Saga(name)")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ConfigurationError(f"Saga(version={version!r}): count from 1")
        self.version = version
        self.state = state
        self.replies = require_name(
            f"{name}.replies" if replies is None else replies, "Saga(replies)"
        )
        self.decode: Callable[[bytes | None], S] = JsonCodec().decoder_for(state)
        self._deadline = None if deadline is None else in_seconds(deadline, of="deadline")
        self._nodes: dict[str, Node] = {}
        self._functions: dict[str, Functions] = {}
        self._undos: dict[str, Undo] = {}
        self._compensated_by: dict[str, str] = {}
        self._blocks = [Block()]
        self._graph: Graph | None = None
        self._migrations: dict[int, Migration] = {}

    def command(
        self, topic: str, **options: Unpack[StepOptions]
    ) -> Callable[[Callable[[S], C]], Callable[[S], C]]:
        """Send what the function returns to *topic*, and wait for the participant's reply.

        It is sent if and only if the transition to this step commits. A reply that does not
        come leaves the outcome unknown: the command is sent again with the same idempotency
        key, and what stays unknown is compensated.
        """
        require_name(topic, f"command({topic!r})")

        def register(function: Callable[[S], C]) -> Callable[[S], C]:
            self._add(NodeKind.COMMAND, function, options, topic=topic, timeout=TIMEOUT)
            return function

        return register

    def local(self, **options: Unpack[StepOptions]) -> LocalDecorator[S]:
        """Run the function in the transaction that also writes that the step is done.

        It returns the state to go on with. What it does to the database through its session
        happens once or not at all, whatever crashes. Raise `StepFailed` to fail for good. One
        that is `async def` takes an `AsyncSession`, under the same promise.
        """

        def register(function: Any) -> Any:
            self._add(NodeKind.LOCAL, function, options)
            return function

        return register

    def signal(self, **options: Unpack[StepOptions]) -> FoldDecorator[S]:
        """Wait for a signal with the function's name; it takes up what the signal brought.

        A signal that comes before the saga waits for it is kept. Without one within *timeout*
        the step has failed.
        """

        def register(function: Any) -> Any:
            name = self._add(NodeKind.SIGNAL, function, options)
            self._functions[name] = _folding(self.name, function, function)
            return function

        return register

    def timer(
        self, **options: Unpack[StepOptions]
    ) -> Callable[[Callable[[S], Duration]], Callable[[S], Duration]]:
        """Wait as long as the function says: seconds, a timedelta, or a text such as "3d"."""

        def register(function: Callable[[S], Duration]) -> Callable[[S], Duration]:
            self._add(NodeKind.TIMER, function, options)
            return function

        return register

    def choice(
        self, **options: Unpack[StepOptions]
    ) -> Callable[[Callable[[S], C]], Callable[[S], C]]:
        """Pick one of the cases in the function's return type, a `Literal` of texts."""

        def register(function: Callable[[S], C]) -> Callable[[S], C]:
            name = self._add(NodeKind.CHOICE, function, options)
            self._nodes[name] = replace(self._nodes[name], cases=_cases(self.name, function))
            return function

        return register

    def reply(self, step: Callable[..., object] | str) -> FoldDecorator[S]:
        """Take up into the state what the participant of *step* replied when it was done."""

        def register(function: Any) -> Any:
            name = _name(step)
            node = self._nodes.get(name)
            if node is None or node.kind is not NodeKind.COMMAND:
                raise InvalidSaga(self.name, f"reply({name!r}): there is no such command step")
            if self._functions[name].fold is not None:
                raise InvalidSaga(self.name, f"step {name!r} has a reply function already")
            self._changes()
            self._functions[name] = _folding(self.name, self._functions[name].run, function)
            return function

        return register

    def compensation(
        self, topic: str, **options: Unpack[UndoOptions]
    ) -> Callable[[Callable[[S], C]], Callable[[S], C]]:
        """Undo a step by sending what the function returns to *topic*."""
        require_name(topic, f"compensation({topic!r})")

        def register(function: Callable[[S], C]) -> Callable[[S], C]:
            self._add_undo(NodeKind.COMMAND, function, options, topic=topic, timeout=TIMEOUT)
            return function

        return register

    def local_compensation(self, **options: Unpack[UndoOptions]) -> LocalDecorator[S]:
        """Undo a step in the engine's own transaction, under the same promise as `local`."""

        def register(function: Any) -> Any:
            self._add_undo(NodeKind.LOCAL, function, options)
            return function

        return register

    def migrate(
        self, *, from_version: int, skip: Collection[str] = ()
    ) -> Callable[[Callable[[Any], S]], Callable[[Any], S]]:
        """Move instances of an older version here; the function makes its state of theirs.

        It only computes. An instance is moved when something next happens to it, in a program
        that has this version and not the older one. Steps are the same if they have the same
        name. One that has not run, before one that has, keeps an instance where it is,
        unless *skip* names it. Annotate the argument with the older state, or get a dict.
        """
        if not isinstance(from_version, int) or not 0 < from_version < self.version:
            raise InvalidSaga(
                self.name, f"migrate(from_version={from_version!r}): name a version before "
                f"{self.version}"
            )  # fmt: skip
        if from_version in self._migrations:
            raise InvalidSaga(self.name, f"there are two migrations from version {from_version}")

        def register(function: Callable[[Any], S]) -> Callable[[Any], S]:
            annotation = payload_annotation(function)
            decode = JsonCodec().decoder_for(Any if annotation is None else annotation)
            self._migrations[from_version] = Migration(
                function=function, decode=decode, skip=frozenset(skip)
            )
            return function

        return register

    @property
    def migrations(self) -> typing.Mapping[int, Migration]:
        """How instances of older versions come here, by their version."""
        return self._migrations

    @contextmanager
    def parallel(self) -> Iterator[None]:
        """Let the steps written inside run side by side; what follows waits for all of them."""
        with self._block(self._blocks[-1].opened(parallel=True)):
            yield

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Let the steps written inside of `parallel` run one after the other."""
        with self._block(self._blocks[-1].opened(parallel=False)):
            yield

    @contextmanager
    def when(self, choice: Callable[..., object] | str, case: str) -> Iterator[None]:
        """Run the steps written inside only if *choice* has picked *case*."""
        name = _name(choice)
        node = self._nodes.get(name)
        if node is None or node.kind is not NodeKind.CHOICE:
            raise InvalidSaga(self.name, f"when({name!r}): there is no such choice above")
        with self._block(self._blocks[-1].opened_case(name, case)):
            yield

    @property
    def graph(self) -> Graph:
        """The steps, checked as a whole, or `InvalidSaga`; nothing can be added afterwards."""
        if self._graph is None:
            if len(self._blocks) > 1:
                raise InvalidSaga(self.name, "it is used inside of its own with block")
            self._graph = self._built()
        return self._graph

    @property
    def steps(self) -> typing.Mapping[str, Functions]:
        """The functions of steps and compensations by name."""
        return self._functions

    def start(self, session: Session | Connection, state: S, *, key: str) -> StartedSaga:
        """Start one in the caller's transaction: it runs if and only if that commits.

        *key* is the business key. While a saga runs under it, a start with the same state gives
        that one back, and a start with another state is a `DuplicateSaga`. With an `AsyncSession`
        write  await session.run_sync(lambda s: saga.start(s, state, key=key)).
        """
        require_name(key, f"{self.name}.start(key=…)")
        if not isinstance(session, Session | Connection):
            raise ConfigurationError(
                f"{self.name}.start({type(session).__name__}): pass the Session or Connection "
                "whose transaction it belongs to"
            )
        if isinstance(session, Connection):
            return start(session, self, state, key, _OUTBOX)
        session.flush()
        return start(session.connection(), self, state, key, _OUTBOX)

    def diagram(self) -> str:
        """Return the saga as a Mermaid flowchart."""
        return mermaid(self.graph)

    def __repr__(self) -> str:
        return f"Saga({self.name!r}, version={self.version})"

    def _built(self) -> Graph:
        nodes, used = [], set()
        for node in self._nodes.values():
            wanted = self._compensated_by.get(node.name)
            if wanted is None:
                nodes.append(node)
                continue
            if wanted not in self._undos:
                raise InvalidSaga(
                    self.name,
                    f"step {node.name!r} is compensated by {wanted!r}, which is not there: write "
                    "it with @saga.compensation(topic) or @saga.local_compensation()",
                )
            used.add(wanted)
            nodes.append(replace(node, undo=self._undos[wanted]))
        if unused := self._undos.keys() - used:
            raise InvalidSaga(
                self.name,
                f"no step names the compensation {min(unused)!r}: add "
                f"compensate={min(unused)!r} to the step that it undoes, or remove it",
            )
        return build(self.name, self.version, nodes, deadline=self._deadline)

    def _add(
        self,
        kind: NodeKind,
        function: Callable[..., Any],
        options: StepOptions,
        *,
        topic: str | None = None,
        timeout: Duration | None = None,
    ) -> str:
        name = self._new_name(function, kind)
        _known(self.name, name, options, StepOptions)
        if "compensate" in options and kind not in (NodeKind.LOCAL, NodeKind.COMMAND):
            raise InvalidSaga(self.name, f"step {name!r} is a {kind}: it has nothing to compensate")
        if "timeout" in options and kind not in (NodeKind.COMMAND, NodeKind.SIGNAL):
            raise InvalidSaga(self.name, f"step {name!r} is a {kind}: it waits for no answer, so "
                              "it has no timeout")  # fmt: skip
        compensate = options.get("compensate")
        if compensate is not None:
            self._compensated_by[name] = _name(compensate)
        after = options.get("after")
        places = after if isinstance(after, tuple | list) else (after,)
        block = self._blocks[-1]
        node = Node(
            name=name,
            kind=kind,
            when=block.when,
            after=block.add(
                name, None if after is None else frozenset(_name(one) for one in places if one)
            ),
            topic=topic,
            timeout=_seconds(options, "timeout", name, timeout),
            deadline=_seconds(options, "deadline", name),
            retry=_policy(self.name, name, options.get("retry", RETRY)),
            pivot=options.get("pivot", False),
            is_harmless="compensate" in options and compensate is None,
        )
        self._nodes[name] = node
        self._functions[name] = _local_or_plain(kind, function)
        return name

    def _add_undo(
        self,
        kind: NodeKind,
        function: Callable[..., Any],
        options: UndoOptions,
        *,
        topic: str | None = None,
        timeout: Duration | None = None,
    ) -> None:
        name = self._new_name(function, kind)
        _known(self.name, name, options, UndoOptions)
        if "timeout" in options and kind is NodeKind.LOCAL:
            raise InvalidSaga(self.name, f"compensation {name!r} is local: it waits for no answer, "
                              "so it has no timeout")  # fmt: skip
        self._undos[name] = Undo(
            name=name,
            kind=kind,
            topic=topic,
            timeout=_seconds(options, "timeout", name, timeout),
            retry=_policy(self.name, name, options.get("retry", UNDO_RETRY)),
        )
        self._functions[name] = _local_or_plain(kind, function)

    def _new_name(self, function: Callable[..., Any], kind: NodeKind) -> str:
        self._changes()
        name = require_name(_name(function), f"saga {self.name!r}")
        is_async = inspect.iscoroutinefunction(function)
        if is_async and kind not in (NodeKind.LOCAL, NodeKind.SIGNAL):
            raise InvalidSaga(
                self.name,
                f"{name!r} is async: write it with def; what it has to wait for belongs into a "
                "local step before it",
            )
        if kind is NodeKind.LOCAL and not is_async and wants_async_session(function):
            raise InvalidSaga(
                self.name, f"{name!r} asks for an AsyncSession: write it with async def"
            )
        if name in self._functions:
            raise InvalidSaga(self.name, f"there are two steps named {name!r}: rename one")
        return name

    def _changes(self) -> None:
        if self._graph is not None:
            raise InvalidSaga(self.name, "it is in use already: write all steps before its first")

    @contextmanager
    def _block(self, inner: Block) -> Iterator[None]:
        self._blocks.append(inner)
        try:
            yield
        finally:
            self._blocks.pop()
        self._blocks[-1].close(inner)


def _name(step: Callable[..., object] | str) -> str:
    return step if isinstance(step, str) else getattr(step, "__name__", repr(step))


def _known(saga: str, step: str, options: Any, kind: Any) -> None:
    if unknown := options.keys() - kind.__annotations__.keys():
        raise InvalidSaga(
            saga,
            f"step {step!r} has no option {min(unknown)!r}; there are: "
            f"{', '.join(kind.__annotations__)}",
        )


def _seconds(options: Any, name: str, step: str, default: Duration | None = None) -> float | None:
    if name not in options:
        return None if default is None else in_seconds(default, of=name)
    return in_seconds(options[name], of=f"step {step!r}: {name}")


def _policy(saga: str, step: str, retry: Backoff | None) -> Backoff:
    if retry is None:
        return ONCE
    if not isinstance(retry, Backoff):
        raise InvalidSaga(saga, f"step {step!r}: retry={retry!r}: pass a Backoff, or None")
    return retry


def _folding(saga: str, run: Callable[..., Any], fold: Callable[..., Any]) -> Functions:
    """Return the functions of a step whose *fold* takes the state and what came."""
    parameters = list(inspect.signature(fold).parameters.values())
    if len(parameters) != 2:
        raise InvalidSaga(
            saga, f"{_name(fold)!r} takes {len(parameters)} arguments: write (state, what came)"
        )
    annotation = parameters[1].annotation
    wanted = Any if annotation is inspect.Parameter.empty else resolved(fold, annotation)
    return Functions(run=run, fold=fold, decode=JsonCodec().decoder_for(wanted))


def _local_or_plain(kind: NodeKind, function: Callable[..., Any]) -> Functions:
    """Return the functions of a step that nothing is taken up from."""
    is_local = kind is NodeKind.LOCAL
    return Functions(run=function, is_awaited=is_local and wants_async_session(function))


def _cases(saga: str, function: Callable[..., Any]) -> tuple[str, ...]:
    annotation = inspect.signature(function).return_annotation
    found = resolved(function, annotation)
    cases = typing.get_args(found) if typing.get_origin(found) is Literal else ()
    if not cases or not all(isinstance(case, str) for case in cases):
        raise InvalidSaga(
            saga,
            f"choice {_name(function)!r} does not say what it chooses from: annotate it with "
            'e.g.  -> Literal["express", "standard"]',
        )
    return cases
