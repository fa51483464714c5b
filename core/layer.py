"""Layers: what a decorator adds around a handler, and where it belongs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeGuard, TypeVar

from holdfast.pipeline import Handler, wrap
from holdfast.scrubbing import scrubbed

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.engine import Engine

    from holdfast.call import Again, Call, Done, Stage

P = ParamSpec("P")
R = TypeVar("R")


class Layer:
    """Base of every layer; override the hooks that are needed, the others cost nothing.

    A layer object is also a decorator, usable alone on any function. It is shared by all
    calls, so what belongs to one call goes into `call.notes[self]`. Around an `async def`
    a hook named `enter_async`, `leave_async` or `fail_async` stands in for the plain one.
    """

    stage: ClassVar[Stage]
    label: ClassVar[str]
    """How the decorator is written, e.g. '@retry'."""

    @property
    def visible(self) -> Callable[[bytes | None], bytes | None] | None:
        """How a payload is rid of fields that it hides from what is kept; None: it hides none."""
        return None

    def __call__(self, function: Callable[P, R]) -> Handler[P, R]:
        """Wrap *function*; the order of all its layers is checked here."""
        return wrap(self, function)

    def describe(self) -> str:
        """Return one line for `explain()`."""
        return ""

    def bind_database(self, engine: Engine) -> Layer:
        """Return this layer for a consumer whose database is *engine*; most need none."""
        return self

    def inside(self) -> Layer | None:
        """Return what this layer asks right beside the function, inside all others."""

    def enter(self, call: Call) -> Done | None:
        """Before what is inside; `Done` ends the run without it, though `leave` still runs."""

    def leave(self, call: Call) -> Again | None:
        """After what is inside succeeded; `Again` runs the inside once more.

        An error raised here fails the layers outside.
        """

    def fail(self, call: Call, error: BaseException) -> Done | Again | None:
        """After what is inside raised *error*; None lets it go on outwards.

        An error raised here takes the place of *error* for the layers outside.
        """

    def scrub(self, call: Call, text: str) -> str:
        """Return *text*, which is about *call*, as it may be kept; who settles it knows more."""
        return scrubbed(text)

    def hook(self, name: str, *, is_async: bool) -> Callable[..., Any] | None:
        """Return the hook *name*, or None where it would do nothing: then it costs nothing."""
        other = getattr(self, f"{name}_async", None) if is_async else None
        if other is not None:
            return other  # type: ignore[no-any-return]
        inherited = getattr(type(self), name) is getattr(Layer, name)
        return None if inherited else getattr(self, name)


def is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    """Whether *value* is what a decorator without parentheses gets: a function, maybe decorated."""
    return inspect.isroutine(value) or isinstance(value, Handler)
