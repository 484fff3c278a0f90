"""The composed examples, in small: on two devices, what it computes is what the family's loss says, and it runs as a command."""

import composed_dqn
import composed_sac
import dqn_family
import jax
import jax.numpy as jnp
import numpy as np
import sac
import transitions

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


def test_sac_trains_as_one_after_another_whoever_trains(lenient):
    """One update for four timesteps, replay uniform: on two devices, and with threads that change what they do."""
    system = composed_sac.make(actors=2, envs=2, length=2, batch=8, sub_batches=2, capacity=64)
    state = system.init(jax.random.key(0))
    places = Composition(0, 1, 1, 1, 1.0, 1.0)
    found, report = pearl.run(
        system, state, KEY, composition=places, devices=jax.devices()[:2], iterations=9, reallocate_every=1
    )
    jax.tree.map(np.testing.assert_array_equal, found, pearl.reference(system, state, KEY, 9))
    assert (report.updates, report.transitions) == (2 * 8, 8 * 9)
    assert np.all(np.asarray(found.manager.tree.leaves)[:64] == 1.0)


def test_an_update_of_sac_is_the_recipes(lenient):
    """By `sac.learn` on the same transitions, of environments and timesteps instead of a batch, with scaled rewards."""
    rng, learner = np.random.default_rng(0), jax.jit(composed_sac.init, static_argnums=1)(KEY, (8, 8))
    values = rng.normal(size=(6, 3)), rng.uniform(-1, 1, (6, 1)), rng.normal(size=6), rng.normal(size=(6, 3))
    obs, action, reward, following = (jnp.asarray(v, jnp.float32) for v in values)
    over, no = jnp.asarray(rng.random(6) < 0.3), jnp.zeros(6, bool)
    x = pearl.Transition(obs, action, reward, over, no, following)
    grads, errors, _ = jax.jit(composed_sac.gradient)(learner, x, jnp.ones(6), KEY)
    found = jax.jit(composed_sac.apply)(learner, grads)
    rows = transitions.Transition(obs, action, 0.1 * reward, over, following)
    wanted = jax.jit(sac.learn)(learner, jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), rows), KEY)
    assert np.all(errors == 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), found, wanted)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found.params.actor, learner.params.actor)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_random_actions_come_first():
    policy = jax.jit(composed_sac.policy)
    params = jax.jit(composed_sac.init, static_argnums=1)(KEY, (8, 8)).params.actor
    first, later = (jax.vmap(policy, (None, None, 0, None))(params, jnp.ones(3), jax.random.split(KEY, 200), jnp.int32(t))
                    for t in (199, 200))  # fmt: skip
    assert abs(float(jnp.std(first)) - 1 / np.sqrt(3)) < 0.06  # uniform in [-1, 1]
    assert not np.array_equal(first, later)
    assert float(jnp.abs(later).max()) < 1.0
