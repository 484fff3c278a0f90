"""Nested loops that merely follow from a recurrence leave its loop over t: the same values and gradients, in fewer steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.schedule.physical import Repeated

CPU = rlfx.target("cpu")
T, B, W, STEPS = 4, 2, 3, 3
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"h": 0.3 * jax.random.normal(KEYS[0], (W, W)), "v": jax.random.normal(KEYS[1], (W,))}
CARRY, LATER = jax.random.normal(KEYS[2], (B, W)), jnp.linspace(0.0, 0.3, W)


def imagined(p, h):
    """Discounted values along what the model goes on with, and heads on all of that."""
    _, states = jax.lax.scan(lambda s, _: (jnp.tanh(s @ p["h"] + 0.1),) * 2, h, None, length=STEPS)
    values = jnp.tanh(states @ p["h"]) @ p["v"]
    return jax.lax.scan(lambda g, v: (v + 0.9 * g, None), 0.0, values, reverse=True)[0]


def acted(p, h):
    return jnp.tanh(h @ p["h"] + 0.5)


def lookahead(p, h, t):
    """The target is imagined from a stopped state, and nothing of it is differentiated."""
    h = acted(p, h)
    target = jax.lax.stop_gradient(imagined(p, h))
    return (h @ p["v"] - target) ** 2, h, target


def trained(p, h, t):
    """What is imagined is differentiated, from a stopped state."""
    h = acted(p, h)
    found = imagined(p, jax.lax.stop_gradient(h))
    return (h @ p["v"]) ** 2 - found, h, found


def planning(p, h, t):
    """What is imagined decides the next state: the loop needs it."""
    h = acted(p, h)
    value = imagined(p, h)
    return value, h + 0.1 * value, value


def told(p, h, t):
    """A softmax over products of the state, which no next state needs, and through all of which the gradient flows."""
    h = acted(p, h)
    scores = jnp.linspace(-1.0, 1.0, 64 * W).reshape(64, W) @ jnp.tanh(h @ p["h"])
    return jax.nn.logsumexp(scores), h, jax.lax.stop_gradient(h[0])


def soft(p, h, t):
    """Soft maxima over moves; the loss is of two of the scores that the recurrence makes anyway."""
    scores = jnp.linspace(-1.0, 1.0, 4 * W * W).reshape(4, W, W) @ h + 0.1 * p["v"][None]
    after = jax.nn.logsumexp(scores, 0)
    first = jnp.argmax(jnp.sin(7.0 * scores))
    chosen = (scores - after[None]).reshape(-1)[jnp.stack([first, (first + 5) % (4 * W)])]
    return -2.0 * chosen.sum(), after, jax.lax.stop_gradient(after[0])


def branching(p, h, t):
    """A loop that ends sooner for some environments: many together would take as long as the last."""
    h = acted(p, h)
    steps = jax.lax.while_loop(lambda s: jnp.sum(s) > 0.1, lambda s: 0.5 * s, jnp.abs(h))
    return jnp.sum(h), h, jax.lax.stop_gradient(steps)


def compiled(f, **options):
    return rlfx.compile(f, length=T, batch=B, **options)


def with_cache(cache):
    return dataclasses.replace(CPU, room=dataclasses.replace(CPU.room, cache=cache))


def nested(fn, pass_="acting"):
    """How many nested loops the loops over t of a pass have."""
    nodes = [n for n in getattr(fn.physical(PARAMS, CARRY), pass_).nodes if isinstance(n, Repeated)]
    return sum(e.op.name in ("scan", "while") for n in nodes for e in n.equations)


@pytest.mark.parametrize(("f", "inside"), [(lookahead, 0), (trained, 0), (planning, 1), (branching, 1)])
def test_a_nested_loop_leaves_if_no_recurrence_needs_it(f, inside):
    """Of planning's two loops, the iterations of that which multiplies are equations (``rewrite/unrolled.py``)."""
    fn = compiled(f, plan=rlfx.Plan())
    assert nested(fn) == inside
    if f is not branching:
        assert nested(fn, "learning") == inside
        assert nested(compiled(f, plan=rlfx.Plan("one pass"))) == inside


def test_it_stays_where_all_timesteps_do_not_fit_or_a_loop_may_end_early():
    assert [nested(compiled(lookahead, target=with_cache(room))) for room in (100, 1 << 20)] == [2, 0]
    assert nested(compiled(lookahead, until=lambda h: h[0] > 0.9)) == 2
    assert nested(compiled(lookahead, memory_budget=1 << 20)) == 2


def test_it_stays_with_what_follows_from_it_and_does_not_fit():
    def wide(p, h, t):
        h = acted(p, h)
        _, states = jax.lax.scan(lambda s, _: (jnp.tanh(s @ p["h"]),) * 2, h, None, length=STEPS)
        frames = jnp.outer(states.ravel(), jnp.arange(4096.0))
        return jnp.sum(h**2), h, jnp.max(jax.lax.stop_gradient(jnp.sin(frames)))

    frames = 4 * T * B * STEPS * W * 4096
    assert [nested(compiled(wide, target=with_cache(room))) for room in (frames, 4 * frames)] == [1, 0]


def test_nothing_is_evaluated_twice():
    """Heads on what a nested loop stacks leave with it."""
    for f in (lookahead, trained):
        equations = [e for n in compiled(f).physical(PARAMS, CARRY).acting.nodes for e in n.equations]
        assert [e.op.name for e in equations].count("scan") == 2
        assert len(equations) == len(set(equations))


def test_what_the_learner_differentiates_after_the_loop_is_not_evaluated_in_it():
    """Not even for the maximum of the softmax, which is not differentiated and small: the loop is the recurrence alone."""
    passes = compiled(told, plan=rlfx.Plan()).physical(PARAMS, CARRY)
    (loop,) = (n for n in passes.learning.nodes if isinstance(n, Repeated))
    assert [e.op.name for e in loop.equations].count("dot_general") == 1


def test_what_is_picked_of_a_recurrence_is_picked_in_its_loop():
    """Its derivative needs places alone, not all scores of all timesteps."""
    passes = compiled(soft, plan=rlfx.Plan()).physical(PARAMS, CARRY)
    (loop,) = (n.loop for n in passes.learning.nodes if isinstance(n, Repeated))
    assert {v.shape for v in loop.stacked} == {()}


def by_hand(f, p, h):
    """Plain loops over timesteps and environments."""
    total, aux, last = 0.0, [], 0.0
    for b in range(B):
        state = h[b]
        for t in range(T):
            loss, state, seen = f(p, state, t)
            total, aux = total + loss, [*aux, seen]
        last += state @ LATER
    return total / (T * B) + last, jnp.stack(aux).reshape(B, T).T


PLANS = None, rlfx.Plan("at once"), rlfx.Plan("blocks", 3)


@pytest.mark.parametrize("f", [lookahead, trained, told, soft])
def test_values_and_gradients_are_those_of_loops(f):
    expected, slopes = jax.jit(jax.value_and_grad(lambda p, h: by_hand(f, p, h), (0, 1), has_aux=True))(PARAMS, CARRY)

    def outcome(fn):
        def total(p, h):
            loss, (carry, aux) = fn(p, h)
            return loss + jnp.sum(carry @ LATER), aux

        return jax.value_and_grad(total, (0, 1), has_aux=True)

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, outcome(rlfx.reference(f, length=T, batch=B))(PARAMS, CARRY), (expected, slopes))
    for plan in PLANS:
        jax.tree.map(close, jax.jit(outcome(compiled(f, plan=plan)))(PARAMS, CARRY), (expected, slopes))
