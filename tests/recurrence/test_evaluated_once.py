"""All at once, what is learned from and what a stopped value reads are one evaluation: the same values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.recurrence.gradient.forms import Pass
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.once import CACHES, MOST, TILE, TILE_OF_LOOPS
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.learner import activation_bytes, temporaries

CPU = rlfx.target("cpu")
T, B, WIDTH = 8, 4, 16
K = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "pi": jax.random.normal(K[0], (WIDTH, 3)) / 4.0,
    "in": jax.random.normal(K[1], (5, WIDTH)),
    "critic": jax.random.normal(K[2], (5, WIDTH)),
    "v": jax.random.normal(K[3], (WIDTH,)) / 4.0,
}
X, KEY = jax.random.normal(K[4], (B, 5)), K[5]


def critic(p, x):
    return jnp.tanh(x @ p["critic"]) @ p["v"]


def acts(p, x, t):
    """The policy acts, sampled; returns the new state and the log-probability of what was done."""
    log_probs = jax.nn.log_softmax(jnp.tanh(x @ p["in"]) @ p["pi"])
    action = jax.random.categorical(t.key, stop_gradient(log_probs))
    moved = 0.9 * jnp.roll(x, 1) + 0.1 * jnp.sin(x + action.astype(x.dtype))
    return stop_gradient(moved), log_probs[action]


def normalised(p, x, t):
    """Advantages behind values of other timesteps, with mean and deviation over all points."""
    moved, log_prob = acts(p, x, t)
    v = critic(p, x)
    value = rlfx.series(v)
    step = rlfx.envs.Step(jnp.cos(moved[0]), moved[1] > 1.5, jnp.bool_(False), moved)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=0.9, lam=0.8))
    scaled = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-3)
    return 0.5 * (v - stop_gradient(v) - advantage) ** 2 - log_prob * scaled, moved


def targets(p, x, t):
    """Targets of two steps, and a value that aux returns."""
    moved, log_prob = acts(p, x, t)
    v = critic(p, x)
    value, reward = rlfx.series(v), rlfx.series(jnp.cos(moved[0]), end=0.0)
    target = stop_gradient(reward[t] + 0.9 * reward[t + 1] + 0.81 * value[t + 2])
    return (v - target) ** 2 - log_prob * (target - stop_gradient(v)), moved, {"log_prob": log_prob}


def returned(p, x, t):
    """Acting returns the value: it evaluates the critic anyway."""
    moved, log_prob = acts(p, x, t)
    v = critic(p, x)
    target = stop_gradient(rlfx.series(v)[t + 1])
    return (v - target) ** 2 - log_prob * target, moved, v


def carried(p, x, t):
    """A state that the value is part of: the loop needs the critic."""
    moved, log_prob = acts(p, x, t)
    v = critic(p, x)
    return v**2 - log_prob * stop_gradient(v), moved.at[0].set(stop_gradient(jnp.tanh(v)))


def recurrent(p, x, t):
    """The gradient flows through the state, too."""
    h = jnp.tanh(0.5 * jnp.roll(x, 1) + (x @ p["in"])[:5] + jax.random.normal(t.key, (5,)))
    v = critic(p, h)
    target = stop_gradient(rlfx.discounted_sum(rlfx.series(v)[t:], 0.9))
    return (v - target) ** 2, h


PROGRAMS = [normalised, targets, returned, carried, recurrent]


def gradient(make, f, batch=B, **how):
    fn = make(f, length=T, batch=batch, **how)
    return jax.value_and_grad(lambda p, x: fn(p, x, KEY)[0], argnums=(0, 1) if f is recurrent else 0)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found, expected)


def learner_of(f, length=T, batch=B):
    program = rlfx.trace(f, PARAMS, X[:batch], KEY, length=length, batch=batch)
    return GradientRule(program, Options(), CPU).learner(frozenset(program.params))


@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize("batch", [1, B])
def test_the_gradient_is_that_of_the_reference(f, batch):
    at_once = jax.jit(gradient(rlfx.compile, f, batch, plan=rlfx.Plan()))
    close(at_once(PARAMS, X[:batch]), gradient(rlfx.reference, f, batch)(PARAMS, X[:batch]))


@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize("environments", [1, 2])
def test_the_gradient_of_some_environments_at_a_time_is_that_of_the_reference(f, environments):
    def found(make, **how):  # with respect to the carry, which has all environments, there is no such gradient
        fn = make(f, length=T, batch=B, **how)
        return jax.value_and_grad(lambda p: fn(p, X, KEY)[0])

    tiles = jax.jit(found(rlfx.compile, plan=rlfx.Plan(environments=environments)))
    close(tiles(PARAMS), found(rlfx.reference)(PARAMS))


def predicts(p, x, t):
    """No action is sampled: plain loops can follow."""
    moved = stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * jnp.sin(x))
    v = critic(p, x)
    target = stop_gradient(jnp.cos(moved[0]) + 0.9 * rlfx.series(v, end=0.0)[t + 1])
    return (v - target) ** 2 * (1.0 + stop_gradient(v)), moved


def test_the_gradient_is_that_of_plain_loops():
    def loss(p):
        total = 0.0
        for x in X:
            points = [x]
            for _ in range(T):
                points.append(0.9 * jnp.roll(points[-1], 1) + 0.1 * jnp.sin(points[-1]))
            v = [critic(p, x) for x in points[:T]]
            for t in range(T):
                later = v[t + 1] if t + 1 < T else 0.0
                target = stop_gradient(jnp.cos(points[t + 1][0]) + 0.9 * later)
                total += (v[t] - target) ** 2 * (1.0 + stop_gradient(v[t]))
        return total / (T * B)

    for plan in (None, rlfx.Plan(), rlfx.Plan("blocks", 4), rlfx.Plan(environments=2)):
        close(gradient(rlfx.compile, predicts, plan=plan)(PARAMS, X), jax.value_and_grad(loss)(PARAMS))


@pytest.mark.parametrize("f", [normalised, targets, predicts, recurrent])
def test_acting_does_not_evaluate_the_critic(f):
    learner = learner_of(f)
    spared = learner.products - learner.whole.products
    assert len(spared) >= (1 if f is recurrent else 2)
    assert learner.whole.whole is learner.whole  # once is enough
    assert learner.under(rlfx.Plan()) is learner.whole
    assert learner.under(rlfx.Plan("blocks", 4)) is learner
    coupled = f is normalised  # means over all environments are known before
    assert learner.under(rlfx.Plan(environments=2)) is (learner if coupled else learner.whole)
    assert (learner.whole.coupled is not None) is coupled
    assert learner.coupled is None


@pytest.mark.parametrize("f", [returned, carried])
def test_what_acting_needs_it_evaluates(f):
    learner = learner_of(f)
    assert learner.whole is learner


def test_products_are_counted_once():
    def products(**how):
        text = jax.jit(gradient(rlfx.compile, predicts, **how)).lower(PARAMS, X).as_text()
        return text.count("stablehlo.dot_general")

    assert products(plan=rlfx.Plan()) < products(plan=rlfx.Plan("blocks", 4))


def test_environments_that_end():
    def ends(p, carry, t):
        x, _ = carry
        moved, log_prob = acts(p, x, t)
        v = critic(p, x)
        target = stop_gradient(rlfx.discounted_sum(rlfx.series(v)[t:], 0.9))
        return (v - target) ** 2 - log_prob * target, (moved, moved[1] > 0.4)

    carry = X, jnp.zeros(B, bool)

    def found(make, **how):
        fn = make(ends, length=T, batch=B, until=lambda carry: carry[1], **how)
        return jax.value_and_grad(lambda p: fn(p, carry, KEY)[0])(PARAMS)

    for plan in (rlfx.Plan(), rlfx.Plan(environments=1)):
        close(found(rlfx.compile, plan=plan), found(rlfx.reference))


def caches(*, tile, cache=None):
    return dataclasses.replace(CPU, room=dataclasses.replace(CPU.room, tile=tile, cache=cache or tile))


@pytest.mark.parametrize("scale", [jnp.float32(0.5), jnp.full((), 0.5)], ids=["strong", "weak"])
def test_what_the_planner_traced_to_know_its_bytes_is_not_traced_again(scale, monkeypatch):
    def scaled(p, x, t):
        loss, moved = normalised(p, x, t)
        return scale * loss, moved

    length, evaluated = 64, []
    evaluate = Pass.gradient
    monkeypatch.setattr(Pass, "gradient", lambda *args: evaluated.append(args) or evaluate(*args))
    needed = temporaries(rlfx.Plan(), learner_of(normalised, length), B)
    target = caches(tile=needed / (2 * CACHES), cache=needed)  # too much for a look from far, and it may fit

    def text_and_values(**how):
        fn = rlfx.compile(scaled, length=length, batch=B, target=target, **how)
        lowered = jax.jit(jax.value_and_grad(lambda p: fn(p, X, KEY)[0])).lower(PARAMS)
        return lowered.as_text(), lowered.compile()(PARAMS)

    text, values = text_and_values()
    assert len(evaluated) == 1
    expected_text, expected = text_and_values(plan=rlfx.Plan())
    assert len(evaluated) == 2
    assert text == expected_text or jax.typeof(scale).weak_type  # of which a conversion is left
    jax.tree.map(np.testing.assert_array_equal, values, expected)


def test_it_is_the_default_where_all_activations_take_a_few_caches():
    length = 64
    needed = temporaries(rlfx.Plan(), learner_of(normalised, length), B)

    def plan(tile, **how):
        return rlfx.compile(normalised, length=length, batch=B, target=caches(tile=tile), **how).plan(PARAMS, X, KEY)

    assert plan(needed / CACHES) == rlfx.Plan()
    assert plan(0.9 * needed / CACHES).form == "blocks"
    in_blocks = rlfx.incrementalize(normalised, over="t", block_size=8)
    asked = rlfx.compile(in_blocks, length=length, batch=B, target=caches(tile=needed))
    assert asked.plan(PARAMS, X, KEY).form == "blocks"


def default(f, tile, cache, length=64, batch=32, **how):
    x = jax.random.normal(K[4], (batch, 5))
    return rlfx.compile(f, length=length, batch=batch, target=caches(tile=tile, cache=cache), **how).plan(PARAMS, x, KEY)


def test_larger_programs_take_as_many_environments_as_a_few_caches_hold():
    one = activation_bytes(learner_of(targets, 64, 1).whole, 1) * 64
    for tiles in (4, 8):  # 256 rows a weight, at least
        assert default(targets, tiles * one / TILE, 1e3 * one) == rlfx.Plan(environments=tiles)
    assert default(targets, 0.9 * one / CACHES, one).form == "blocks"  # one has more than fits


def test_where_environments_need_each_other_all_are_taken_if_the_cache_holds_what_exists():
    batch = 32
    x = jax.random.normal(K[4], (batch, 5))
    explained = rlfx.compile(normalised, length=64, batch=batch, plan=rlfx.Plan()).explain(PARAMS, x, KEY)
    tile = 0.5 * temporaries(rlfx.Plan(), explained.learner, batch) / CACHES
    assert default(normalised, tile, 1.1 * explained.predicted_bytes) == rlfx.Plan()
    assert default(normalised, tile, 0.9 * explained.predicted_bytes).form == "blocks"


def test_products_that_both_evaluate_are_spared_not_those_of_acting_alone():
    """A target network's values are acting's or the learner's: once in any case, and no reason."""

    def stops(p, x, t):
        moved = stop_gradient(0.9 * jnp.roll(x, 1) + 0.1 * jnp.sin(x))
        target = stop_gradient(rlfx.series(critic({**p, "critic": p["in"]}, x), end=0.0)[t + 1])
        return (critic(p, x) - target) ** 2, moved

    assert learner_of(stops).products - learner_of(stops).whole.products
    tile = 2 * temporaries(rlfx.Plan(), learner_of(stops, 64, B), B) / CACHES
    assert default(stops, tile, tile, batch=B).form == "blocks"


def test_blocks_that_are_skipped_stay():
    def late(p, x, t):
        loss, moved, _ = targets(p, x, t)
        return jnp.where(t >= 32, loss, 0.0), moved

    one = activation_bytes(learner_of(targets, 64, 1).whole, 1) * 64
    assert default(late, 2 * one / TILE, 1e3 * one).form == "blocks"


def test_explain_says_where_the_critic_is():
    text = str(rlfx.compile(normalised, length=T, batch=B).explain(PARAMS, X, KEY, verbose=True))
    acting = text[: text.index("learner")]
    assert "the learner runs for all timesteps at once" in text
    assert "reverse scan" not in acting  # advantages are the learner's


def test_explain_says_how_many_environments_are_learnt_from_at_a_time():
    fn = rlfx.compile(targets, length=T, batch=B, plan=rlfx.Plan(environments=2))
    said = "learning (evaluated and differentiated), for all timesteps at once, 2 environments at a time"
    assert said in str(fn.explain(PARAMS, X, KEY))


def traces(p, h, t):
    """A recurrence that multiplies nothing, between layers that do: gates depend on the data alone."""
    p, data = p
    x = rlfx.inputs(data)[t]
    gate = jax.nn.sigmoid(x @ p["critic"])
    h = (1 - gate) * h + gate * jnp.tanh(x @ p["in"])
    return jnp.sum((h @ p["pi"]) ** 2) + (h @ p["v"]), h


def multiplied(p, h, t):
    """The same with weights in the loop."""
    loss, h = traces(p, h, t)
    return loss, jnp.tanh(h @ (p[0]["pi"] @ p[0]["pi"].T))


def test_a_recurrence_that_multiplies_nothing_takes_environments_that_a_few_caches_hold():
    length, batch = 64, 32
    data, h = jax.random.normal(K[5], (length, batch, 5)), jnp.zeros((batch, WIDTH))

    def plan(f, tile, cache, **how):
        fn = rlfx.compile(f, length=length, batch=batch, target=caches(tile=tile, cache=cache), **how)
        return fn.plan((PARAMS, data), h, wrt=(True, False))

    explained = rlfx.compile(traces, length=length, batch=batch).explain((PARAMS, data), h, wrt=(True, False))
    each = activation_bytes(explained.learner, 1) * length
    for count in (4, 8, 16):
        assert plan(traces, count * each / TILE_OF_LOOPS, 1e3 * each) == rlfx.Plan(environments=count)
        assert plan(multiplied, count * each / TILE_OF_LOOPS, 1e3 * each).environments is None
    assert plan(traces, each / TILE_OF_LOOPS, 1e3 * each) == rlfx.Plan(environments=4)  # fewer would be short rows
    assert plan(traces, batch * each / TILE_OF_LOOPS, 1e3 * each).environments is None  # all of them
    assert plan(traces, each / TILE_OF_LOOPS, 4 * each / MOST) == rlfx.Plan(environments=4)
    assert plan(traces, each / TILE_OF_LOOPS, 3.9 * each / MOST).environments is None  # those of four are not in the cache
    asked = rlfx.incrementalize(traces, over="t", block_size=8)
    assert plan(asked, 8 * each / TILE_OF_LOOPS, 1e3 * each).form == "blocks"

    def gradient(make, **how):
        fn = make(traces, length=T, batch=batch, **how)
        return jax.value_and_grad(lambda p: fn((p, data[:T]), h)[0])(PARAMS)

    close(gradient(rlfx.compile, target=caches(tile=each / 8, cache=1e3 * each)), gradient(rlfx.reference))
