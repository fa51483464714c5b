"""Where a step stands: after what was written before it, beside its siblings, in its case."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Block:
    """The steps of one `with` block, or of the whole saga, while they are being written."""

    start: frozenset[str] = frozenset()
    when: tuple[tuple[str, str], ...] = ()
    is_parallel: bool = False
    case: str | None = None
    """The choice that this block is a case of."""
    ends: frozenset[str] = field(init=False)
    """What the next step comes after; of a parallel block, what comes behind the block does."""
    case_ends: dict[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends = frozenset() if self.is_parallel else self.start

    @property
    def before(self) -> frozenset[str]:
        """What the next step of this block comes after."""
        return self.start if self.is_parallel else self.ends

    def add(self, name: str, after: frozenset[str] | None) -> frozenset[str]:
        """Place step *name*, by default behind what is here; return what it comes after."""
        waits_for = self.before if after is None else after
        self.ends = (self.ends if self.is_parallel else self.ends - waits_for) | {name}
        return waits_for

    def opened(self, *, parallel: bool) -> Block:
        """Return a block that begins where the next step would stand."""
        return Block(self.before, self.when, parallel)

    def opened_case(self, choice: str, case: str) -> Block:
        """Return the block of one *case*: beside the other cases of *choice*, behind the rest."""
        others = self.case_ends.get(choice, frozenset())
        start = (self.before - others) | {choice}
        return Block(start, (*self.when, (choice, case)), case=choice)

    def close(self, inner: Block) -> None:
        """Go on behind the steps of *inner*."""
        if inner.case is not None:
            known = self.case_ends.get(inner.case, frozenset())
            self.case_ends[inner.case] = known | (inner.ends - inner.start)
            self.ends |= inner.ends
        elif self.is_parallel:
            self.ends |= inner.ends
        else:
            self.ends = inner.ends or self.ends
