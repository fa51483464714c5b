"""What to do about an error that somebody else raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigurationError, HoldfastError, Remedy
from holdfast.foreign import rule_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Classify = Any
"""A callable `(error) -> Remedy | None`; None means that it does not know."""


def classify(error: BaseException) -> Remedy:
    """Return the remedy for *error*; one that nobody knows may pass when tried again."""
    remedy = recognise(error)
    return Remedy.RETRY if remedy is None else remedy


def recognise(error: BaseException) -> Remedy | None:
    """Return the remedy for *error*, None when nothing is known about it.

    What the error declares itself comes first, then the rules for common libraries, which
    match class names along the inheritance: no library is imported for it.
    """
    remedy = declared(error)
    if remedy is not None:
        return remedy
    if isinstance(error, BaseExceptionGroup):
        return _of_group(error)
    if not isinstance(error, Exception):
        return Remedy.RELEASE  # the process or the task is told to end: nobody is to blame
    rule = rule_for(type(error))
    return rule(error) if callable(rule) else rule


def check_classify(classify: Classify | None, decorator: str) -> None:
    """Refuse what cannot judge errors, before there is one."""
    if classify is not None and (not callable(classify) or isinstance(classify, type)):
        raise ConfigurationError(
            f"{decorator}(classify={classify!r}): pass a function of the error that returns a "
            "Remedy or None, or Rules({ErrorType: Remedy.RETRY, …})"
        )


def declared(error: BaseException) -> Remedy | None:
    """Return the remedy that *error* carries: `HoldfastError.remedy` or `__holdfast_remedy__`."""
    remedy = getattr(error, "__holdfast_remedy__", None)
    if remedy is None:
        return error.remedy if isinstance(error, HoldfastError) else None
    try:
        return Remedy(remedy)
    except ValueError:
        return None  # nonsense from elsewhere must not hide the error itself


@dataclass(frozen=True, slots=True)
class Rules:
    """A classification of your own: error types or predicates, asked in the order given.

    `Rules({CardDeclined: Remedy.DEAD_LETTER, lambda e: "busy" in str(e): Remedy.RETRY})`
    What no rule matches goes to *otherwise*.
    """

    rules: Mapping[type[BaseException] | Callable[[BaseException], bool], Remedy]
    otherwise: Classify = recognise

    def __post_init__(self) -> None:
        for condition, remedy in self.rules.items():
            if not callable(condition) or not isinstance(remedy, Remedy):
                raise ConfigurationError(
                    f"Rules({{{condition!r}: {remedy!r}}}): map error types or predicates to Remedy"
                )

    def __call__(self, error: BaseException) -> Remedy | None:
        """Return the remedy of the first rule that matches *error*."""
        for condition, remedy in self.rules.items():
            if isinstance(condition, type):
                if isinstance(error, condition):
                    return remedy
            elif condition(error):
                return remedy
        found: Remedy | None = self.otherwise(error)
        return found


_GRAVEST = (
    Remedy.FIX,
    Remedy.DEAD_LETTER,
    Remedy.RELEASE,
    Remedy.PAUSE,
)


def _of_group(group: BaseExceptionGroup[BaseException]) -> Remedy | None:
    """Return the gravest remedy: a group may be retried only if every member may."""
    remedies = {recognise(error) for error in group.exceptions}
    for remedy in _GRAVEST:
        if remedy in remedies:
            return remedy
    return None if None in remedies else Remedy.RETRY
