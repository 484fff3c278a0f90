"""DQN and SAC against rejax's, at equal hyper-parameters: learning curves over seeds, and steps a second.

    python benchmarks/rejax_peer.py --rejax-python PYTHON [--algorithms dqn sac] [--seeds 10] [--rounds 3] [--out FILE]

PYTHON is that of an environment with rejax: `pip install rejax 'gymnax==0.0.9'` (rejax 0.1.3 steps environments as gymnax
did before 1.0). Each arm is a process of its own: `dqn_family.py double` and `sac.py` with the numbers of `SETTINGS` in place
of their own, and rejax's algorithm as `pip` brings it. All seeds of an arm are one program by `jax.vmap`. Both are evaluated
greedily, 100 episodes, as often. The area under a learning curve is the mean over its evaluations; reported are the
difference of the arms' mean areas relative to rejax's, and its 95% confidence interval (Welch).

Weights of both begin as flax's do (LeCun): with the recipes' own, orthogonal ones the curves differ. What is not equal: rejax
takes a truncated episode for a terminated one. Steps a second: one agent, without evaluation, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

#: Shared by both: `steps` in all environments together, `evaluations` of so many.
SETTINGS = {
    "dqn": {
        "env": "CartPole-v1", "steps": 128_000, "evaluations": 16, "envs": 16, "hidden": 64, "rate": 5e-4, "gamma": 0.99,
        "polyak": 0.01, "batch": 256, "capacity": 80_000, "warmup": 4_000, "epsilon": 0.05, "explored": 32_000,
    },
    "sac": {
        "env": "Pendulum-v1", "steps": 20_000, "evaluations": 10, "envs": 4, "hidden": 64, "rate": 1e-3, "gamma": 0.99,
        "polyak": 0.005, "batch": 256, "capacity": 32_000, "warmup": 800,
    },
}  # fmt: skip


# -- the arms: `arm(settings)` gives `train(keys, evaluated)`, of an array of keys: returns [evaluations, seeds], or None


def of_rejax(algorithm, s):
    import jax
    import jax.numpy as jnp
    import rejax
    from rejax.evaluate import evaluate

    shared = {
        "env": s["env"], "num_envs": s["envs"], "buffer_size": s["capacity"], "fill_buffer": s["warmup"],
        "batch_size": s["batch"], "learning_rate": s["rate"], "gamma": s["gamma"], "polyak": 1 - s["polyak"],
        "total_timesteps": s["steps"], "eval_freq": s["steps"] // s["evaluations"], "skip_initial_evaluation": True,
    }  # fmt: skip
    own = {
        "dqn": {
            "eps_start": 1.0, "eps_end": s.get("epsilon"), "exploration_fraction": s.get("explored", 0) / s["steps"],
            "ddqn": True, "agent_kwargs": {"activation": "tanh"},
        },
        "sac": {"agent_kwargs": {"activation": "tanh"}, "target_entropy_ratio": 1.0},
    }  # fmt: skip
    made = rejax.get_algo(algorithm).create(**shared, **own[algorithm])

    def greedy(algo, ts):
        if algorithm == "dqn":
            return lambda obs, key: algo.agent.apply(ts.q_ts.params, obs[None])[0].argmax()
        return lambda obs, key: mode(algo, ts, obs)

    def mode(algo, ts, obs):
        """The middle of the squashed normal, of which rejax takes samples when it evaluates."""
        middle = jnp.tanh(algo.actor.apply(ts.actor_ts.params, obs[None], method="_action_dist").loc[0])
        actor = algo.actor.bind(ts.actor_ts.params)
        return actor.action_loc + middle * actor.action_scale

    def score(algo, ts, key):
        steps = algo.env_params.max_steps_in_episode
        return evaluate(greedy(algo, ts), key, algo.env, algo.env_params, 100, steps)[1].mean()

    def train(evaluated):
        algo = made.replace(eval_callback=score if evaluated else lambda algo, ts, key: ())
        trained = jax.jit(jax.vmap(algo.train) if evaluated else lambda keys: algo.train(keys[0]))
        return lambda keys: trained(keys)[1].T if evaluated else trained(keys)[0]

    return train


def of_rlfx(algorithm, s):
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from dataclasses import dataclass, replace
    from itertools import pairwise

    import dqn_family
    import jax
    import jax.numpy as jnp
    import optax
    import sac
    from networks import one_each

    from rlfx.training.loop import key_of

    def init_mlp(key, sizes, last_scale=None):
        init, keys = jax.nn.initializers.lecun_normal(), jax.random.split(key, len(sizes) - 1)
        return [(init(k, shape), jnp.zeros(shape[1])) for k, shape in zip(keys, pairwise(sizes), strict=True)]

    @dataclass(frozen=True)
    class Squared(dqn_family.Expectation):
        def loss(self, x, reward, discount, following):
            error = x[0] - (reward + discount * following[0])
            return 0.5 * error**2, error

    for module in (dqn_family, sac):
        module.init_mlp = init_mlp
    optimizer, iterations = optax.adam(s["rate"]), s["steps"] // s["envs"]
    length, size = iterations // s["evaluations"], {"envs": s["envs"], "hidden": (s["hidden"], s["hidden"])}
    if algorithm == "dqn":
        numbers = {
            "optimizer": optimizer, "GAMMA": s["gamma"], "POLYAK": s["polyak"], "SAMPLES": s["batch"], "REWARD_SCALE": 1.0,
            "CAPACITY": s["capacity"] // s["envs"], "WARMUP": s["warmup"] // s["envs"], "EPSILON": s["epsilon"],
            "EXPLORE_UNTIL": s["explored"] // s["envs"],
        }  # fmt: skip
        module, make = dqn_family, dqn_family.make
        arguments = (replace(dqn_family.DOUBLE, estimate=Squared()), "dqn")
    else:
        numbers = {"optimizer": optimizer, "SAMPLES": s["batch"] // s["envs"]}
        task = replace(
            sac.PENDULUM, scale=1.0, capacity=s["capacity"] // s["envs"], explore=s["warmup"] // s["envs"], gamma=s["gamma"],
            critics=sac.Critics(polyak=s["polyak"]),
        )  # fmt: skip
        module, make, arguments = sac, sac.make, (task,)
    for name, value in numbers.items():
        setattr(module, name, value)
    recipe = make(*arguments, length=length, updates=s["evaluations"], **size)

    def one(agent, key):
        def update(agent, i):
            agent, _ = recipe.update(agent, key_of(key, 2 * i))
            return agent, recipe.evaluate(agent, key_of(key, 2 * i + 1), 100)

        return jax.lax.scan(update, agent, jnp.arange(s["evaluations"], dtype=jnp.uint32))[1]

    def alone(agent, key):
        keys = jax.vmap(lambda i: key_of(key, i))(jnp.arange(s["evaluations"], dtype=jnp.uint32))
        return jax.lax.scan(recipe.update, agent, keys)[0]

    def train(evaluated):
        init, trained = jax.jit(recipe.init), jax.jit(jax.vmap(one) if evaluated else alone)

        def run(keys):
            begin = jax.vmap(jax.random.split)(keys)
            if not evaluated:
                return trained(init(begin[0, 0]), begin[0, 1])
            return trained(one_each(init, begin[:, 0]), begin[:, 1]).T

        return run

    return train


ARMS = {"rlfx": of_rlfx, "rejax": of_rejax}


def child(arm, algorithm, seeds, rounds, what):
    import jax
    import numpy as np

    settings = SETTINGS[algorithm]
    made = ARMS[arm](algorithm, settings)
    keys = jax.vmap(jax.random.key)(np.arange(1000, 1000 + seeds) + (10_000 if arm == "rejax" else 0))
    result = {"versions": {"jax": jax.__version__}}
    if what == "curves":
        result["returns"] = np.round(np.asarray(made(True)(keys)), 2).tolist()
    else:
        train = made(False)
        began = time.perf_counter()
        jax.block_until_ready(train(keys[:1]))
        result["first"], result["seconds"] = time.perf_counter() - began, []
        for i in range(rounds):
            began = time.perf_counter()
            jax.block_until_ready(train(keys[i % seeds : i % seeds + 1]))
            result["seconds"].append(time.perf_counter() - began)
    if arm == "rejax":
        import importlib.metadata

        result["versions"] |= {name: importlib.metadata.version(name) for name in ("rejax", "gymnax")}
    print(json.dumps(result))


def compared(curves):
    import numpy as np
    from welch import relative

    areas = {arm: np.asarray(returns).mean(0) for arm, returns in curves.items()}
    return {
        "areas": {a: np.round(x, 1).tolist() for a, x in areas.items()},
        **relative(areas["rlfx"], areas["rejax"]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rejax-python", help="of an environment with rejax")
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=("curves", "seconds"), default=["curves", "seconds"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rejax_peer.json"), help="added to")
    parser.add_argument("--child", nargs=3, help="what the script starts: an arm, an algorithm and a part")
    args = parser.parse_args()
    if args.child:
        arm, algorithm, what = args.child
        child(arm, algorithm, args.seeds, args.rounds, what)
        return

    pythons, versions = {"rlfx": sys.executable, "rejax": args.rejax_python}, {}

    def ran(arm, algorithm, what, rounds):
        command = [
            pythons[arm],
            __file__,
            "--seeds",
            str(args.seeds),
            "--rounds",
            str(rounds),
            "--child",
            arm,
            algorithm,
            what,
        ]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(out.splitlines()[-1])
        versions.update(found["versions"])
        return found

    results = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    for algorithm in args.algorithms:
        found = results.setdefault(algorithm, {"settings": SETTINGS[algorithm], "seeds": args.seeds})
        if "curves" in args.parts:
            curves = {arm: ran(arm, algorithm, "curves", 0)["returns"] for arm in ARMS}
            found |= {"returns": curves, **compared(curves)}
        if "seconds" in args.parts:
            times = {arm: ran(arm, algorithm, "seconds", args.rounds) for arm in ARMS}
            found["first"] = {arm: t["first"] for arm, t in times.items()}
            found["seconds"] = {arm: t["seconds"] for arm, t in times.items()}
            found["steps a second"] = {
                arm: SETTINGS[algorithm]["steps"] / statistics.median(t["seconds"]) for arm, t in times.items()
            }
        results[algorithm] = found
        print(algorithm, {k: v for k, v in found.items() if k not in ("returns", "settings")}, flush=True)

    import recorded  # imports jax, which the arms do for themselves

    command = f"python benchmarks/rejax_peer.py --rejax-python PYTHON --seeds {args.seeds} --rounds {args.rounds}"
    about = recorded.about("rejax_peer", **versions) | {"command": command}
    recorded.write(args.out, about | {"results": results})


if __name__ == "__main__":
    main()
