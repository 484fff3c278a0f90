"""States that begin anew at known timesteps: windows run side by side, and nothing else is taken for one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.gradient.one_pass import one_pass_of
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.rewrite.now_and_then import with_now_and_then
from rlfx.recurrence.schedule import physical
from rlfx.recurrence.schedule.restarted import restarted
from rlfx.recurrence.schedule.schedule import Loop
from tests.oracle import driver, grow

T, B, W, N = 12, 2, 4, 3


def normal(i, *shape):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape, jnp.float32)


P = {"w": normal(0, N, N), "b": jnp.asarray([0.1, -0.2, 0.3], jnp.float32)}
DATA = {"state": normal(1, T, B, N), "done": jnp.arange(T * B).reshape(T, B) % 5 == 3}
H, KEY = normal(2, B, N), jax.random.key(2)


def moved(p, h, t):
    return jnp.tanh(h @ p["w"] + p["b"] + 0.3 * jax.random.normal(t.key_for("noise"), (N,), jnp.float32))


def lost(h, t):
    """What timesteps count is different, so that mistaken ones show."""
    return jnp.sum(h**2 * jnp.cos(0.7 * t.now.astype(h.dtype)))


def stored(p, h, t):
    """Stored states of replayed sequences, and episodes that end within a window."""
    p, data = p
    x = rlfx.inputs(data)[t]
    h = moved(p, jnp.where(t.now % W == 0, x["state"], h), t)
    return lost(h, t), jnp.where(x["done"], 0.0, h), (h.sum(), x["done"])


def but_the_first(p, h, t):
    """The first window begins with the carry that a call is given."""
    p, data = p
    h = moved(p, jnp.where((t.now % W == 0) & (t.now > 0), rlfx.inputs(data)[t]["state"], h), t)
    return lost(h, t), h


def two(p, carry, t):
    """Two states, one of which begins anew at every second timestep; one is of whole numbers."""
    p, data = p
    h, n = carry
    h = jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h)
    n = jnp.where(t.now % 2 == 0, 1, n)
    new = moved(p, h * n.astype(h.dtype), t)
    return lost(new, t), (new, n + n * (new[0] > 0).astype(n.dtype)), n


def halves(p, h, t):
    """It begins anew once, in the middle."""
    p, data = p
    h = moved(p, jnp.where(t.now == T // 2, rlfx.inputs(data)[t]["state"], h), t)
    return lost(h, t), h


def of_parameters(p, h, t):
    """A state that is learned, for every window."""
    p, _ = p
    h = moved(p, jnp.where(t.now % 3 == 0, p["b"], h), t)
    return lost(h, t), h


def encoded(p, h, t):
    """A code of what is observed then, of which the encoder is computed for the first timesteps of windows alone."""
    p, data = p
    h = moved(p, jnp.where(t.now % W == 0, jnp.sin(rlfx.inputs(data)[t]["state"] @ p["w"]), h), t)
    return lost(h, t), h


def follows(p, h, t):
    """Returns and windows beside it see all timesteps."""
    p, data = p
    h = rlfx.series(moved(p, jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h), t), end=jnp.zeros(N, jnp.float32))
    total = rlfx.discounted_sum(rlfx.series(h[t].sum())[t:], 0.9)
    return lost(h[t], t) + 0.1 * total * h[t + 1][0], h[t]


def leaks(p, h, t):
    """The loss knows of what came before."""
    p, data = p
    new = moved(p, jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h), t)
    return lost(new, t) + 0.1 * jnp.sum(jax.lax.stop_gradient(h)), new


def told(p, h, t):
    """What came before is no part of the loss, and returned."""
    p, data = p
    new = moved(p, jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h), t)
    return lost(new, t), new, h[0] > 0


def goes_on(p, carry, t):
    """One state begins anew, the other one does not, and has no derivative."""
    p, data = p
    h, g = carry
    h = jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h)
    new = moved(p, h + jax.lax.stop_gradient(g), t)
    return lost(new, t), (new, 0.5 * g + 0.1 * new)


def by_data(p, h, t):
    """It begins anew where data say so."""
    p, data = p
    x = rlfx.inputs(data)[t]
    h = moved(p, jnp.where(x["done"], x["state"], h), t)
    return lost(h, t), h


def uneven(p, h, t):
    """Windows that do not divide T."""
    p, data = p
    h = moved(p, jnp.where(t.now % 5 == 0, rlfx.inputs(data)[t]["state"], h), t)
    return lost(h, t), h


def branches(p, h, t):
    """Of what one timestep of a window computes alone, the others would compute all."""
    p, data = p
    h = jnp.where(t.now % W == 0, rlfx.inputs(data)[t]["state"], h)
    h = moved(p, jax.lax.cond(t.now % W == 1, lambda h: jnp.sin(h @ p["w"]), lambda h: h, h), t)
    return lost(h, t), h


CARRIES = {two: (H, jnp.ones(B, jnp.int32)), goes_on: (H, 0.5 * H)}
WINDOWS = {stored: W, but_the_first: W, two: W, halves: T // 2, of_parameters: 3, encoded: W, follows: W}
#: How many of the plans are legal, of what reads following timesteps.
LEGAL = {follows: 3}
OTHERS = [leaks, told, goes_on, by_data, uneven, branches]
PLANS = [None, rlfx.Plan("one pass"), rlfx.Plan(), rlfx.Plan("blocks", 3)]


def gradient(make, f, t0=0, **options):
    fn = make(f, length=T, batch=B, **options)
    run = jax.value_and_grad(lambda p, h: fn((p, DATA), h, KEY, t0=t0), (0, 1), has_aux=True, allow_int=True)
    return jax.tree.map(floats, jax.jit(run)(P, CARRIES.get(f, H)))


def floats(x):
    return jnp.zeros(x.shape, jnp.float32) if x.dtype == jax.dtypes.float0 else x


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def windows(f):
    program = with_now_and_then(rlfx.trace(f, (P, DATA), CARRIES.get(f, H), KEY, length=T, batch=B))
    rule = GradientRule(program, rlfx.target("cpu"), Options())
    wrt = frozenset(v for v in program.params if v.shape in ((N,), (N, N)))
    loops = [s for s in one_pass_of(rule.learner(wrt)).stages if isinstance(s, Loop) and s.direction == "forward"]
    return [at and at.timesteps for at in (restarted(program, loop) for loop in loops)]


@pytest.mark.parametrize("f", WINDOWS)
def test_windows_are_found(f):
    assert WINDOWS[f] in windows(f)


@pytest.mark.parametrize("f", OTHERS)
def test_what_is_no_window(f):
    assert set(windows(f)) == {None}


@pytest.mark.parametrize("f", [*WINDOWS, *OTHERS])
def test_values_and_gradients_are_those_of_the_reference(f):
    expected = gradient(rlfx.reference, f)
    for plan in PLANS[: LEGAL.get(f, len(PLANS))] if f in WINDOWS else PLANS[:1]:
        close(gradient(rlfx.compile, f, plan=plan), expected)


@pytest.mark.parametrize("f", [stored, but_the_first])
@pytest.mark.parametrize("t0", [3, W])
def test_calls_that_begin_later(f, t0):
    """Windows begin at multiples of W, not at a call's first timestep."""
    close(gradient(rlfx.compile, f, t0=t0, plan=rlfx.Plan("one pass")), gradient(rlfx.reference, f, t0=t0))


def test_a_beginning_that_only_the_call_knows():
    fn = rlfx.compile(stored, length=T, batch=B, plan=rlfx.Plan("one pass"))
    run = jax.jit(jax.grad(lambda p, t0: fn((p, DATA), H, KEY, t0=t0)[0]))
    for t0 in (0, 2):
        (_, (expected, _)) = gradient(rlfx.reference, stored, t0=t0)
        close(run(P, t0), expected)


def by_hand(p):
    """Windows as an axis of arrays, one loop over their timesteps."""
    _, (_, given) = rlfx.compile(lambda p, h, t: (jnp.sum(h), h, jax.random.normal(t.key_for("noise"), (N,), jnp.float32)),
                                 length=T, batch=B)(P, H, KEY)  # fmt: skip
    cut = lambda x: jnp.swapaxes(x.reshape(-1, W, *x.shape[1:]), 0, 1)  # noqa: E731

    def step(h, at_t):
        t, noise, done = at_t
        new = jnp.tanh(h @ p["w"] + p["b"][None, None] + 0.3 * noise)
        return jnp.where(done[..., None], 0.0, new), (new**2 * jnp.cos(0.7 * t.astype(h.dtype))[:, None, None]).sum()

    at = cut(jnp.arange(T, dtype=jnp.int32)), cut(given), cut(DATA["done"])
    last, found = jax.lax.scan(step, DATA["state"][::W], at)
    return found.sum() / (T * B), last[-1]


def test_windows_against_a_loop_by_hand():
    (value, new), slope = jax.value_and_grad(by_hand, has_aux=True)(P)
    (found, (last, _)), (slopes, by_start) = gradient(rlfx.compile, stored)
    close((found, last, slopes), (value, new, slope))
    assert not np.any(by_start)


def trips(text):
    """How often the loops of a compiled program go round."""
    return sorted(map(int, re.findall(r'known_trip_count":\{"n":"(\d+)"', text)))


def test_no_loop_has_more_timesteps_than_a_window():
    fn = rlfx.compile(stored, length=T, batch=B)
    grad = jax.jit(jax.grad(lambda p: fn((p, DATA), H, KEY)[0]))
    assert set(trips(grad.lower(P).compile().as_text())) <= {W}
    said = fn.explain((P, DATA), H, KEY, wrt=(True, {"state": False, "done": False}))
    assert f"its state begins anew every {W} timesteps: these windows run side by side" in str(said)


def test_other_transforms_of_it():
    fn, same = (make(stored, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    loss = lambda fn: lambda p: fn((p, DATA), H, KEY)[0]  # noqa: E731
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), P)
    close(jax.jit(jax.vmap(jax.grad(loss(fn))))(many), jax.jit(jax.vmap(jax.grad(loss(same))))(many))
    along = jax.tree.map(jnp.ones_like, P)
    twice = lambda fn: jax.jvp(jax.grad(loss(fn)), (P,), (along,))  # noqa: E731
    close(jax.jit(lambda: twice(fn))(), jax.jit(lambda: twice(same))())


@pytest.mark.parametrize("seed", [970_006, 970_011, 970_018, 970_022, 970_024, 970_030])
def test_generated_programs(seed, monkeypatch):
    """Those whose states begin anew at every second timestep, or third, in calls that begin at 0."""
    found = []
    monkeypatch.setattr(physical, "restarted", lambda *of: found.append(restarted(*of)) or found[-1])
    tree = grow.grow(seed, 2 + seed % 4, length=6 if seed % 3 else 12, t0=0, until=None)
    verdict = driver.check(grow.begun_anew(tree, 2 if seed % 2 else 3), plans=1, reference=True)
    assert not verdict.wrong, verdict.wrong
    assert {2, 3} & {at.timesteps for at in found if at}
