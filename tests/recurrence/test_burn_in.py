"""A burn-in: the way back leaves out the timesteps that the loss does not count, and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.recurrence.gradient import own
from rlfx.recurrence.gradient.counted import counted
from rlfx.recurrence.gradient.own import Truncation
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.truncated import BurnIn, truncated

T, B, K = 12, 4, 8
P = {"w": 0.6 * jax.random.normal(jax.random.key(0), (3, 3)), "b": jnp.asarray([0.1, -0.2, 0.3])}
H, DATA = jax.random.normal(jax.random.key(1), (B, 3)), jax.random.normal(jax.random.key(2), (T, B, 3))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Blocks as of many rows."""
    monkeypatch.setattr(own, "ROWS", 4 * B)


def moved(p, h, x):
    return jnp.tanh(h @ p["w"] + p["b"] + x)


def error(new, t):
    """What timesteps count is different, so that mistaken ones show."""
    return jnp.sum(new**2 * jnp.cos(0.7 * t.now.astype(new.dtype)))


def sequences(p, h, t, end=K, begin=K):
    """As of stored sequences: a state that is warmed up, and a loss of what follows."""
    params, data = p
    h = jnp.where(t.now == end, stop_gradient(h), h)
    new = moved(params, h, rlfx.inputs(data)[t])
    return jnp.where(t.now >= begin, error(new, t), 0.0), new


def ends_later(p, h, t):
    """The state ends once more, before the loss begins."""
    return sequences(p, jnp.where(t.now == 2, stop_gradient(h), h), t)


def target_beside(p, carry, t):
    """A target network's state beside it, which nothing differentiates."""
    _, new = sequences(p, carry[0], t)
    aside = moved({"w": 0.5 * stop_gradient(p[0]["w"]), "b": stop_gradient(p[0]["b"])}, carry[1], rlfx.inputs(p[1])[t])
    return jnp.where(t >= K, error(new, t) * (1.0 + jnp.sum(stop_gradient(aside) ** 2)), 0.0), (new, aside)


def looks_back(p, h, t):
    """The loss that counts reads what was computed before."""
    params, data = p
    h = jnp.where(t == K, stop_gradient(h), h)
    new = rlfx.series(moved(params, h, rlfx.inputs(data)[t]), start=jnp.zeros(3))
    return jnp.where(t >= K, error(new[t], t) + jnp.sum(new[t - 2] ** 3), 0.0), new[t]


def of_all(p, h, t):
    """What the loss counts is weighed by a mean over all timesteps."""
    params, data = p
    new = moved(params, jnp.where(t == K, stop_gradient(h), h), rlfx.inputs(data)[t])
    return jnp.where(t >= K, error(new, t) * rlfx.mean(new[0]), 0.0), new


PROGRAMS = {
    "sequences": sequences,
    "an end that no block begins with": functools.partial(sequences, end=7, begin=7),
    "a loss that begins later": functools.partial(sequences, begin=10),
    "ends once more": ends_later,
    "a target beside it": target_beside,
}
OTHERS = {
    "a loss that begins before": functools.partial(sequences, begin=5),
    "looks back": looks_back,
    "of all timesteps": of_all,
}


def carry_of(f):
    return (H, 0.5 * H) if f is target_beside else H


def gradient(make, f, t0=0, length=T, **options):
    fn = make(f, length=length, batch=B, **options)

    def loss(p, h, t0):
        value, (last, _) = fn((p, DATA), h, t0=t0)
        return value, last

    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return (jax.jit(run, static_argnums=2) if make is rlfx.compile else run)(P, carry_of(f), t0)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-5), found, expected)


def found_in(f):
    """``(first timestep in the loss, burn-ins of the loops that are differentiated)``."""
    program = rlfx.compile(f, length=T, batch=B).trace((P, DATA), carry_of(f))
    rule = GradientRule(program, rlfx.target("cpu"), Options())
    learner = rule.learner(frozenset(v for v in program.params if v.shape in ((3, 3), (3,))))
    counted_from = counted(learner, True).first
    found = [truncated(program, loop, learner.active, counted_from) for loop in learner.region.loops]
    return counted_from, [at.timesteps if isinstance(at, BurnIn) else None for at in found]


def test_burn_ins_are_found():
    found = {name: found_in(f) for name, f in PROGRAMS.items()}
    assert found == {
        "sequences": (8, [8]),
        "an end that no block begins with": (7, [7]),
        "a loss that begins later": (10, [8]),
        "ends once more": (8, [8]),
        "a target beside it": (8, [8]),
    }
    assert found_in(OTHERS["a loss that begins before"]) == (5, [None])


PLANS = [None, rlfx.Plan("one pass"), rlfx.Plan(), rlfx.Plan(environments=2), rlfx.Plan("blocks", 3)]


@pytest.mark.parametrize("f", [*PROGRAMS.values(), *OTHERS.values()], ids=[*PROGRAMS, *OTHERS])
def test_values_and_gradients_are_those_of_the_reference(f):
    expected = gradient(rlfx.reference, f)
    for plan in PLANS:
        try:
            found = gradient(rlfx.compile, f, plan=plan)
        except rlfx.errors.ScheduleError:
            assert plan in PLANS[2:]  # no environments, or no blocks, of some
            continue
        close(found, expected)


@pytest.mark.parametrize("f", [sequences, of_all])
def test_on_two_devices(f):
    """Each has its environments' cotangents; the loop may have what all of them share."""
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    for plan in PLANS[:2]:
        close(gradient(rlfx.compile, f, mesh=mesh, plan=plan), gradient(rlfx.reference, f))


@pytest.mark.parametrize("t0", [1, K, 3])
def test_calls_that_begin_later(t0):
    """The state ends, and the loss begins, at a time that is not the call's."""
    close(gradient(rlfx.compile, sequences, t0=t0), gradient(rlfx.reference, sequences, t0=t0))
    fn = rlfx.compile(sequences, length=T, batch=B, plan=rlfx.Plan("one pass"))
    (_, (expected, _)) = gradient(rlfx.reference, sequences, t0=t0)
    close(jax.jit(jax.grad(lambda p, t0: fn((p, DATA), H, t0=t0)[0]))(P, t0), expected)


def test_what_else_is_differentiated():
    """A caller's derivative of the last state, and of what every timestep puts out, the burn-in's too."""

    def f(p, h, t):
        loss, new = sequences(p, h, t)
        return loss, new, new[0] ** 2

    def run(fn):
        def total(p):
            loss, (last, aux) = fn((p, DATA), H)
            return loss + (last**3).mean() + (aux**2).mean()

        return jax.value_and_grad(total)(P)

    expected = run(rlfx.reference(f, length=T, batch=B))
    for plan in PLANS[:3]:
        fn = rlfx.compile(f, length=T, batch=B, plan=plan)
        close(jax.jit(functools.partial(run, fn))(), expected)


def test_against_two_calls_by_hand():
    """As one writes it: the states before without a derivative, and those after."""

    def by_hand(p, h):
        def step(h, x):
            new = jnp.tanh(h @ p["w"] + p["b"][None] + x)
            return new, new

        h, _ = jax.lax.scan(step, h, DATA[:K])
        last, news = jax.lax.scan(step, stop_gradient(h), DATA[K:])
        weight = jnp.cos(0.7 * jnp.arange(K, T).astype(news.dtype))
        return (news**2 * weight[:, None, None]).sum() / (T * B), last

    (value, new), grads = jax.value_and_grad(by_hand, (0, 1), has_aux=True)(P, H)
    (found, last), slopes = gradient(rlfx.compile, sequences)
    close((found, last, slopes), (value, new, grads))
    assert not np.any(slopes[1])


def test_nothing_of_the_burn_in_is_computed():
    """A derivative that is infinite there, times nothing, leaves no trace; no condition is asked for without a burn-in."""

    def roots(p, h, t, end=K):
        params, data = p
        h = jnp.where(t == end, stop_gradient(h), h)
        new = jnp.sqrt(jnp.where(t < K - 3, 0.0, 1.0) * moved(params, h, rlfx.inputs(data)[t]) ** 2)
        return jnp.where(t >= K, error(new, t), 0.0), new

    plan = rlfx.Plan("one pass")
    _, (grads, _) = gradient(rlfx.compile, roots, plan=plan)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(grads))

    def text(f):
        fn = rlfx.compile(f, length=T, batch=B, plan=plan)
        notes = str(fn.explain((P, DATA), H).passes)
        return jax.jit(jax.grad(lambda p: fn((p, DATA), H)[0])).lower(P).compile().as_text(), notes

    compiled, notes = text(sequences)
    assert "conditional" in compiled
    assert f"no derivative goes back beyond t = {K}: the loss counts nothing before" in notes
    compiled, notes = text(functools.partial(sequences, begin=5))
    assert "conditional" not in compiled
    assert "goes back beyond" not in notes


def test_second_derivatives_and_populations():
    fn, same = rlfx.compile(sequences, length=T, batch=B), rlfx.reference(sequences, length=T, batch=B)

    def twice(fn, p):
        slope = lambda p: sum(x.sum() for x in jax.tree.leaves(jax.grad(lambda p: fn((p, DATA), H)[0])(p)))  # noqa: E731
        return jax.grad(slope)(p)

    close(jax.jit(functools.partial(twice, fn))(P), twice(same, P))
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), P)
    found = jax.jit(jax.vmap(jax.grad(lambda p: fn((p, DATA), H)[0])))(many)
    for i in range(2):
        one = jax.grad(lambda p: same((p, DATA), H)[0])(jax.tree.map(lambda x, i=i: x[i], many))
        close(jax.tree.map(lambda x, i=i: x[i], found), one)


@pytest.mark.parametrize(
    ("burn_in", "length", "most", "fewest", "size"),
    [(40, 120, 30, 8, 20), (40, 120, 8, 8, 8), (7, 12, 12, 4, 4), (8, 12, 6, 1, 4), (5, 7, 7, 2, None), (8, 12, 12, 9, None)],
)
def test_blocks_end_with_a_burn_in_where_they_can(burn_in, length, most, fewest, size):
    assert Truncation(BurnIn(burn_in), True, lambda x: x).block_of(length, most, fewest) == size
