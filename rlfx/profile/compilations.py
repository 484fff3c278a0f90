"""Compilations during a capture: which function, how long, and why it was compiled again."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.monitoring

from rlfx._jaxpr import partial_eval, pxla

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
CACHE_HIT = "/jax/compilation_cache/cache_hits"
EXPLAINS = partial_eval.__name__  # the logger that answers `jax_explain_cache_misses`
LOWERS = pxla.__name__  # the logger that names each program before it is compiled, with the types of its arguments
LOWERING = "Compiling %s with global shapes and types %s"
FIRST_SEEN = "first call in this process"
REDEFINED = "a new function object, defined again on the same line"
OTHER = "not explained by jax"
UNAVAILABLE = "cache miss explanation unavailable"


@dataclass
class CompileLog:
    """Filled while `watching()`: `stages` as plain dictionaries for JSON, `causes` by function in order of compiling."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    causes: dict[str, list[str]] = field(default_factory=dict)
    cache_hits: int = 0
    _missed: dict[str, str] = field(default_factory=dict)  # function: why it was traced again, until it is compiled
    _types: dict[str, tuple[str, ...]] = field(default_factory=dict)  # function: argument types compiled last

    def as_notes(self) -> dict[str, Any]:
        return {"compilations": self.stages, "causes": self.causes, "cache_hits": self.cache_hits}

    def missed(self, function: str, cause: str) -> None:
        """jax traces a function, and says why."""
        self._missed[function] = cause

    def lowered(self, function: str, types: tuple[str, ...]) -> None:
        """jax lowers a function for arguments of these types; functions of libraries are traced without a reason."""
        before, cause = self._types.get(function), self._missed.pop(function, None)
        # Where jax has no words, or compares with a call of another structure although the last one had the same.
        same_structure = before is not None and len(before) == len(types) and before != types
        if cause is None or cause == UNAVAILABLE or ("<class" in cause and same_structure):
            cause = difference(before, types)
        self._types[function] = types
        self.causes.setdefault(function, []).append(cause)


def difference(before: tuple[str, ...] | None, now: tuple[str, ...]) -> str:
    """Why a program is compiled for these argument types after those.

    Example:
      >>> difference(("f32[3]", "i32[]"), ("f32[4]", "i32[]"))
      'argument 0: now f32[4] and before f32[3]'
      >>> difference(None, ("f32[3]",))
      'not compiled for (f32[3]) before'
    """
    listed = f"({', '.join(now)})"
    if before is None:
        return f"not compiled for {listed} before"
    if len(before) != len(now):
        return f"arguments: now {listed} and before ({', '.join(before)})"
    changed = [
        f"argument {i}: now {b} and before {a}" for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b
    ]
    return "; ".join(changed) or f"same types {listed}: a static argument, placement, sharding or donation changed"


def first(cause: str) -> bool:
    """Is it the first compilation of a function, which no other call could have saved?

    Example:
      >>> first("not compiled for (f32[3]) before"), first("argument 0: now f32[6] and before f32[5]")
      (True, False)
    """
    return cause in (FIRST_SEEN, OTHER) or cause.startswith("not compiled for")


def bare(name: str) -> str:
    """Example:
    >>> bare("jit(step)"), bare("step")
    ('step', 'step')
    """
    wrapped = re.fullmatch(r"p?jit\((.*)\)", name)
    return wrapped[1] if wrapped else name


def cause_of(text: str) -> tuple[str, str]:
    """`(function, cause)` of jax's explanation of a tracing-cache miss.

    Example:
      >>> cause_of('''TRACING CACHE MISS at agent.py:28 (main):
      ...   for f defined at agent.py:7
      ...   all previously seen cache keys differ. For the closest previous key:
      ...   different input types:
      ...   * at x, now f32[129] and before f32[128]''')
      ('f', 'argument x: now f32[129] and before f32[128]')
    """
    never = re.search(r"never seen function:\s+(\S+) id=", text)
    if never:
        return never[1], REDEFINED if "but seen another function" in text else FIRST_SEEN
    known = re.search(r"^\s*for (\S+)", text, re.MULTILINE)
    changed = [re.sub(r"\s+", " ", line) for line in re.findall(r"^\s*\* (.*)$", text, re.MULTILINE)]
    last = [line.strip() for line in text.strip().splitlines()][-1]
    return (known[1] if known else "?"), "; ".join(_readable(c) for c in changed) or last


# From jax's words for a place among the arguments (`[0]` the positional ones, `[1]` the others) to the user's.
READABLE = (
    (r"now \S+ \S+Static'> with pytree metadata Static\(val=(.*)\) and before \S+ \S+Static'> with pytree metadata "
     r"Static\(val=(.*)\), so .*", r"static, now \1 and before \2"),
    (r"^at input path \[0\]\[(\d+)\]([^,]*), ", r"argument \1\2: "),
    (r"^at input path \[1\]\['(\w+)'\]([^,]*), ", r"argument \1\2: "),
    (r"^at input path \[1\], ", "keyword arguments: "),
    (r"^at ([^,]+), ", r"argument \1: "),
)  # fmt: skip


def _readable(change: str) -> str:
    """Example:
    >>> _readable("at input path [0][2]['w'], now <class 'dict'> and before pytree leaf, so their Python types differ")
    "argument 2['w']: now <class 'dict'> and before pytree leaf, so their Python types differ"
    """
    for pattern, words in READABLE:
        change = re.sub(pattern, words, change)
    return change


class _Listens(logging.Filter):
    """Keep what jax says of compilations; let through to the user's own log only what the user had asked for."""

    def __init__(self, log: CompileLog, level: int, explain: bool):
        super().__init__()
        self.log, self.level, self.explain = log, level, explain

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith(LOWERING) and isinstance(record.args, tuple):
            module, types = record.args[:2]
            self.log.lowered(bare(str(module)), tuple(_short(t) for t in types))  # pyright: ignore[reportGeneralTypeIssues]
        elif "TRACING CACHE MISS" in (text := record.getMessage()):
            self.log.missed(*cause_of(text))
            return self.explain
        return record.levelno >= self.level


def _short(type_: Any) -> str:
    return type_.str_short(short_dtypes=True) if hasattr(type_, "str_short") else str(type_)


@contextlib.contextmanager
def _listening(name: str, log: CompileLog, level: int, explain: bool) -> Iterator[None]:
    """Filter one of jax's loggers, made talkative enough."""
    logger = logging.getLogger(name)
    own, listens = logger.level, _Listens(log, logger.getEffectiveLevel(), explain)
    logger.addFilter(listens)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.setLevel(own)
        logger.removeFilter(listens)


@contextlib.contextmanager
def watching(log: CompileLog, main: int) -> Iterator[None]:
    """Record every compilation in the process, with jax's own explanation of why; `main` is a thread's ident."""

    def duration(event: str, seconds: float, **tags: Any) -> None:
        stage = STAGES.get(event)
        if stage:
            entry = {"stage": stage, "function": bare(str(tags.get("fun_name", "?"))), "seconds": seconds}
            log.stages.append({**entry, "end_ns": time.time_ns(), "main": threading.get_ident() == main})

    def happened(event: str, **tags: Any) -> None:
        log.cache_hits += event == CACHE_HIT

    asked = bool(jax.config.jax_explain_cache_misses)
    jax.monitoring.register_event_duration_secs_listener(duration)
    jax.monitoring.register_event_listener(happened)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        with _listening(EXPLAINS, log, logging.WARNING, asked), _listening(LOWERS, log, logging.DEBUG, asked):
            yield
    finally:
        jax.config.update("jax_explain_cache_misses", asked)
        jax.monitoring.unregister_event_duration_listener(duration)
        jax.monitoring.unregister_event_listener(happened)


@dataclass(frozen=True)
class Compiled:
    """A function compiled in the window: how often, seconds of tracing, lowering and compiling, and the causes."""

    function: str
    count: int
    seconds: float
    causes: tuple[str, ...]


def summarize(notes: dict[str, Any]) -> list[Compiled]:
    """One `Compiled` a function, the costliest first; `count` counts executables built (XLA compilations).

    Example:
      >>> stage = {"stage": "compile", "function": "f", "seconds": 0.5}
      >>> summarize({"compilations": [stage], "causes": {"f": ["not compiled for (f32[3]) before"]}})
      [Compiled(function='f', count=1, seconds=0.5, causes=('not compiled for (f32[3]) before',))]
    """
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for c in notes.get("compilations", []):
        counts[c["function"]] = counts.get(c["function"], 0) + (c["stage"] == "compile")
        seconds[c["function"]] = seconds.get(c["function"], 0.0) + c["seconds"]
    out = []
    for function, count in counts.items():
        if not count:
            continue  # traced inside another function's compilation
        known = notes.get("causes", {}).get(function, [])[-count:]
        out.append(Compiled(function, count, seconds[function], (*known, *[OTHER] * (count - len(known)))))
    return sorted(out, key=lambda c: -c.seconds)
