"""Measure what profiling costs on this machine: RL-Scope's appendix C, with both kinds of calibration.

*Delta*: run a loop with and without a kind of book-keeping; the difference over its number of events is the cost of
one (annotations, instructions of XLA). *Difference of averages*: where book-keeping cannot be switched on alone,
compare the average duration of a call with and without profiling (jitted calls, waits, transfers, callbacks,
compilations).
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.profile.annotate import operation
from rlfx.profile.capture import capture, machine
from rlfx.profile.overhead import Overhead
from rlfx.profile.rules import BACKEND, CALLBACK, COMPILE, TRANSFER, WAIT

ANNOTATION, THUNK = "annotation", "thunk"


def _once(body: Callable[[], object], profiled: bool) -> float:
    """Process CPU seconds of one run, right after another: the end of a capture leaves cold caches behind."""
    body()
    with contextlib.ExitStack() as stack:
        if profiled:
            stack.enter_context(capture(stack.enter_context(tempfile.TemporaryDirectory())))
        begin = time.process_time()
        body()
        return time.process_time() - begin


def _seconds(body: Callable[[], object], rounds: int, profiled: bool) -> float:
    """The cheapest of `rounds` runs: the one that others on the machine disturbed least."""
    return min(_once(body, profiled) for _ in range(rounds))


def _difference(plain: Callable[[], object], profiled: Callable[[], object], count: int, rounds: int) -> float:
    """ns an event: `(time of profiled under capture - time of plain without) / count`, not below zero."""
    return max(0.0, (_seconds(profiled, rounds, True) - _seconds(plain, rounds, False)) / count * 1e9)


def _annotations(count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            with operation("calibration"):
                pass

    return loop


def _empty(count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            pass

    return loop


def _scan(body: Callable, carry: object, length: int) -> Callable[[], object]:
    program = jax.jit(lambda c: jax.lax.scan(body, c, None, length=length))
    return lambda: jax.block_until_ready(program(carry))


def _keys(count: int) -> Callable[[], object]:
    """Very many short instructions: random numbers, `count` times."""

    def body(key, _):
        key, noise = jax.random.split(key)
        return key, jax.random.normal(noise, (16,)).sum()

    return _scan(body, jax.random.key(0), count)


def _layers(count: int) -> Callable[[], object]:
    """Small layers, forwards and backwards, `count` times."""
    ws = [jnp.zeros((16, 16))] * 3

    def body(x, _):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x + jax.grad(lambda a: jnp.tanh(a @ ws[0]).sum())(x), x.sum(axis=0)

    return _scan(body, jnp.zeros((16, 16)), count)


def _calls(function: Callable[[object], object], argument: object, count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            jax.block_until_ready(function(argument))

    return loop


def _compilations(count: int) -> Callable[[], None]:
    def loop() -> None:
        for i in range(count):
            jax.block_until_ready(jax.jit(lambda a: jnp.sin(a) + i)(jnp.zeros(3)))

    return loop


def calibrate(rounds: int = 7) -> Overhead:
    """Measure what one event of each kind costs on this machine, in process CPU time; about 20 s.

    Args:
      rounds: runs of each loop; the fastest with and the fastest without profiling are compared.

    Returns:
      An `Overhead`; `save()` it for `Report.corrected`.
    """
    x = jnp.zeros(8)
    small = np.zeros(8, np.float32)
    call = jax.jit(lambda a: a + 1)
    back = jax.jit(lambda a: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(a.shape, a.dtype), a))
    costs = {ANNOTATION: _difference(_empty(20_000), _annotations(20_000), 20_000, rounds)}
    # Half of an algorithm's instructions make random numbers, half are layers.
    costs[THUNK] = (_instruction(_keys(1_500), rounds) + _instruction(_layers(2_000), rounds)) / 2
    for kind, body, count in (
        (WAIT, _calls(lambda a: a, x, 3_000), 3_000),
        (BACKEND, _calls(call, x, 3_000), 3_000),
        (TRANSFER, _calls(jax.device_put, small, 3_000), 3_000),
        (CALLBACK, _calls(back, x, 1_000), 1_000),
        (COMPILE, _compilations(8), 8),
    ):
        body()
        known = sum(costs.get(k, 0.0) * n for k, n in _paid(body).items() if k != kind) / count
        costs[kind] = max(0.0, _difference(body, body, count, rounds) - known)
    return Overhead(machine(), costs, datetime.date.today().isoformat())


def fit(overhead: Overhead, workload: Callable[[], object], rounds: int = 9) -> Overhead:
    """Scale a machine's costs to one workload, as the paper calibrates: by the difference of its runs.

    The costs of an event vary with what the processor's caches hold, and with what else the machine does.

    Args:
      overhead: of this machine; the proportions between kinds of events stay.
      workload: runs a few iterations and waits for them; compiled before.
      rounds: runs with and without profiling, in turns; the median difference counts.

    Returns:
      An `Overhead` that explains the difference; the given one if the workload has no events.
    """
    predicted = sum(overhead.costs.get(kind, 0.0) * count for kind, count in _paid(workload).items())
    if not predicted:
        return overhead
    found = [_once(workload, True) - _once(workload, False) for _ in range(rounds)]
    factor = max(0.0, float(np.median(found))) * 1e9 / predicted
    return replace(overhead, costs={kind: factor * ns for kind, ns in overhead.costs.items()})


def _instruction(body: Callable[[], object], rounds: int) -> float:
    body()
    count = _paid(body).get(THUNK, 0)  # none where the device is not the host
    return _difference(body, body, count, rounds) if count else 0.0


def _paid(body: Callable[[], object]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        with capture(folder) as session:
            body()
        (process,) = session.report().processes
    return {kind: len(found) for kind, found in process.timeline.paid.items()}
