"""Whether the static bound ranks the plans of a program by memory as XLA's own numbers do.

    python benchmarks/memory_ranking.py [--generated 40] [--out FILE.json]

Programs: large observations with Monte-Carlo and with n-step returns, recurrent learners of several forms, a convolution on
images, attention over the past; and programs of tests/strategies.py (with T = 40 and B = 256). Each under the plans that are
legal for it: at once, blocks of several sizes, tiles of environments, streaming, replay. Pairs of plans are counted whose
bytes differ by 2% or more (by XLA), and of which the larger needs 64 KiB. Prints, for each program, the pairs that are
ranked alike, and bound / exact.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import recorded
from memory_ranking_pairs import ranked

import rlfx
from rlfx.recurrence.analysis.divisors import divisors
from rlfx.recurrence.plan.choose import why_not, why_not_environments
from rlfx.recurrence.plan.planner import evaluator_of

sys.path.append(str(pathlib.Path(__file__).parents[1]))


def images(p, carry, t):
    """A convolution on observations, which the environment's state is."""
    x, n = carry
    h = jax.nn.relu(jax.lax.conv(x[None], p["k"], (2, 2), "SAME"))[0]
    logits = p["w"] @ h.mean((1, 2))
    action = jax.random.categorical(t.key_for("action"), logits)
    moved = jax.lax.stop_gradient(jnp.roll(x, 1, 1) * 0.9 + 0.1 * action.astype(jnp.float32))
    reward = rlfx.series(moved.mean(), end=0.0)
    advantage = jax.lax.stop_gradient(reward[t] + 0.9 * reward[t + 1])
    return -jax.nn.log_softmax(logits)[action] * advantage, (moved, n + 1)


def attention(p, x, t):
    """Attention of each timestep to its past."""
    q, k, v = (rlfx.series(p[name] @ x) for name in "qkv")
    weights = jax.nn.softmax(k[: t + 1] @ q[t])
    return jnp.sum((weights @ v[: t + 1]) ** 2), jnp.roll(x, 1) * 0.99


def written():
    from tests.recurrence import test_budget as budget
    from tests.recurrence import test_through_time as recurrent

    key = jax.random.key(0)
    for f in (budget.program, budget.n_step):
        yield f.__name__, f, {"length": 64, "batch": 16}, (*budget.arguments(), key)
    hidden = 64
    shapes = {"w": (hidden, hidden), "u": (hidden, 2), "v": (hidden,), "start": (hidden,)}
    params = {name: 0.1 * jax.random.normal(key, shape) for name, shape in shapes.items()}
    h = jnp.zeros((32, hidden))
    carries = {
        recurrent.elman: h,
        recurrent.with_resets: (h, jnp.zeros(32, jnp.int32)),
        recurrent.stacked_layers: (h, (h, h)),
        recurrent.named: jnp.zeros(32),
    }
    for f, carry in carries.items():
        yield f.__name__, f, {"length": 120, "batch": 32}, (params, carry, key)
    params = {"k": 0.1 * jax.random.normal(key, (8, 3, 3, 3)), "w": 0.1 * jax.random.normal(key, (4, 8))}
    state = jnp.ones((16, 3, 24, 24)), jnp.zeros(16, jnp.int32)
    yield "images", images, {"length": 32, "batch": 16}, (params, state, key)
    params = {name: 0.1 * jax.random.normal(key, (16, 16)) for name in "qkv"}
    yield "attention", attention, {"length": 64, "batch": 8}, (params, jnp.ones((8, 16)), key)


def generated(count):
    from tests import strategies

    for seed in range(count):
        p = dataclasses.replace(strategies.program(seed), length=40, batch=256)
        yield f"generated, seed {seed}", p.function, p.options(), p.arguments()


def plans(learner, order, length, batch):
    sizes = [n for n in divisors(length) if 1 < n < length]
    chosen = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    yield rlfx.Plan()
    for form in ("blocks", "stream", "replay"):
        if why_not(form, learner) is None:
            yield from (rlfx.Plan(form, n) for n in sorted(chosen))
            if batch > 1 and form == "blocks" and why_not_environments(learner, order) is None:
                yield from (rlfx.Plan(form, n, batch // 4) for n in (sizes[0], sizes[-1]))


def measure(name, f, options, arguments):
    rule, _, _ = rlfx.compile(f, **options)._prepare(*arguments)
    order = tuple(v for v in rule.program.params if jnp.issubdtype(v.dtype, jnp.inexact))
    learner, evaluator = rule.learner(frozenset(order)), evaluator_of(rule, order)
    rows = []
    for plan in plans(learner, order, options["length"], options["batch"] or 1):
        rows.append({"plan": str(plan), "exact": evaluator.measured(plan), "bound": evaluator.estimated(plan)})
    return {"name": name, "plans": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=40)
    parser.add_argument("--out")
    args = parser.parse_args()
    results, refused = [], []
    for program in itertools.chain(written(), generated(args.generated)):
        try:
            found = measure(*program)
        except (rlfx.errors.RlfxError, TypeError, ValueError) as error:  # not legal with these T and B, or no gradient
            refused.append(f"{program[0]}: {type(error).__name__}")
            continue
        results.append(found)
        alike, pairs = ranked(found)
        ratios = [f"{row['bound'] / max(1, row['exact']):.2f}" for row in found["plans"]]
        print(f"{alike:3} of {pairs:3}  {found['name']}: bound / exact {', '.join(ratios)}", flush=True)
    for kind, rows in (("written", results), ("generated", results)):
        mine = [ranked(r) for r in rows if r["name"].startswith("generated") == (kind == "generated")]
        alike, pairs = sum(a for a, _ in mine), sum(n for _, n in mine)
        print(f"{kind}: {alike} of {pairs} pairs ranked alike ({alike / max(1, pairs):.1%})")
    ratios = [row["bound"] / max(1, row["exact"]) for r in results for row in r["plans"] if row["exact"] > 2**16]
    print(f"bound / exact: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    if args.out:
        record = recorded.about("memory_ranking") | {
            "results": results,
            "refused": refused,
        }
        recorded.write(args.out, record)


if __name__ == "__main__":
    main()
