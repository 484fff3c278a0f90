"""The table of docs/training.md: what the recipes learn."""

from __future__ import annotations

import sys

from benchmarks.tables_markdown import RESULTS, ROOT, markdown, read

sys.path.append(str(ROOT / "examples"))

import recipes  # the examples are scripts that stand beside each other

#: The example and what is said of the task beyond the environment's name, by recipe, in the order of the page.
RECIPES = {
    "ppo_continuous": ("ppo_continuous.py pendulum", ""), "sac": ("sac.py pendulum", ""), "dqn": ("dqn_family.py dqn", ""),
    "double_dqn": ("dqn_family.py double", ""), "dueling_dqn": ("dqn_family.py dueling", ""),
    "prioritised_dqn": ("dqn_family.py prioritised", ""), "n_step_dqn": ("dqn_family.py n_step", ""),
    "distributional_dqn": ("dqn_family.py distributional", ""), "pqn": ("pqn.py cartpole", ""),
    "recurrent_ppo": ("recurrent_ppo.py", ", velocities hidden"), "td3": ("td3.py td3", ""), "ddpg": ("td3.py ddpg", ""),
    "grpo": ("grpo.py", " six digits"), "reinforce": ("reinforce.py monte_carlo", ""), "a2c": ("a2c.py", ""),
    "impala": ("vtrace.py", ""), "ppo_cartpole": ("ppo.py cartpole", ""), "ppo_acrobot": ("ppo.py acrobot", ""),
    "ppo_mountain_car": ("ppo.py mountain_car", ""), "sac_mountain_car": ("sac.py mountain_car", ""),
    "ppo_breakout": ("ppo.py breakout", ""), "pqn_breakout": ("pqn.py breakout", ""),
    "ppo_masked": ("ppo.py masked", ", actions masked"),
    "ppo_inverted_pendulum": ("ppo_continuous.py inverted_pendulum", ", springs"),
    "sac_inverted_pendulum": ("sac.py inverted_pendulum", ""),
    "sac_inverted_pendulum_spring": ("sac.py inverted_pendulum_spring", ", springs"),
    "ppo_reacher": ("ppo_continuous.py reacher", ", 50 steps an episode"),
    "sac_reacher": ("sac.py reacher", ", 50 steps an episode"),
    "search": ("search.py", ", against a perfect opponent"), "apg": ("apg.py", ", through the dynamics"),
    "es": ("es.py", ""), "her": ("her.py her", ", ten bits"), "r2d2": ("r2d2.py", ", a corridor of eight"),
    "learned_discount": ("learned_discount.py", ""), "awr": ("awr.py", ", offline from SAC's log"),
    "decision_transformer": ("decision_transformer.py told", ", offline from SAC's log"),
    "cloning_best": ("decision_transformer.py cloning_best", ", offline, cloning of the best tenth"),
    "ippo": ("multi_agent.py independent", ""), "mappo": ("multi_agent.py central", ""),
}  # fmt: skip
#: What the horizontal axis counts, and what the bar is of, by recipe: environment steps and returns where nothing is said.
UNITS = {"grpo": ("tokens", " of the digits"), "awr": ("minibatches", "")}
UNITS |= dict.fromkeys(("decision_transformer", "cloning_best"), ("minibatches", ""))


def learning() -> str:
    recorded = {path.stem.removeprefix("learning_") for path in RESULTS.glob("learning_*.json")}
    if recorded != set(RECIPES):
        raise ValueError(f"RECIPES and the files learning_*.json differ: {sorted(recorded ^ set(RECIPES))}")
    body = []
    for name, (example, more) in RECIPES.items():
        r = read(f"learning_{name}")
        unit, of = UNITS.get(name, ("steps", ""))
        last = r["returns"][-1]
        digits = 1 if r["bar"] > 1 or r["bar"] < 0 else 2
        least, mean, most = (round(v, digits) for v in (min(last), recipes.interquartile_mean(last), max(last)))
        first = recipes.Curve(r["steps"], r["returns"], r["seconds"], 0.0).reached(r["bar"])
        body.append(
            [
                f"`{example}`",
                r["env"] + more,
                f"{r['bar']:g}{of}",
                f"{r['steps'][-1]:,}" + (f" {unit}" if unit != "steps" else ""),
                f"{mean} ({least} to {most})",
                "never" if None in first else f"{max(first):,} {unit}",
            ]
        )
    title = "interquartile mean at the end (range)"
    return markdown(["recipe", "task", "bar", "steps", title, "bar first reached by all after"], body)


TABLES = {"learning": learning}
