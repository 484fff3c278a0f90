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

from rlfx._jaxpr import partial_eval

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
CACHE_HIT = "/jax/compilation_cache/cache_hits"
EXPLAINS = partial_eval.__name__  # the logger that answers `jax_explain_cache_misses`
FIRST_SEEN = "first call in this process"
REDEFINED = "a new function object, defined again on the same line"
OTHER = "not explained by jax: a function of a library, or new placement, sharding, donation or compiler options"


@dataclass
class CompileLog:
    """Filled while `watching()`: `stages` as plain dictionaries for JSON, `misses` as the texts of jax."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    misses: list[dict[str, str]] = field(default_factory=list)
    cache_hits: int = 0

    def as_notes(self) -> dict[str, Any]:
        return {"compilations": self.stages, "misses": self.misses, "cache_hits": self.cache_hits}


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
    reasons = [re.sub(r"^at ([^,]+), ", r"argument \1: ", change) for change in changed]
    last = [line.strip() for line in text.strip().splitlines()][-1]
    return (known[1] if known else "?"), "; ".join(reasons) or last


class _Listens(logging.Filter):
    """Keep jax's explanations; let them through to the user's own log only if the user had asked for them."""

    def __init__(self, log: CompileLog, show: bool):
        super().__init__()
        self.log, self.show = log, show

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "TRACING CACHE MISS" not in text:
            return True
        function, cause = cause_of(text)
        where = re.match(r"TRACING CACHE MISS at (.*):$", text.splitlines()[0])
        self.log.misses.append({"function": function, "cause": cause, "where": where[1] if where else ""})
        return self.show


@contextlib.contextmanager
def watching(log: CompileLog) -> Iterator[None]:
    """Record every compilation in the process, with jax's own explanation of why."""
    main = threading.get_ident()

    def duration(event: str, seconds: float, **tags: Any) -> None:
        stage = STAGES.get(event)
        if stage:
            entry = {"stage": stage, "function": bare(str(tags.get("fun_name", "?"))), "seconds": seconds}
            log.stages.append({**entry, "end_ns": time.time_ns(), "main": threading.get_ident() == main})

    def happened(event: str, **tags: Any) -> None:
        log.cache_hits += event == CACHE_HIT

    asked = bool(jax.config.jax_explain_cache_misses)
    listens = _Listens(log, asked)
    logger = logging.getLogger(EXPLAINS)
    jax.monitoring.register_event_duration_secs_listener(duration)
    jax.monitoring.register_event_listener(happened)
    logger.addFilter(listens)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        yield
    finally:
        jax.config.update("jax_explain_cache_misses", asked)
        logger.removeFilter(listens)
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
      >>> summarize({"compilations": [{"stage": "compile", "function": "f", "seconds": 0.5}], "misses": []})
      [Compiled(function='f', count=1, seconds=0.5, causes=('not explained by jax: ... compiler options',))]
    """
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for c in notes.get("compilations", []):
        counts[c["function"]] = counts.get(c["function"], 0) + (c["stage"] == "compile")
        seconds[c["function"]] = seconds.get(c["function"], 0.0) + c["seconds"]
    causes: dict[str, list[str]] = {}
    for miss in notes.get("misses", []):
        causes.setdefault(miss["function"], []).append(miss["cause"])
    out = []
    for function, count in counts.items():
        if not count:
            continue  # traced inside another function's compilation
        known = (
            causes.get(function, [])[-count:] if count <= len(causes.get(function, [])) else causes.get(function, [])
        )
        out.append(Compiled(function, count, seconds[function], (*known, *[OTHER] * (count - len(known)))))
    return sorted(out, key=lambda c: -c.seconds)
