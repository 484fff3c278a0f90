"""Whole episodes: as many as asked for, each counted once; actions on the agent's scale; steps with other fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.envs import Environment, Step, spaces
from rlfx.errors import EnvError

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Halves(Environment):
    """Half of the episodes last one step, the others ``long``; each step gives the action."""

    long: int = 9

    name = "halves"
    observation_space = spaces.Box(0.0, 10.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, ())

    def reset(self, key):
        return jnp.where(jax.random.bernoulli(key), 1, self.long).astype(jnp.int32), jnp.int32(0)

    def observe(self, state):
        return jnp.stack(state).astype(jnp.float32)

    def transition(self, key, state, action):
        state = (state[0], state[1] + 1)
        return state, Step(action, state[1] >= state[0], jnp.zeros((), bool), self.observe(state))


def one(params, obs, key):
    return jnp.float32(1.0)


@pytest.mark.parametrize("wrap", [lambda e: e, rlfx.envs.auto_reset], ids=["once", "resets"])
def test_short_episodes_count_no_more_than_long_ones(wrap):
    """The first 1,000 episodes to end would be of 1.8 steps, those of 1,000 environments are of 5."""
    result = rlfx.envs.evaluate(wrap(Halves()), one, None, KEY, episodes=1000)
    assert set(np.unique(result.lengths)) == {1, 9}
    assert abs(float(result.mean_length) - 5.0) < 0.5
    np.testing.assert_array_equal(result.returns, result.lengths)
    assert result.ended.all()
    assert result.returns.shape == (1000,)


def test_an_episode_that_goes_on_is_left():
    result = rlfx.envs.evaluate(Halves(), one, None, KEY, 20, max_steps=4)
    np.testing.assert_array_equal(result.ended, result.lengths == 1)
    assert set(np.unique(result.lengths)) == {1, 4}


def test_a_policy_remembers_within_its_own_episode():
    """The memory begins anew, counts the steps of its episode, and stands still after the end."""

    def counting(params, memory, obs, key):
        return params * memory.astype(jnp.float32), memory + 1

    result = rlfx.envs.evaluate(Halves(), counting, jnp.float32(0.5), KEY, 50, memory=jnp.int32(0))
    n = np.asarray(result.lengths)
    np.testing.assert_allclose(result.returns, 0.5 * n * (n - 1) / 2)


def test_keys_differ_between_episodes_and_steps_and_are_the_callers():
    def noise(params, obs, key):
        return jax.random.uniform(key)

    results = [rlfx.envs.evaluate(Halves(), noise, None, k, 40).returns for k in (KEY, KEY, jax.random.key(1))]
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])
    assert len(np.unique(results[0])) == 40


def test_it_is_a_part_of_what_is_compiled():
    env = rlfx.envs.make("CartPole-v1")

    def policy(params, obs, key):
        return (obs @ params > 0).astype(jnp.int32)

    params = jnp.array([[0.0, 0.0, 1.0, 0.3], [0.0, 0.0, -1.0, 0.0]], jnp.float32)
    run = jax.jit(jax.vmap(lambda p: rlfx.envs.evaluate(env, policy, p, KEY, 10).mean_return))
    each = [rlfx.envs.evaluate(env, policy, p, KEY, 10).mean_return for p in params]
    np.testing.assert_allclose(run(params), each, rtol=1e-6)
    assert each[0] > 10 * each[1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"episodes": 0}, r"evaluate: episodes must be a positive integer, got 0"),
        ({"max_steps": 2.5}, r"evaluate: max_steps must be a positive integer, got 2.5"),
        ({"env": "CartPole-v1"}, r"evaluate: env must be an environment, got 'CartPole-v1'"),
        ({"policy": 3}, r"the policy is int \(3\), which can't be called"),
        ({"policy": lambda obs: 0}, r"evaluate: policy must be a function of \(params, obs, key\), got"),
        ({"policy": one, "memory": jnp.int32(0)}, r"must be a function of \(params, memory, obs, key\), got"),
        ({"policy": lambda p, m, o, k: jnp.float32(1), "memory": jnp.int32(0)}, r"a policy with memory returned"),
        ({"policy": lambda p, m, o, k: (jnp.float32(1), jnp.float32(1)), "memory": jnp.int32(0)},
         r"was given memory \(\['int32\[\]'\]"),
        ({"policy": lambda p, o, k: jnp.ones(2)}, r"halves: the action has shape \(2,\)"),
    ],
)  # fmt: skip
def test_what_can_not_be_evaluated_is_refused(change, text):
    with pytest.raises(EnvError, match=text):
        rlfx.envs.evaluate(**{"env": Halves(), "policy": one, "params": None, "key": KEY, **change})


def test_what_can_not_be_hashed_is_refused():
    class Unhashable(Halves):
        __hash__ = None

    with pytest.raises(EnvError, match="Unhashable can't be hashed"):
        rlfx.envs.evaluate(Unhashable(), one, None, KEY)


def test_actions_are_stretched_to_the_bounds():
    env = rlfx.envs.make("Pendulum-v1", auto_reset=False)
    ours = rlfx.envs.rescale_action(env)
    rlfx.envs.check(ours)
    state = env.reset(KEY)
    for scaled, torque in ((-1.0, -2.0), (1.0, 2.0), (0.25, 0.5)):
        got = ours.step(KEY, state, jnp.array([scaled]))[1].reward
        np.testing.assert_allclose(got, env.step(KEY, state, jnp.array([torque]))[1].reward, rtol=1e-6)
    positive = rlfx.envs.rescale_action(env, 0.0, 10.0)
    got = positive.step(KEY, state, jnp.array([10.0]))[1].reward
    np.testing.assert_allclose(got, env.step(KEY, state, jnp.array([2.0]))[1].reward, rtol=1e-6)
    # Limits and resets go beneath it, as beneath other wrappers of actions.
    assert rlfx.envs.auto_reset(ours).resets
    with pytest.raises(EnvError, match="CartPole-v1 takes Discrete"):
        rlfx.envs.rescale_action(rlfx.envs.make("CartPole-v1"))
    with pytest.raises(EnvError, match=r"low=1.0, high=-1.0"):
        rlfx.envs.rescale_action(env, 1.0, -1.0)
    with pytest.raises(EnvError, match="finite bounds"):
        rlfx.envs.rescale_action(rlfx.envs.clip_action(env))


def test_a_step_with_other_fields():
    step = Step(jnp.float32(2.0), jnp.bool_(False), jnp.bool_(True), jnp.ones(2))
    changed = step.replace(reward=0.5 * step.reward)
    assert (changed.reward, changed.truncated, changed.done) == (1.0, True, True)
    with pytest.raises(TypeError, match="rewards"):
        step.replace(rewards=1.0)
