"""A learned discount: A2C at a discount that a meta-gradient chooses (Xu et al. 2018), on a climb that pays late.

Notice `reached`: an update of the parameters at the discount, and what the updated policy is worth at the discount that
counts, on timesteps of its own. `jax.grad` of it goes through the update, and so through the gradient of `inner`, by way of
the advantages and targets alone. Those depend on the discount, and not on parameters: `stop_gradient` is around the critics,
not around the targets. At the first discount, 0.5, whoever is at the bottom is better off there: with `meta_rate=0` it stays
0.5, and the policy unlearns to climb.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient
from networks import actor, init_mlp, mlp
from recipes import Recipe, main
from tasks import Climb, made

import rlfx

LENGTH, ENVS, UPDATES = 16, 32, 200
COUNTS, LAMBDA, ENTROPY = 0.99, 0.9, 0.02  # the discount that counts
RATE, META_RATE = 5e-3, 0.05
BAR = 0.55  # greedy, the mean of 100 episodes; 0.6 is the best, and 0 what resting gives

env = made(Climb())
(OBS,), ACTIONS = env.observation_space.shape, env.action_space.n


def advantage(critic, obs, step, gamma):
    """Of a critic that is a constant: a function of the discount."""
    value = mlp(critic, obs)[0]
    next_value = rlfx.next_value(lambda obs: mlp(critic, obs)[0], step, value)
    return rlfx.gae(step, value, next_value, gamma=gamma, lam=LAMBDA), value


def acted(params, state, t):
    """``(state, obs, log-probabilities, action, step)``."""
    obs = env.observe(state)
    log_probs = actor(params, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    return *env.step(t.key_for("env"), state, action), obs, log_probs, action


def inner(both, state, t):
    """A2C at the discount that is learned; a second critic learns what counts."""
    params, gamma = both
    state, step, obs, log_probs, action = acted(params, state, t)
    gain, _ = advantage(stop_gradient(params["critic"]), obs, step, gamma)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    loss = -log_probs[action] * gain - ENTROPY * entropy
    for name, discount in (("critic", gamma), ("judge", COUNTS)):
        gain, value = advantage(stop_gradient(params[name]), obs, step, discount)
        loss += 0.5 * (mlp(params[name], obs)[0] - (gain + value)) ** 2
    return loss, state, step.reward


def outer(params, state, t):
    """The policy gradient alone, by the judge."""
    state, step, obs, log_probs, action = acted(params, state, t)
    gain, _ = advantage(stop_gradient(params["judge"]), obs, step, COUNTS)
    return -log_probs[action] * gain, state, step.reward


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    logit: jax.Array  # of the discount
    logit_state: Any
    state: Any


def greedy(agent, obs, key):
    return jnp.argmax(actor(agent.params, obs)).astype(jnp.int32)


optimizer = optax.adam(RATE, eps_root=1e-8)  # its root has no slope at 0, the gradient of what was never seen


def make_reached(*, length, envs, mesh=None):
    """``reached(logit, agent, key) -> (loss, (params, opt_state, state, reward))``: one update, and its worth."""
    learning, judging = (rlfx.compile(program, length=length, batch=envs, mesh=mesh) for program in (inner, outer))

    def reached(logit, agent, key):
        here, following = jax.random.split(key)
        loss = lambda params: learning((params, jax.nn.sigmoid(logit)), agent.state, here)  # noqa: E731
        grads, (state, _) = jax.grad(loss, has_aux=True)(agent.params)
        changes, opt_state = optimizer.update(grads, agent.opt_state, agent.params)
        params = optax.apply_updates(agent.params, changes)
        worth, (state, reward) = judging(params, state, following)
        return worth, (params, opt_state, state, reward.mean())

    return reached


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(16,), meta_rate=META_RATE, mesh=None):
    meta_optimizer = optax.adam(meta_rate)
    slope = jax.grad(make_reached(length=length, envs=envs, mesh=mesh), has_aux=True)

    def init(key):
        *keys, env_key = jax.random.split(key, 4)
        outs = {"actor": ACTIONS, "critic": 1, "judge": 1}
        params = {name: init_mlp(k, (OBS, *hidden, n), 0.01) for k, (name, n) in zip(keys, outs.items(), strict=True)}
        logit, state = jnp.float32(0.0), jax.vmap(env.reset)(jax.random.split(env_key, envs))
        return Agent(params, optimizer.init(params), logit, meta_optimizer.init(logit), state)

    def update(agent, key):
        grad, (params, opt_state, state, reward) = slope(agent.logit, agent, key)
        change, logit_state = meta_optimizer.update(grad, agent.logit_state)
        logit = agent.logit + change
        return Agent(params, opt_state, logit, logit_state, state), {
            "reward": reward,
            "discount": jax.nn.sigmoid(logit),
        }

    return Recipe("learned_discount", env, init, update, greedy, updates, 10, 20, 2 * length * envs, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
