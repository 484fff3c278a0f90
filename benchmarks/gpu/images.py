"""PPO on images by the plans that its memory may ask for: what is offloaded comes back the same, and what it costs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.gpu.measures import EXACT, distance, median_ms
from rlfx.errors import RlfxError

SIZE, LENGTH, BATCH = 128, 64, 128
PLANS = {
    "at once": rlfx.Plan(),
    "blocks": rlfx.Plan("blocks", 8),
    "offload": rlfx.Plan("blocks", 8, offload=1 << 20),
    "replay": rlfx.Plan("replay", 8),
}


@functools.cache
def _made(tiny: bool) -> tuple[Any, tuple]:
    import memory_images

    size, batch = (16, 4) if tiny else (SIZE, BATCH)
    pixels = jnp.zeros((batch, 3, size, size))
    return memory_images.ppo, (memory_images.parameters(jax.random.key(0), size), pixels, jax.random.key(1))


@functools.cache
def _expected(tiny: bool) -> Any:
    return _under(tiny, PLANS["at once"])[1]


def _under(tiny: bool, plan: rlfx.Plan) -> tuple[Any, Any]:
    program, arguments = _made(tiny)
    loss_fn = rlfx.compile(program, length=8 if tiny else LENGTH, batch=len(arguments[1]), plan=plan)
    with jax.default_matmul_precision("highest"):
        run = jax.jit(jax.value_and_grad(lambda *a: loss_fn(*a)[0])).lower(*arguments).compile()
    return run, jax.device_get(run(*arguments))


def images(tiny: bool, name: str) -> tuple[dict, list[str]]:
    """Loss and gradients under a plan against those at once; milliseconds, bytes of the device and of the host."""
    row: dict[str, Any] = {"plan": name}
    try:
        run, result = _under(tiny, PLANS[name])
    except RlfxError as error:
        return {**row, "refused": str(error).splitlines()[0]}, [] if name == "offload" else [f"{name}: {error}"]
    stats = run.memory_analysis()
    row |= {"MB": stats.temp_size_in_bytes / 1e6, "host MB": stats.host_temp_size_in_bytes / 1e6}
    row["ms"] = median_ms(run, _made(tiny)[1], 3)
    row["difference"] = distance(result, _expected(tiny))
    return row, [f"{name}: {row['difference']:.1e}"] if row["difference"] > EXACT else []
