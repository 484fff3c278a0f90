"""Gradients under ``until=``, where values after an environment's end are infinite, NaN, or reductions of nothing.

Oracle: NumPy loops over the timesteps that each environment has, in float64, and central differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan

T, GONE = 6, 0.0
QUICK = {"xla_llvm_disable_expensive_passes": True}
#: x counts down and ends at 0, where all of these are singular; nothing is left from the fourth timestep on.
X0 = np.array([2.0, 3.0, 3.5, 1.0])
B = len(X0)
LENGTHS = np.array([2, 3, 4, 1])
X = np.maximum(X0[None] - np.arange(T)[:, None], 0.0)
DATA = np.where(np.arange(T)[:, None] < LENGTHS, X + 0.5, np.nan)  # padded with NaN
ROW = np.where(np.arange(T) < LENGTHS.max(), np.arange(T) + 1.0, 0.0)  # padded with 0, the same for all

SINGULAR = {
    "log": (jnp.log, np.log),
    "reciprocal": (lambda x: 1 / x, lambda x: 1 / x),
    "sqrt": (jnp.sqrt, np.sqrt),
}
REDUCTIONS = ("sum", "mean", "max", "min")


def points(over: tuple, t: int, b: int) -> list:
    times = range(T) if "t" in over else (t,)
    envs = range(B) if "b" in over else (b,)
    return [(s, c) for c in envs for s in times if s < LENGTHS[c]]


def members() -> dict:
    """``name: (of the program (p, x, t), of NumPy (p, t, b))``: the loss at one point, with a parameter of its own."""
    out = {}

    def reduced(op, over, inner):
        return lambda p, t, b: getattr(np, op)([inner(p, X[s, c]) for s, c in points(over, t, b)])

    for name, (f, g) in SINGULAR.items():
        out[f"p {name}(x)"] = (lambda p, x, t, f=f: p * f(x)), (lambda p, t, b, g=g: p * g(X[t, b]))
        out[f"{name}(p x)"] = (lambda p, x, t, f=f: f(p * x)), (lambda p, t, b, g=g: g(p * X[t, b]))
        for over in (("b",), ("t",), ("t", "b")):
            for op in REDUCTIONS:
                out[f"{op} over {over} of {name}"] = (
                    lambda p, x, t, f=f, op=op, over=over: getattr(rlfx, op)(f(p * x), over),
                    reduced(op, over, lambda p, x, g=g: g(p * x)),
                )
        for op in REDUCTIONS:
            out[f"p {name}({op} over b)"] = (
                lambda p, x, t, f=f, op=op: p * f(getattr(rlfx, op)(x, "b")),
                lambda p, t, b, g=g, r=reduced(op, "b", lambda p, x: x): p * g(r(p, t, b)),
            )
        out[f"sum of the past of {name}"] = (
            lambda p, x, t, f=f: rlfx.series(f(p * x))[: t + 1].sum(),
            lambda p, t, b, g=g: sum(g(p * X[s, b]) for s in range(t + 1)),
        )
        out[f"mean of the future of {name}"] = (
            lambda p, x, t, f=f: jnp.mean(rlfx.series(f(p * x))[t:]),
            lambda p, t, b, g=g: np.mean([g(p * X[s, b]) for s in range(t, LENGTHS[b])]),
        )
        out[f"{name} of the next"] = (
            lambda p, x, t, f=f: f(rlfx.series(p * x, end=2.0)[t + 1]),
            lambda p, t, b, g=g: g(p * X[t + 1, b] if t + 1 < LENGTHS[b] else 2.0),
        )
        out[f"{name} of data"] = (
            lambda p, x, t, f=f: p * f(rlfx.inputs(jnp.asarray(DATA, jnp.float32))[t]),
            lambda p, t, b, g=g: p * g(DATA[t, b]),
        )
        out[f"{name} of data of all"] = (
            lambda p, x, t, f=f: f(p * rlfx.inputs(jnp.asarray(ROW, jnp.float32), axes="t")[t]),
            lambda p, t, b, g=g: g(p * ROW[t]),
        )
        out[f"{name} of the time"] = (
            lambda p, x, t, f=f: p * f(4.0 - t.now.astype(jnp.float32)),
            lambda p, t, b, g=g: p * g(4.0 - t),
        )
    centred = lambda p, t, b: X[t, b] * p - np.mean([X[k] * p for k in points(("t", "b"), t, b)])  # noqa: E731
    out["normalised"] = (
        lambda p, x, t: ((p * x - rlfx.mean(p * x)) / (rlfx.std(p * x) + 0.1)) ** 2,
        lambda p, t, b: (centred(p, t, b) / (np.std([X[k] * p for k in points(("t", "b"), t, b)]) + 0.1)) ** 2,
    )
    return out


MEMBERS = members()


def program(p, c, t):
    x = c["x"]
    each = jnp.stack([f(p[i], x, t) for i, (f, _) in enumerate(MEMBERS.values())])
    return each.sum(), {"x": x - 1.0}


def end(c):
    return c["x"] <= GONE


def by_hand(p: np.ndarray) -> np.ndarray:
    """The loss of every member."""
    alive = [(t, b) for b in range(B) for t in range(LENGTHS[b])]
    return np.array([np.mean([g(p[i], t, b) for t, b in alive]) for i, (_, g) in enumerate(MEMBERS.values())])


P = np.random.default_rng(0).uniform(0.8, 1.5, len(MEMBERS))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return (by_hand(P + 1e-5) - by_hand(P - 1e-5)) / 2e-5


def test_there_are_many():
    assert len(MEMBERS) > 70


def test_what_comes_after_the_ends_has_no_gradient(expected):
    carry = {"x": jnp.asarray(X0, jnp.float32)}
    fn = rlfx.compile(program, length=T, batch=B, until=end)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: fn(p, carry)[0]), compiler_options=QUICK)(
        jnp.asarray(P, jnp.float32)
    )
    np.testing.assert_allclose(loss, by_hand(P).sum(), rtol=1e-4)
    wrong = {k: (g, e) for k, g, e in zip(MEMBERS, np.asarray(grads), expected, strict=True) if not abs(g - e) < 1e-3}
    assert not wrong


# -- reductions over environments in loops ------------------------------------------------------------------------------

#: ``(s, x, p, over the environments) -> the value at t``, where s is the loop's value at the timestep before (or after).
STEPS = {
    "of data": lambda np, s, x, p, r: 0.5 * s + r(p * x),
    "of the loop": lambda np, s, x, p, r: 0.4 * r(s * p) + x,
    "of both": lambda np, s, x, p, r: r(np.tanh(s + p * x)),
    "centred": lambda np, s, x, p, r: 0.5 * (s - r(s)) + p * x,
    "a factor": lambda np, s, x, p, r: np.tanh(s * r(p * x) * 0.3),
    "twice": lambda np, s, x, p, r: 0.3 * r(s - r(p * s)) + 0.2 * x,
    "log": lambda np, s, x, p, r: 0.5 * s + p * np.log(r(x)),  # of nothing: log(0), 1 / 0
    "quotient": lambda np, s, x, p, r: (0.5 * s + p) / r(x),
}
LOOPS = [(op, ahead) for op in REDUCTIONS for ahead in (False, True)]
EDGES = np.array([0.3, -0.4, 0.6, 0.1])


def loops_by_hand(p: np.ndarray, op: str, ahead: bool) -> np.ndarray:
    """The loss of each of the steps, by loops over t, environments, and what the reduction is asked for."""
    total = np.zeros(len(STEPS))
    for i, step in enumerate(STEPS.values()):
        s = np.zeros((T + 2, B))  # at t + 1
        for b in range(B):
            s[LENGTHS[b] + 1 if ahead else 0, b] = EDGES[b]
        for t in reversed(range(T)) if ahead else range(T):
            alive = np.flatnonzero(t < LENGTHS)
            if alive.size:
                before = s[t + 2 if ahead else t, alive]
                # all environments at once: a reduction is the same number for each of them
                s[t + 1, alive] = step(np, before, X[t, alive], p[i], lambda v: getattr(np, op)(v))
        total[i] = np.mean([s[t + 1, b] for b in range(B) for t in range(LENGTHS[b])])
    return total


def test_reductions_over_environments_in_loops():
    """Values and derivatives of 64: each step, forwards and backwards, by each reduction."""

    def f(p, c, t):
        each = []
        for j, (op, ahead) in enumerate(LOOPS):
            over = lambda v, op=op: getattr(rlfx, op)(v, "b")  # noqa: E731

            def steps(s, j=j, ahead=ahead, over=over):
                near = s[t + 1] if ahead else s[t - 1]
                return jnp.stack([g(jnp, near[i], c["x"], p[j, i], over) for i, g in enumerate(STEPS.values())])

            edge = jnp.full(len(STEPS), c["edge"])
            each.append(rlfx.solve(steps, **{"end" if ahead else "start": edge}))
        return jnp.stack(each).sum(), {"x": c["x"] - 1.0, "edge": c["edge"]}, jnp.stack(each)

    p = np.random.default_rng(1).uniform(0.8, 1.5, (len(LOOPS), len(STEPS)))
    carry = {k: jnp.asarray(v, jnp.float32) for k, v in {"x": X0, "edge": EDGES}.items()}
    fn = rlfx.compile(f, length=T, batch=B, until=end)
    compute = jax.jit(jax.value_and_grad(lambda p: fn(p, carry), has_aux=True), compiler_options=QUICK)
    (_, (_, aux, _)), grads = compute(jnp.asarray(p, jnp.float32))
    alive = np.arange(T)[:, None] < LENGTHS
    means = np.where(alive[..., None, None], aux, 0.0).sum((0, 1)) / alive.sum()
    assert p.size >= 50
    for j, (op, ahead) in enumerate(LOOPS):
        slopes = (loops_by_hand(p[j] + 1e-5, op, ahead) - loops_by_hand(p[j] - 1e-5, op, ahead)) / 2e-5
        np.testing.assert_allclose(
            means[j], loops_by_hand(p[j], op, ahead), rtol=1e-4, atol=1e-5, err_msg=f"{op} {ahead}"
        )
        np.testing.assert_allclose(grads[j], slopes, rtol=1e-3, atol=1e-4, err_msg=f"{op} {ahead}")


def test_the_first_timesteps_of_blocks_are_not_those_of_the_episode():
    """A block may begin after all ends, or be of some environments."""

    def f(p, c, t):
        x = c["x"]
        return p * jnp.log(x) + jnp.log(p * x) / x + p / (3.5 - t.now.astype(jnp.float32)), {"x": x - 1.0}

    carry = {"x": jnp.asarray(X0, jnp.float32)}
    alive = [(t, b) for b in range(B) for t in range(LENGTHS[b])]
    expected = np.mean([np.log(X[t, b]) + 1 / (2.0 * X[t, b]) + 1 / (3.5 - t) for t, b in alive])
    for plan in (Plan("blocks", 1), Plan("blocks", 4), Plan("blocks", 2, 2), Plan()):
        fn = rlfx.compile(f, length=T, batch=B, until=end, plan=plan)
        got = jax.jit(jax.grad(lambda p, fn=fn: fn(p, carry)[0]), compiler_options=QUICK)(jnp.float32(2.0))
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_gradients_through_the_carry_and_to_data():
    """The carry reaches its singular value with the last timestep; data are padded with NaN. Against the reference."""
    length, batch = 4, 2
    data = jnp.asarray(DATA[:length, :batch], jnp.float32)

    def f(p, c, t):
        x, h = c["x"], c["h"]
        d = rlfx.inputs(p["data"])[t]
        g = rlfx.solve(lambda g: jnp.log(d * p["w"]) + 0.5 * g[t + 1], end=h)
        s = rlfx.solve(lambda s: jnp.sqrt(d) / (s[t - 1] + 1.0), start=h)
        shown = rlfx.shared(lambda v: v.sum(), p["w"] * x)  # it sees environments that have ended
        loss = jnp.sqrt(h) + p["w"] / h + g * s + 0.1 * shown
        return loss, {"x": x - 1.0, "h": jnp.where(x <= 1.0, 0.0 * h, h * p["w"])}

    params = {"w": jnp.float32(1.2), "data": data}
    carry = {"x": jnp.asarray(X0[:batch], jnp.float32), "h": jnp.linspace(0.4, 0.8, batch, dtype=jnp.float32)}

    def run(make):
        fn = make(f, length=length, batch=batch, until=end)

        def outputs(params, carry):
            loss, (final, _, _) = fn(params, carry)
            return loss, jnp.sum(jnp.cos(final["h"] + 0.1))

        return outputs

    compiled, (value, pull) = run(rlfx.compile), jax.vjp(run(rlfx.reference), params, carry)
    np.testing.assert_allclose(compiled(params, carry), value, rtol=1e-5)
    for weights in ((1.0, 0.0), (1.0, 2.0)):
        objective = lambda p, c, w=weights: sum(x * y for x, y in zip(w, compiled(p, c), strict=True) if x)  # noqa: E731
        got = jax.jit(jax.grad(objective, (0, 1)), compiler_options=QUICK)(params, carry)
        expected = pull(tuple(map(jnp.float32, weights)))
        for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert np.isfinite(g).all()
            np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6)


def test_on_a_mesh():
    """Devices agree on where nothing is left, also one whose own environments have all ended."""
    mesh = jax.make_mesh((2,), ("b",))

    def f(p, c, t):
        each = [p[i] / getattr(rlfx, op)(c["x"] + 0.1 * p[i], "b") for i, op in enumerate(REDUCTIONS)]
        return sum(each[1:], start=each[0]), {"x": c["x"] - 1.0}

    carry = {"x": jnp.asarray([1.0, 1.0, 3.0, 2.0], jnp.float32)}
    got, expected = (
        jax.jit(jax.grad(lambda p, kw=kw: rlfx.compile(f, length=T, batch=B, until=end, **kw)(p, carry)[0]))(
            jnp.ones(4, jnp.float32)
        )
        for kw in ({"mesh": mesh}, {})
    )
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=1e-5)
