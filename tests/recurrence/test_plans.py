"""Every legal plan has the same results: the learner at once, in tiles, behind the actor, or acting again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ScheduleError
from rlfx.recurrence.analysis.divisors import divisors
from rlfx.recurrence.plan.choose import why_not, why_not_environments
from tests import strategies
from tests.recurrence.test_generated import mismatches
from tests.sampling import spread

BATCH = 4


def score(params, state, t, lookahead=3):
    """n-step REINFORCE with a critic: the learner is ``lookahead`` behind the actor."""
    obs = jnp.sin(state * jnp.arange(1.0, 41.0, dtype=jnp.float32))
    hidden = jnp.tanh(params["w"] @ obs)
    action = jax.random.categorical(t.key_for("action"), hidden[:2])
    noise = jax.random.normal(t.key_for("env"), (), dtype=jnp.float32)
    moved = jax.lax.stop_gradient(0.9 * state + 0.3 * action.astype(jnp.float32) - 0.1 + 0.1 * noise)
    value = rlfx.series(hidden[2])
    reward = rlfx.series(jax.lax.stop_gradient(jnp.cos(moved)))
    discount = rlfx.series(jnp.where(moved > 1.0, 0.0, 0.97).astype(jnp.float32))
    returns = rlfx.discounted_sum(reward[t : t + lookahead], discount[t : t + lookahead]) + 0.8 * value[t + lookahead]
    returns = jax.lax.stop_gradient(returns)
    log_prob = jax.nn.log_softmax(hidden[:2])[action]
    return -log_prob * jax.lax.stop_gradient(returns - hidden[2]) + (hidden[2] - returns) ** 2, moved


def monte_carlo(params, state, t):
    """Returns to the end of the rollout: no learning before it is over."""
    obs = jnp.sin(state * jnp.arange(1.0, 41.0, dtype=jnp.float32))
    logits = params["w"][:2] @ obs
    action = jax.random.categorical(t.key_for("action"), logits)
    moved = jax.lax.stop_gradient(0.9 * state + 0.3 * action.astype(jnp.float32) - 0.1)
    reward = rlfx.series(jnp.cos(moved))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.9 * jnp.ones_like(reward[t:])))
    return -jax.nn.log_softmax(logits)[action] * returns, moved


def gradient(program, length, mesh=None, **options):
    fn = rlfx.compile(program, length=length, batch=BATCH, mesh=mesh, **options)
    params = {"w": jnp.asarray(np.random.RandomState(0).randn(3, 40), jnp.float32)}
    state, key = jnp.linspace(-1.0, 1.0, BATCH, dtype=jnp.float32), jax.random.key(0)
    return jax.jit(jax.value_and_grad(lambda p: fn(p, state, key), has_aux=True))(params)


@functools.cache
def at_once(program):
    return gradient(program, 23, plan=rlfx.Plan())


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


PLANS = [
    rlfx.Plan("blocks", 4),
    rlfx.Plan("blocks", 23, 2),
    rlfx.Plan("blocks", 5, 1),
    rlfx.Plan("replay", 4),
    rlfx.Plan("replay", 23),
    rlfx.Plan("replay", 5, 2),
]
STREAMS = [rlfx.Plan("stream", 1), rlfx.Plan("stream", 5), rlfx.Plan("stream", 20, 2), rlfx.Plan("stream", 3, 1)]


@pytest.mark.parametrize("plan", PLANS + STREAMS, ids=lambda p: f"{p.form}-{p.block}-{p.environments}")
def test_the_plan_changes_nothing(plan):
    assert_close(gradient(score, 23, plan=plan), at_once(score))


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.form}-{p.block}-{p.environments}")
def test_the_plan_changes_nothing_for_whole_returns(plan):
    assert_close(gradient(monte_carlo, 23, plan=plan), at_once(monte_carlo))


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[5], STREAMS[1]], ids=lambda p: p.form)
def test_plans_on_a_mesh(plan):
    plan = rlfx.Plan(plan.form, plan.block, plan.environments and 1)
    mesh = jax.make_mesh((2,), ("b",))
    assert_close(gradient(score, 23, mesh, plan=plan), at_once(score))


@pytest.mark.parametrize("lookahead", [0, 1, 7, 11])
def test_streams_of_any_delay(lookahead):
    def program(params, state, t):
        return score(params, state, t, lookahead) if lookahead else monte_carlo_free(params, state, t)

    expected = gradient(program, 17, plan=rlfx.Plan())
    assert_close(gradient(program, 17, plan=rlfx.Plan("stream", 4)), expected)


def monte_carlo_free(params, state, t):
    """Nothing is read from later timesteps."""
    return (params["w"][0, 0] - jax.lax.stop_gradient(state)) ** 2, jnp.cos(state)


@pytest.mark.optimised
def test_streaming_stores_nothing_of_length_t():
    """No buffer of the compiled program has an axis of T with the observation."""
    length = 211
    fn = rlfx.compile(score, length=length, batch=BATCH, plan=rlfx.Plan("stream", 8))
    params, state = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)
    step = jax.jit(jax.value_and_grad(lambda p: fn(p, state, jax.random.key(0))[0]))
    text = step.lower(params).compile().as_text()
    assert "f32[8,4,40]" in text
    assert f"[{length},4,40]" not in text
    assert f"[{4 * length},40]" not in text  # the same, along one axis
    assert f"[{length},4]" not in text


@pytest.mark.optimised
def test_what_a_long_delay_leaves_at_the_end_is_learned_from_in_chunks():
    length, lookahead = 211, 32  # and 3 that do not fill a chunk
    program = lambda params, state, t: score(params, state, t, lookahead)  # noqa: E731
    fn = rlfx.compile(program, length=length, batch=BATCH, plan=rlfx.Plan("stream", 8))
    params, state = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)
    step = jax.jit(jax.value_and_grad(lambda p: fn(p, state, jax.random.key(0))[0]))
    text = step.lower(params).compile().as_text()
    assert f"f32[{7 * 4},2]" in text  # the gradient of the log-probabilities, of rows
    assert "f32[35,4,2]" not in text
    assert f"f32[{35 * 4},2]" not in text


@pytest.mark.optimised
def test_replay_stores_no_observations():
    length = 210
    fn = rlfx.compile(monte_carlo, length=length, batch=BATCH, plan=rlfx.Plan("replay", 14))
    params, state = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)
    text = jax.jit(jax.grad(lambda p: fn(p, state, jax.random.key(0))[0])).lower(params).compile().as_text()
    assert f"f32[{14 * 4},40]" in text
    assert f"[{length},4,40]" not in text
    assert f"[{4 * length},40]" not in text
    assert f"[{length},4]" in text  # actions and returns


def test_replay_keeps_actions_and_does_not_run_the_policy_again():
    """The policy's product with one environment's observation: in the acting loop, once; the learner's has a block."""
    fn = rlfx.compile(monte_carlo, length=210, batch=BATCH, plan=rlfx.Plan("replay", 14))
    params, state = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)

    def products(jaxpr, inside=()):
        for e in jaxpr.eqns:
            if e.primitive.name == "dot_general":
                yield inside, tuple(e.outvars[0].aval.shape)
            for sub in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from products(sub, (*inside, e.primitive.name))

    jaxpr = jax.make_jaxpr(jax.grad(lambda p: fn(p, state, jax.random.key(0))[0]))(params)
    acted = [inside for inside, shape in products(jaxpr.jaxpr) if sorted(shape) == [2, BATCH]]
    assert len(acted) == 1, acted


def keeps_its_action(params, carry, t):
    """The last action is read from the carry as well: it is acted again, not kept."""
    state, last = carry
    obs = jnp.sin(state * jnp.arange(1.0, 41.0, dtype=jnp.float32)) + 0.1 * last
    logits = params["w"][:2] @ obs
    action = jax.random.categorical(t.key_for("action"), logits)
    moved = jax.lax.stop_gradient(0.9 * state + 0.3 * action.astype(jnp.float32) - 0.1)
    reward = rlfx.series(jnp.cos(moved))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.9 * jnp.ones_like(reward[t:])))
    return -jax.nn.log_softmax(logits)[action] * returns, (moved, action.astype(jnp.float32))


def test_replay_of_a_program_that_carries_its_action():
    def found(plan):
        fn = rlfx.compile(keeps_its_action, length=23, batch=BATCH, plan=plan)
        params = {"w": jnp.asarray(np.random.RandomState(0).randn(3, 40), jnp.float32)}
        carry = jnp.linspace(-1.0, 1.0, BATCH, dtype=jnp.float32), jnp.zeros(BATCH, jnp.float32)
        return jax.jit(jax.value_and_grad(lambda p: fn(p, carry, jax.random.key(0)), has_aux=True))(params)

    assert_close(found(rlfx.Plan("replay", 5)), found(rlfx.Plan()))


def test_a_plan_is_a_value_that_can_be_saved_and_pinned():
    fn = rlfx.compile(score, length=23, batch=BATCH, transform=lambda p: rlfx.incrementalize(p, block_size=4))
    arguments = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)
    plan = fn.plan(*arguments)
    assert plan == rlfx.Plan("stream", 4)
    again = rlfx.compile(score, length=23, batch=BATCH, plan=rlfx.Plan.from_json(plan.to_json()))
    assert again.plan(*arguments) == plan
    assert "the learner follows behind the actor (4 timesteps at a time)" in str(
        again.explain(*arguments, verbose=True)
    )


@pytest.mark.parametrize(("over", "size"), [("t", 5), ("b", 2), ("tb", (5, 2))])
def test_incrementalize_over_timesteps_and_environments(over, size):
    expected = at_once(score)
    assert_close(gradient(rlfx.incrementalize(score, over=over, block_size=size), 23), expected)


def test_function_level_transforms_are_those_of_programs():
    expected = at_once(score)
    assert_close(gradient(rlfx.vectorize(rlfx.incrementalize(score, over="t", block_size=4)), 23), expected)
    reference = rlfx.reference(rlfx.vectorize(monte_carlo), length=3, batch=BATCH)
    loss, _ = reference({"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32), jax.random.key(0))
    assert_close(
        loss,
        rlfx.compile(monte_carlo, length=3, batch=BATCH)(
            {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32), jax.random.key(0)
        )[0],
    )


def test_vectorize_moves_everything_out_of_the_loop():
    def program(w, x, t):
        return jnp.tanh(jax.lax.stop_gradient(jnp.sin(x) * 2.0) * w), x + 1.0

    asked = rlfx.compile(rlfx.vectorize(program), length=4).explain(2.0, jnp.float32(0.0))
    (loop,) = [s for s in asked.learner.acting.stages if hasattr(s, "direction")]
    assert [e.op.name for e in loop.body if not e.is_read] == ["add", "series"]


@pytest.mark.parametrize("seed", spread(range(60), 24))
def test_generated_programs_have_the_same_results_under_every_legal_plan(seed):
    """A random legal plan for each of them; see ``test_generated`` to reproduce a program."""
    p = strategies.program(seed, 3)
    rng = np.random.RandomState(seed)
    compiled = rlfx.compile(p.function, **p.options())
    try:
        explained = compiled.explain(*p.arguments(), wrt=True)
    except rlfx.errors.RlfxError:
        return
    legal = [form for form in ("blocks", "stream", "replay") if why_not(form, explained.learner) is None]
    if (p.batch or 1) > 1 and why_not_environments(explained.learner, explained.evaluator.order) is None:
        legal.append("at once")
    params, carry, key = p.arguments()

    def evaluated(fn):
        return jax.jit(jax.value_and_grad(lambda params: fn(params, carry, key, t0=p.t0), has_aux=True))(params)

    expected = evaluated(compiled) if legal else None
    for form in legal:
        several = int(rng.choice(divisors(p.batch or 1)[:-1])) if form == "at once" else None
        plan = rlfx.Plan(form, None if form == "at once" else int(rng.randint(1, p.length + 1)), several)
        got = evaluated(rlfx.compile(p.function, **p.options(), plan=plan))
        assert not mismatches(got, expected), f"{p!r}{plan!r}"


@pytest.mark.parametrize("form", ["blocks", "stream", "replay", "one pass"])
@pytest.mark.parametrize("flows", [False, True])
def test_one_timestep_has_every_plan(form, flows):
    """Nothing flows from one timestep to another; that it is a block of one is all the plan says."""

    def f(w, h, t):
        h = jnp.tanh(w * h + 1.0)
        return h**2, h if flows else jax.lax.stop_gradient(h)

    plan = rlfx.Plan(form) if form == "one pass" else rlfx.Plan(form, 1, environments=1)
    w, h = jnp.float32(0.5), jnp.asarray([0.3, -0.2], jnp.float32)
    given, plain = rlfx.compile(f, length=1, batch=2, plan=plan), rlfx.compile(f, length=1, batch=2)
    np.testing.assert_allclose(*(jax.grad(lambda w, fn=fn: fn(w, h)[0])(w) for fn in (given, plain)), rtol=1e-6)
    with pytest.raises(ScheduleError, match="longer than T=1"):
        rlfx.compile(f, length=1, batch=2, plan=rlfx.Plan("blocks", 2)).plan(w, h)


def test_illegal_plans_are_refused_with_the_reason():
    arguments = {"w": jnp.ones((3, 40), jnp.float32)}, jnp.ones(BATCH, jnp.float32)

    def refusal(program, plan, **options):
        with pytest.raises(ScheduleError) as error:
            rlfx.compile(program, length=9, batch=BATCH, plan=plan, **options).plan(*arguments)
        return str(error.value)

    assert "monte_carlo cannot run by the plan 'stream': there is more than one loop" in refusal(
        monte_carlo, rlfx.Plan("stream", 2)
    )
    text = refusal(score, rlfx.Plan("blocks", 2, 3))
    assert "3 environments at a time do not divide the 4" in text
    assert "Fix: Give 2, or another divisor of 4." in text
    text = refusal(score, rlfx.Plan("blocks", 10))
    assert "a block of 10 timesteps is longer than T=9" in text
    assert "Fix: Give a block of at most 9." in text

    def recurrent(params, state, t):
        return jnp.sum(params["w"]) * state, jnp.tanh(params["w"][0, 0] * state)

    assert "the gradient flows through reads of other timesteps" in refusal(recurrent, rlfx.Plan("replay", 3))
    with pytest.raises(ScheduleError, match=r'form must be "at once", .*, got .fast.'):
        rlfx.Plan("fast", 3)
    with pytest.raises(ScheduleError, match="block must be a positive integer or None, got 0"):
        rlfx.Plan("blocks", 0)
    with pytest.raises(ScheduleError, match="This text is no plan"):
        rlfx.Plan.from_json("{")


def test_data_that_are_differentiated_have_no_blocks():
    """Where data are parameters, the reason is not that other timesteps are read."""
    data, carry = jnp.ones((6, 3), jnp.float32), jnp.ones(3, jnp.float32)

    def f(p, c, t):
        return (p["w"] * rlfx.inputs(p["x"])[t] * c) ** 2, jax.lax.stop_gradient(c)

    for form in ("blocks", "stream"):
        fn = rlfx.compile(f, length=6, batch=3, plan=rlfx.Plan(form, 3))
        gradient = jax.grad(lambda p, fn=fn: fn(p, carry)[0])
        with pytest.raises(rlfx.errors.ScheduleError, match=r"the gradient with respect to data is asked for \(test_plans.py"):
            gradient({"w": jnp.float32(2.0), "x": data})


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="jax takes none of 64 bits for a float32")
def test_the_pullback_takes_a_number():
    fn = rlfx.compile(lambda w, c, t: (jnp.sum(w * c), c * w), length=3, batch=2)
    loss, pull = jax.vjp(lambda w: fn(w, jnp.ones(2, jnp.float32))[0], jnp.float32(0.5))
    np.testing.assert_allclose(pull(2.0)[0], 2 * pull(jnp.ones_like(loss))[0])
