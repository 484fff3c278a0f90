"""The static estimate of temporary bytes against XLA's count, on every example, benchmark program and generated program.

    python benchmarks/memory_estimate.py [--generated 160] [--held-out 100] [--out FILE.json]

Programs: the training loop of each example; TimeRL's workload by hand, in chunks and by rlfx; gradients of the losses of
memory_losses.py, whole and in 8 blocks; and programs of tests/strategies.py (with T = 40 and B = 256, so that they need
memory), as value_and_grad, until `--generated` of them need 64 KiB or more; the estimate was written with these in view
(the last 60 were held out from an earlier version), the `--held-out` next ones were not looked at. Prints
estimate / exact, and how long the estimate took (process CPU time).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import io
import json
import pathlib
import platform
import sys
import time
from unittest import mock

import jax
import memory_losses
import ppo_timerl

import rlfx
from rlfx.recurrence.memory.estimate import estimate_temp_bytes
from rlfx.recurrence.plan.evaluator import QUICKLY

ROOT = pathlib.Path(__file__).parents[1]
SMALL = 64 * 1024


class Captured(BaseException):
    """The first jitted call of a script: its function and arguments."""


def first_call(run):
    """The function and arguments of the first jitted call of ``run()``, which is not executed, on one device."""

    class Call:
        def __init__(self, fn):
            self.fn = fn

        def __call__(self, *args, **kwargs):
            raise Captured(lambda *a: self.fn(*a, **kwargs), args)

        lower = __call__

    jit, jax.jit = jax.jit, lambda fn, **_: Call(fn)
    try:
        one_device = mock.patch.object(rlfx, "use_all_cores", return_value=None)
        with contextlib.redirect_stdout(io.StringIO()), one_device:
            run()
    except Captured as found:
        return found.args
    finally:
        jax.jit = jit
    raise RuntimeError("the script jits nothing")


def one_update(recipe):
    """Of an agent whose first values are known by their shapes alone."""
    key = jax.random.key(0)
    return jax.jit(recipe.update)(jax.eval_shape(recipe.init, key), key)


def examples():
    """Every example that trains: its first jitted call."""
    sys.path.append(str(ROOT / "examples"))
    module = importlib.import_module
    scripts = {
        "a2c": lambda: module("a2c").train(),
        "attention": lambda: module("attention").train(),
        "dqn": lambda: module("dqn").train(),
        "frame_stacking": lambda: module("frame_stacking").train(),
        "gru_bptt, carry": lambda: module("gru_bptt").train(module("gru_bptt").recall_carry),
        "gru_bptt, solve": lambda: module("gru_bptt").train(module("gru_bptt").recall_solve),
        "gru_bptt, truncated": lambda: module("gru_bptt").train(module("gru_bptt").truncated(4)),
        "iteration_level": lambda: module("iteration_level").main([]),
        "policies": lambda: module("policies").train("plain"),
        "ppo_cartpole": lambda: module("ppo_cartpole").main([]),
        "ppo_one_epoch": lambda: module("a2c").train(module("ppo_one_epoch").ppo, length=128, updates=10),
        "recurrent_ppo": lambda: one_update(module("recurrent_ppo").make()),
        "reinforce": lambda: module("reinforce").train(None),
        "reinforce, n = 25": lambda: module("reinforce").train(25),
        "sarsa_lambda": lambda: module("sarsa_lambda").train(),
        "vtrace": lambda: module("vtrace").train(),
    }
    for name, run in scripts.items():
        yield f"examples/{name}", lambda run=run: first_call(run)


def workloads():
    for batch, hidden in ((64, 64), (512, 64), (512, 256)):
        params = ppo_timerl.init(jax.random.key(0), hidden)
        state = jax.vmap(ppo_timerl.env_reset)(jax.random.split(jax.random.key(1), batch))
        ways = {
            "hand": ppo_timerl.hand_written,
            "hand-chunked": lambda b: ppo_timerl.hand_written(b, 10),
            "rlfx": ppo_timerl.compiled_by_rlfx,
        }
        for way, make in ways.items():
            args = (params, state, jax.random.key(2))
            yield f"ppo_timerl, B={batch}, H={hidden}, {way}", lambda make=make, b=batch, args=args: (make(b), args)


def losses():
    for name, make in memory_losses.MODELS.items():
        for blocks in (1, 8):

            def program(make=make, blocks=blocks):
                loss, params, batch = make()
                fn = jax.value_and_grad(loss) if blocks == 1 else memory_losses.by_rlfx(loss, blocks)
                return fn, (params, batch)

            yield f"memory_losses, {name}, {blocks} block(s)", program


def generated():
    """Random programs of the test-suite, large enough to need memory."""
    sys.path.append(str(ROOT / "tests"))
    strategies = importlib.import_module("strategies")
    seed = 0
    while True:
        program = dataclasses.replace(strategies.program(seed), length=40, batch=256)
        yield f"generated, seed {seed}", lambda program=program: gradient_of(program)
        seed += 1


def gradient_of(program):
    params, carry, key = program.arguments()
    loss_fn = rlfx.compile(program.function, **program.options())

    def run(params, carry, key):
        return jax.value_and_grad(lambda p: loss_fn(p, carry, key), has_aux=True, allow_int=True)(params)

    return run, (params, carry, key)


def measure(name, make):
    fn, args = make()
    jaxpr = jax.make_jaxpr(fn)(*args)
    begin = time.process_time()
    estimated = estimate_temp_bytes(jaxpr)
    seconds = time.process_time() - begin
    # Buffers are assigned before machine code is generated: how well that is done does not matter here.
    exact = jax.jit(fn).lower(*args).compile(QUICKLY["cpu"]).memory_analysis().temp_size_in_bytes
    return {"name": name, "exact": exact, "estimated": estimated, "seconds": seconds}


def near(row):
    return 0.8 <= row["estimated"] / max(1, row["exact"]) <= 1.2


def show(row):
    mark = "" if near(row) else "   <- off"
    ratio = row["estimated"] / max(1, row["exact"])
    print(f"{ratio:6.2f}  {row['exact']:>12,} bytes  {row['seconds']:.3f} s  {row['name']}{mark}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=160)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--out")
    args = parser.parse_args()
    written = [measure(*program) for program in (*losses(), *workloads(), *examples())]
    for row in written:
        show(row)
    random, small, failed = [], 0, []
    for name, make in generated():
        if len(random) >= args.generated + args.held_out:
            break
        try:
            row = measure(name, make)
        except (rlfx.errors.RlfxError, TypeError) as error:  # a program that is not legal with these T and B
            failed.append(f"{name}: {type(error).__name__}")
            continue
        if row["exact"] < SMALL:
            small += 1
        else:
            random.append(row)
            show(row)
    random, unseen = random[: args.generated], random[args.generated :]
    print(f"{sum(map(near, written))} of {len(written)} programs within a fifth")
    print(f"{sum(map(near, random))} of {len(random)} generated ones ({small} below 64 KiB, {len(failed)} not legal)")
    print(f"{sum(map(near, unseen))} of {len(unseen)} generated ones that were held out")
    print(f"at most {max(r['seconds'] for r in written + random + unseen):.3f} s")
    if args.out:
        record = {
            "benchmark": "memory_estimate",
            "date": datetime.date.today().isoformat(),
            "device": f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})",
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "results": {
                "programs": written,
                "generated": random,
                "held out": unseen,
                "small": small,
                "not legal": failed,
            },
        }
        with open(args.out, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
