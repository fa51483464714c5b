"""Exceptions taken apart without trusting them: they may be huge, cyclic or broken."""

from __future__ import annotations

import functools
import sys
import sysconfig
from typing import TYPE_CHECKING

from holdfast.dlq.letter import ExceptionInfo, Frame
from holdfast.scrubbing import scrubbed, text_of, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, TracebackType

MOST_RAISED = 8
"""Exceptions kept of a chain: the root and those nearest to the top."""
MOST_FRAMES = 50
"""Frames kept of each exception: the innermost."""
MOST_TRACE = 8_000
"""Characters of the readable trace."""
_MOST_WALKED = 1_000
_LIBRARIES = tuple(
    sorted({path for name, path in sysconfig.get_paths().items() if "lib" in name}, key=len)
)


def taken_apart(
    error: BaseException, *, redact: Callable[[str], str] = scrubbed
) -> tuple[tuple[ExceptionInfo, ...], tuple[ExceptionInfo, ...]]:
    """Return the chain of *error*, root first, and the other members of exception groups."""
    others: list[BaseException] = []
    chain = list(_causes(error, others))[::-1]
    if len(chain) > MOST_RAISED:
        chain = [chain[0], *chain[-(MOST_RAISED - 1) :]]
    also = sorted(
        (_raised(other, redact) for other in others[:MOST_RAISED]), key=lambda r: (r.type, r.text)
    )
    return tuple(_raised(one, redact) for one in chain), tuple(also)


def traced(error: BaseException, redact: Callable[[str], str] = scrubbed) -> str:
    """Return the trace of *error* as a log may hold it: frames, and texts without secrets."""
    return trace_of(taken_apart(error, redact=redact)[0])


def trace_of(chain: tuple[ExceptionInfo, ...]) -> str:
    """Return *chain* as readable text, root first, of bounded length."""
    lines: list[str] = []
    size = 0
    for number, raised in enumerate(chain):
        if number:
            lines.append("which led to")
        lines.append(f"{raised.type}: {raised.text[:500]}")
        lines += [
            f"  {'*' if frame.in_app else ' '} {frame.module}.{frame.function}:{frame.line}"
            for frame in raised.frames
        ]
        size = sum(map(len, lines))
        if size > MOST_TRACE:
            break
    return "\n".join(lines)[:MOST_TRACE]


def _causes(error: BaseException, others: list[BaseException]) -> Iterator[BaseException]:
    """Walk from *error* to its root; members of a group are unwrapped, cycles end."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < _MOST_WALKED:
        seen.add(id(current))
        if isinstance(current, BaseExceptionGroup):
            leaves = sorted(_leaves(current, seen), key=type_name)
            if not leaves:
                yield current
                return
            first = leaves[0]
            others += leaves[1:]
            current = first
            continue
        yield current
        cause = current.__cause__
        if cause is None and not current.__suppress_context__:
            cause = current.__context__
        current = cause


def _leaves(group: BaseExceptionGroup[BaseException], seen: set[int]) -> list[BaseException]:
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [*group.exceptions]
    while waiting and len(leaves) < _MOST_WALKED:
        one = waiting.pop(0)
        if isinstance(one, BaseExceptionGroup):
            if id(one) not in seen:
                seen.add(id(one))
                waiting[:0] = one.exceptions
        else:
            leaves.append(one)
    return leaves


def _raised(error: BaseException, redact: Callable[[str], str]) -> ExceptionInfo:
    return ExceptionInfo(
        type=type_name(error),
        text=text_of(error, redact),
        frames=tuple(_frames(error.__traceback__)),
    )


def _frames(trace: TracebackType | None) -> list[Frame]:
    frames: list[Frame] = []
    while trace is not None:
        frame = trace.tb_frame
        code = frame.f_code
        name = frame.f_globals.get("__name__")
        module = name if isinstance(name, str) else "?"
        frames.append(
            Frame(
                module[:200],
                _function(code)[:200],
                trace.tb_lineno or 0,
                not module.startswith("holdfast.") and is_own_file(code.co_filename),
            )
        )
        if len(frames) > MOST_FRAMES * 4:  # a deep recursion: the innermost say what failed
            del frames[: MOST_FRAMES * 2]
        trace = trace.tb_next
    return frames[-MOST_FRAMES:]


def _function(code: CodeType) -> str:
    return code.co_qualname if sys.version_info >= (3, 11) else code.co_name


@functools.lru_cache(maxsize=4096)
def is_own_file(path: str) -> bool:
    """Whether the code at *path* is the application's: no library's and not generated."""
    if path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_LIBRARIES)
