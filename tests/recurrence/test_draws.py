"""Random numbers drawn ahead of the loop that uses them: the same numbers, as long as they are few."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.schedule.physical import Repeated

CPU = rlfx.target("cpu")
T, B, WIDTH = 6, 3, 5


def ahead(draws, starts=True):
    rewrites = dataclasses.replace(CPU.rewrites, starts=starts)
    return dataclasses.replace(CPU, rewrites=rewrites, room=dataclasses.replace(CPU.room, draws=draws))


def walk(p, c, t):
    noise = jax.random.normal(t.key_for("step"), (WIDTH,))
    action = jax.random.categorical(t.key_for("action"), p * c)
    return (p * c)[action] + noise.sum() * 0.1, jnp.tanh(c + 0.1 * noise), noise


def arguments():
    c = np.random.default_rng(0).uniform(-1, 1, (B, WIDTH)).astype(np.float32)
    return jnp.linspace(0.5, 1.5, WIDTH), jnp.asarray(c), jax.random.key(3)


def drawn_in_loops(fn):
    """How many draws the loops of acting have."""
    nodes = [n for n in fn.physical(*arguments()).acting.nodes if isinstance(n, Repeated)]
    return sum(e.op in J.RANDOM for n in nodes for e in n.equations)


@pytest.mark.parametrize("options", [{}, {"until": lambda c: c.sum() > 0.5}, {"mesh": 3}])
def test_the_same_numbers(options):
    if "mesh" in options:
        options = {"mesh": jax.make_mesh((3,), ("b",), devices=jax.devices()[:3])}
    found = []
    late = ahead(0, starts=False)
    for target in (late, CPU, ahead(1 << 20)):
        fn = rlfx.compile(walk, length=T, batch=B, target=target, **options)
        found.append(jax.jit(jax.value_and_grad(fn, has_aux=True))(*arguments()))
        assert (drawn_in_loops(fn) == 0) == (target is not late)
    for other in found[1:]:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found[0], other)


@pytest.mark.parametrize(
    "asked",
    [
        {"memory_budget": 1 << 20}, {"plan": rlfx.Plan("replay", 2)}, {"plan": rlfx.Plan("blocks", 2)},
        {"transform": lambda p: rlfx.incrementalize(p, block_size=2)},
        {"transform": lambda p: rlfx.incrementalize(p, over="b", block_size=1)},
    ],
)  # fmt: skip
def test_in_the_loop_where_less_memory_is_asked_for(asked):
    """On a CPU, whose loops start operations soon."""
    assert drawn_in_loops(rlfx.compile(walk, length=T, batch=B, target=CPU, **asked)) > 0


def test_only_as_long_as_they_are_few():
    """The noise of all points, and what an action is drawn with."""
    few = 2 * T * B * WIDTH * 4
    asked = {
        draws: drawn_in_loops(rlfx.compile(walk, length=T, batch=B, target=ahead(draws))) for draws in (few - 1, few)
    }
    assert asked[few] == 0 < asked[few - 1]


def test_fused_steps_draw_in_their_kernel():
    env = rlfx.envs.make("CartPole-v1")

    def acting(p, state, t):
        action = jax.random.randint(t.key_for("a"), (), 0, 2)
        state, step = env.step(t.key_for("env"), state, action)
        return state, (action, step)

    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    results = []
    for transform in (None, lambda program: rlfx.fuse_steps(program, backend="scan")):
        fn = rlfx.unroll(acting, length=4, batch=2, target=ahead(1 << 20), transform=transform)
        directives = fn.trace(None, state, jax.random.key(1)).directives
        assert (directives.ahead is None) == (directives.loops is not None) == (transform is not None)
        results.append(fn(None, state, jax.random.key(1)))
    (one, (actions, steps)), (other, (drawn, taken)) = results
    np.testing.assert_array_equal(actions, drawn)
    # XLA joins the products and sums of the physics in one of them and not in the other.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), (one, steps), (other, taken))
