"""A kernel beside XLA's form where it first runs: compared once, timed once, and the answer kept in a file.

No kernel of rlfx is known to be right on a device that nobody has tried. So before one is used there by default, both forms
take a few steps of a few environments: the kernel is used if it gives the same, sooner.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.ahead.kept import digest

#: Steps and environments that are compared, at most and (environments) at least.
STEPS, LEAST, MOST = 16, 64, 4096

#: Floats agree to this part of themselves and of their leaf's mean size: products have ten bits by default on a GPU.
TOLERANCE = 5e-3

#: One environment of so many may differ: rounding decides which action is drawn, and what follows from it.
FEW = 16

_TIMES = 3


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel is used.

    Attributes:
      kernel: it is, rather than XLA's form.
      why: in words.
      seconds: of the kernel and of XLA's form; None where they were not timed.
      wrong: the kernel differs, or failed: something to warn of.
    """

    kernel: bool
    why: str
    seconds: tuple[float, float] | None = None
    wrong: bool = False


def verdict(kernel: Callable, plain: Callable, arguments: tuple, device: str, folder: Path) -> Verdict:
    """The kept answer for these two programs, this kind of device and these versions; else what :func:`judge` finds.

    Args:
      kernel, plain: both forms, functions of ``arguments`` to ``(carry, ys)`` with leaves ``[N, ...]`` and ``[K, N, ...]``.
      arguments: arrays, known now.
      device: its kind.
      folder: of the files.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     verdict(lambda x: (x + 1, None), lambda x: (x, None), (jax.numpy.ones(32),), "a device", Path(folder)).why
      'it gives other numbers in 32 of 32 environments'
    """
    made_by = [device, *(_version(name) for name in ("jax", "jaxlib", "rlfx"))]
    texts = [_text(plain, arguments)]
    try:
        texts.append(_text(kernel, arguments))
    except Exception as error:  # whatever its compiler trips over
        return _failed(error)
    path = folder / f"{digest(json.dumps(made_by), *texts)}.json"
    found = _read(path)
    if found is None:
        found = judge(kernel, plain, arguments)
        if (found.seconds is not None or found.wrong) and "RESOURCE_EXHAUSTED" not in found.why:
            _write(path, found)
    return found


def judge(kernel: Callable, plain: Callable, arguments: tuple) -> Verdict:
    """Run both: does the kernel give the same, and sooner?"""
    try:
        expected, its = _timed(plain, arguments)
    except jax.errors.JaxRuntimeError as error:
        return Verdict(False, f"XLA's form failed: {_line(error)}")
    try:
        given, own = _timed(kernel, arguments)
    except Exception as error:  # whatever its compiler trips over
        return _failed(error)
    bad = differing(expected, given)
    seconds = (own, its)
    if bad.sum() > len(bad) // FEW:
        return Verdict(False, f"it gives other numbers in {bad.sum()} of {len(bad)} environments", seconds, wrong=True)
    quick = f"{own * 1e6:.0f} microseconds, XLA's form {its * 1e6:.0f}"
    return Verdict(own < its, quick, seconds)


def made_up(structs: Any, lead: tuple[int, ...], seed: int = 0) -> Any:
    """Arrays ``[*lead, ...]`` of these types: small normal numbers (weights by their rows), 0 and 1, keys."""
    draw = np.random.default_rng(seed)

    def one(x: Any) -> Any:
        shape = (*lead, *x.shape)
        if J.is_key(x):
            words = jax.eval_shape(jax.random.key_data, x).shape
            words = draw.integers(0, 2**32, (*lead, *words), np.uint32)
            return J.keys_of(jnp.asarray(words), x.dtype)
        if jnp.issubdtype(x.dtype, np.floating):
            rows = 1 if lead or len(x.shape) < 2 else x.shape[-2]
            return (draw.normal(size=shape) / np.sqrt(max(rows, 1))).astype(x.dtype)
        return draw.integers(0, 2, shape).astype(x.dtype)

    return jax.tree.map(one, structs)


def outside(fn: Callable[[], Any]) -> Any:
    """``fn()`` outside of every trace around, with jax's options as they are here: in a thread of its own."""
    done: list[Any] = []
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision

    def run() -> None:
        try:
            with jax.enable_x64(x64), jax.default_matmul_precision(precision):
                done.append((fn(), None))
        except BaseException as error:  # raised again in the thread that asked
            done.append((None, error))

    thread = threading.Thread(target=run, name="rlfx: a kernel beside XLA's form")
    thread.start()
    thread.join()
    ((value, error),) = done
    if error is not None:
        raise error
    return value


def differing(expected: Any, given: Any) -> np.ndarray:
    """Which environments differ, bool [N]: in integers and keys at all, in floats by more than :data:`TOLERANCE`."""
    bad: Any = False
    for axis, (wanted, got) in enumerate(zip(expected, given, strict=True)):
        for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
            x, y = (np.asarray(jax.random.key_data(v) if J.is_key(v) else v) for v in (x, y))
            rows = np.moveaxis(_unlike(x, y), axis, 0)
            bad = bad | rows.reshape(len(rows), -1).any(1)
    return np.asarray(bad)


def warn(what: str, found: Verdict) -> None:
    """Say that a kernel is not used because something is wrong with it."""
    text = f"{what}: the kernel is not used on this device: {found.why}. XLA's form runs instead."
    warnings.warn(f'{text}\n  Fix: none is needed; backend="vmap" says so without the comparison.', stacklevel=3)


def _unlike(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(x.dtype, np.floating):
        return x != y
    x, y = x.astype(np.float64), y.astype(np.float64)
    size = np.abs(np.where(np.isfinite(x), x, 0))
    with np.errstate(invalid="ignore"):
        near = np.abs(x - y) <= TOLERANCE * (size + size.mean() + 1e-6)
    return ~(near & np.isfinite(x) | (x == y) | (np.isnan(x) & np.isnan(y)))


def _timed(fn: Callable, arguments: tuple) -> tuple[Any, float]:
    """What it gives, and the median of its seconds."""
    run = jax.jit(fn)
    given = jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - start)
    return given, statistics.median(seconds)


def _version(name: str) -> str:
    """Of a package; rlfx may run from a folder that nobody installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _failed(error: Exception) -> Verdict:
    return Verdict(False, f"it does not run: {_line(error)}", wrong=True)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}, {(str(error).splitlines() or [''])[0][:200]}"


def _text(fn: Callable, arguments: tuple) -> str:
    return jax.jit(fn).lower(*arguments).as_text()


def _read(path: Path) -> Verdict | None:
    try:
        fields = json.loads(path.read_text())
        seconds = fields["seconds"] and (float(fields["seconds"][0]), float(fields["seconds"][1]))
        return Verdict(bool(fields["kernel"]), str(fields["why"]), seconds, bool(fields["wrong"]))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _write(path: Path, found: Verdict) -> None:
    """Whole or not at all; where nothing can be written, nothing is kept."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(found), file)
        os.replace(name, path)
