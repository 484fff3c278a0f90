"""Plans and budgets hold for every output: pullbacks of the loss, aux and the carry, and of unrolled programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import MemoryBudgetError, RlfxError, ScheduleError
from rlfx.recurrence.plan.choose import why_not
from rlfx.recurrence.schedule.learner import is_float
from tests import strategies
from tests.recurrence import test_through_time as recurrent
from tests.recurrence.test_generated import mismatches
from tests.sampling import met, spread

ONE = jnp.float32(1.0)
LENGTH, BATCH = 7, 4


# -- a loss, and more than it ----------------------------------------------------------------------------------------

ASKED = [
    {"memory_budget": 1 << 20},
    *({"plan": p} for p in (rlfx.Plan(), *(rlfx.Plan("blocks", n) for n in (1, 3, 4)))),
    {"plan": rlfx.Plan("blocks", 1, cached=True)},
    {"plan": rlfx.Plan("blocks", 2)},
]
#: What is differentiated besides the loss.
PICKED = [
    lambda out: out[1][0],
    lambda out: out[0] + out[1][0],
    lambda out: out[1][1].sum(),
    lambda out: out[0] * out[1][0],
    lambda out: out[0] + out[1][1][-1],
    lambda out: jnp.where(out[0] > 0, out[1][0], out[0]),
    lambda out: jax.lax.cond(out[0] > 0, lambda: out[1][1][0], lambda: out[0]),
    lambda out: jnp.stack([out[0], out[1][0]]).max(),
    lambda out: sum(jnp.sum(x) for x in jax.tree.leaves(out)),
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_gradient_of_more_than_the_loss_has_the_plan(asked):
    """63 gradients of aux or the carry, too, against a plain loop."""
    assert len(ASKED) * len(PICKED) >= 50
    fn = rlfx.compile(lambda p, c, t: (jnp.sin(p * c), 0.9 * p * c, p + c), length=4, **asked)

    def loop(p):
        c, losses, aux = ONE, [], []
        for _ in range(4):
            losses.append(jnp.sin(p * c))
            aux.append(p + c)
            c = 0.9 * p * c
        return sum(losses) / 4, (c, jnp.stack(aux))

    def gradients(call):
        return jax.jit(lambda p: [jax.grad(lambda p, pick=pick: pick(call(p)))(p) for pick in PICKED])(2.0)

    np.testing.assert_allclose(gradients(lambda p: fn(p, ONE)), gradients(loop), rtol=1e-5)


# -- every output, under every plan ----------------------------------------------------------------------------------


def pullback(call, arguments, seed=0):
    """The outputs of ``call(params, carry)``, and their random cotangents pulled back to both."""

    def floats(params, carry):
        leaves = jax.tree.leaves(call(params, carry))
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]

    outs, pull = jax.vjp(floats, *arguments)
    rng = np.random.RandomState(seed)
    return outs, pull([jnp.asarray(rng.randn(*x.shape), x.dtype) for x in outs])


def close(got, want, tolerance=2e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for x, y in zip(got, want, strict=True):
        if x.dtype != jax.dtypes.float0:
            scale = max(1.0, float(jnp.max(jnp.abs(y), initial=0.0)))
            np.testing.assert_allclose(x / scale, y / scale, atol=tolerance, rtol=tolerance)


def policy(p, x, t):
    """No gradient flows through time; aux varies with both axes, with one, with none."""
    x = jax.lax.stop_gradient(x)
    h = jnp.tanh(p["w"] @ x)
    y = rlfx.series(jax.lax.stop_gradient(jnp.sum(h)), end=0.0)
    shared = p["v"] * t.now.astype(jnp.float32)
    x = jnp.cos(x + h[:2])
    return jnp.sum(h * p["v"]) * (y[t] - 0.9 * y[t + 1]), x, {"h": h, "shared": shared, "w": p["w"] * 2.0}


def gru(p, carry, t):
    h = recurrent.cell(p, carry["h"], recurrent.observation(t))
    count = carry["n"] + 1
    return jnp.sum(p["v"] * h) ** 2, {"h": jnp.where(count % 3 == 0, p["start"], h), "n": count}, (h, p["v"] + h[0])


WRITTEN: dict[str, Any] = {
    "policy": (
        policy,
        {"w": jnp.full((3, 2), 0.3), "v": jnp.arange(3.0)},
        jnp.linspace(0.1, 1.0, 2 * BATCH).reshape(BATCH, 2),
    ),
    "gru": (gru, recurrent.weights(), {"h": jnp.full((BATCH, 3), 0.1), "n": jnp.arange(BATCH)}),
}
PLANS = [
    rlfx.Plan(),
    rlfx.Plan("blocks", 1),
    rlfx.Plan("blocks", 3),
    rlfx.Plan("blocks", 7),
    rlfx.Plan("blocks", 2, cached=True),
]


def unrolled(f):
    def g(*args):
        loss, carry, aux = f(*args)
        return carry, (loss, aux)

    return g


@pytest.mark.parametrize(("name", "make"), met(WRITTEN, ["compile", "unroll"]))
def test_every_output_is_pulled_back_under_every_plan(name, make):
    f, params, carry = WRITTEN[name]
    f, kinds = (unrolled(f), (rlfx.unroll,)) if make == "unroll" else (f, (rlfx.compile,))
    sizes = {"length": LENGTH, "batch": BATCH}
    key = jax.random.key(3)

    def evaluated(fn):
        return jax.jit(functools.partial(pullback, lambda p, c: fn(p, c, key)))((params, carry))

    expected = evaluated(rlfx.lower(rlfx.trace(f, params, carry, key, loss=make == "compile", **sizes)))
    oracle = rlfx.reference(rlfx.trace(f, params, carry, key, loss=make == "compile", **sizes))
    close(expected, pullback(lambda p, c: oracle(p, c, key), (params, carry)))
    for plan in PLANS:
        close(evaluated(kinds[0](f, **sizes, plan=plan)), expected)


def test_tiles_of_environments_count_what_they_share_once():
    f, params, carry = WRITTEN["policy"]
    for make, g in ((rlfx.compile, f), (rlfx.unroll, unrolled(f))):
        of = lambda fn: jax.jit(jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(fn(p, carry)))))(params)  # noqa: E731
        expected = of(make(g, length=LENGTH, batch=BATCH))
        for plan in (rlfx.Plan("blocks", 3, 2), rlfx.Plan("blocks", 7, 1)):
            close(of(make(g, length=LENGTH, batch=BATCH, plan=plan)), expected)


@pytest.mark.parametrize("form", ["stream", "replay"])
def test_the_last_carry_under_forms_that_act_in_turns(form):
    def f(p, x, t):
        x = jax.lax.stop_gradient(x)
        h = jnp.tanh(p * x)
        value = rlfx.series(jax.lax.stop_gradient(jnp.sum(h)), end=0.0)
        weight = value[t] - value[t + 1] if form == "stream" else jnp.sin(value[t])
        return jnp.sum(h) * weight, jnp.cos(x + h)

    arguments = jnp.float32(0.7), jnp.linspace(0.1, 1.0, 5 * BATCH).reshape(BATCH, 5)
    expected = pullback(rlfx.reference(f, length=LENGTH, batch=BATCH), arguments)
    for block in (2, 7):
        fn = rlfx.compile(f, length=LENGTH, batch=BATCH, plan=rlfx.Plan(form, block))
        close(pullback(fn, arguments), expected)


@pytest.mark.parametrize("seed", spread(range(60), 20))
def test_generated_programs(seed):
    """All outputs in blocks of a random length, where that is legal; see ``test_generated`` to reproduce a program."""
    p = strategies.program(seed, 3)
    params, carry, key = p.arguments()
    plan = rlfx.Plan("blocks", int(np.random.RandomState(seed).randint(1, p.length + 1)))
    try:
        rule, _, _ = rlfx.compile(p.function, **p.options())._prepare(params, carry, key)
    except RlfxError:
        return
    floats = frozenset(v for v in (*rule.program.params, *rule.program.carry) if is_float(v))
    if why_not("blocks", rule.learner(floats, rule.differentiable)) is not None:
        return

    def evaluated(plan):
        fn = rlfx.compile(p.function, **p.options(), plan=plan)
        return jax.jit(lambda *args: pullback(lambda params, c: fn(params, c, key, t0=p.t0), args))(params, carry)

    assert not mismatches(evaluated(plan), evaluated(rlfx.Plan())), f"{p!r}{plan!r}"


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_a_budget_holds_for_unrolled_programs_and_their_pullback():
    def f(p, h, t):
        h = jnp.tanh(p @ h)
        return h, jnp.sum(h)

    p, h = jnp.eye(16) * 0.9, jnp.ones((8, 16))
    sizes = {"length": 64, "batch": 8}

    def of(fn):
        def both(p, h):
            outs, pull = jax.vjp(fn, p, h)
            return pull(outs)

        return jax.jit(both).lower(p, h).compile()

    def bytes_of(compiled):
        return compiled.memory_analysis().temp_size_in_bytes

    whole = of(rlfx.unroll(f, **sizes))
    budget = bytes_of(whole) // 2
    small = of(rlfx.unroll(f, **sizes, memory_budget=budget))
    assert bytes_of(small) <= budget
    close(small(p, h), whole(p, h))
    with pytest.raises(MemoryBudgetError, match="The smallest plan needs"):
        of(rlfx.unroll(f, **sizes, memory_budget=1000))


def test_a_budget_of_other_outputs_is_counted_under_vmap():
    def f(p, h, t):
        h = jnp.tanh(p * h)
        return jnp.sum(h), h, h

    p, h = jnp.linspace(0.5, 0.9, 3), jnp.ones((4, 16))
    fn = rlfx.compile(f, length=32, batch=4, memory_budget=1 << 20)
    loop = rlfx.compile(f, length=32, batch=4)
    of = lambda fn: jax.jit(jax.vmap(jax.grad(lambda p: jnp.sum(fn(p, h)[1][1] ** 2))))(p)  # noqa: E731
    close(of(fn), of(loop))
    tight = rlfx.compile(f, length=32, batch=4, memory_budget=30_000)
    jax.eval_shape(jax.grad(lambda p: jnp.sum(tight(p, h)[1][1] ** 2)), p[0])
    with pytest.raises(MemoryBudgetError, match="mapped 50 times"):
        jax.eval_shape(jax.vmap(jax.grad(lambda p: jnp.sum(tight(p, h)[1][1] ** 2))), jnp.linspace(0.5, 0.9, 50))


# -- the last carry of environments that end apart -----------------------------------------------------------------------

APART = {"left": jnp.asarray([3.0, 1.0, 7.0, 5.0]), "x": jnp.linspace(0.5, 1.5, 4), "s": rlfx.Shared(jnp.float32(0.3))}


def direct(p, c, t):
    """The next carry depends on the parameters at its own timestep alone: through the others it is kept after an end."""
    x = jax.lax.stop_gradient(c["x"])
    after = {"left": c["left"] - 1.0, "x": jnp.tanh(p * x + 0.2 / c["left"]), "s": p * rlfx.mean(x, "b")}
    return p * x / c["left"], after, p * x


def through_time(p, c, t):
    """It goes through all of them."""
    after = {
        "left": c["left"] - 1.0,
        "x": jnp.sin(p * c["x"]) + 0.2 / c["left"],
        "s": 0.9 * c["s"] + p * rlfx.mean(jax.lax.stop_gradient(c["x"]), "b"),
    }
    return p * c["x"] / c["left"], after, p * c["x"]


@pytest.mark.parametrize("f", spread([through_time, direct], 1))
def test_the_last_carry_of_environments_that_end_apart(f):
    """Blocks pass each environment's cotangent to where it ended; all infinite derivatives are behind the ends."""
    options = {"length": 6, "batch": 4, "until": lambda c: c["left"] <= 0}

    def gradient(make, some=False, **plan):
        """The pullback; ``some`` environments at a time have none of what is theirs, and no carry that all share."""
        fn = make(f, **options, **plan)

        def outputs(p, x):
            loss, (carry, aux, _) = fn(p, {**APART, "x": x})
            return loss, jnp.cos(carry["x"]), jnp.float32(0.0) if some else carry["s"].value, aux

        of = functools.partial(outputs, x=APART["x"]) if some else outputs
        given = (jnp.float32(0.7), *([] if some else [APART["x"]]))
        pulled = lambda *cotangents: jax.vjp(of, *given)[1](cotangents)  # noqa: E731
        return pulled if make is rlfx.reference else jax.jit(pulled)

    x, aux = jnp.asarray([1.0, -2.0, 3.0, 0.5]), jnp.cos(jnp.arange(24.0)).reshape(6, 4)
    reference = {some: gradient(rlfx.reference, some) for some in (False, True)}
    plans = rlfx.Plan(), rlfx.Plan("blocks", 1), rlfx.Plan("blocks", 4), rlfx.Plan("blocks", 2, 2)
    planned = {plan: gradient(rlfx.compile, plan.environments is not None, plan=plan) for plan in plans}
    for cotangents in ((1.0, 0 * x, 0.0, 0 * aux), (0.0, x, 0.0, 0 * aux), (0.3, x, 2.0, aux)):
        given = jax.tree.map(jnp.float32, cotangents)
        expected = {some: pulled(*given) for some, pulled in reference.items()}
        for plan, pulled in planned.items():
            for g, e in zip(pulled(*given), expected[plan.environments is not None], strict=True):
                np.testing.assert_allclose(g, e, rtol=2e-5, atol=1e-6, err_msg=f"{plan} {cotangents[:3]}")


def test_some_environments_do_not_know_when_the_last_of_all_ends():
    fn = rlfx.compile(through_time, length=6, batch=4, until=lambda c: c["left"] <= 0, plan=rlfx.Plan("blocks", 2, 2))
    text = "the gradient flows through a last carry that environments share, which the last of all leaves"
    with pytest.raises(ScheduleError, match=text):
        jax.eval_shape(jax.grad(lambda p: fn(p, APART)[1][0]["s"].value), 1.1)


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_unroll_says_what_is_no_plan():
    with pytest.raises(ScheduleError, match="plan"):
        rlfx.unroll(lambda p, c, t: (c, c), length=3, plan="blocks")  # pyright: ignore[reportArgumentType]
    with pytest.raises(RlfxError, match="memory_budget"):
        rlfx.unroll(lambda p, c, t: (c, c), length=3, memory_budget=0)


def walked(p, h, t):
    """What is returned at the end is returned at every timestep, too, beside what has no derivative, and what is stopped."""
    h = jnp.tanh(h @ p + 0.1 * t.now.astype(jnp.float32))
    return h, (h, h.sum(), t.now, jax.lax.stop_gradient(h[0]))


@pytest.mark.parametrize("until", [None, lambda h: h[0] > 0.9], ids=["", "until"])
def test_an_unrolled_program_with_a_derivative_is_that_of_loops(until):
    length, batch, d = 24, 3, 4
    p, h = 0.7 * jax.random.normal(jax.random.key(0), (d, d)), jnp.linspace(-1.0, 1.0, batch * d).reshape(batch, d)
    fn = rlfx.unroll(walked, length=length, batch=batch, **({} if until is None else {"until": until}))

    def summed(p, h):
        out = fn(p, h)
        carry, (states, sums, times, stopped) = out[0], out[1]
        return (carry**2).sum() + jnp.sin(states).sum() + (sums * stopped).sum(), (carry, states, sums, times, stopped)

    def by_hand(p, h):
        total, made = 0.0, []
        for b in range(batch):
            state, going = h[b], True
            for t in range(length):
                if going:
                    state = jnp.tanh(state @ p + 0.1 * t)
                    total += jnp.sin(state).sum() + state.sum() * jax.lax.stop_gradient(state[0])
                    going = until is None or not bool(until(jax.lax.stop_gradient(state)))
            total += (state**2).sum()
            made.append(state)
        return total, jnp.stack(made)

    (found, outputs), grads = jax.jit(jax.value_and_grad(summed, (0, 1), has_aux=True))(p, h)
    (expected, carry), slopes = jax.value_and_grad(by_hand, (0, 1), has_aux=True)(p, h)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (found, grads), (expected, slopes))
    np.testing.assert_allclose(outputs[0], carry, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), outputs, summed(p, h)[1])


def test_an_unrolled_program_goes_ahead_once_and_back_once():
    """Its values are those of the pass that its derivative needs: no other loop is left."""
    length, batch, d = 24, 3, 4
    p, h = jnp.eye(d), jnp.ones((batch, d))
    fn = rlfx.unroll(walked, length=length, batch=batch)

    def loss(p):
        carry, (states, *_) = fn(p, h)
        return (carry**2).sum() + jnp.sin(states).sum()

    text = jax.jit(jax.value_and_grad(loss)).lower(p).compile().as_text()
    assert text.count(" while(") == 2
