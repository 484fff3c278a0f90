"""REINFORCE, A2C, one-epoch PPO and V-trace: gradients against hand-written scans."""

import a2c
import hand
import jax
import jax.numpy as jnp
import numpy as np
import policies
import ppo_one_epoch
import pytest
import reinforce
import vtrace
from networks import actor, critic, init_actor_critic, init_mlp, mlp

import rlfx.envs
from tests.sampling import met

T, B, KEY = 40, 3, jax.random.key(7)


@pytest.fixture
def short_episodes(monkeypatch):
    """Some episodes fall early, some are cut."""
    env = rlfx.envs.make("CartPole-v1", max_steps_in_episode=9, theta_threshold_radians=0.12)
    for module in (reinforce, a2c, ppo_one_epoch, vtrace, policies):
        monkeypatch.setattr(module, "env", env)
    return env


def start(env, seed=0):
    return jax.vmap(env.reset)(jax.random.split(jax.random.key(seed), B))


def played(env, log_probs):
    final, data = hand.rollout(env, log_probs, start(env), *hand.keys(T, B, KEY, "action", "env"))
    assert data.truncated.any()
    assert not data.done.all()
    return final, data


@pytest.mark.parametrize(("n", "normalize"), met([None, 1, 5], [True, False]))
def test_reinforce_is_the_hand_written_gradient(short_episodes, n, normalize):
    params = init_mlp(jax.random.key(1), (4, 16, 2))
    loss_fn = rlfx.compile(reinforce.make_program(n, normalize), length=T, batch=B)
    step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (loss, (state, falls)), grads = step(params, start(short_episodes), KEY)

    final, data = played(short_episodes, lambda obs: jax.nn.log_softmax(mlp(params, obs)))
    assert data.terminated.any()
    returns = hand.monte_carlo(data.reward, data.done, reinforce.GAMMA, n)
    if normalize:
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)

    def by_hand(params):
        log_probs = jax.nn.log_softmax(hand.over(lambda obs: mlp(params, obs), data.obs))
        return jnp.mean(-hand.chosen(log_probs, data.action) * returns)

    wanted = jax.value_and_grad(by_hand)(params)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5, atol=1e-6)
    hand.assert_close(grads, wanted[1])
    hand.assert_close(state, final)
    np.testing.assert_allclose(falls, 1000 * data.terminated.mean(), rtol=1e-5)


def _targets(env, params):
    final, data = played(env, lambda obs: actor(params, obs))
    values = np.asarray(hand.over(lambda obs: critic(params, obs), data.obs))
    last_obs = jax.vmap(env.observe)(final)
    return data, values, hand.next_values(lambda obs: critic(params, obs), data, values, last_obs)


def _actor_critic_loss(params, data, target, advantage, entropy_weight):
    log_probs = hand.over(lambda obs: actor(params, obs), data.obs)
    values = hand.over(lambda obs: critic(params, obs), data.obs)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    policy = hand.chosen(log_probs, data.action) * advantage
    return jnp.mean(0.5 * (values - target) ** 2 - policy - entropy_weight * entropy)


def test_a2c_is_the_hand_written_gradient(short_episodes):
    params = init_actor_critic(jax.random.key(1), (4, 16, 2))
    loss_fn = rlfx.compile(a2c.a2c, length=T, batch=B)
    got = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, start(short_episodes), KEY)[0]))(params)

    data, values, following = _targets(short_episodes, params)
    target = np.zeros_like(values)
    for t in range(T):  # five rewards, then the value of what follows; less where the episode or the rollout ends
        for b in range(B):
            weight = 1.0
            for s in range(t, min(t + a2c.STEPS, T)):
                target[t, b] += weight * data.reward[s, b]
                weight *= a2c.GAMMA
                if data.done[s, b] or s == min(t + a2c.STEPS, T) - 1:
                    target[t, b] += 0.0 if data.terminated[s, b] else weight * following[s, b]
                    break
    wanted = jax.value_and_grad(_actor_critic_loss)(params, data, target, target - values, a2c.ENTROPY)
    hand.assert_close(got, wanted)


def test_one_epoch_ppo_is_the_hand_written_gradient(short_episodes):
    params = init_actor_critic(jax.random.key(1), (4, 16, 2))
    loss_fn = rlfx.compile(ppo_one_epoch.ppo, length=T, batch=B)
    _, grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(p, start(short_episodes), KEY)[0]))(params)

    data, values, following = _targets(short_episodes, params)
    advantage = hand.gae(data, values, following, ppo_one_epoch.GAMMA, ppo_one_epoch.LAMBDA)
    normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    wanted = jax.grad(_actor_critic_loss)(params, data, advantage + values, normalised, ppo_one_epoch.ENTROPY)
    hand.assert_close(grads, wanted)


def test_vtrace_is_the_hand_written_gradient(short_episodes):
    behaviour, learner = (init_actor_critic(jax.random.key(k), (4, 16, 2)) for k in (1, 2))
    learner["actor"][-1] = (1000.0 * learner["actor"][-1][0], jnp.array([0.5, -0.5]))  # policies that really differ
    loss_fn = rlfx.compile(vtrace.impala, length=T, batch=B)

    def loss(learner):
        return loss_fn({"learner": learner, "actor": behaviour}, start(short_episodes), KEY)[0]

    got = jax.jit(jax.value_and_grad(loss))(learner)

    final, data = played(short_episodes, lambda obs: actor(behaviour, obs))
    values = np.asarray(hand.over(lambda obs: critic(learner, obs), data.obs))
    last_obs = jax.vmap(short_episodes.observe)(final)
    following = hand.next_values(lambda obs: critic(learner, obs), data, values, last_obs)
    new, old = (hand.over(lambda obs, p=p: actor(p, obs), data.obs) for p in (learner, behaviour))
    rho = np.asarray(jnp.exp(hand.chosen(new, data.action) - hand.chosen(old, data.action)))
    assert rho.max() > 1.2
    assert rho.min() < 0.8
    clipped = np.minimum(rho, 1.0)
    terminated, done, gamma = np.asarray(data.terminated), np.asarray(data.done), vtrace.GAMMA
    # Espeholt et al. 2018, remark 1: v_s = V(x_s) + delta_s + gamma c_s (v_{s+1} - V(x_{s+1})).
    target, correction = np.zeros_like(values), np.zeros(B, np.float32)
    reward = vtrace.REWARD_SCALE * np.asarray(data.reward)
    for t in reversed(range(T)):
        bootstrap = gamma * np.where(terminated[t], 0.0, following[t])
        delta = clipped[t] * (reward[t] + bootstrap - values[t])
        correction = delta + gamma * vtrace.LAMBDA * clipped[t] * np.where(done[t], 0.0, correction)
        target[t] = values[t] + correction
    after = np.concatenate([target[1:], following[-1:]])
    after = np.where(terminated, 0.0, np.where(done, following, after))
    advantage = clipped * (reward + gamma * after - values)
    wanted = jax.value_and_grad(_actor_critic_loss)(learner, data, target, advantage, vtrace.ENTROPY)
    hand.assert_close(got, wanted)


def test_vtrace_of_one_policy_is_a_lambda_return(short_episodes):
    params = init_actor_critic(jax.random.key(1), (4, 16, 2))

    def both(params, state, t):
        obs = short_episodes.observe(state)
        value = critic(params, obs)
        action = jax.random.categorical(t.key_for("action"), actor(params, obs))
        state, step = short_episodes.step(t.key_for("env"), state, action)
        following = rlfx.next_value(lambda obs: critic(params, obs), step, value)
        target, _ = rlfx.vtrace(step, value, following, jnp.float32(0.0), gamma=0.99, lam=0.9)
        return state, (target, rlfx.lambda_return(step, following, gamma=0.99, lam=0.9))

    target, wanted = rlfx.unroll(both, length=T, batch=B)(params, start(short_episodes), KEY)[1]
    hand.assert_close(target, wanted)


@pytest.mark.parametrize("name", policies.POLICIES)
def test_policies_of_every_library_have_the_hand_written_gradient(short_episodes, lenient, name):
    policy = policies.POLICIES[name](jax.random.key(1))
    loss_fn = rlfx.compile(policies.make_program(policy.apply), length=T, batch=B)
    got = jax.jit(jax.grad(lambda p: loss_fn(p, start(short_episodes), KEY)[0]))(policy.params)

    _, data = played(short_episodes, lambda obs: jax.nn.log_softmax(policy.apply(policy.params, obs)))
    returns = hand.monte_carlo(data.reward, data.done, 0.99)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)

    def by_hand(params):
        log_probs = jax.nn.log_softmax(hand.over(lambda obs: policy.apply(params, obs), data.obs))
        return jnp.mean(-hand.chosen(log_probs, data.action) * returns)

    hand.assert_close(got, jax.grad(by_hand)(policy.params))


def test_reinforce_learns(lenient):
    falls = reinforce.train(updates=40, batch=16)
    assert falls[-5:].mean() < 0.25 * falls[:5].mean()


@pytest.mark.parametrize("module", [a2c, vtrace])
def test_the_recipes_are_commands(module, capsys, lenient):
    assert module.main(module.make, ["--updates", "2", "--seeds", "0"]) == 1  # two updates reach no bar
    assert "seed 0: " in capsys.readouterr().out


@pytest.mark.parametrize("module", [ppo_one_epoch, policies])
def test_the_scripts_run(module, capsys, lenient):
    module.main(["--updates", "2"])
    assert "falls per 1,000 steps" in capsys.readouterr().out
