"""Gradients that end at known timesteps: windows are differentiated side by side, and nothing else is taken for one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.recurrence.analysis.timed import Timed
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule import physical
from rlfx.recurrence.schedule.truncated import InWindows, truncated
from tests.oracle import driver, grow

T, B, W = 12, 2, 4
P = {"w": jax.random.normal(jax.random.key(0), (3, 3)), "b": jnp.asarray([0.1, -0.2, 0.3])}
H, KEY = jax.random.normal(jax.random.key(1), (B, 3)), jax.random.key(2)


def moved(p, h, t):
    return jnp.tanh(h @ p["w"] + p["b"] + 0.3 * jax.random.normal(t.key_for("noise"), (3,)))


def lost(h, t):
    """What timesteps count is different, so that mistaken ones show."""
    return jnp.sum(h**2 * jnp.cos(0.7 * t.now.astype(h.dtype)))


def before(p, h, t):
    """What is read ends, with masks of a window's last timestep beside it."""
    h = jnp.where(t.now % W == 0, stop_gradient(h), h)
    new = moved(p, h, t)
    return lost(new, t) + jnp.where(t.now % W == W - 1, jnp.sum(new), 0.0), new


def after(p, h, t):
    """What is carried ends, as of an analytical policy gradient."""
    new = moved(p, h, t)
    return lost(new, t), jnp.where((t.now + 1) % W == 0, stop_gradient(new), new)


def both(p, carry, t):
    """Two states, one of which ends at every second timestep."""
    h, g = carry
    h, g = jnp.where(t.now % W == 0, stop_gradient(h), h), jnp.where(t.now % 2 == 0, stop_gradient(g), g)
    new = moved(p, h + 0.5 * g, t)
    return lost(new + g, t), (new, jnp.sin(g) + new)


def halves(p, h, t):
    """It ends once, in the middle."""
    new = moved(p, jnp.where(t == T // 2, stop_gradient(h), h), t)
    return lost(new, t), new


def beside(p, carry, t):
    """A state that ends, and one that is given its derivative by nothing."""
    h, count = carry
    h = jnp.where(t.now % W == 0, stop_gradient(h), h)
    new = moved(p, h * jnp.cos(stop_gradient(count))[None], t)
    return lost(new, t), (new, count + 0.5)


def leaks(p, h, t):
    """The loss knows of what was read."""
    kept = jnp.where(t.now % W == 0, stop_gradient(h), h)
    new = moved(p, kept, t)
    return lost(new, t) + 0.1 * jnp.sum(h), new


def goes_on(p, carry, t):
    """One state ends, the other one does not."""
    h, g = carry
    new = moved(p, jnp.where(t.now % W == 0, stop_gradient(h), h) + g, t)
    return lost(new, t), (new, 0.5 * g + 0.1 * new)


def by_data(p, h, t):
    """It ends where a state says so."""
    new = moved(p, jnp.where(h[0] > 0, stop_gradient(h), h), t)
    return lost(new, t), new


def uneven(p, h, t):
    """Windows that do not divide T."""
    new = moved(p, jnp.where(t.now % 5 == 0, stop_gradient(h), h), t)
    return lost(new, t), new


def turned_round(p, h, t):
    """It ends everywhere but at some timesteps, none of which is a third one."""
    new = moved(p, jnp.where(t.now % W == 0, h, stop_gradient(h)), t)
    return lost(new, t), new


def longer_ago(p, h, t):
    """It reads further back than a window's first timestep."""
    past = rlfx.series(h)
    h = jnp.where(t.now % W == 0, stop_gradient(h), h)
    new = moved(p, h, t)
    return lost(new, t) + jnp.sum(past[rlfx.maximum(t - 2, 0)]), new


CARRIES = {both: (H, 0.5 * H), beside: (H, jnp.ones(B)), goes_on: (H, 0.5 * H)}
ENDING = {before: W, after: W, both: W, halves: T // 2, beside: W, turned_round: 3}
OTHERS = [leaks, goes_on, by_data, uneven, longer_ago]


def carry_of(f):
    return CARRIES.get(f, H)


def gradient(make, f, t0=0, length=T, **options):
    fn = make(f, length=length, batch=B, **options)
    run = jax.value_and_grad(lambda p, h, t0: fn(p, h, KEY, t0=t0), (0, 1), has_aux=True)
    return (jax.jit(run, static_argnums=2) if make is rlfx.compile else run)(P, carry_of(f), t0)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def windows(f, length=T):
    """Of the loops that are differentiated."""
    fn = rlfx.compile(f, length=length, batch=B)
    program = fn.trace(P, carry_of(f), KEY)
    rule = GradientRule(program, rlfx.target("cpu"), Options())
    learner = rule.learner(frozenset(program.params))
    found = [truncated(program, loop, learner.active) for loop in learner.region.loops]
    return [at.timesteps if isinstance(at, InWindows) else None for at in found]


@pytest.mark.parametrize("f", ENDING)
def test_windows_are_found(f):
    assert windows(f) == [ENDING[f]]


@pytest.mark.parametrize("f", OTHERS)
def test_what_is_no_window(f):
    assert set(windows(f)) == {None}


PLANS = [None, rlfx.Plan("one pass"), rlfx.Plan(), rlfx.Plan("blocks", 3), rlfx.Plan("blocks", 8)]


@pytest.mark.parametrize("f", [*ENDING, *OTHERS])
def test_values_and_gradients_are_those_of_the_reference(f):
    expected = gradient(rlfx.reference, f)
    plans = PLANS if f in ENDING else PLANS[:1]
    for plan in plans:
        close(gradient(rlfx.compile, f, plan=plan), expected)


@pytest.mark.parametrize("f", [before, after])
@pytest.mark.parametrize("t0", [3, W, 7])
def test_calls_that_begin_later(f, t0):
    """Windows begin at multiples of W, not at a call's first timestep."""
    close(gradient(rlfx.compile, f, t0=t0, plan=rlfx.Plan("one pass")), gradient(rlfx.reference, f, t0=t0))


def test_a_beginning_that_only_the_call_knows():
    fn = rlfx.compile(before, length=T, batch=B, plan=rlfx.Plan("one pass"))
    run = jax.jit(jax.grad(lambda p, t0: fn(p, H, KEY, t0=t0)[0]))
    for t0 in (0, 2, W):
        (_, (expected, _)) = gradient(rlfx.reference, before, t0=t0)
        close(run(P, t0), expected)
    starts = jnp.arange(3, dtype=jnp.int32)
    many = jax.jit(jax.vmap(jax.grad(lambda p, t0: fn(p, H, KEY, t0=t0)[0]), (None, 0)))(P, starts)
    for i in range(3):
        close(jax.tree.map(lambda x, i=i: x[i], many), run(P, i))


def test_a_window_against_a_loop_by_hand():
    """``jax.lax.scan`` over windows of ``jax.lax.scan``, as one writes it."""
    drawn = lambda p, h, t: (jnp.sum(h), h, jax.random.normal(t.key_for("noise"), (3,)))  # noqa: E731
    _, (_, given) = rlfx.compile(drawn, length=T, batch=B)(P, H, KEY)

    def by_hand(p, h):
        def step(h, at_t):
            t, noise = at_t
            new = jnp.tanh(h @ p["w"] + p["b"][None] + 0.3 * noise)
            return new, (new**2 * jnp.cos(0.7 * t.astype(h.dtype))).sum() + jnp.where(t % W == W - 1, new.sum(), 0.0)

        def window(h, at):
            return jax.lax.scan(step, stop_gradient(h), at)

        at = jnp.arange(T, dtype=jnp.int32).reshape(-1, W), given.reshape(-1, W, B, 3)
        after, found = jax.lax.scan(window, h, at)
        return found.sum() / (T * B), after

    (value, new), grads = jax.value_and_grad(by_hand, (0, 1), has_aux=True)(P, H)
    (found, (last, _)), slopes = gradient(rlfx.compile, before)
    close((found, last, slopes), (value, new, grads))


def trips(text):
    """How often the loops of a compiled program go round."""
    return sorted(map(int, re.findall(r'known_trip_count":\{"n":"(\d+)"', text)))


def test_the_way_back_has_a_window_s_timesteps_and_no_condition():
    fn = rlfx.compile(before, length=48, batch=B)
    compiled = jax.jit(jax.grad(lambda p: fn(p, H, KEY)[0])).lower(P).compile().as_text()
    assert trips(compiled)[-2:] == [W, 48]
    assert "conditional" not in compiled  # at which time a call begins is known when it is compiled
    assert f"no derivative leaves windows of {W} timesteps" in str(fn.explain(P, H, KEY).passes)


def test_second_derivatives_and_products_with_them():
    fn, same = rlfx.compile(before, length=T, batch=B), rlfx.reference(before, length=T, batch=B)
    along = jax.tree.map(jnp.ones_like, P)

    def twice(fn):
        slope = lambda p: sum(jnp.vdot(a, b) for a, b in zip(  # noqa: E731
            jax.tree.leaves(jax.grad(lambda p: fn(p, H, KEY)[0])(p)), jax.tree.leaves(along), strict=True))  # fmt: skip
        return jax.grad(slope)(P)

    close(jax.jit(functools.partial(twice, fn))(), twice(same))


def test_numbers_of_what_follows_from_t():
    def f(p, h, t):
        age = (t.now * 3 - 1) // 2 % 5
        late = jnp.where((t.now > 2) & ~(t.now == 4), jnp.abs(2 - t.now), jnp.sign(t.now - 1))
        return jnp.sum(h) * (age.astype(h.dtype) + late.astype(h.dtype)), h, (age, late, jnp.sum(h))

    program = rlfx.compile(f, length=6, batch=B).trace(P, H, KEY)
    age, late, total = map(Timed(program).of, program.aux)
    t = np.arange(6)
    np.testing.assert_array_equal(age, (t * 3 - 1) // 2 % 5)
    np.testing.assert_array_equal(late, np.where((t > 2) & (t != 4), np.abs(2 - t), np.sign(t - 1)))
    assert total is None


@pytest.mark.parametrize("seed", [910_001, 910_014, 910_019, 910_026, 910_062, 910_076, 910_087, 910_146])
def test_generated_programs(seed, monkeypatch):
    """Those whose carry ends at every second timestep, in calls that begin at 0."""
    found = []
    monkeypatch.setattr(physical, "truncated", lambda *of: found.append(truncated(*of)) or found[-1])
    verdict = driver.check(grow.grow(seed, 2, length=8, t0=0, until=None), plans=1, reference=True)
    assert not verdict.wrong, verdict.wrong
    assert {1, 2} & {at.timesteps for at in found if isinstance(at, InWindows)}
