"""DQN, SARSA(lambda) and the iteration level: programs that learn at every timestep, against Python loops."""

from types import SimpleNamespace

import dqn
import hand
import iteration_level
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sarsa_lambda as sarsa
from networks import actor, critic, init_actor_critic, mlp

import rlfx.envs

B, KEY = 3, jax.random.key(7)


@pytest.mark.parametrize("calls", [1, 2])
def test_dqn_is_a_python_loop(monkeypatch, calls):
    """Also over two calls: schedules, random keys and the buffer go on with ``t0``."""
    length = 26
    for name, value in {"CAPACITY": 10, "SAMPLES": 5, "LEARN_EVERY": 3, "COPY_EVERY": 8}.items():
        monkeypatch.setattr(dqn, name, value)
    monkeypatch.setattr(dqn, "optimizer", optax.sgd(0.1))
    first = dqn.init_carry(jax.random.key(0), B, sizes=(4, 8, 2))
    program = jax.jit(rlfx.unroll(dqn.dqn, length=length // calls, batch=B))
    carry = first
    for call in range(calls):
        carry, _ = program(None, carry, KEY, t0=call * (length // calls))

    explore_keys, action_keys, env_keys, replay_keys = hand.keys(length, B, KEY, "explore", "action", "env", "replay")
    state, params, target, past = first.state, first.params.value, first.target.value, []
    step_all, gradient = jax.jit(jax.vmap(dqn.env.step)), jax.jit(jax.grad(dqn.batch_loss))

    @jax.jit
    def act(params, obs, epsilon, explore_keys, action_keys):
        explore = jax.vmap(lambda k: jax.random.bernoulli(k, epsilon))(explore_keys)
        anything = jax.vmap(lambda k: jax.random.randint(k, (), 0, 2))(action_keys)
        greedy = jax.vmap(lambda o: jnp.argmax(mlp(params, o)))(obs).astype(jnp.int32)
        return jnp.where(explore, anything, greedy)

    @jax.jit
    def draw(keys, low, stop):
        return jax.vmap(lambda k: jax.random.randint(k, (dqn.SAMPLES,), low, stop))(keys)

    for t in range(length):
        obs = jax.vmap(dqn.env.observe)(state)
        action = act(params, obs, max(0.05, 1.0 - t / dqn.EXPLORE_UNTIL), explore_keys[t], action_keys[t])
        state, step = step_all(env_keys[t], state, action)
        past.append(dqn.Transition(obs, action, step.reward, step.terminated, step.final_obs))

        times = np.asarray(draw(replay_keys[t], max(t - dqn.CAPACITY + 1, 0), t + 1))
        memory = jax.tree.map(lambda *x: np.stack(x), *past)
        sampled = jax.tree.map(lambda x: np.stack([x[times[b], b] for b in range(B)]), memory)
        if t % dqn.LEARN_EVERY == 0:
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params, target, sampled))
        if t % dqn.COPY_EVERY == 0:
            target = params
    hand.assert_close((carry.params.value, carry.target.value), (params, target))
    hand.assert_close(carry.state, state)


def test_sarsa_lambda_is_a_python_loop(monkeypatch):
    monkeypatch.setattr(sarsa, "env", rlfx.envs.make("MountainCar-v0", max_steps_in_episode=15))
    length = 40
    first = sarsa.init_carry(jax.random.key(0), B)
    carry, (done, _) = jax.jit(rlfx.unroll(sarsa.sarsa, length=length, batch=B))(None, first, KEY)
    assert done.any()

    action_keys, env_keys = hand.keys(length, B, KEY, "action", "env")
    state, action, weights = first.state, first.action, first.weights.value
    trace = np.zeros(first.trace.shape)
    choose = jax.jit(jax.vmap(sarsa.epsilon_greedy, in_axes=(0, None, 0)))

    def features(obs):  # Konidaris et al. 2011: cos(pi c . s), s in [0, 1]
        return np.cos(np.pi * ((np.asarray(obs) - sarsa.LOW) / (sarsa.HIGH - sarsa.LOW)) @ sarsa.FREQUENCIES.T)

    step_all = jax.jit(jax.vmap(sarsa.env.step))
    for t in range(length):
        here = features(jax.vmap(sarsa.env.observe)(state))
        state, step = step_all(env_keys[t], state, action)
        following = choose(action_keys[t], weights, step.final_obs)
        next_action = choose(action_keys[t], weights, jax.vmap(sarsa.env.observe)(state))
        update = np.zeros(weights.shape)
        for b in range(B):
            trace[b] *= sarsa.GAMMA * sarsa.LAMBDA
            trace[b, action[b]] += here[b]
            after = np.asarray(weights)[following[b]] @ features(step.final_obs[b])
            target = step.reward[b] + (0.0 if step.terminated[b] else sarsa.GAMMA * after)
            error = target - np.asarray(weights)[action[b]] @ here[b]
            update += error * sarsa.STEP_SIZES[None] * trace[b] / B
            if step.terminated[b] | step.truncated[b]:
                trace[b] = 0.0
        weights, action = (np.asarray(weights) + update).astype(np.float32), next_action
    hand.assert_close(carry.weights.value, weights)
    hand.assert_close(carry.trace, trace.astype(np.float32))
    np.testing.assert_array_equal(carry.action, action)


def test_iterations_are_a_python_loop():
    iterations, length, batch = 9, 12, 4
    descent = optax.identity()
    train = jax.jit(
        iteration_level.make_train(iterations=iterations, length=length, batch=batch, first_rate=0.1, optimizer=descent)
    )
    logs = train(jax.random.key(3))
    np.testing.assert_allclose(logs["rate"], 0.1 * 0.98 ** np.arange(1, iterations + 1), rtol=1e-5)

    params_key, env_key, key = jax.random.split(jax.random.key(3), 3)
    online = target = init_actor_critic(params_key, (4, 64, 64, 2))
    env = iteration_level.env
    state = jax.vmap(env.reset)(jax.random.split(env_key, batch))
    take_key = rlfx.unroll(lambda _, c, i: (c, i.key), length=iterations)

    @jax.jit
    def act(params, state, keys):
        state, data = hand.rollout(env, lambda obs: actor(params, obs), state, *keys)
        return state, vars(data)

    @jax.jit
    def gradient(online, target, obs, action, advantage):
        wanted = advantage + hand.over(lambda x: critic(target, x), obs)
        normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

        def loss(online):
            log_probs = hand.over(lambda x: actor(online, x), obs)
            error = hand.over(lambda x: critic(online, x), obs) - wanted
            return jnp.mean(0.5 * error**2 - hand.chosen(log_probs, action) * normalised)

        return jax.value_and_grad(loss)(online)

    for i, iteration_key in enumerate(take_key(None, None, key)[1]):
        if i % iteration_level.COPY_EVERY == 0:
            target = online
        state, data = act(online, state, hand.keys(length, batch, iteration_key, "action", "env"))
        data = SimpleNamespace(**data)
        values = np.asarray(hand.over(lambda obs, p=target: critic(p, obs), data.obs))
        last_obs = jax.vmap(env.observe)(state)
        following = hand.next_values(lambda obs, p=target: critic(p, obs), data, values, last_obs)
        advantage = hand.gae(data, values, following, iteration_level.GAMMA, iteration_level.LAMBDA)
        loss, grads = gradient(online, target, data.obs, data.action, jnp.asarray(advantage))
        np.testing.assert_allclose(logs["loss"][i], loss, rtol=1e-4)
        online = jax.tree.map(lambda p, g: p - 0.1 * 0.98 ** (i + 1) * g, online, grads)


def test_sarsa_lambda_learns():
    lengths = sarsa.train(steps=6_000, length=2_000, batch=8)
    assert lengths[-1] < 0.75 * lengths[0]


def test_the_scripts_run(capsys, lenient):
    dqn.main(["--steps", "1000"])
    iteration_level.main(["--iterations", "2"])
    out = capsys.readouterr().out
    assert "falls per 1,000 steps:" in out
    assert "seed 2:" in out
