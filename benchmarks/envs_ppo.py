"""PPO training with and without fused rollouts: environment steps a second, end to end and of the rollout alone.

    python benchmarks/envs_ppo.py [--envs 64 256 1024 4096] [--hidden 64 64] [--rounds 5] [--out FILE.json]

The program of ``examples/ppo_cartpole.py`` (T = 128, two 64x64 networks). Two learners: its own, 4 epochs of 4
minibatches, and one pass over the rollout (1 epoch, 1 minibatch), where the rollout weighs more. ``plain`` is
``rlfx.unroll``, ``fused`` the same with ``transform=fuse_steps``; keys are threefry or the fast generator; ``gymnax`` is
the plain program on gymnax's environment. Seconds are process CPU time on one core, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys

import jax
from envs_throughput import HERE, earlier, report, seconds  # sets XLA's flags before jax starts

import rlfx
import rlfx.envs
from rlfx.transforms.fuse_steps import fuse_steps

EXAMPLES = HERE.parent / "examples"
KEYS = {"threefry": "threefry2x32", "fast": rlfx.envs.fast_prng}
VARIANTS = [
    ("gymnax, plain, threefry", "gymnax/{}", None, "threefry"),
    ("plain, fast", "{}", None, "fast"),
    ("fused, fast", "{}", fuse_steps, "fast"),
]
LEARNERS = {"4 epochs of 4 minibatches": (4, 4), "1 epoch of 1 minibatch": (1, 1)}


def example():
    """The example as a module of its own, so that its settings can be changed."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("ppo_example", EXAMPLES / "ppo_cartpole.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def candidate(env, transform, impl, envs, learner, hidden):
    """``(rollout, update)``: functions without arguments that block until they are done."""
    ppo = example()
    ppo.env = rlfx.envs.make(env)
    ppo.EPOCHS, ppo.MINIBATCHES = learner
    init = ppo.init_actor_critic
    ppo.init_actor_critic = lambda key, sizes: init(key, (sizes[0], *hidden, sizes[-1]))
    optimizer = ppo.make_optimizer(1000)
    agent = params, _, carry = ppo.init_agent(jax.random.key(0, impl=KEYS[impl]), optimizer, envs)
    program = rlfx.unroll(ppo.act, length=ppo.LENGTH, batch=envs, transform=transform)
    rollout, update = jax.jit(program), jax.jit(ppo.make_update(program, optimizer))
    key = jax.random.key(1, impl=KEYS[impl])
    return (
        lambda: jax.block_until_ready(rollout(params, carry, key)),
        lambda: jax.block_until_ready(update(agent, key)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 64], help="hidden layers of actor and critic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "envs_ppo.json")
    parser.add_argument("--append", action="store_true", help="keep the file's rows of other sizes and networks")
    args = parser.parse_args()
    rows = {(tuple(r["hidden"]), r["envs"], r["learner"]): r for r in earlier(args.out, args.append)}
    for envs in args.envs:
        for learner, sizes in LEARNERS.items():
            made = {
                name: candidate(env.format(args.env), transform, impl, envs, sizes, args.hidden)
                for name, env, transform, impl in VARIANTS
            }
            steps = envs * 128
            rates = {}
            for part, which in (("rollout", 0), ("training", 1)):
                if part == "rollout" and learner != next(iter(LEARNERS)):
                    continue
                timed = seconds({name: pair[which] for name, pair in made.items()}, args.rounds)
                rates[part] = {name: steps / s for name, s in timed.items()}
                base = rates[part]["gymnax, plain, threefry"]
                print(
                    f"envs={envs:5} {learner:26} {part:9}"
                    + "  ".join(
                        f"{name} {rate / base:.2f}x ({rate / 1e6:.3f}M/s)" for name, rate in rates[part].items()
                    ),
                    flush=True,
                )
            row = {"envs": envs, "learner": learner, "T": 128, "env": args.env, "hidden": args.hidden, "steps/s": rates}
            rows[tuple(args.hidden), envs, learner] = row
            ordered = sorted(rows.values(), key=lambda r: (r["hidden"][::-1], r["envs"]))
            args.out.write_text(json.dumps(report(ordered), indent=1) + "\n")


if __name__ == "__main__":
    main()
