"""Launches of rlfx's programs beside programs written by hand, on machines that are not here.

    python benchmarks/launches.py [--targets h200 a100 t4 v5e] [--programs ...] [--forms ...] [--json FILE]
    python benchmarks/launches.py --table benchmarks/results/launches.json       # the table of docs/targets.md

Counted in the HLO that the machine's own compiler makes (`rlfx.target(...).compile`): kernels of one call, loops as often as
they run. If a loop's length is decided by data it counts once, and the row says so; of a conditional the dearest branch counts,
and their number is given. Whole updates donate the agent, as a training loop does: else each of its arrays is copied once. On a
TPU, which starts a program once, operations are counted. Nothing is run, so this is no measure of time. "one kernel" is rlfx
with `transform=fuse_steps`, on GPUs that have Triton. The programs by hand are in `by_hand.py` and `ppo_timerl.py`. Sums: value
and gradient, B = 1,024. With `--json`, rows of the file that are not asked for stay.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import types

import by_hand
import jax
import jax.numpy as jnp
import ppo_cartpole
import ppo_timerl
import targets

import rlfx
from rlfx.transforms.fuse_steps import fuse_steps

S = jax.ShapeDtypeStruct
KERNEL = "one kernel"
FORMS = ("rlfx", KERNEL, "by hand")
GAMMA, LAM, BATCH = 0.99, 0.95, 1024


def pair(here, there, arguments):
    return {"rlfx": (here, arguments), "by hand": (there, arguments)}


# -- sums over time


def discounted(data, carry, t):
    reward, discount = map(rlfx.inputs, data)
    return rlfx.discounted_sum(reward[t:], discount[t:]) ** 2, carry


def advantages(data, carry, t):
    (reward, value, following), (terminated, truncated) = rlfx.inputs(data)[t]
    step = types.SimpleNamespace(reward=reward, terminated=terminated, truncated=truncated)
    return rlfx.gae(step, value, following, gamma=GAMMA, lam=LAM) ** 2, carry


def targets_of_vtrace(data, carry, t):
    (reward, value, following, log_rho), (terminated, truncated) = rlfx.inputs(data)[t]
    step = types.SimpleNamespace(reward=reward, terminated=terminated, truncated=truncated)
    return rlfx.vtrace(step, value, following, log_rho, gamma=GAMMA, lam=LAM)[0] ** 2, carry


def gae_by_hand(data):
    (reward, value, following), ended = data
    return by_hand.gae(reward, *ended, value, following, gamma=GAMMA, lam=LAM)


def vtrace_by_hand(data):
    (reward, value, following, log_rho), ended = data
    return by_hand.vtrace(reward, *ended, value, following, log_rho, gamma=GAMMA, lam=LAM)


SUMS = {
    "discounted sums": (discounted, lambda data: by_hand.discounted_sum(*data), 2, False),
    "GAE": (advantages, gae_by_hand, 3, True),
    "V-trace": (targets_of_vtrace, vtrace_by_hand, 4, True),
}


def sums(name, length, batch=BATCH):
    """Value and gradient with respect to all that is no boolean."""
    program, written, values, ends = SUMS[name]
    x = (S((length, batch), jnp.float32),) * values
    ended = (S((length, batch), bool),) * 2
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    data = lambda x, ended: (x, ended) if ends else x  # noqa: E731
    here = jax.value_and_grad(lambda x, ended: loss_fn(data(x, ended), None)[0])
    there = jax.value_and_grad(lambda x, ended: jnp.mean(written(data(x, ended)) ** 2))
    return pair(here, there, (x, ended))


# -- learners


def one_epoch():
    _, _, batch, arguments = targets.timerl()
    fused = ppo_timerl.compiled_by_rlfx(batch, transform=fuse_steps)
    here = pair(ppo_timerl.compiled_by_rlfx(batch), ppo_timerl.hand_written(batch), arguments)
    return {**here, KERNEL: (fused, arguments)}


def full(envs):
    donated = functools.partial(jax.jit, donate_argnums=0)
    update, arguments = targets.update(envs)
    fused, _ = targets.update(envs, transform=fuse_steps)
    here = pair(donated(update), donated(by_hand.ppo_update(ppo_cartpole.make_optimizer(100), envs)), arguments)
    return {**here, KERNEL: (donated(fused), arguments)}


def recurrent():
    _, length, batch, (params, h) = targets.recurrent()
    samples = targets.sequences(length, batch)
    loss_fn = rlfx.compile(targets.recurrent_ppo.learn, length=length, batch=batch)
    here = jax.value_and_grad(lambda params, samples, h: loss_fn((params, samples), h)[0])
    return pair(here, jax.value_and_grad(by_hand.recurrent_loss), (params, samples, h))


PROGRAMS = {
    "PPO, one epoch (T 250, B 512)": one_epoch,
    **{f"{name}, T {length:,}": functools.partial(sums, name, length) for name in SUMS for length in (250, 2000)},
    **{f"PPO 4x4, {envs:,} environments": functools.partial(full, envs) for envs in (64, 1024, 4096)},
    "recurrent PPO's learner (T 256, B 512)": recurrent,
}


# -- counting


def figures(found):
    """Of a compilation: launches, and which loops they are in."""
    return {
        "launches": found.launches,
        "launches_at_least": found.launches_if(1),
        "conditionals": found.conditionals,
        "loops": [targets.described(loop) for loop in found.loops],
        "temp_bytes": found.temp_bytes,
        "acting": [dataclasses.asdict(kernel) for kernel in found.kernels if kernel.name.startswith("rlfx_")],
        "versions": dict(found.versions),
    }


def shown(row):
    """Launches; with a plus where a loop's length is not known, and the number of conditionals."""
    return targets.launched(row) + (f" ({row['conditionals']} cond.)" if row["conditionals"] else "")


def table(rows):
    """Markdown: a row for each program, a column for each machine and form."""
    machines = list(dict.fromkeys(row["target"] for row in rows))
    found = {(row["program"], row["form"], row["target"]): row for row in rows}
    forms = [form for form in FORMS if any(row["form"] == form for row in rows)]
    lines = ["| program | " + " | ".join(f"{m}: {' | '.join(forms)}" for m in machines) + " |"]
    lines.append("| --- |" + " --- |" * len(machines) * len(forms))
    for name in dict.fromkeys(row["program"] for row in rows):
        cells = [shown(found[name, form, m]) if (name, form, m) in found else "" for m in machines for form in forms]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def place(row):
    """Where a row is in the file."""
    machines = ("h200", "a100", "t4", "v5e")
    return machines.index(row["target"]), [*PROGRAMS].index(row["program"]), FORMS.index(row["form"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["h200", "a100", "t4", "v5e"])
    parser.add_argument("--programs", nargs="+", default=[*PROGRAMS], choices=[*PROGRAMS])
    parser.add_argument("--forms", nargs="+", default=[*FORMS], choices=[*FORMS])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, help="print the table of these results, and compile nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())["rows"]))
        return
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    for name in args.programs:
        for target in args.targets:
            for form, (fn, arguments) in PROGRAMS[name]().items():
                if form not in args.forms or (form == KERNEL and not rlfx.target(target).has_triton):
                    continue
                found = rlfx.target(target).compile(fn, *arguments, limit=1800)
                what = {"program": name, "form": form, "target": target}
                rows = [row for row in rows if not row.items() >= what.items()] + [{**what, **figures(found)}]
                print(f"{target:5} {name:40} {form:8} {shown(rows[-1])}", flush=True)
                if args.json:
                    targets.write(args.json, sorted(rows, key=place))
    print(table(rows))


if __name__ == "__main__":
    main()
