"""Windows that move with t, in blocks that read the rows of all of their timesteps at once, against plain loops."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.language.index import TIME
from rlfx.recurrence.schedule import bands, tiling

WIDTH, BATCH, HEADS = 4, 2, 2


@pytest.fixture
def always(monkeypatch):
    """Every window runs in bands, however small it is."""
    cpu = rlfx.target("cpu")
    small = replace(cpu, room=replace(cpu.room, at_once=0, in_block=1 << 10))
    monkeypatch.setattr("rlfx.recurrence.api.compiled.here", lambda sharding: small)
    monkeypatch.setattr(tiling, "SMALLEST_BLOCK", 2)
    monkeypatch.setattr(bands, "NARROWEST", 1)


def attended(keys, values, q):
    """Heads of attention, and what is no product: a maximum and a mean of absolute values."""
    k, v = (x.reshape(x.shape[0], HEADS, WIDTH // HEADS) for x in (keys, values))
    weights = jax.nn.softmax(jnp.einsum("thw,hw->th", k, q.reshape(HEADS, -1)), axis=0)
    return jnp.einsum("th,thw->hw", weights, v).ravel() + jnp.abs(keys - q[None]).mean(0) + jnp.tanh(values).max(0)


def by_rlfx(window, length, **options):
    def program(params, carry, t):
        w, obs = params
        x = jnp.tanh(rlfx.inputs(obs)[t] @ w[0])
        x = x + attended(window(rlfx.series(x @ w[1]), t), window(rlfx.series(x), t), x)
        return jnp.sum(attended(window(rlfx.series(x @ w[2]), t), window(rlfx.series(x), t), x) ** 2), carry

    return rlfx.compile(program, length=length, batch=BATCH, **options)


def by_loop(bounds, length):
    """The same program timestep by timestep, with slices of Python."""

    def layer(x, keys):
        return jnp.stack([attended(keys[rows], x[rows], x[t]) for t, rows in _rows(bounds, length)])

    def loss(params, environment):
        w, obs = params
        x = jnp.tanh(obs[:, environment] @ w[0])
        x = x + layer(x, x @ w[1])
        return jnp.sum(layer(x, x @ w[2]) ** 2) / length

    return lambda params: jax.vmap(lambda b: loss(params, b))(jnp.arange(BATCH)).mean()


def _rows(bounds, length):
    for t in range(length):
        lo, hi = bounds(t)
        yield t, slice(max(lo, 0), min(hi, length))


def arguments(length):
    k = jax.random.split(jax.random.key(length), 2)
    return jax.random.normal(k[0], (3, WIDTH, WIDTH)) / 2, jax.random.normal(k[1], (length, BATCH, WIDTH))


#: Window by window: as a slice of rlfx, and the bounds that it has at t.
WINDOWS = {
    "behind": (lambda x, t: x[t - 3 : t + 1], lambda t: (t - 3, t + 1)),
    "of one": (lambda x, t: x[t : t + 1], lambda t: (t, t + 1)),
    "ahead": (lambda x, t: x[t : t + 4], lambda t: (t, t + 4)),
    "around": (lambda x, t: x[t - 1 : t + 3], lambda t: (t - 1, t + 3)),
    "as long as T": (lambda x, t: x[t - 20 : t + 1], lambda t: (t - 20, t + 1)),
    "the chunk of t": (lambda x, t: x[t - t % 3 : t + 1], lambda t: (t - t % 3, t + 1)),
}


def assert_equal(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


LENGTHS = [
    ("behind", 12), ("behind", 13), ("ahead", 11), ("around", 13), ("as long as T", 11), ("of one", 7), ("the chunk of t", 10),
]  # fmt: skip


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_values_and_gradients_are_those_of_a_loop(always, name, length):
    window, bounds = WINDOWS[name]
    params = arguments(length)
    loss = by_rlfx(window, length)
    found = jax.value_and_grad(lambda p: loss(p, jnp.zeros(BATCH))[0])(params)
    assert_equal(found, jax.value_and_grad(by_loop(bounds, length))(params))
    physical = str(loss.physical(params, jnp.zeros(BATCH)))
    assert ("that each see" in physical) == (name in ("behind", "ahead", "around", "the chunk of t")), physical


@pytest.mark.parametrize("options", [{"plan": rlfx.Plan(environments=1)}, {"memory_budget": 200_000}, {"devices": 0}])
def test_under_plans_and_vmap(always, options):
    window, bounds = WINDOWS["behind"]
    params = arguments(12)
    expected = jax.value_and_grad(by_loop(bounds, 12))(params)
    loss = by_rlfx(window, 12, **{k: v for k, v in options.items() if k != "devices"})
    fn = jax.value_and_grad(lambda p: loss(p, jnp.zeros(BATCH))[0])
    if "devices" not in options:
        assert_equal(fn(params), expected)
        return
    twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    other = jax.value_and_grad(by_loop(bounds, 12))(jax.tree.map(lambda x: 2 * x, params))
    assert_equal(jax.vmap(fn)(twice), jax.tree.map(lambda a, b: jnp.stack([a, b]), expected, other))


def test_gradients_are_those_of_finite_differences(always):
    (w, obs), loss = arguments(9), by_rlfx(WINDOWS["behind"][0], 9)
    fn = jax.jit(lambda w: loss((w, obs), jnp.zeros(BATCH))[0])
    direction = jax.random.normal(jax.random.key(5), w.shape)
    slope = (fn(w + 1e-2 * direction) - fn(w - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(jax.grad(fn)(w), direction), slope, rtol=2e-2)


def test_what_is_infinite_outside_of_a_window_is_not_seen(always):
    """An infinite row is in the band of timesteps whose windows it is not in."""
    obs = jnp.ones((12, BATCH, WIDTH)).at[8].set(jnp.inf)

    def program(params, carry, t):
        x = rlfx.series(params * rlfx.inputs(obs)[t])[t - 3 : t + 1]
        return carry, jnp.sum(jax.nn.softmax(x @ jnp.ones(WIDTH)) @ x)

    _, losses = rlfx.unroll(program, length=12, batch=BATCH)(jnp.ones(WIDTH), jnp.zeros(BATCH))
    assert np.isfinite(losses[:8]).all()
    assert not np.isfinite(losses[8]).any()


def test_a_band_has_what_each_of_its_timesteps_sees():
    band = bands.Band(first=-3, width=7, block=4)
    assert [int(band.base.evaluate(t, 12, low=min, high=max)) for t in (0, 3, 4, 11)] == [-3, -3, 1, 5]
    assert band.base == TIME // 4 * 4 - 3


SCALES = jnp.linspace(1.0, 3.0, 3)


def scored(params, carry, t):
    """How likely each of a few aims is, by a network of what the timesteps ahead are, and where the aim is from there."""
    w, data = params
    seen = rlfx.inputs(data)
    x, ahead = seen[t], seen[t : t + 3]

    def likely(aim):
        h = jnp.tanh(jnp.concatenate([ahead, (x + aim)[None] - ahead], -1) @ jnp.concatenate([w[0], w[1]]))
        return -((jnp.tanh(h @ w[2]) - ahead) ** 2).sum()

    best = jnp.argmax(jax.lax.stop_gradient(jax.vmap(likely)(jnp.stack([x, 0.5 * x, -x]))))
    return jnp.sum((jnp.tanh(x @ w[0]) * SCALES[best]) ** 2), carry


def test_layers_are_of_the_rows_that_each_timestep_sees(always):
    """A block's rows would be multiplied with weights for timesteps that mask them."""
    args = arguments(length := 11)
    fn = rlfx.compile(scored, length=length, batch=BATCH)
    text = str(fn.physical(args, None))
    assert "x[t:t + 3]: blocks of 11 timesteps" in text  # all of them have room in the cache
    assert "rows" not in text
    with_scores = by_rlfx(WINDOWS["ahead"][0], length)
    assert "that each see" in str(with_scores.physical(args, None))
    found = jax.value_and_grad(lambda w: fn((w, args[1]), None)[0])(args[0])
    expected = jax.value_and_grad(lambda w: _scored_by_loops(w, args[1]))(args[0])
    assert_equal(found, expected)


def test_what_layers_make_of_windows_stays_in_the_cache(always):
    """As many timesteps a block as the widest values of have room there: three rows for each of three aims."""
    args, small = arguments(12), rlfx.target("cpu")
    expected = jax.value_and_grad(lambda w: _scored_by_loops(w, args[1]))(args[0])
    for steps in (1, 4, 5):
        tile = steps * BATCH * 3 * 3 * WIDTH * 4
        target = replace(small, room=replace(small.room, at_once=0, in_block=1 << 10, tile=tile))
        fn = rlfx.compile(scored, length=12, batch=BATCH, target=target)
        assert f"x[t:t + 3]: blocks of {min(steps, 4)} timestep" in str(fn.physical(args, None))
        assert_equal(jax.value_and_grad(lambda w, fn=fn: fn((w, args[1]), None)[0])(args[0]), expected)


def _scored_by_loops(w, data):
    total = 0.0
    for b in range(BATCH):
        for t, x in enumerate(data[:, b]):
            ahead, scores = data[t : t + 3, b], []
            for aim in (x, 0.5 * x, -x):
                h = jnp.tanh(ahead @ w[0] + ((x + aim)[None] - ahead) @ w[1])
                scores.append(-((jnp.tanh(h @ w[2]) - ahead) ** 2).sum())
            total += jnp.sum((jnp.tanh(x @ w[0]) * SCALES[jnp.argmax(jnp.stack(scores))]) ** 2)
    return total / (len(data) * BATCH)


@functools.cache
def _measured(length, window):
    def program(params, carry, t):
        x = rlfx.series(rlfx.inputs(params)[t])
        return jnp.sum(jax.nn.softmax(x[t - window + 1 : t + 1] @ x[t]) @ x[t - window + 1 : t + 1]), carry

    loss = rlfx.compile(program, length=length, batch=4)
    shape = jnp.zeros((length, 4, 32))
    compiled = jax.jit(jax.grad(lambda p: loss(p, jnp.zeros(4))[0])).lower(shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes / shape.nbytes


@pytest.mark.optimised
def test_no_window_is_copied_for_each_timestep():
    assert _measured(512, 64) < 20  # a copy for each would be 64 times the series, forwards and backwards
