"""Parts of recipes by hand: the average of weights that is evaluated, the share of a force that a policy has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import ppo_continuous
import pqn
import pytest
import recurrent_ppo

import rlfx

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


def test_ppos_policy_has_a_share_of_the_force():
    """A fourth of each of its actions moves the pendulum, up to the whole torque."""
    task = dataclasses.replace(ppo_continuous.PENDULUM, bounds=4.0)
    agent = ppo_continuous.make(task, length=1, envs=64, hidden=(4,)).init(KEY)
    params = {**agent.params, "log_std": agent.params["log_std"] + 1.0}
    rollout = rlfx.unroll(ppo_continuous.make_act(task, task.make()), length=1, batch=64)
    carry, (samples, _) = rollout(params, agent.carry, KEY)
    before, action = agent.carry.state, samples.action[0, :, 0]
    assert (np.abs(action) > 4.0).any()
    torque = 2.0 * np.clip(action, -4.0, 4.0) / 4.0
    after = before.theta_dot + (15.0 * np.sin(before.theta) + 3.0 * torque) * 0.05  # g = 10, m = l = 1
    np.testing.assert_allclose(carry.state.theta_dot, np.clip(after, -8.0, 8.0), atol=1e-4)


def test_pqn_plays_by_an_average_of_its_weights():
    """A fourth of what an update made; the policy reads nothing else."""
    task = dataclasses.replace(pqn.CARTPOLE, average=0.25)
    recipe = pqn.make(task, length=4, envs=8, updates=4, hidden=(4,))
    agent = recipe.init(KEY)
    after, _ = jax.jit(recipe.update)(agent, KEY)
    assert not np.array_equal(after.params[0][0], agent.params[0][0])
    expected = jax.tree.map(lambda new, old: 0.25 * new + 0.75 * old, after.params, agent.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), after.average, expected)
    obs = jnp.array([0.1, 0.2, -0.05, 0.3])
    swapped = [*after.average[:-1], tuple(x[..., ::-1] for x in after.average[-1])]  # the two actions
    assert recipe.policy(after._replace(average=swapped), obs, KEY) == 1 - recipe.policy(after._replace(params=None), obs, KEY)


def test_recurrent_ppo_plays_by_an_average_of_its_weights():
    """Its memory is that of the policy that plays; what acts and learns reads the average nowhere."""
    recipe = recurrent_ppo.make(length=4, envs=4, updates=4, hidden=4)
    agent, update = recipe.init(KEY), jax.jit(recipe.update)
    after, _ = update(agent, KEY)
    expected = jax.tree.map(lambda new, old: 0.02 * new + 0.98 * old, after.params, agent.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), after.average, expected)
    unread, _ = update(agent._replace(average=jax.tree.map(jnp.zeros_like, agent.average)), KEY)
    jax.tree.map(np.testing.assert_array_equal, unread[:3], after[:3])

    h, obs = jnp.array([0.1, -0.3, 0.2, 0.4]), jnp.array([0.1, 0.2, -0.05, 0.3])
    action, remembered = recipe.policy(after._replace(params=None), h, obs, KEY)
    np.testing.assert_array_equal(remembered, recurrent_ppo.policy(after.average, h, recurrent_ppo.positions(obs))[0])
    *hidden, last = after.average["actor"]
    swapped = {**after.average, "actor": [*hidden, tuple(x[..., ::-1] for x in last)]}  # the two actions
    assert recipe.policy(after._replace(average=swapped), h, obs, KEY)[0] == 1 - action
