"""Functions of numbers, windows and small matrices on one core: as programs of rlfx have them (`recurrence/cpu/`), and jax's own.

    python -m benchmarks.elements [--rounds 15] [--json FILE]

Both in one process, in turns: the value, and the value with its gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import recorded
from rlfx.recurrence.cpu.contractions import FAST
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.ir.interpret import rewritten

KEY = jax.random.key(0)


def windows(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def turned(x):
    return jnp.arctan2(x, 1.0 + x * x)


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


def at(x, place):
    return jnp.take_along_axis(x, place[..., None], -1)


#: What is computed, of numbers of these shapes.
CASES: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "cos": (jnp.cos, [(65536,)]),
    "tan": (jnp.tan, [(65536,)]),
    "arctan2": (turned, [(65536,)]),
    "softplus": (jax.nn.softplus, [(65536,)]),
    "mish": (mish, [(65536,)]),
    "erf_inv": (lambda x: lax.erf_inv(jnp.tanh(x)), [(65536,), (8192, 8), (10922, 6), (9362, 7), (32, 3, 24, 5, 2)]),
    "argmax": (lambda x: at(x, jnp.argmax(2.0 * x, -1)), [(2048, 32), (512, 128), (64, 1024)]),
    "categorical": (lambda x: at(x, jax.random.categorical(KEY, x)), [(2048, 32), (256, 256)]),
    "sort": (lambda x: jnp.sort(x, -1) * jnp.arange(float(x.shape[-1])), [(4096, 5), (4096, 25), (1024, 125), (512, 256)]),
    "top 8": (lambda x: lax.top_k(x, 8)[0], [(4096, 64), (2048, 256), (512, 1024), (128, 4096)]),
    "cumsum": (lambda x: jnp.cumsum(x, -1), [(4096, 8), (1024, 51)]),
    "cummax": (lambda x: jax.lax.cummax(x, x.ndim - 1), [(4096, 8), (1024, 51)]),
    "cumlogsumexp": (lambda x: jax.lax.cumlogsumexp(x, x.ndim - 1), [(4096, 8), (1024, 51)]),
    "argsort": (lambda x: at(x, jnp.argsort(x, -1)[..., 1]), [(4096, 25)]),
    "matrix products": (lambda x: x @ (2.0 * x), [(128, 2, 2), (512, 6, 6), (512, 8, 8), (512, 16, 16)]),
    "attention": (lambda x: jnp.einsum("bqhd,bkhd->bhqk", x, 2.0 * x), [(512, 10, 4, 8), (128, 16, 2, 16)]),
    "maxima of 3 x 3": (windows, [(20, 32, 32, 16), (160, 16, 16, 32), (160, 42, 42, 16)]),
}


def measured(run: Callable, x: jax.Array) -> float:
    began = time.process_time()
    jax.block_until_ready(run(x))
    return time.process_time() - began


def compared(ours: Callable, theirs: Callable, x: jax.Array, rounds: int) -> list[float]:
    """The median ratio of times, and both in ms; several calls a round where one is short."""
    both = [jax.jit(fn).lower(x).compile() for fn in (ours, theirs)]
    for run in both:
        jax.block_until_ready(run(x))
    calls = max(1, min(200, int(5e-3 / max(measured(run, x) for run in both))))
    pairs = [[sum(measured(run, x) for _ in range(calls)) / calls for run in both] for _ in range(rounds)]
    ms = (round(1e3 * statistics.median(times), 4) for times in zip(*pairs, strict=True))
    return [round(statistics.median(a / b for a, b in pairs), 3), *ms]


def with_gradient(fn: Callable, x: jax.Array) -> tuple:
    return jax.value_and_grad(lambda x: fn(x).sum())(x)


def row(name: str, shape: tuple[int, ...], rounds: int) -> dict:
    fn, _ = CASES[name]
    fast, x = rewritten(fn, ELEMENTS), jax.random.normal(KEY, shape)
    value = compared(rewritten(fast, FAST), fn, x, rounds)
    gradient = compared(rewritten(partial(with_gradient, fast), FAST), partial(with_gradient, fn), x, rounds)
    print(f"{name:18} {shape!s:22} value {value[0]:5.2f} of {value[2]:8.3f} ms, with gradient {gradient[0]:5.2f} "
          f"of {gradient[2]:8.3f} ms", flush=True)  # fmt: skip
    return {"of": name, "shape": list(shape), "value": value, "gradient": gradient}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row(name, shape, args.rounds) for name, (_, shapes) in CASES.items() for shape in shapes]
    if args.json:
        recorded.write(args.json, recorded.about("elements") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
