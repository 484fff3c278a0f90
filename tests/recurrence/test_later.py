"""What the loss needs from a timestep on alone is computed there: heads behind a burn-in, the derivative of layers before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.recurrence.schedule.later import Later

T, B, K, N = 12, 3, 5, 20  # not so narrow that features come first
KEYS = iter(jax.random.split(jax.random.key(0), 9))
SHAPES = {"in": (3, N), "x": (N, N), "h": (N, N), "q": (N, 2), "v": (N, 1)}
P = {name: 0.3 * jax.random.normal(next(KEYS), shape) for name, shape in SHAPES.items()}
H = jax.random.normal(next(KEYS), (B, N))
DATA = {"obs": jax.random.normal(next(KEYS), (T, B, 3)), "reward": jax.random.normal(next(KEYS), (T, B))}


def parts(p, h, t, end=K):
    params, data = p
    x = rlfx.inputs(data)[t]
    h = jnp.where(t == end, stop_gradient(h), h)
    return params, x, jnp.tanh(jnp.tanh(x["obs"] @ params["in"]) @ params["x"] + h @ params["h"])


def of_returns(p, h, t, begin=K):
    """Heads, and what is aimed at by returns of later timesteps."""
    params, x, new = parts(p, h, t)
    q = new @ params["q"]
    later = rlfx.series(stop_gradient(jnp.max(q)), end=0.5)
    step = rlfx.envs.Step(x["reward"], t == 9, t == 7, None)
    aim = rlfx.n_step_return(step, later[t + 1], gamma=0.9, n=3)
    return jnp.where(t >= begin, (q[0] - stop_gradient(aim)) ** 2, 0.0), new


def with_aux(p, h, t):
    """One output is that of all timesteps, one of those that count."""
    params, x, new = parts(p, h, t)
    q, v = new @ params["q"], (new @ params["v"])[0]
    wrong = (q[1] - x["reward"]) ** 2
    return jnp.where(t >= K, wrong + v, 0.0), new, (v, jnp.where(t >= K, wrong, 0.0))


def of_nothing(p, h, t):
    """Zeros would have no finite derivative."""
    params, x, new = parts(p, h, t)
    size = jnp.sqrt(jnp.sum((new @ params["q"]) ** 2))
    later = rlfx.series(x["reward"] / size, end=1.0)
    return jnp.where(t >= K, size + 0.1 * later[t + 1], 0.0), new


def looks_back(p, h, t):
    """What counts reads what was before."""
    params, _, new = parts(p, h, t)
    q = rlfx.series(new @ params["q"], start=jnp.ones(2))
    return jnp.where(t >= K, jnp.sum(q[t] * stop_gradient(q[t - 2])), 0.0), new


def of_all(p, h, t):
    """What counts is compared with all timesteps."""
    params, _, new = parts(p, h, t)
    v = (new @ params["v"])[0]
    return jnp.where(t >= K, (v - rlfx.mean(v)) ** 2, 0.0), new


def from_the_last(p, h, t):
    """What is read behind the end is made of the last value, which counts."""
    params, x, new = parts(p, h, t)
    v = (new @ params["v"])[0]
    v = rlfx.series(v, end=0.3 * v)
    return jnp.where(t >= K, (v[t] - x["reward"] - 0.9 * v[t + 1]) ** 2, 0.0), new


def sequences(p, h, t):
    """No recurrence at all: timesteps that do not count."""
    params, data = p
    x = rlfx.inputs(data)[t]
    q = jnp.tanh(x["obs"] @ params["in"]) @ params["x"]
    return jnp.where(t >= K, jnp.sum((q - x["reward"]) ** 2), 0.0), h


def faded(p, h, t):
    """Layers in no loop, whose outputs a state adds up."""
    params, data = p
    x = rlfx.inputs(data)[t]
    h = 0.9 * jnp.where(t == K, stop_gradient(h), h)
    new = jnp.tanh(h + jnp.tanh(x["obs"] @ params["in"]) @ params["x"])
    return jnp.where(t >= K, jnp.sum((new @ params["q"] - x["reward"]) ** 2), 0.0), new


def of_lambda(p, h, t):
    """The error is computed in the loop of returns, or behind it."""
    params, x, new = parts(p, h, t)
    following = rlfx.series(x["reward"], end=0.5)[t + 1]
    aim = rlfx.lambda_return(rlfx.envs.Step(x["reward"], t == 9, t == 7, None), following, gamma=0.9, lam=0.8)
    return jnp.where(t >= K, ((jnp.tanh(new @ params["h"]) @ params["v"])[0] - aim) ** 2, 0.0), new


def of_ratios(p, h, t):
    """What is divided in the loop of returns has no finite derivative of zeros."""
    params, x, new = parts(p, h, t)
    v = (new @ params["v"])[0]
    later = rlfx.solve(lambda g: x["reward"] + 0.5 * g[t + 1], end=1.0)
    return jnp.where(t >= K, (later / v) ** 2 * 1e-3 + jnp.sum(new) / (1.0 + v**2), 0.0), new


def searched(p, h, t):
    """A loop of the user's that ends for no zeros."""
    params, _, new = parts(p, h, t)
    q = jnp.abs(new @ params["q"]) + 0.1
    doubled = jax.lax.while_loop(lambda y: jnp.min(y) < 1.0, lambda y: 2.0 * y, stop_gradient(q))
    return jnp.where(t >= K, jnp.sum(q * doubled), 0.0), new


PROGRAMS = {
    "returns": of_returns, "a loss that begins later": functools.partial(of_returns, begin=K + 2),
    "a loss that begins before": functools.partial(of_returns, begin=K - 2), "aux": with_aux, "nothing": of_nothing,
    "looks back": looks_back, "all": of_all, "from the last": from_the_last, "sequences": sequences, "faded": faded,
    "searched": searched, "lambda": of_lambda, "ratios": of_ratios,
}  # fmt: skip
PLANS = [None, rlfx.Plan("one pass"), rlfx.Plan(), rlfx.Plan(environments=1), rlfx.Plan("blocks", 4)]


def gradient(make, f, t0=0, **options):
    fn = make(f, length=T, batch=B, **options)
    run = jax.value_and_grad(lambda p, h: fn((p, DATA), h, t0=t0), (0, 1), has_aux=True)
    return run(P, H)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_the_reference(name):
    expected = gradient(rlfx.reference, PROGRAMS[name])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    ran = 0
    for plan in PLANS:
        try:
            found = gradient(rlfx.compile, PROGRAMS[name], plan=plan)
        except rlfx.errors.ScheduleError:
            assert plan not in (None, rlfx.Plan())  # not every program has every plan
            continue
        ran += 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=2e-5), found, expected)
    assert ran >= 2


@pytest.mark.parametrize("plan", [rlfx.Plan("one pass"), rlfx.Plan()], ids=str)
@pytest.mark.parametrize("t0", [3, -2, jnp.int32(3), jnp.int32(0)])
def test_a_rollout_that_goes_on_counts_other_timesteps(plan, t0):
    found, expected = (gradient(make, of_returns, t0, **o) for make, o in ((rlfx.compile, {"plan": plan}), (rlfx.reference, {})))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=2e-5), found, expected)


def test_both_beginnings_of_one_function():
    """Of one compiled function: a start that is known, and one that is traced."""
    fn = rlfx.compile(of_returns, length=T, batch=B, plan=rlfx.Plan("one pass"))
    run = jax.jit(lambda p, t0: jax.grad(lambda p: fn((p, DATA), H, t0=t0)[0])(p))
    known = jax.grad(lambda p: fn((p, DATA), H)[0])(P)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=2e-5), run(P, 0), known)
    other = gradient(rlfx.reference, of_returns, 4)[1][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=2e-5), run(P, 4), other)


def later_in(f, plan=rlfx.Plan("one pass")):
    fn = rlfx.compile(f, length=T, batch=B, plan=plan)
    passes = fn.physical((P, DATA), H, wrt=((True, False)))
    plan = passes.acting if passes.acting.differentiated else passes.learning
    parts = [part for node in plan.nodes for part in getattr(node, "parts", ()) if isinstance(part, Later)]
    shape = lambda e: next(v.shape for v in e.inputs if len(v.shape) == 2)  # noqa: E731
    return {(shape(e), x.first, x.before) for x in parts for e in x.equations if e.op.name == "dot_general"}, str(plan)


def test_heads_are_not_computed_before_and_layers_not_differentiated():
    found, told = later_in(of_returns, rlfx.Plan())
    assert ((N, 2), K, False) in found
    assert f"equations are not computed before t = {K}: the loss counts nothing there" in told
    assert ((N, N), K, False) in later_in(of_lambda)[0]
    found, told = later_in(faded)
    assert found == {((N, 2), K, False), ((3, N), K, True), ((N, N), K, True)}
    assert f"equations have no derivative before t = {K}: the loss counts nothing there" in told
    for f in (looks_back, of_all):
        assert not {what for what, _, before in later_in(f)[0] if not before and what in ((N, 2), (N, 1))}
    assert ((N, 1), K, True) in later_in(with_aux)[0]  # the value's head: it is returned of all timesteps


def test_less_is_multiplied():
    def flops(begin):
        fn = rlfx.compile(functools.partial(of_returns, begin=begin), length=T, batch=B, plan=rlfx.Plan("one pass"))
        return jax.jit(jax.grad(lambda p: fn((p, DATA), H)[0])).lower(P).compile().cost_analysis()["flops"]

    assert flops(K) < flops(0)
