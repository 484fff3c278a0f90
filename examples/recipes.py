"""What recipes share: seeds trained together, greedy evaluation against a bar set beforehand, learning curves as files.

Notice that a recipe is a value: how an agent begins, one update of it, and the policy that is evaluated. All seeds are one
program, by `jax.vmap` of its parts; the loop, its bar, its checkpoints and its evaluation are `rlfx.training`'s.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from networks import one_each

import rlfx.envs
from rlfx.training import Callback, Checkpoints, Evaluate, Interrupt, NaNGuard, Progress, run


@dataclass(frozen=True)
class Recipe:
    """An algorithm on a task.

    Attributes:
      name: of the file that its learning curve goes to.
      env: the environment that the policy is evaluated in; or the name of the task, where ``score`` is given.
      init: ``init(key) -> agent``.
      update: ``update(agent, key) -> (agent, metrics)``.
      policy: the greedy one, ``policy(agent, obs, key) -> action``, or with memory as `rlfx.envs.evaluate` takes it.
      memory: what a recurrent policy begins an episode with.
      score: ``score(agent, key, episodes)``, where the mean return of greedy episodes is not what the bar is set for.
      updates: how many, in all.
      per_call: how many a call of the compiled program makes.
      every: evaluate after as many.
      steps: environment steps of an update.
      bar: the mean return of 100 greedy episodes that is to be reached.
    """

    name: str
    env: Any
    init: Callable
    update: Callable
    policy: Callable
    updates: int
    per_call: int
    every: int
    steps: int
    bar: float
    memory: Any = None
    score: Callable | None = None

    @property
    def task(self) -> str:
        return self.env if isinstance(self.env, str) else self.env.name

    def evaluate(self, agent, key, episodes):
        """How good an agent is: what is compared to the bar."""
        if self.score is not None:
            return self.score(agent, key, episodes)
        return rlfx.envs.evaluate(self.env, self.policy, agent, key, episodes, memory=self.memory).mean_return


@dataclass(frozen=True)
class Curve:
    """Mean returns of greedy episodes, by environment steps: ``returns[i][seed]``."""

    steps: list[int]
    returns: list[list[float]]
    seconds: float
    cpu_seconds: float

    def reached(self, bar: float) -> list[int | None]:
        """The steps after which each seed was above the bar for the first time."""
        above = np.array(self.returns) >= bar
        return [self.steps[int(column.argmax())] if column.any() else None for column in above.T]


def interquartile_mean(x):
    """The mean of the middle half (Agarwal et al. 2021)."""
    x = np.sort(np.asarray(x, float))
    weights = np.clip(np.minimum(np.arange(1, len(x) + 1) - len(x) / 4, 1), 0, 1)
    weights = np.minimum(weights, weights[::-1])
    return float((weights * x).sum() / weights.sum())


def learn(recipe: Recipe, seeds=(0, 1, 2), episodes=100, callbacks: tuple[Callback, ...] = ()) -> tuple[Any, Curve]:
    """``(agents, curve)``: the agents of all seeds, each leaf with a leading axis, and what they learned."""
    keys = jax.vmap(lambda seed: jax.random.split(jax.random.key(seed)))(jnp.array(seeds))
    agents = one_each(jax.jit(recipe.init), keys[:, 0])

    rows = []
    evaluation = Evaluate(
        jax.vmap(lambda agent, key: recipe.evaluate(agent, key, episodes)),
        recipe.every,
        lambda update, returns: rows.append((update, *returns["value"])),
    )
    begin = time.perf_counter(), time.process_time()
    result = run(
        jax.vmap(recipe.update), agents, keys[:, 1], updates=recipe.updates, per_call=recipe.per_call,
        callbacks=[evaluation, *callbacks],
    )  # fmt: skip
    spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
    steps, returns = [row[0] * recipe.steps for row in rows], [[round(float(x), 3) for x in row[1:]] for row in rows]
    return result.agent, Curve(steps, returns, *(round(s, 1) for s in spent))


def main(make: Callable[..., Recipe] | dict[str, Callable[..., Recipe]], argv=None) -> int:
    """The command line of a recipe: train all seeds, print where they stand, write the curve; 0 if the bar is reached.

    Of a family, ``{name: make}``, the first argument chooses the member; without it, it is the first.
    """
    argv, member = list(sys.argv[1:] if argv is None else argv), ""
    if isinstance(make, dict):
        parser = argparse.ArgumentParser(description="one of a family of recipes", add_help=False)
        parser.add_argument("member", choices=make)
        named = bool(argv) and not argv[0].startswith("-")
        chosen, argv = parser.parse_known_args(argv if named else [next(iter(make)), *argv])
        member, make = f"{chosen.member} ", make[chosen.member]
    recipe = make()
    parser = argparse.ArgumentParser(description=f"{recipe.name}: the bar is {recipe.bar:g}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=recipe.updates)
    parser.add_argument("--checkpoints", type=Path, help="save here, and go on from what is there")
    parser.add_argument("--results", type=Path, help="write the learning curve to this directory")
    args = parser.parse_args(argv)
    recipe = make(updates=args.updates)
    saving = [Checkpoints(args.checkpoints, every=recipe.every)] if args.checkpoints else []
    _, curve = learn(recipe, args.seeds, callbacks=(Progress(recipe.name), NaNGuard(), Interrupt(), *saving))
    if not curve.returns:
        print("no update was left to make")
        return 0

    last = curve.returns[-1]
    for seed, now, steps in zip(args.seeds, last, curve.reached(recipe.bar), strict=True):
        print(f"seed {seed}: {now:.4g} at the end; {recipe.bar:g} " + (f"after {steps:,}" if steps else "not reached"))
    print(f"interquartile mean {interquartile_mean(last):.4g}, from {min(last):.4g} to {max(last):.4g}")
    if args.results:
        seeds = "" if args.seeds == [0, 1, 2] else f"--seeds {' '.join(map(str, args.seeds))} "
        arguments = f"{member}{seeds}--updates {args.updates} --results {args.results}"
        about = {
            "recipe": recipe.name, "env": recipe.task, "bar": recipe.bar, "episodes": 100, "seeds": args.seeds,
            "command": f"python examples/{Path(sys.argv[0]).name} {arguments}",
            "device": f"{jax.devices()[0].platform} x {jax.device_count()}", "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        args.results.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**about, **asdict(curve)}, indent=None)
        (args.results / f"learning_{recipe.name}.json").write_text(text.replace('"steps"', '\n"steps"') + "\n")
    return 0 if min(last) >= recipe.bar else 1
