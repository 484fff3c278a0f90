"""What fits machines that are not here: by the plans that rlfx chooses, and by the number of the machine's own compiler.

    python benchmarks/fits.py --part grid [--json FILE]       # TimeRL's grid with 16,384 environments on a T4 (16 GB)
    python benchmarks/fits.py --part budgets [--json FILE]    # 20 programs, three budgets each, on an H200
    python benchmarks/fits.py --part images [--json FILE]     # 3x256x256, T 1,000, B 256, on an H200 and an A100

Nothing is run. With `--json`, rows that the file has are not made again: an interrupted run goes on. `grid`: PPO by hand with the
full batch beside rlfx's default plan, both compiled; a program that needs more than the machine has is refused by its compiler,
which says how much. `budgets`: of the bytes at once 1/2, 1/4 and 1/8; how many
plans were compiled to find one. `images` (TimeRL section 8.3): every value of an image at every timestep, as float32 or as
uint8, at once, replayed, by default, and offloaded (jaxlib 0.11.1 or later computes that right on GPUs).
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import memory_images
import ppo_grid
import ppo_timerl
import targets

import rlfx
from rlfx.errors import MemoryBudgetError, RlfxError, TargetError
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.plan.room import free_bytes

S, KEY = jax.ShapeDtypeStruct, targets.KEY


# -- TimeRL's grid on a small GPU

WIDE = 16384


def points():
    """Those of the grid, with ``WIDE`` environments: the three of the factor B are one."""
    grid = [ppo_grid.CENTRE | {f: v} for f, values in ppo_grid.FACTORS.items() for v in values]
    return list({tuple((point | {"B": WIDE}).items()): point | {"B": WIDE} for point in grid}.values())


def bytes_there(target, fn, arguments):
    """Temporary bytes, what else a call holds, and whether all of it fits."""
    try:
        found = target.compile(fn, *arguments)
    except TargetError as error:
        if error.needed is None:
            raise
        return {"temp_bytes": error.needed, "fits": False}
    held = found.argument_bytes + found.output_bytes - found.alias_bytes
    return {
        "temp_bytes": found.temp_bytes, "held_bytes": held, "launches": found.launches_if(1),
        "fits": found.temp_bytes + held <= free_bytes(target),
    }  # fmt: skip


def grid():
    for point in points():
        for form in ("by hand", "rlfx"):
            yield {**point, "target": "t4", "form": form}, functools.partial(at_point, point, form)


def at_point(point, form):
    target, batch = rlfx.target("t4"), point["B"]
    ppo_timerl.LENGTH = point["T"]
    params = jax.eval_shape(lambda key: ppo_grid.init(key, point["units"], point["layers"]), KEY)
    init = lambda key: jax.vmap(ppo_timerl.env_reset)(jax.random.split(key, batch))  # noqa: E731
    arguments = params, jax.eval_shape(init, KEY), KEY
    if form == "by hand":
        return bytes_there(target, ppo_timerl.hand_written(batch), arguments)
    loss_fn = rlfx.compile(ppo_timerl.ppo, length=point["T"], batch=batch, target=target)
    plan = {"plan": str(loss_fn.explain(*arguments).plan)}
    return {**plan, **bytes_there(target, ppo_timerl.compiled_by_rlfx(batch), arguments)}


# -- twenty programs, three budgets each

LENGTH, BATCH, UNITS = 128, 512, 64


def linear(w, x):
    return w["body"] @ x


def layer(w, x):
    return jnp.tanh(w["body"] @ x)


def layers(w, x):
    return jnp.tanh(w["more"] @ jax.nn.relu(w["body"] @ x))


def gated(w, x):
    return jnp.tanh(w["body"] @ x) * jax.nn.sigmoid(w["more"] @ x)


def residual(w, x):
    return x + w["more"] @ jax.nn.gelu(w["body"] @ x)


NETWORKS = {f.__name__: f for f in (linear, layer, layers, gated, residual)}
RETURNS = {
    "to the end": lambda reward, value, t: rlfx.discounted_sum(reward[t:], 0.99),
    "8 steps": lambda reward, value, t: rlfx.discounted_sum(reward[t : t + 8], 0.9),
    "advantage": lambda reward, value, t: rlfx.solve(
        lambda a, d=reward[t] + 0.99 * value[t + 1] - value[t]: d + 0.9 * a[t + 1], end=0.0
    ),
    "one step": lambda reward, value, t: reward[t] + 0.99 * value[t + 1] - value[t],
}


def actor(network, returns):
    """An actor-critic whose actor and critic share a network of each observation."""

    def program(w, x, t):
        hidden = network(w, x)
        log_probs, value = jax.nn.log_softmax(w["pi"] @ hidden), w["v"] @ hidden
        action = jax.random.categorical(t.key_for("action"), log_probs)
        noise = jax.random.normal(t.key_for("env"), x.shape)
        following = jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * noise + 0.01 * action)
        reward, old = rlfx.series(following[0]), rlfx.series(jax.lax.stop_gradient(value), end=0.0)
        gain = jax.lax.stop_gradient(returns(reward, old, t))
        return (value - gain) ** 2 - log_probs[action] * gain, following

    return program


def gradient(program, target, **options):
    loss_fn = rlfx.compile(program, length=LENGTH, batch=BATCH, target=target, **options)
    return loss_fn, lambda w, x, key: jax.value_and_grad(lambda w: loss_fn(w, x, key), has_aux=True)(w)


def budgets():
    target = rlfx.target("h200")
    f = lambda *shape: S(shape, jnp.float32)  # noqa: E731
    square = f(UNITS, UNITS)
    arguments = {"body": square, "more": square, "pi": f(8, UNITS), "v": f(UNITS)}, f(BATCH, UNITS), KEY
    for network, body in NETWORKS.items():
        for returns, gain in RETURNS.items():
            for part in (2, 4, 8):
                what = {"program": f"{network}, {returns}", "target": "h200", "part": part}
                yield what, functools.partial(within_part, actor(body, gain), target, part, arguments)


def within_part(program, target, part, arguments):
    """The plan for a part of the bytes at once."""
    whole = target.compile(gradient(program, target, plan=rlfx.Plan())[1], *arguments).temp_bytes
    return {"at_once_bytes": whole, **within(program, target, whole // part, arguments)}


def within(program, target, budget, arguments):
    """The plan for a budget: its bytes by the machine's compiler, and how many plans were compiled to find it."""
    asked, plain = [], PlanEvaluator.measured
    PlanEvaluator.measured = lambda self, plan: asked.append(plan) or plain(self, plan)
    try:
        loss_fn, fn = gradient(program, target, memory_budget=budget)
        found = loss_fn.explain(*arguments)
        refused = None
    except MemoryBudgetError as error:
        found, refused = None, str(error).splitlines()[0]
    finally:
        PlanEvaluator.measured = plain
    compiled = {"budget": budget, "compiled_plans": len(dict.fromkeys(asked))}
    if found is None:
        return {**compiled, "refused": refused}
    whole = target.compile(fn, *arguments)  # what the user differentiates: not what the planner has compiled
    return {**compiled, "plan": str(found.plan), "temp_bytes": whole.temp_bytes, "launches": whole.launches_if(1)}


# -- images

SIZE, STEPS, ENVIRONMENTS = 256, 1000, 256


def as_floats(params, obs, t):
    return memory_images.ppo(params, obs, t)


def as_bytes(params, pixels, t):
    """The same, of an environment whose images are bytes: what is kept is kept as bytes."""
    loss, following = memory_images.ppo(params, pixels.astype(jnp.float32) / 255, t)
    return loss, jnp.round(255 * jnp.clip(following, 0.0, 1.0)).astype(jnp.uint8)


IMAGES = {
    "float32, at once": (as_floats, jnp.float32, {"plan": rlfx.Plan()}),
    "float32, default": (as_floats, jnp.float32, {}),
    "float32, replay": (as_floats, jnp.float32, {"plan": rlfx.Plan("replay", 10)}),
    "float32, offload": (as_floats, jnp.float32, {"plan": rlfx.Plan("blocks", 10, offload=1 << 30)}),
    "uint8, blocks": (as_bytes, jnp.uint8, {"plan": rlfx.Plan("blocks", 10)}),
    "uint8, default": (as_bytes, jnp.uint8, {}),
    "uint8, offload": (as_bytes, jnp.uint8, {"plan": rlfx.Plan("blocks", 10, offload=1 << 30)}),
}


def images():
    params = jax.eval_shape(lambda key: memory_images.parameters(key, SIZE), KEY)
    for machine in ("h200", "a100"):
        target = rlfx.target(machine)
        for name in IMAGES:
            what = {"program": name, "target": machine}
            yield what, functools.partial(image, name, target, params)


def image(name, target, params):
    program, dtype, options = IMAGES[name]
    arguments = params, S((ENVIRONMENTS, 3, SIZE, SIZE), dtype), KEY
    free = {"free_bytes": free_bytes(target)}
    try:
        loss_fn = rlfx.compile(program, length=STEPS, batch=ENVIRONMENTS, target=target, **options)
        plan = str(loss_fn.explain(*arguments).plan)
        found = target.compile(jax.value_and_grad(loss_fn, has_aux=True), *arguments)
    except RlfxError as error:
        needed = getattr(error, "needed", None)
        return {**free, "temp_bytes": needed, "refused": str(error).splitlines()[0][:200]}
    return {
        **free, "plan": plan, "temp_bytes": found.temp_bytes, "host_bytes": found.host_temp_bytes,
        "launches": found.launches_if(1), "host_transfers": [vars(x) for x in found.host_transfers],
        "versions": dict(found.versions),
    }  # fmt: skip


PARTS = {"grid": grid, "budgets": budgets, "images": images}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS], required=True)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    for what, make in PARTS[args.part]():
        if any(row.items() >= what.items() for row in rows):
            continue
        rows.append({**what, **make()})
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            targets.write(args.json, rows)


if __name__ == "__main__":
    main()
