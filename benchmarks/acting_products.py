"""Acting with few environments: rlfx against the usual hand-written scan. Ratios first.

    python benchmarks/acting_products.py [--batch 0 1 4 16 64 256] [--rounds 40] [--out FILE.json]

`actor-critic` are two tanh MLPs of 2 x 64 that see one observation, `gru` is a flax GRUCell of 64 units between two layers: what
an RL agent computes at every timestep, with an environment that costs next to nothing. `hand` is a `lax.scan` over t of a
vmapped step (of the step itself without a batch). rlfx makes one product of those that have one operand. Both run the same
function, their results are compared before anything is timed, on one core, interleaved; medians.
"""

from __future__ import annotations

import argparse
import json
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import recorded
from attention_blocks import measure

import rlfx

LENGTH, OBS, UNITS = 200, 4, 64


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        logits, value = (self.mlp(x, out, name) for out, name in ((2, "actor"), (1, "critic")))
        return logits, value[..., 0]

    def mlp(self, x, out, name):
        for i in range(2):
            x = nn.tanh(nn.Dense(UNITS, name=f"{name}_{i}")(x))
        return nn.Dense(out, name=f"{name}_out")(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, h, x):
        h, _ = nn.GRUCell(UNITS)(h, nn.relu(nn.Dense(UNITS)(x)))
        return h, nn.Dense(2)(h)


def world(x, logits):
    return jnp.tanh(x + jnp.where(logits[0] > logits[1], 0.1, -0.1) + 0.05 * jnp.roll(x, 1))


def actor_critic(lead):
    net, x = ActorCritic(), jnp.full((*lead, OBS), 0.1)

    def step(params, x):
        logits, value = net.apply(params, x)
        return world(x, logits), (x, value)

    return step, net.init(jax.random.key(0), x), x


def gru(lead):
    net, x, h = Recurrent(), jnp.full((*lead, OBS), 0.1), jnp.zeros((*lead, UNITS))

    def step(params, carry):
        x, h = carry
        h, logits = net.apply(params, h, x)
        return (world(x, logits), h), x

    return step, net.init(jax.random.key(0), h, x), (x, h)


def by_hand(step, batch):
    def run(params, carry):
        one = lambda c: step(params, c)  # noqa: E731
        return jax.lax.scan(lambda c, _: (one if batch is None else jax.vmap(one))(c), carry, None, length=LENGTH)

    return run


def by_rlfx(step, batch):
    return rlfx.unroll(lambda params, carry, t: step(params, carry), length=LENGTH, batch=batch)


def compare(make, batch, rounds):
    step, params, carry = make(() if batch is None else (batch,))
    candidates = {"rlfx": by_rlfx(step, batch), "hand": by_hand(step, batch)}
    rows = measure(candidates, (params, carry), rounds, rtol=1e-4, atol=1e-4)
    step_us = {name: 1e3 * row["ms"] / LENGTH for name, row in rows.items()}
    return {
        "program": make.__name__, "B": batch, "ratio": round(step_us["rlfx"] / step_us["hand"], 3),
        "us_a_step": {n: round(t, 2) for n, t in step_us.items()}, "compile_s": {n: r["compile_s"] for n, r in rows.items()},
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[0, 1, 4, 16, 64, 256], help="0: no batch axis")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = []
    for batch in args.batch:
        for make in (actor_critic, gru):
            rows.append(compare(make, batch or None, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        recorded.write(args.out, recorded.about("acting_products") | {"rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
