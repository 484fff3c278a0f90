"""What callbacks and going on cost, as shares of the training they are beside.

    python benchmarks/training_overhead.py [--recipes ppo_cartpole sac] [--rounds 3] [--calls 4] [--out FILE]

Three seeds of a recipe, as its file trains them: `call` is what a call of its program takes without callbacks. `callbacks`:
each is given such calls, with an agent that stands still, so that its processor time is its own, threads that write included:
what there is once a run (to open, to close, to compile), and each time that it acts. Evaluations and checkpoints act where the
recipe evaluates, the others after every call. `resume`: a run that has its checkpoint, and no update left to make.
`together`: so many calls with all callbacks and with none, interleaved: by how much they differ, and what the parts make of it.
Processor time, medians of the rounds. An evaluation's episodes are what a user asks for: here its function is a word of its
key. What a process imports and compiles once, not once a run, is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import recorded

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import ppo
import sac
from networks import one_each

from rlfx.training import CSV, Checkpoints, Evaluate, Interrupt, Metrics, NaNGuard, Progress, Stop, TensorBoard, run
from rlfx.training.loop import Call, Loop, owned

RECIPES = {"ppo_cartpole": ppo.FAMILY["cartpole"], "sac": sac.FAMILY["pendulum"]}
SEEDS = (0, 1, 2)
SELDOM = ("Evaluate", "Checkpoints")


def first_word(agent, key):
    return jax.random.key_data(key)[0]


def callbacks(recipe, folder, every):
    """All there are, by name."""
    return {
        "Progress": Progress(recipe.name),
        "CSV": Metrics(CSV(f"{folder}/metrics.csv")),
        "TensorBoard": Metrics(TensorBoard(f"{folder}/board")),
        "Evaluate": Evaluate(jax.vmap(first_word), every, CSV(f"{folder}/scores.csv")),
        "Stop": Stop(lambda metrics: False),
        "Checkpoints": Checkpoints(f"{folder}/checkpoints", every=every),
        "NaNGuard": NaNGuard(),
        "Interrupt": Interrupt(),
    }


def spent(fn):
    began = time.process_time()
    result = fn()
    return time.process_time() - began, result


def alone(recipe, name, loop, agent, metrics, times):
    """``(once, each)``: the processor seconds of a callback, of calls that are over when it sees them."""

    def drive(count):
        with tempfile.TemporaryDirectory() as folder, quiet():
            callback, begun = callbacks(recipe, folder, recipe.per_call)[name], loop.done
            began = time.process_time()
            with callback.opened(loop) as after:
                for _ in range(count):
                    after(Call(begun, begun + loop.per_call, agent, metrics, False))
                    begun += loop.per_call
            return time.process_time() - began

    drive(2)  # imports, and what a process compiles once
    first, all_of_them = drive(1), drive(1 + times)
    each = (all_of_them - first) / times
    return first - each, each


def measured(recipe, rounds, calls):
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(jnp.array(SEEDS))
    agents, update = one_each(jax.jit(recipe.init), keys[:, 0]), jax.vmap(recipe.update)
    options = {"per_call": recipe.per_call}

    def train(count, *callbacks):
        result = run(update, agents, keys[:, 1], updates=count * recipe.per_call, callbacks=callbacks, **options)
        return jax.block_until_ready(result.agent)

    def with_all():
        with tempfile.TemporaryDirectory() as folder, quiet():
            return train(calls, *callbacks(recipe, folder, recipe.every).values())

    trained, _ = train(1), with_all()
    plain, full = zip(*((spent(lambda: train(calls))[0], spent(with_all)[0]) for _ in range(rounds)), strict=True)
    call, whole = statistics.median(plain) / calls, recipe.updates // recipe.per_call
    acts = lambda name, calls: calls * recipe.per_call // (recipe.every if name in SELDOM else recipe.per_call)  # noqa: E731

    metrics = jax.eval_shape(update, agents, keys[:, 1])[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((recipe.per_call, *x.shape), x.dtype), metrics)
    loop = Loop(update, owned(agents), keys[:, 1], recipe.updates, recipe.per_call)
    found = {}
    for name in callbacks(recipe, "", 1):
        several = [alone(recipe, name, loop, trained, metrics, 8) for _ in range(rounds)]
        once, each = (statistics.median(x) for x in zip(*several, strict=True))
        found[name] = {"once": once, "each": each, "acts": acts(name, whole)}

    with tempfile.TemporaryDirectory() as folder:
        saving = Checkpoints(folder, every=recipe.per_call)
        train(1, saving)
        resume = statistics.median(spent(lambda: train(1, saving))[0] for _ in range(rounds))
    return {
        "bytes": sum(x.nbytes for x in jax.tree.leaves(agents)), "arrays": len(jax.tree.leaves(agents)),
        "calls": whole, "call": call, "callbacks": found, "resume": resume,
        "together": {
            "calls": calls, "none": plain, "all": full, "difference": statistics.median(full) - statistics.median(plain),
            "parts": sum(c["once"] + acts(name, calls) * c["each"] for name, c in found.items()),
        },
    }  # fmt: skip


@contextlib.contextmanager
def quiet():
    """Progress writes to a file, as where a job's errors go."""
    with tempfile.TemporaryFile("w") as file, contextlib.redirect_stderr(file):
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=4, help="of the runs that are compared")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_overhead.json"))
    args = parser.parse_args()
    results = {}
    for name in args.recipes:
        results[name] = measured(RECIPES[name](), args.rounds, args.calls)
        print(name, results[name])
    command = f"python benchmarks/training_overhead.py --rounds {args.rounds} --calls {args.calls}"
    about = recorded.about("training_overhead") | {"command": command, "seeds": len(SEEDS)}
    recorded.write(args.out, about | {"recipes": results})


if __name__ == "__main__":
    main()
