"""Streaming where environments end apart: the learner follows the actor to each environment's own end.

Oracle: NumPy loops over the timesteps that each environment has, in float64, and central differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.errors import ScheduleError
from tests.sampling import met

LENGTHS = np.array([3, 1, 9, 6, 14])
T, B, GAMMA = 12, len(LENGTHS), 0.9
CARRY = {"x": jnp.linspace(-1, 1, B), "left": jnp.asarray(LENGTHS, jnp.float32)}
AT = np.array([0.7, -0.3])
QUICK = {"xla_llvm_disable_expensive_passes": True}


def end(carry):
    return carry["left"] <= 0


def learner(ahead):
    """A policy gradient and a critic with returns of ``ahead`` steps, which bootstrap; singular where nothing is left."""

    def f(p, c, t):
        action = jnp.tanh(p[0] * c["x"])
        held = jax.lax.stop_gradient(action)
        reward, value = rlfx.series(held * c["x"]), rlfx.series(p[1] * c["x"] + 1.0 / (c["left"] + 0.5))
        window = reward.window(0, max(ahead, 1))
        target = sum(GAMMA**k * window[k] for k in range(ahead)) + GAMMA**ahead * jax.lax.stop_gradient(
            value[t + ahead]
        )
        loss = (
            -(target - jax.lax.stop_gradient(value[t])) * jnp.log(1.1 + action) * jnp.log(c["left"] * (1 + p[1] ** 2))
        )
        return loss + (value[t] - target) ** 2, {"x": 0.8 * c["x"] + 0.5 * held, "left": c["left"] - 1.0}

    return f


def by_hand(p, q, ahead, reduce):
    """The loss; what no gradient goes through is computed with ``q``."""
    losses = []
    for b in range(B):
        n, x = min(T, LENGTHS[b]), float(CARRY["x"][b])
        xs = [x]
        for _ in range(n):
            xs.append(0.8 * xs[-1] + 0.5 * np.tanh(q[0] * xs[-1]))
        reward = [np.tanh(q[0] * x) * x for x in xs[:n]]
        value = lambda p, s, b=b, xs=xs: p[1] * xs[s] + 1.0 / (LENGTHS[b] - s + 0.5)  # noqa: E731
        for t in range(n):
            rewards = sum(GAMMA**k * reward[t + k] for k in range(ahead) if t + k < n)
            target = rewards + GAMMA**ahead * value(q, min(t + ahead, n))
            score = np.log(1.1 + np.tanh(p[0] * xs[t])) * np.log((LENGTHS[b] - t) * (1 + p[1] ** 2))
            losses.append(-(target - value(q, t)) * score + (value(p, t) - target) ** 2)
    return np.mean(losses) if reduce == "mean" else np.sum(losses)


def expected_of(ahead, reduce):
    steps = 1e-5 * np.eye(2)
    slopes = [(by_hand(AT + s, AT, ahead, reduce) - by_hand(AT - s, AT, ahead, reduce)) / 2e-5 for s in steps]
    return by_hand(AT, AT, ahead, reduce), slopes


def evaluated(f, plan, reduce="mean", **options):
    fn = rlfx.compile(f, length=T, batch=B, until=end, reduce=reduce, plan=plan, **options)
    both = jax.jit(jax.value_and_grad(lambda p: fn(p, CARRY), has_aux=True), compiler_options=QUICK)
    (loss, (carry, _, lengths)), slopes = both(jnp.asarray(AT, jnp.float32))
    return loss, slopes, carry, lengths


@pytest.mark.parametrize(
    ("loss", "plan"),
    met(
        [(5, "mean"), (0, "sum"), (1, "mean"), (3, "sum")],
        [Plan("stream", 1), Plan("stream", 4), Plan("stream", 5, 1), Plan("stream", 11)],
    ),
)
def test_each_environment_has_its_own_end(loss, plan):
    ahead, reduce = loss
    loss, slopes, carry, lengths = evaluated(learner(ahead), plan, reduce)
    expected, derivatives = expected_of(ahead, reduce)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    np.testing.assert_allclose(slopes, derivatives, rtol=2e-4, atol=1e-5)
    np.testing.assert_array_equal(lengths, np.minimum(LENGTHS, T))
    np.testing.assert_array_equal(carry["left"], LENGTHS - np.minimum(LENGTHS, T))


def test_what_environments_see_of_each_other():
    """A sum over those that have not ended, of a value that is read ahead."""

    def f(p, c, t):
        others = rlfx.sum(rlfx.series(c["x"])[t + 1], "b")
        return (p[0] * others - p[1] * c["x"]) ** 2, {"x": 0.8 * c["x"] + 0.1, "left": c["left"] - 1.0}

    for got, expected in zip(evaluated(f, Plan("stream", 4)), evaluated(f, Plan()), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), got, expected)


def test_a_window_that_lies_beyond_the_end():
    """In the last chunk it is its fill, which does not vary with the environment."""

    def f(p, c, t):
        clock = rlfx.series(jnp.sin(t.now.astype(jnp.float32)))
        return p[0] * clock.window(1, 2, fill=0.5)[0] + p[1] * c["x"], {**c, "left": c["left"] - 1.0}

    for got, expected in zip(evaluated(f, Plan("stream", 1)), evaluated(f, Plan()), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5), got, expected)


def test_on_a_mesh():
    """The devices' environments end at different timesteps, those of one long before the others."""
    carry = {"x": jnp.linspace(-1, 1, 4), "left": jnp.asarray([2.0, 1.0, 11.0, 7.0])}
    results = []
    for options in ({"plan": Plan()}, {"plan": Plan("stream", 3), "mesh": jax.make_mesh((2,), ("b",))}):
        fn = rlfx.compile(learner(2), length=T, batch=4, until=end, **options)
        results.append(jax.jit(jax.value_and_grad(lambda p, fn=fn: fn(p, carry)[0]))(jnp.asarray(AT, jnp.float32)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *results)


def test_nothing_runs_when_all_have_ended():
    seen = []

    def f(p, c, t):
        jax.debug.callback(lambda now, x: seen.append(int(now)), t.now, c["x"])
        loss, following = learner(2)(p, c, t)
        return loss, following

    fn = rlfx.compile(f, length=400, batch=B, until=end, plan=Plan("stream", 5))
    jax.block_until_ready(jax.grad(lambda p: fn(p, CARRY)[0])(jnp.asarray(AT, jnp.float32)))
    jax.effects_barrier()
    assert max(LENGTHS) <= len(set(seen)) <= max(LENGTHS) + 2 + 2 * 5 + 5  # a delay, two chunks, and what is left over


def test_memory_does_not_grow_with_the_length():
    def temporaries(length):
        fn = rlfx.compile(learner(2), length=length, batch=B, until=end, plan=Plan("stream", 5))
        compiled = jax.jit(jax.grad(lambda p: fn(p, CARRY)[0])).lower(jnp.asarray(AT, jnp.float32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2002) <= 1.25 * temporaries(102) + 4 * 1900  # the chunks' first timesteps, an integer each


def test_what_is_not_known_before_the_end_is_refused():
    def with_aux(p, c, t):
        loss, following = learner(1)(p, c, t)
        return loss, following, p[0] ** 2

    fn = rlfx.compile(with_aux, length=T, batch=B, until=end, plan=Plan("stream", 4))
    with pytest.raises(ScheduleError, match="aux is differentiated beside a mean over timesteps whose number"):
        jax.grad(lambda p: fn(p, CARRY)[0] + fn(p, CARRY)[1][1])(jnp.asarray(AT, jnp.float32))
