"""Evolution strategies on CartPole-v1 (Salimans et al. 2017): no gradient of anything, only whole episodes of neighbours.

Notice `evolve`: one member of one generation, which plays an episode by calling a program over t. Members with numbers 2k and
2k + 1 go in opposite directions: their noise has one key, of `i.shared_key`. Ranks are one `rlfx.shared` computation of all
returns, and `rlfx.mean(..., over="p")` is the step that all of them suggest.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx.envs

MEMBERS, EPISODES, HORIZON, UPDATES = 32, 2, 500, 80
SIGMA, LEARNING_RATE = 0.1, 0.1
BAR = 475.0  # greedy, the mean of 100 episodes; reached in half of the updates, and held

env = rlfx.envs.make("CartPole-v1", auto_reset=False)
ACTIONS, (OBS,) = env.action_space.n, env.observation_space.shape


def choose(params, obs):
    return jnp.argmax(mlp(params, obs)).astype(jnp.int32)


class Carry(NamedTuple):
    state: Any
    ended: jax.Array


def play(params, carry, t):
    """A step of an episode that may have ended."""
    state, step = env.step(t.key_for("env"), carry.state, choose(params, env.observe(carry.state)))
    reward = jnp.where(carry.ended, 0.0, step.reward)
    return Carry(state, carry.ended | step.done), reward


class Learner(NamedTuple):
    params: Any
    opt_state: Any


def noise_like(key, params):
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree, [jax.random.normal(k, x.shape) for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)]
    )


def centred_ranks(returns):
    """From -0.5 to 0.5, by rank."""
    return jnp.argsort(jnp.argsort(returns)) / (returns.size - 1) - 0.5


def make(*, members=MEMBERS, episodes=EPISODES, horizon=HORIZON, updates=UPDATES, hidden=(16,), mesh=None):
    optimizer = optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, updates))
    episode = rlfx.unroll(play, length=horizon, batch=episodes)

    def evolve(_, learner, i):
        p = i.index("p")
        direction = jnp.where(p % 2 == 0, 1.0, -1.0)
        noise = noise_like(jax.random.fold_in(i.shared_key, p // 2), learner.params)
        mine = jax.tree.map(lambda w, n: w + SIGMA * direction * n, learner.params, noise)

        starts = jax.vmap(env.reset)(jax.random.split(i.key_for("starts"), episodes))
        _, reward = episode(mine, Carry(starts, jnp.zeros(episodes, bool)), i.key_for("episode"))
        returns = reward.sum(0).mean()

        rank = rlfx.shared(centred_ranks, returns)[p]
        uphill = jax.tree.map(lambda n: rlfx.mean(rank * direction * n, over="p") / SIGMA, noise)
        changes, opt_state = optimizer.update(jax.tree.map(jnp.negative, uphill), learner.opt_state)
        return Learner(optax.apply_updates(learner.params, changes), opt_state), rlfx.mean(returns, over="p")

    generation = rlfx.unroll(evolve, length=1, dim="i", batch={"p": members}, mesh=mesh)

    def init(key):
        params = init_mlp(key, (OBS, *hidden, ACTIONS), 0.01)
        return rlfx.Shared(Learner(params, optimizer.init(params)))

    def update(learner, key):
        learner, returns = generation(None, learner, key)
        return learner, {"return": returns.mean()}

    def greedy(learner, obs, key):
        return choose(learner.value.params, obs)

    return Recipe("es", env, init, update, greedy, updates, 4, 8, members * episodes * horizon, BAR)


if __name__ == "__main__":
    sys.exit(main(make))
