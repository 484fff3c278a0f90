"""Algorithms of the field against NumPy loops: GRU, LSTM, GAE, V-trace, HER, CPC, RSSM, HMM, Kalman, MAML, DQN, and more.

Several of them make one program: its loss is their sum, its parameters, carry and aux have one entry for each. So one
compilation checks five, and every gradient belongs to one algorithm.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.oracle import written_models  # noqa: F401  (registers its algorithms)
from tests.oracle.driver import QUICK
from tests.oracle.written import PROGRAMS
from tests.oracle.written_loops import ALGORITHMS, T0

NAMES = tuple(ALGORITHMS)
GROUPS = [NAMES[i::5] for i in range(5)]
STEP = 1e-5
# float32 against float64; derivatives relative to the largest of the algorithm's
VALUES, SLOPES = {"rtol": 3e-4, "atol": 3e-5}, 2e-3


def draw(name: str, rng: np.random.Generator, length: int, batch: int) -> tuple[dict, dict]:
    """Parameters and carry of one algorithm, float64, always with the environments' axis."""

    def one(key: str, kind, lead: tuple[int, ...]):
        lead = (length, batch) if key.endswith("_tb") else lead
        if kind == "bool":
            return rng.uniform(size=lead) < 0.3
        if kind == "unit":
            return rng.integers(0, 100, lead) / 100 + 0.005  # no multiple of 1 / n
        if isinstance(kind, str) and kind.startswith("int:"):
            return rng.integers(0, int(kind[4:]), lead)
        if isinstance(kind, str):
            return rng.uniform(-1, 1, tuple(map(int, kind.split(":")[1].split(","))))
        return rng.uniform(-1, 1, (*lead, *kind))

    a = ALGORITHMS[name]
    return {k: one(k, s, ()) for k, s in a.params.items()}, {k: one(k, s, (batch,)) for k, s in a.carry.items()}


def outcome(name: str, p: dict, c: dict, length: int, batch: int, kept: list, recording: bool) -> tuple:
    """``(mean loss, final carry [B], aux [T, B])``. What stops a gradient is what it was when it was recorded."""
    replay = iter(list(kept))

    def stop(x):
        if recording:
            kept.append(x)
            return x
        return next(replay)

    a = ALGORITHMS[name]
    if a.batched:
        losses, final, aux = a.loops(p, c, length, stop)
        return np.mean(losses), final, np.array(aux, float)
    runs = [
        a.loops(
            {k: x[:, b] if k.endswith("_tb") else x for k, x in p.items()},
            {k: x[b] for k, x in c.items()}, length, stop,
        )
        for b in range(batch)
    ]  # fmt: skip
    final = {k: np.stack([r[1][k] for r in runs]) for k in c}
    return np.mean([r[0] for r in runs]), final, np.stack([np.array(r[2], float) for r in runs], 1)


def directions(tree: dict, rng: np.random.Generator) -> dict:
    return {
        k: rng.choice([-1, 1], x.shape) * rng.uniform(0.5, 1.5, x.shape) for k, x in tree.items() if x.dtype == float
    }


def slope(name, p, c, length, batch, kept, group: str, key: str, direction) -> float:
    """The derivative of the mean loss along a direction, by central differences of fourth order."""

    def loss(step):
        moved = {"params": dict(p), "carry": dict(c)}
        moved[group][key] = moved[group][key] + step * STEP * direction
        return outcome(name, moved["params"], moved["carry"], length, batch, kept, False)[0]

    return (8 * (loss(1) - loss(-1)) - (loss(2) - loss(-2))) / (12 * STEP)


def compare(names: tuple[str, ...], length: int, batch: int | None, seed: int, **options) -> None:
    rng, envs = np.random.default_rng(seed), batch or 1
    drawn = {name: draw(name, rng, length, envs) for name in names}

    def f(p, c, t):
        results = {name: PROGRAMS[name](p[name], c[name], t) for name in names}
        loss = sum(r[0] for r in results.values())
        return loss, {k: r[1] for k, r in results.items()}, {k: r[2] for k, r in results.items()}

    def argument(name: str, k: str, x):
        shared = str(ALGORITHMS[name].carry.get(k, "")).startswith("shared")
        if batch is None and (k.endswith("_tb") or (k in ALGORITHMS[name].carry and not shared)):
            x = x[:, 0] if k.endswith("_tb") else x[0]
        kinds = {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}
        x = jnp.asarray(x, kinds[x.dtype.kind])
        return rlfx.Shared(x) if shared else x

    params = {n: {k: argument(n, k, x) for k, x in p.items()} for n, (p, _) in drawn.items()}
    carry = {n: {k: argument(n, k, x) for k, x in c.items()} for n, (_, c) in drawn.items()}
    loss_fn = rlfx.compile(f, length=length, batch=batch, **options)

    def objective(p, c):
        return loss_fn(p, c, t0=T0)

    differentiate = jax.value_and_grad(objective, (0, 1), has_aux=True, allow_int=True)
    (loss, (final, aux)), gradients = jax.jit(differentiate, compiler_options=QUICK)(params, carry)
    total = 0.0
    for name, (p, c) in drawn.items():
        kept: list = []
        mean, end, reported = outcome(name, p, c, length, envs, kept, True)
        total += mean
        seen = np.asarray(aux[name], float)
        seen = seen if batch is not None and seen.ndim == reported.ndim else np.expand_dims(seen, 1)
        np.testing.assert_allclose(*np.broadcast_arrays(seen, reported), **VALUES, err_msg=name)
        for k, x in end.items():
            got = final[name][k]
            got = got.value if isinstance(got, rlfx.Shared) else got
            shared = str(ALGORITHMS[name].carry[k]).startswith("shared")
            np.testing.assert_allclose(got, x if batch is not None or shared else x[0], **VALUES, err_msg=f"{name} {k}")
        slopes = {}
        for group, tree, grads in (("params", p, gradients[0][name]), ("carry", c, gradients[1][name])):
            for k, d in directions(tree, rng).items():
                g = grads[k].value if isinstance(grads[k], rlfx.Shared) else grads[k]
                mine = np.sum(np.asarray(g, float).reshape(d.shape) * d)
                slopes[f"{name} {group} {k}"] = mine, slope(name, p, c, length, envs, kept, group, k, d)
        largest = max(1.0, *(abs(e) for _, e in slopes.values()))
        for what, (got, expected) in slopes.items():
            assert abs(got - expected) <= SLOPES * largest, f"d {what}: {got} instead of {expected}"
    np.testing.assert_allclose(loss, total, **VALUES)


@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_algorithms(names: tuple[str, ...]):
    compare(names, length=5, batch=2, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "batch"), [(1, 2), (2, None), (7, None), (13, 3), (150, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_algorithms_at_other_lengths(name: str, length: int, batch: int | None):
    if ALGORITHMS[name].batched and batch is None:
        pytest.skip("needs a batch")
    compare((name,), length, batch, seed=length)
