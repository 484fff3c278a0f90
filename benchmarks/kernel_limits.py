"""Up to which widths acting is one kernel: registers, shared memory and spills, on GPUs that are not here.

    python benchmarks/kernel_limits.py [--targets h200 a100] [--networks ...] [--limit 600] [--json FILE]

Policies of 2 to 4 layers and GRU cells of several widths act for 128 timesteps in 1,024 environments, with
`transform=fuse_steps`. `rlfx.target(...).compile` gives what ptxas says of the kernel. Nothing is run. A policy that is not
compiled within `--limit` seconds has a row that says so. With `--json`, rows that the file has are not made again.
"""

import argparse
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import targets

import rlfx
from rlfx.errors import TargetError

LENGTH, BATCH, OBS, ACTIONS = 128, 1024, 8, 4
WIDTHS, LAYERS = (64, 128, 256, 512), (2, 3, 4)
S = jax.ShapeDtypeStruct
KERNEL = functools.partial(rlfx.fuse_steps, backend="triton")  # by itself rlfx makes none that is slower than the loop


def moved(state, action, key):
    """An environment of eight numbers: cheap, with numbers of its own."""
    x = 0.9 * state + 0.1 * jax.random.uniform(key, (OBS,)) + 0.05 * (action.astype(jnp.float32) - 1.5)
    return jnp.where(jnp.abs(x).max() > 2.0, 0.0, x)


def of_layers(params, state, t):
    x = state
    for w, b in params["hidden"]:
        x = jnp.tanh(x @ w + b)
    return chosen(params["out"], x, state, t)


def of_a_cell(params, carry, t):
    state, h = carry
    (rx, zx, nx), (rh, zh, nh) = (jnp.split(v, 3) for v in (state @ params["wx"] + params["bx"], h @ params["wh"]))
    z = jax.nn.sigmoid(zx + zh)
    h = (1 - z) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + z * h
    state, seen = chosen(params["out"], h, state, t)
    return (state, h), seen


def chosen(out, hidden, state, t):
    log_probs = jax.nn.log_softmax(hidden @ out)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    return moved(state, action, t.key_for("env")), (action, log_probs[action])


def f(*shape):
    return S(shape, jnp.float32)


def layers(count, width):
    sizes = [OBS, *[width] * count]
    hidden = [(f(n, m), f(m)) for n, m in zip(sizes, sizes[1:], strict=False)]
    return of_layers, {"hidden": hidden, "out": f(width, ACTIONS)}, f(BATCH, OBS)


def cell(width):
    params = {"wx": f(OBS, 3 * width), "bx": f(3 * width), "wh": f(width, 3 * width), "out": f(width, ACTIONS)}
    return of_a_cell, params, (f(BATCH, OBS), f(BATCH, width))


NETWORKS = {
    **{f"{count} layers of {width}": functools.partial(layers, count, width) for width in WIDTHS for count in LAYERS},
    **{f"GRU of {width}": functools.partial(cell, width) for width in (32, *WIDTHS)},
}


def compiled(name, machine, limit):
    """A row: of the kernel what ptxas says of it, or why there is none."""
    act, params, carry = NETWORKS[name]()
    target = rlfx.target(machine)
    rollout = rlfx.unroll(act, length=LENGTH, batch=BATCH, transform=KERNEL, target=target)
    row = {"network": name, "target": machine}
    try:
        found = target.compile(rollout, params, carry, targets.KEY, limit=limit)
    except TargetError as error:
        first = str(error).splitlines()[0]
        late = re.search(r"was not done after", first)
        return {**row, "refused": f"not compiled in {limit:.0f} s" if late else first}
    kernels = [k for k in found.kernels if k.name.startswith("rlfx_")]
    if not kernels:
        return {**row, "launches": found.launches, "refused": "a loop"}
    (kernel,) = kernels
    return {
        **row, "launches": found.launches, "registers": kernel.registers, "shared_bytes": kernel.shared_bytes,
        "spill_bytes": kernel.spill_bytes, "threads": kernel.threads, "blocks": kernel.blocks,
        "compile_s": round(found.seconds, 1), "versions": dict(found.versions),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h200", "a100"])
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=[*NETWORKS])
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    done = {(row["network"], row["target"]) for row in rows}
    for name in args.networks:
        for machine in args.targets:
            if (name, machine) in done:
                continue
            rows.append(compiled(name, machine, args.limit))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "versions"}), flush=True)
            if args.json:
                targets.write(args.json, rows)


if __name__ == "__main__":
    main()
