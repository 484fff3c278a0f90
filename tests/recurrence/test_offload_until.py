"""Values that go to the host while episodes end: results and gradients are those of a loop over each episode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rlfx

T, B = 5, 3
S = rlfx.series

#: What the learner needs of acting: ``(parameter, state, its key's draw, t) -> value``; each is stored, and goes to the host.
VALUES = {
    "an observation": lambda p, x, t: p * jnp.sin(3.0 * x),
    "a condition": lambda p, x, t: jnp.where(x > 0.5, p, p * p),
    "an integer": lambda p, x, t: p * jnp.floor(4.0 * x).astype(jnp.int32).astype(jnp.float32),
    "16 bits": lambda p, x, t: p * x.astype(jnp.bfloat16).astype(jnp.float32),
    "named": lambda p, x, t: p * checkpoint_name(jnp.tanh(x), "named"),
    "the one before": lambda p, x, t: p * jax.lax.stop_gradient(S(x, start=0.5)[t - 1]),
    "the next one": lambda p, x, t: p * jax.lax.stop_gradient(S(x, end=0.25)[t + 1]),
    "all that follows": lambda p, x, t: p * jax.lax.stop_gradient(jnp.sum(S(x)[t:])),
    "all before": lambda p, x, t: p * jax.lax.stop_gradient(jnp.max(S(x)[: t + 1])),
    "a return": lambda p, x, t: p * jax.lax.stop_gradient(rlfx.discounted_sum(S(x)[t:], 0.5)),
    "a recurrence": lambda p, x, t: p * jax.lax.stop_gradient(rlfx.solve(lambda a: 0.5 * a[t - 1] + x, start=0.1)),
    "from the end": lambda p, x, t: p * jax.lax.stop_gradient(rlfx.solve(lambda a: 0.5 * a[t + 1] + x, end=0.2)),
}
#: The same of an episode and a timestep of it.
LOOPS = {
    "an observation": lambda p, xs, t: p * np.sin(3.0 * xs[t]),
    "a condition": lambda p, xs, t: np.where(xs[t] > 0.5, p, p * p),
    "an integer": lambda p, xs, t: p * np.floor(4.0 * xs[t]),
    "16 bits": lambda p, xs, t: p * float(jnp.bfloat16(xs[t])),
    "named": lambda p, xs, t: p * np.tanh(xs[t]),
    "the one before": lambda p, xs, t: p * (xs[t - 1] if t else 0.5),
    "the next one": lambda p, xs, t: p * (xs[t + 1] if t + 1 < len(xs) else 0.25),
    "all that follows": lambda p, xs, t: p * sum(xs[t:]),
    "all before": lambda p, xs, t: p * max(xs[: t + 1]),
    "a return": lambda p, xs, t: p * sum(x * 0.5**i for i, x in enumerate(xs[t:])),
    "a recurrence": lambda p, xs, t: p * (0.1 * 0.5 ** (t + 1) + sum(xs[s] * 0.5 ** (t - s) for s in range(t + 1))),
    "from the end": lambda p, xs, t: p * (
        0.2 * 0.5 ** (len(xs) - t) + sum(xs[s] * 0.5 ** (s - t) for s in range(t, len(xs)))
    ),
}  # fmt: skip
#: Ends of each environment, in timesteps of which the last is the one that ends it.
ENDS = {"early": (1, 2, 1), "apart": (1, 3, 5), "at T": (5, 5, 5), "never": (9, 2, 9)}
FORMS = {
    "min_bytes": {"transform": lambda f: rlfx.offload(f, min_bytes=1)},
    "names": {"transform": lambda f: rlfx.offload(f, names=["named"])},
    "a plan": {"plan": rlfx.Plan("blocks", 2, offload=1)},
    "a plan, some environments": {"plan": rlfx.Plan("blocks", 2, 1, offload=1)},
}


def program(ps, carry, t):
    n, x, end = carry["n"], carry["x"], carry["end"]
    values = [value(p, x, t) for p, value in zip(ps, VALUES.values(), strict=True)]
    following = jax.lax.stop_gradient(0.8 * x + 0.1)
    return sum((1.0 + i) * v for i, v in enumerate(values)), {"n": n + 1, "x": following, "end": end}


def by_hand(ps, x0, ends):
    total = 0.0
    for x, end in zip(x0, ends, strict=True):
        xs = [x]
        while len(xs) < min(end, T):
            xs.append(0.8 * xs[-1] + 0.1)
        for t in range(len(xs)):
            total += sum((1.0 + i) * f(p, xs, t) for i, (p, f) in enumerate(zip(ps, LOOPS.values(), strict=True)))
    return total


@pytest.mark.parametrize("form", FORMS)
def test_values_on_the_host_are_those_of_loops_however_episodes_end(form: str):
    """12 values, four ways to end, four ways to ask: 192."""
    assert len(VALUES) * len(ENDS) * len(FORMS) >= 50
    ps, x0 = np.linspace(0.3, 1.1, len(VALUES)), np.array([0.2, 0.9, 0.55])
    fn = rlfx.compile(program, length=T, batch=B, reduce="sum", until=lambda c: c["n"] >= c["end"], **FORMS[form])
    n = jnp.zeros(B, jnp.int32)

    def outcome(p, end):
        return jax.value_and_grad(lambda p: fn(p, {"n": n, "x": jnp.asarray(x0, jnp.float32), "end": end})[0])(p)

    run = jax.jit(outcome)
    for ends in ENDS.values():
        loss, gradient = run(jnp.asarray(ps, jnp.float32), jnp.asarray(ends, jnp.int32))
        np.testing.assert_allclose(loss, by_hand(ps, x0, ends), rtol=1e-4)
        steps = np.eye(len(ps)) * 1e-6
        slopes = [(by_hand(ps + d, x0, ends) - by_hand(ps - d, x0, ends)) / 2e-6 for d in steps]
        np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-5)


def test_the_reference_agrees():
    ps, x0 = np.linspace(0.3, 1.1, len(VALUES)), np.array([0.2, 0.9, 0.55])
    for ends in ENDS.values():
        carry = {"n": jnp.zeros(B, jnp.int32), "x": jnp.asarray(x0, jnp.float32), "end": jnp.asarray(ends, jnp.int32)}
        fn = rlfx.reference(program, length=T, batch=B, reduce="sum", until=lambda c: c["n"] >= c["end"])
        np.testing.assert_allclose(fn(jnp.asarray(ps, jnp.float32), carry)[0], by_hand(ps, x0, ends), rtol=1e-4)
