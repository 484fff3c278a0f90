"""PureJaxRL's shape: PPO's whole training in one jitted scan."""

import jax
import jax.numpy as jnp
from gain_programs.cartpole import apply, network, reset, step

ENVS, STEPS, UPDATES, EPOCHS, MINIBATCHES = 64, 64, 4, 4, 4


def loss(params, batch):
    state, action, old, advantage, target = batch
    logits, value = apply(params, state)
    logp = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(logp, action[:, None], 1)[:, 0] - old)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    actor = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
    return actor + 0.5 * ((value - target) ** 2).mean() - 0.01 * -(jnp.exp(logp) * logp).sum(-1).mean()


def update(carry, _):
    params, states, key = carry

    def act(carry, _):
        states, key = carry
        key, one, two = jax.random.split(key, 3)
        logits, value = apply(params, states)
        action = jax.random.categorical(one, logits)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        after, reward, done = jax.vmap(step)(jax.random.split(two, ENVS), states, action.astype(jnp.float32))
        return (after, key), (states, action, logp, value, reward * jnp.ones(ENVS), done)

    (states, key), (seen, action, logp, value, reward, done) = jax.lax.scan(act, (states, key), None, STEPS)

    def advantage(carry, x):
        gae, following = carry
        value, reward, done = x
        delta = reward + 0.99 * following * (1 - done) - value
        gae = delta + 0.99 * 0.95 * (1 - done) * gae
        return (gae, value), gae

    _, advantages = jax.lax.scan(
        advantage, (jnp.zeros(ENVS), apply(params, states)[1]), (value, reward, done), reverse=True
    )
    data = (seen, action, logp, advantages, advantages + value)
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

    def epoch(carry, _):
        params, key = carry
        key, one = jax.random.split(key)
        order = jax.random.permutation(one, ENVS * STEPS)
        batches = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)

        def minibatch(params, batch):
            grads = jax.grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 3e-4 * g, params, grads), None

        return (jax.lax.scan(minibatch, params, batches)[0], key), None

    (params, key), _ = jax.lax.scan(epoch, (params, key), None, EPOCHS)
    return (params, states, key), reward.sum()


@jax.jit
def train(key):
    one, two, three = jax.random.split(key, 3)
    carry = network(one), jax.vmap(reset)(jax.random.split(two, ENVS)), three
    (params, *_), rewards = jax.lax.scan(update, carry, None, UPDATES)
    return params, rewards


def once():
    jax.block_until_ready(train(jax.random.key(0)))
