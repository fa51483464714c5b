"""Packages that share their name with the function they are for: both are to be had by it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect


class CallableModule(ModuleType):
    """A module that can be called: the function of its name answers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the module is named after."""
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The parameters of that function, for `help` and editors."""
        import inspect

        return inspect.signature(self._function)

    @property
    def _function(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])


def make_callable(name: str) -> None:
    """Let the module *name* be called: `from holdfast import retry` may find either of the two.

    Python binds an imported package to its parent under its own name, so that the function of
    that name would be hidden by it.
    """
    sys.modules[name].__class__ = CallableModule
