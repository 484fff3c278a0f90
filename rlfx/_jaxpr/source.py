"""Source lines of the user's."""

from __future__ import annotations

import linecache
import os
import re
import sys
from typing import Any

from jax._src import source_info_util

# The user's source line is the first frame outside the library.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Source(str):
    """``file.py:12 (function)``, which knows its expression: ``frame`` has the file, the lines and the columns; and the
    calls that led there, ``traceback``."""

    frame: Any
    traceback: Any


def source_of(equation: Any) -> str:
    """``file.py:12 (function)`` of the user's code that made a jaxpr equation."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    if frame is None:
        return short_source(source_info_util.summarize(equation.source_info))
    found = Source(f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})")
    found.frame, found.traceback = frame, equation.source_info.traceback
    return found


def scope_of(equation: Any) -> str:
    """The ``jax.named_scope`` path under which a jaxpr equation was made."""
    return str(equation.source_info.name_stack)


def made_at(source: str, scope: str) -> Any:
    """A context in which equations come from the user's source line and scope; without a known line, from the code that runs."""
    names = source_info_util.current_name_stack()
    return source_info_util.user_context(
        getattr(source, "traceback", None), name_stack=names.extend(scope) if scope else names
    )


def here() -> str:
    """``file.py:12 (function)`` of the user's frame that is running now."""
    found = short_source(source_info_util.summarize(source_info_util.current()))
    return _caller_of_init(found) if "__create_fn__" in found else found


def _caller_of_init(found: str) -> str:
    """Where a dataclass is made, for the line of the ``__init__`` that Python has written for it."""
    frame: Any = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("__init__", "<string>"):
        frame = frame.f_back
    frame = None if frame is None else frame.f_back
    while frame is not None and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back  # a function of the library's that makes one for the user
    if frame is None:
        return found
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def short_source(summary: str) -> str:
    """``dir/file.py:12:8 (f)`` without the directory and the column.

    Example:
      >>> short_source("some/where/agent.py:12:8 (loss)")
      'agent.py:12 (loss)'
    """
    location, _, function = summary.partition(" (")
    parts = os.path.basename(location).split(":")
    return ":".join(parts[:2]) + (f" ({function}" if function else "")


def function_source(fn: Any) -> str:
    """``file.py:12 (name)`` of a Python function."""
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({name})" if code else name


def source_in_traceback(error: BaseException) -> str | None:
    """The user's innermost source line in an exception's traceback."""
    frame, found = error.__traceback__, None
    while frame is not None:
        code = frame.tb_frame.f_code
        if source_info_util.is_user_filename(code.co_filename):
            found = f"{os.path.basename(code.co_filename)}:{frame.tb_lineno} ({code.co_name})"
        frame = frame.tb_next
    return found


def expression_in_traceback(error: BaseException) -> tuple[str, dict]:
    """The user's innermost expression in an exception's traceback, and the names that it sees; "" where it is unknown."""
    frame, found = error.__traceback__, None
    while frame is not None:
        if source_info_util.is_user_filename(frame.tb_frame.f_code.co_filename):
            found = frame
        frame = frame.tb_next
    if found is None:
        return "", {}
    code = found.tb_frame.f_code
    first, last, start, stop = list(code.co_positions())[found.tb_lasti // 2]
    if first is None or last is None or start is None or stop is None:
        return "", {}
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]  # columns are those of the bytes
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(), {**found.tb_frame.f_globals, **found.tb_frame.f_locals}


def leaked_from(error: BaseException) -> str | None:
    """The user's line that made the value of which jax says that it leaked."""
    found = re.search(r"created on line (\S+:\d+)\S*( \(\w+\))?", str(error))
    return short_source(found[1] + (found[2] or "")) if found else None
