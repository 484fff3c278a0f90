"""What an expert writes by hand, in plain jax, for what rlfx derives: a scan over time forward, a scan backward, vmap.

For `launches.py`, which counts what both launch. `tests/ahead/test_by_hand.py` compares values and gradients with rlfx's.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import ppo_cartpole
import recurrent_ppo
from networks import mlp

# -- sums over time, of arrays [T, B]


def backward(body, end, xs):
    """``body(following, x) -> here``, from the last timestep to the first."""
    return jax.lax.scan(lambda c, x: (body(c, x),) * 2, end, xs, reverse=True)[1]


def discounted_sum(reward, discount):
    return backward(lambda g, x: x[0] + x[1] * g, jnp.zeros(reward.shape[1:]), (reward, discount))


def gae(reward, terminated, truncated, value, following, *, gamma, lam):
    delta = reward + gamma * (1 - terminated) * following - value
    going = gamma * lam * (1 - (terminated | truncated))
    return backward(lambda a, x: x[0] + x[1] * a, jnp.zeros(reward.shape[1:]), (delta, going))


def vtrace(reward, terminated, truncated, value, following, log_rho, *, gamma, lam):
    """Targets (Espeholt et al. 2018, eq. 1), weights clipped at 1."""
    clipped = jnp.minimum(jnp.exp(log_rho), 1.0)
    delta = clipped * (reward + gamma * (1 - terminated) * following - value)
    trace = gamma * lam * (1 - (terminated | truncated)) * clipped
    return value + backward(lambda c, x: x[0] + x[1] * c, jnp.zeros(reward.shape[1:]), (delta, trace))


# -- PPO on CartPole, 4 epochs of 4 minibatches (examples/ppo_cartpole.py)


def split_keys(key, name, length, batch):
    """As PureJaxRL: a key for every point, split off one before."""
    return jax.random.split(jax.random.fold_in(key, len(name)), (length, batch))


def ppo_update(optimizer, envs, *, keys=split_keys, shuffle=jax.random.permutation):
    """``update(agent, key) -> (agent, (score, done))``, as ``ppo_cartpole.make_update`` has it.

    Args:
      keys: ``keys(key, name, length, batch)``, those of one draw, ``[T, B]``.
      shuffle: ``shuffle(key, n)``, a permutation.
    """
    env, p = ppo_cartpole.env, ppo_cartpole

    def update(agent, key):
        params, opt_state, carry = agent
        act_key, shuffle_key = jax.random.split(key)
        actor, critic = (jax.vmap(lambda obs, f=f: f(params, obs)) for f in (p.actor, p.critic))

        def act(carry, keys):
            obs = jax.vmap(env.observe)(carry.state)
            log_probs, value = actor(obs), critic(obs)
            action = jax.vmap(jax.random.categorical)(keys[0], log_probs)
            state, step = jax.vmap(env.step)(keys[1], carry.state, action)
            score = carry.score + step.reward
            log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=1)[:, 0]
            out = obs, action, log_prob, value, step, critic(step.final_obs), score
            return p.Carry(state, jnp.where(step.done, 0.0, score)), out

        drawn = [keys(act_key, name, p.LENGTH, envs) for name in ("action", "env")]
        carry, (obs, action, log_prob, value, step, final, score) = jax.lax.scan(act, carry, drawn)
        last = critic(jax.vmap(env.observe)(carry.state))
        following = jnp.where(step.truncated, final, jnp.concatenate([value[1:], last[None]]))
        advantage = gae(step.reward, step.terminated, step.truncated, value, following, gamma=p.GAMMA, lam=p.LAMBDA)
        samples = p.Sample(obs, action, log_prob, advantage, advantage + value)
        rows = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), samples)

        def learn(learner, indices):
            params, opt_state = learner
            minibatch = jax.tree.map(lambda x: x[indices], rows)
            updates, opt_state = optimizer.update(jax.grad(p.ppo_loss)(params, minibatch), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        def epoch(learner, key):
            return jax.lax.scan(learn, learner, shuffle(key, envs * p.LENGTH).reshape(p.MINIBATCHES, -1))

        learner, _ = jax.lax.scan(epoch, (params, opt_state), jax.random.split(shuffle_key, p.EPOCHS))
        return (*learner, carry), (score, step.done)

    return update


# -- the learner of recurrent PPO (examples/recurrent_ppo.py)


def recurrent_loss(params, samples, h):
    """The loss on whole sequences, samples ``[T, B]``, the memory ``h[B, hidden]``: the cell alone is in the loop."""
    p = recurrent_ppo
    over = lambda fn: jax.vmap(jax.vmap(fn))  # noqa: E731
    embedded = over(lambda obs: jnp.tanh(mlp(params["embed"], obs)))(samples.obs)

    def cell(h, x):
        embedded, first = x
        h = jax.vmap(lambda h, x: p.gru(params["gru"], h, x))(jnp.where(first[:, None], 0.0, h), embedded)
        return h, h

    _, h = jax.lax.scan(cell, h, (embedded, samples.first))
    log_probs = jax.nn.log_softmax(over(lambda h: mlp(params["actor"], h))(h))
    value = over(lambda h: mlp(params["critic"], h)[0])(h)
    log_prob = jnp.take_along_axis(log_probs, samples.action[..., None], axis=-1)[..., 0]
    advantage = (samples.advantage - samples.advantage.mean()) / (samples.advantage.std() + 1e-8)
    ratio = jnp.exp(log_prob - samples.log_prob)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - p.CLIP, 1 + p.CLIP) * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    return jnp.mean(0.25 * (value - samples.target) ** 2 - surrogate - p.ENTROPY * entropy)
