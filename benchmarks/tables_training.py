"""Tables of docs/training.md: what callbacks, and going on, cost; the first trained policy; DQN and SAC beside rejax."""

from __future__ import annotations

from benchmarks.tables_markdown import markdown, number, percent, read

TITLES = {"ppo_cartpole": "PPO on CartPole", "sac": "SAC on Pendulum"}
APART = 10.0  # seconds of training between two checkpoints


def milliseconds(seconds: float) -> str:
    return "< 0.1" if seconds < 1e-4 else number(1000 * seconds)


def share(seconds: float, of: float) -> str:
    return "< 0.1%" if seconds < 0.0005 * of else percent(seconds / of)


def acting(r: dict) -> float:
    """The share of a long run: nothing that there is once, and checkpoints so many seconds apart."""
    seldom = r["callbacks"]["Checkpoints"]["each"] / APART
    others = (c["acts"] * max(c["each"], 0) for name, c in r["callbacks"].items() if name != "Checkpoints")
    return seldom + sum(others) / (r["calls"] * r["call"])


def overhead() -> str:
    """A row for each callback: milliseconds of a processor, once a run and each time, and its share of the whole training."""
    recipes = {TITLES[name]: r for name, r in read("training_overhead")["recipes"].items()}
    lasting = {title: r["calls"] * r["call"] for title, r in recipes.items()}
    header = ["callback", *(f"{title}, {lasting[title]:.0f} s: once, each time" for title in recipes)]
    header += [f"share, {title}" for title in recipes]
    body, totals = [], dict.fromkeys(recipes, 0.0)
    for name in next(iter(recipes.values()))["callbacks"]:
        of = {title: r["callbacks"][name] for title, r in recipes.items()}
        spent = {title: max(c["once"], 0) + c["acts"] * max(c["each"], 0) for title, c in of.items()}
        totals = {title: totals[title] + spent[title] for title in recipes}
        times = [f"{milliseconds(c['once'])}, {milliseconds(c['each'])} ({c['acts']} times)" for c in of.values()]
        body.append([f"`{name}`", *times, *(share(spent[title], lasting[title]) for title in recipes)])
    none = ["" for _ in recipes]
    body.append(["all, in these runs", *none, *(share(totals[title], lasting[title]) for title in recipes)])
    body.append(
        [f"all that acts, a checkpoint for each {APART:g} s", *none, *(percent(acting(r)) for r in recipes.values())]
    )
    going_on = [milliseconds(r["resume"]) for r in recipes.values()]
    body.append(["going on", *going_on, *(share(r["resume"], lasting[title]) for title, r in recipes.items())])
    return markdown(header, body)


def first_policy() -> str:
    """A row for each seed: seconds since its process was started, to the bar and to the end, with what was reached."""
    body = []
    for r in read("first_policy")["results"]:
        there = next((row for row in r["rows"] if row[2] >= r["bar"]), None)
        reached = f"{there[0]:.1f} s, {there[1]:,} steps" if there else "never"
        seconds, steps, score = r["rows"][-1]
        body.append(
            [str(r["seed"]), f"{r['began']:.1f} s", reached, f"{seconds:.1f} s, {steps:,} steps", f"{score:.1f}"]
        )
    return markdown(["seed", "imported, and begun", "bar reached", "end", "mean return at the end"], body)


def peer() -> str:
    """A row for each algorithm: how far the areas under its curves are apart, and steps a second of both."""
    body = []
    for name, r in read("rejax_peer")["results"].items():
        apart = [f"{100 * x:+.0f}%" for x in (r["difference"], *r["interval"])]
        ours, theirs = (r["steps a second"][arm] for arm in ("rlfx", "rejax"))
        about = f"{r['settings']['env']}, {r['settings']['steps']:,} steps, {r['seeds']} seeds"
        body.append(
            [
                name.upper(),
                about,
                f"{apart[0]} ({apart[1]} to {apart[2]})",
                f"{ours:,.0f}",
                f"{theirs:,.0f}",
                f"{ours / theirs:.2f}",
            ]
        )
    areas = "area under the curve, beside rejax's (95%)"
    return markdown(["algorithm", "task", areas, "steps a second, rlfx", "rejax", "ratio"], body)


def ways() -> str:
    """A row for each way to write a checkpoint: milliseconds of a processor."""
    found = read("checkpoint_ways")["ways"]
    header = ["written by", "a save", "of them in the thread that trains"]
    return markdown(header, [[name, *map(milliseconds, times)] for name, times in found.items()])


TABLES = {"checkpoint-ways": ways, "training-overhead": overhead, "first-policy": first_policy, "rejax-peer": peer}
