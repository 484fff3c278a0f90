"""What learners compile to on machines that are not here: temporary bytes against the static estimate and against "at once".

    python benchmarks/targets.py [--targets h100 a100 v5e] [--programs ...] [--json FILE]

Each program under three plans: at once, the default of the target, and the one that a budget of 1/8 of the bytes at once gives.
Temporary bytes are by the machine's own compiler (`rlfx.target(...).compile`), estimated are those of the static estimate, which
was written for XLA:CPU. Launches count loops as often as they run. Then whole updates, and TimeRL's PPO by hand. Nothing is run.

The plugins are installed by `make aot-cuda` and `make aot-tpu`.
"""

import argparse
import datetime
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import ppo_timerl

import rlfx
from rlfx.errors import RlfxError

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import attention
import ppo_cartpole
import recurrent_ppo

KEY = jax.eval_shape(lambda: jax.random.key(0))
BUDGET = 8


def states(env, batch):
    return jax.eval_shape(lambda key: jax.vmap(env.reset)(jax.random.split(key, batch)), KEY)


def timerl():
    """TimeRL's workload: one epoch of PPO, T = 250, B = 512, two layers of 64."""
    params, state = jax.eval_shape(
        lambda key: (ppo_timerl.init(key, 64), jax.vmap(ppo_timerl.env_reset)(jax.random.split(key, 512))), KEY
    )
    return ppo_timerl.ppo, ppo_timerl.LENGTH, 512, (params, state, KEY)


def sequences(length, batch):
    """Shapes of what the recurrent learner learns from."""
    x = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((length, batch, *shape), dtype)  # noqa: E731
    return recurrent_ppo.Sample(x(2), x(dtype=bool), x(dtype=jnp.int32), x(), x(), x())


def recurrent():
    """The learner of examples/recurrent_ppo.py: a GRU of 128 units, whole sequences, T = 256, B = 512."""
    length, batch, hidden = 256, 512, 128
    samples = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sequences(length, batch))

    def learn(params, h, t):  # what was acted is data, and not differentiated
        return recurrent_ppo.learn((params, samples), h, t)

    params = jax.eval_shape(lambda key: recurrent_ppo.init_params(key, hidden), KEY)
    return learn, length, batch, (params, jax.ShapeDtypeStruct((batch, hidden), jnp.float32))


def attending():
    """examples/attention.py: REINFORCE that attends to the episode's past, T = 512, B = 128."""
    params = jax.eval_shape(attention.init_params, KEY)
    return attention.reinforce, 512, 128, (params, states(attention.env, 128), KEY)


PROGRAMS = {"PPO, one epoch": timerl, "recurrent PPO's learner": recurrent, "attention": attending}


def update(envs, **options):
    """The whole update of examples/ppo_cartpole.py, 4 epochs of 4 minibatches."""
    optimizer = ppo_cartpole.make_optimizer(100)
    rollout = rlfx.unroll(ppo_cartpole.act, length=ppo_cartpole.LENGTH, batch=envs, **options)
    agent = jax.eval_shape(lambda key: ppo_cartpole.init_agent(key, optimizer, envs), KEY)
    return ppo_cartpole.make_update(rollout, optimizer), (agent, KEY)


def by_hand():
    _, _, batch, arguments = timerl()
    return ppo_timerl.hand_written(batch), arguments


WHOLE = {
    "PPO, one epoch, by hand": by_hand,
    "PPO 4x4, 64 environments": lambda: update(64),
    "PPO 4x4, 1024 environments": lambda: update(1024),
    "PPO 4x4, 4096 environments": lambda: update(4096),
}


def write(path, rows):
    """Rows as JSON, with when and by what they were made."""
    about = {"date": str(datetime.date.today()), "jax": jax.__version__, "run": "nothing: compiled ahead of time"}
    about["command"] = f"python benchmarks/{pathlib.Path(sys.argv[0]).name}"
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def launched(row):
    """Launches of a row; with a plus where a loop's length is not known."""
    return f"{row['launches_at_least']:,}" + ("" if row["launches"] is not None else " +")


def figures(found):
    kernels = found.kernels
    return {
        "temp_bytes": found.temp_bytes,
        "peak_bytes": found.peak_bytes,
        "launches": found.launches,
        "launches_at_least": found.launches_if(1),
        "loops": [described(loop) for loop in found.loops],
        "host_transfers": len(found.host_transfers),
        "kernels": len(kernels),
        "registers": max((k.registers for k in kernels), default=None),
        "shared_bytes": max((k.shared_bytes for k in kernels), default=None),
        "spill_bytes": found.spill_bytes if kernels else None,
        "compile_s": round(found.seconds, 2),
        "versions": dict(found.versions),
    }


def described(loop):
    return {"trips": loop.trips, "kernels": loop.kernels, "loops": [described(inner) for inner in loop.loops]}


def plans(name, target):
    """Rows of one program under three plans."""
    f, length, batch, arguments = PROGRAMS[name]()
    budget = None
    for form, options in (("at once", {"plan": rlfx.Plan()}), ("default", {}), (f"budget 1/{BUDGET}", {})):
        start = time.perf_counter()
        row = {"program": name, "target": target, "plan": form, "T": length, "B": batch}
        if form.startswith("budget"):
            if not budget:  # all of it stays in a TPU's vector memory
                return
            options = {"memory_budget": budget}
        fn = rlfx.compile(f, length=length, batch=batch, target=target, **options)
        try:
            shown = fn.explain(*arguments, measure=True)
        except RlfxError as error:
            yield {**row, "refused": str(error).splitlines()[0], "budget": budget}
            continue
        budget = budget or shown.measured_bytes // BUDGET
        row |= {"chosen": str(shown.plan), "estimated_bytes": shown.predicted_bytes, "temp_bytes": shown.measured_bytes}
        row |= {"fits": False} if shown.compilation is None else figures(shown.compilation)
        if form.startswith("budget"):
            row["budget"] = budget
        yield {**row, "seconds": round(time.perf_counter() - start, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["h100", "a100", "v5e"])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS, *WHOLE])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = []

    def keep(row):
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("loops", "versions", "chosen")}), flush=True)
        if args.json:
            write(args.json, rows)

    for target in args.targets:
        for name in args.programs:
            if name in PROGRAMS:
                for row in plans(name, target):
                    keep(row)
            else:
                fn, arguments = WHOLE[name]()
                found = rlfx.target(target).compile(fn, *arguments)
                keep({"program": name, "target": target, **figures(found)})


if __name__ == "__main__":
    main()
