"""PPO with several epochs: advantages and updates against hand-written ones, and the main example learns."""

import hand
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ppo_cartpole as ppo
import pytest
import recurrent_ppo as rnn
from networks import actor, critic, init_actor_critic

import rlfx.envs

T, B, KEY = 40, 4, jax.random.key(7)


@pytest.fixture
def short_episodes(monkeypatch):
    env = rlfx.envs.make("gymnax/CartPole-v1", max_steps_in_episode=9, theta_threshold_radians=0.12)
    monkeypatch.setattr(ppo, "env", env)
    monkeypatch.setattr(rnn, "env", env)
    return env


def start(env):
    return jax.vmap(env.reset)(jax.random.split(jax.random.key(0), B))


def test_the_rollout_is_the_hand_written_one(short_episodes):
    params = init_actor_critic(jax.random.key(1), (4, 16, 2))
    carry = ppo.Carry(start(short_episodes), jnp.zeros(B))
    rollout = jax.jit(rlfx.unroll(ppo.act, length=T, batch=B))
    after, (sample, (score, done)) = rollout(params, carry, KEY)

    action_keys = hand.keys(T, B, KEY, "action", "env")
    final, data = hand.rollout(short_episodes, lambda obs: actor(params, obs), carry.state, *action_keys)
    assert data.truncated.any()
    assert data.terminated.any()
    values = np.asarray(hand.over(lambda obs: critic(params, obs), data.obs))
    last_obs = jax.vmap(short_episodes.observe)(final)
    following = hand.next_values(lambda obs: critic(params, obs), data, values, last_obs)
    advantage = hand.gae(data, values, following, ppo.GAMMA, ppo.LAMBDA)
    log_prob = hand.chosen(hand.over(lambda obs: actor(params, obs), data.obs), data.action)

    wanted = ppo.Sample(data.obs, data.action, log_prob, advantage, advantage + values)
    hand.assert_close(sample, wanted)
    hand.assert_close(after.state, final)
    np.testing.assert_array_equal(done, data.done)
    # The score of an episode is its length here: one for each timestep since the one before ended.
    for b in range(B):
        ends = np.flatnonzero(np.asarray(done)[:, b])
        np.testing.assert_array_equal(np.asarray(score)[ends, b], np.diff(ends, prepend=-1))


def surrogate(log_probs, values, sample, clip, entropy_weight):
    """PPO's loss on arrays of any leading shape."""
    advantage = (sample.advantage - sample.advantage.mean()) / (sample.advantage.std() + 1e-8)
    ratio = jnp.exp(hand.chosen(log_probs, sample.action) - sample.log_prob)
    policy = jnp.where(
        advantage > 0, jnp.minimum(ratio, 1 + clip) * advantage, jnp.maximum(ratio, 1 - clip) * advantage
    )
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return jnp.mean(0.25 * (values - sample.target) ** 2 - policy - entropy_weight * entropy)


def test_an_update_is_16_hand_written_gradient_steps(short_episodes):
    params = init_actor_critic(jax.random.key(1), (4, 16, 2))
    carry = ppo.Carry(start(short_episodes), jnp.zeros(B))
    rollout = rlfx.unroll(ppo.act, length=T, batch=B)
    optimizer = optax.sgd(0.05)
    update = jax.jit(ppo.make_update(rollout, optimizer))
    (got, _, _), _ = update((params, optimizer.init(params), carry), KEY)

    act_key, shuffle_key = jax.random.split(KEY)
    _, (sample, _) = jax.jit(rollout)(params, carry, act_key)
    rows = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), sample)

    @jax.jit
    def gradient(params, part):
        log_probs = lambda p: jax.vmap(lambda obs: actor(p, obs))(part.obs)  # noqa: E731
        values = lambda p: jax.vmap(lambda obs: critic(p, obs))(part.obs)  # noqa: E731
        return jax.grad(lambda p: surrogate(log_probs(p), values(p), part, ppo.CLIP, ppo.ENTROPY))(params)

    wanted = params
    for epoch_key in jax.random.split(shuffle_key, ppo.EPOCHS):
        for rows_of_part in rlfx.shuffle(epoch_key, T * B).reshape(ppo.MINIBATCHES, -1):
            part = jax.tree.map(lambda x: x[rows_of_part], rows)
            wanted = jax.tree.map(lambda p, g: p - 0.05 * g, wanted, gradient(wanted, part))
    change = lambda new: jax.tree.map(lambda n, o: n - o, new, params)  # noqa: E731
    hand.assert_close(change(got), change(wanted), 1e-4)


def test_the_recurrent_learner_is_a_hand_written_scan(short_episodes):
    params = rnn.init_params(jax.random.key(1), hidden=16)
    carry = rnn.Carry(start(short_episodes), jnp.zeros((B, 16)))
    _, (samples, _) = jax.jit(rlfx.unroll(rnn.act, length=T, batch=B))(params, carry, KEY)
    assert samples.first[1:].any()
    loss_fn = rlfx.compile(rnn.learn, length=T, batch=B)
    got = jax.jit(jax.value_and_grad(lambda p: loss_fn((p, samples), carry.h)[0]))(params)

    def by_hand(params):
        def cell(h, sample):
            h, *outputs = jax.vmap(lambda h, obs: rnn.policy(params, h, obs))(
                jnp.where(sample.first[:, None], 0.0, h), sample.obs
            )
            return h, outputs

        _, (log_probs, values) = jax.lax.scan(cell, carry.h, samples)
        # Acting and learning see the same policy.
        return surrogate(log_probs, values, samples, rnn.CLIP, rnn.ENTROPY), hand.chosen(log_probs, samples.action)

    (loss, log_prob), grads = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(params)
    np.testing.assert_allclose(got[0], loss, rtol=0, atol=1e-6)  # a mean of numbers of about one, which cancel
    hand.assert_close(got[1], grads)
    hand.assert_close(samples.log_prob, log_prob)


def test_recurrent_minibatches_keep_sequences_whole(lenient):
    """One epoch of one minibatch is one gradient step on the whole rollout."""
    params = rnn.init_params(jax.random.key(1), hidden=16)
    carry = rnn.Carry(start(rnn.env), jnp.zeros((B, 16)))
    optimizer = optax.sgd(10.0)
    update = jax.jit(rnn.make_update(optimizer, length=T, batch=B, epochs=1, minibatches=1))
    (got, _, _), _ = update((params, optimizer.init(params), carry), KEY)

    act_key, _ = jax.random.split(KEY)
    _, (samples, _) = jax.jit(rlfx.unroll(rnn.act, length=T, batch=B))(params, carry, act_key)
    loss_fn = rlfx.compile(rnn.learn, length=T, batch=B)
    grads = jax.jit(jax.grad(lambda p: loss_fn((p, samples), carry.h)[0]))(params)
    hand.assert_close(got, jax.tree.map(lambda p, g: p - 10.0 * g, params, grads))


def test_the_demo_learns(tmp_path, capsys, lenient):
    path = tmp_path / "curve.png"
    assert ppo.main(["--seed", "0", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "act: T=128, B=16, the values" in out
    assert "mean return 475:" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_if_it_did_not_learn(tmp_path, capsys, lenient):
    assert ppo.main(["--seed", "0", "--updates", "5", "--envs", "4", "--plot", str(tmp_path / "curve.png")]) == 1
    assert "not reached" in capsys.readouterr().out
