"""The composed example, in small: on two devices, what it computes is what the family's loss says, and it runs as a command."""

import composed_dqn
import dqn_family
import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place import pearl
from rlfx.place.compose import Composition

KEY = jax.random.key(3)


def test_the_example_trains_as_one_after_another(lenient):
    system = composed_dqn.make(actors=2, envs=2, length=4, batch=8, sub_batches=2, capacity=64, warmup=16)
    state = system.init(jax.random.key(0))
    places = Composition(0, 1, 1, 1, 1.0, 1.0)
    found, report = pearl.run(system, state, KEY, composition=places, devices=jax.devices()[:2], iterations=6)
    wanted = pearl.reference(system, state, KEY, 6)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert (system.updates, report.updates, report.transitions) == (1, 5, 96)
    moved = jax.tree.map(
        lambda a, b: float(jnp.abs(a - b).max()), found.learner.params, jax.device_put(state.learner.params)
    )
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_its_gradient_is_the_familys(lenient):
    """Of scaled rewards, with the weights of the draw."""
    rng = np.random.default_rng(0)
    x = pearl.Transition(
        *(jnp.asarray(v) for v in (
            rng.normal(size=(6, 4)).astype("f4"), rng.integers(0, 2, 6).astype("i4"), np.ones(6, "f4"),
            rng.random(6) < 0.3, np.zeros(6, bool), rng.normal(size=(6, 4)).astype("f4"),
        ))
    )  # fmt: skip
    weight, learner = jnp.linspace(0.2, 1.0, 6), jax.jit(composed_dqn.init, static_argnums=1)(KEY, (8, 8))
    grads, errors, _ = jax.jit(composed_dqn.gradient)(learner, x, weight, KEY)
    family = dqn_family.Transition(*jax.tree.map(lambda leaf: leaf[:, None], x._replace(reward=0.1 * x.reward)))
    plain = dqn_family.optimizer.init(learner.params)
    stepped, wanted = jax.jit(dqn_family.learn, static_argnums=0)(
        dqn_family.PRIORITISED, learner._replace(opt_state=plain), family, weight
    )
    np.testing.assert_allclose(errors, wanted, rtol=1e-5)
    found = jax.jit(composed_dqn.apply)(learner, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), found.params, stepped.params)
