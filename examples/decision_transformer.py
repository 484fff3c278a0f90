"""A decision transformer on Pendulum-v1, offline: the actions of logged episodes that had such a return (Chen et al. 2021).

Notice that learning and acting are one model of one timestep, with another program around it. `x[t - CONTEXT + 1:t + 1]` is
what a timestep attends to: in learning, of a logged episode (`rlfx.inputs`), all timesteps at once; in acting, of a ring that
the compiler keeps. At an episode's beginning the slice is shorter, in both. A timestep is one token, not three: what is to be
received from here on, the observation, and the action before. The log is that of `awr.py`, all that SAC saw while it learned.

Beside it, `cloning_best` is the same model that is not told the return, and has the tenth of the episodes with the highest
ones alone. These are mostly those that began upright, and show nothing of the way there.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import sac
from awr import ACTIONS, OBS, SAC_UPDATES, env, logged
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx

EPISODE, EPISODES, LEARNING_RATE = 200, 16, 2e-3  # an update learns from so many whole episodes
CONTEXT, WIDTH, HEADS, LAYERS = 20, 32, 2, 1
RETURN = 200.0  # the unit of returns in the network
ASKED = 0.0  # the return to go that is asked for, and never more: no reward is above 0
BAR = -200.0  # greedy, the mean of 100 episodes; AWR's and SAC's


@dataclass(frozen=True)
class Learns:
    """What is learned from the log."""

    name: str
    updates: int
    told: bool = True  # the return from here on
    share: float = 1.0  # of the episodes, the best ones


TOLD = Learns("decision_transformer", 4_000)
CLONES = Learns("cloning_best", 1_600, told=False, share=0.1)


# -- the model: a causal transformer, of one timestep


def init_params(key, width=WIDTH):
    embed, act, *keys = jax.random.split(key, 2 + 3 * LAYERS)

    def layer(qkv, out, hidden):
        return {
            "qkv": init_mlp(qkv, (width, 3 * width)),
            "out": init_mlp(out, (width, width), 0.5),
            "mlp": init_mlp(hidden, (width, 4 * width, width), 0.5),
            "age": jnp.zeros((CONTEXT, HEADS)),
        }

    return {
        "embed": init_mlp(embed, (OBS + ACTIONS + 2, 2 * width, width)),
        "layers": [layer(*keys[3 * i : 3 * i + 3]) for i in range(LAYERS)],
        "act": init_mlp(act, (width, ACTIONS), 0.1),
    }


def normed(x):
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5)


def attend(layer, x, t):
    """What the heads find in the last `CONTEXT` timesteps; how long ago counts, too."""
    query, key, value = mlp(layer["qkv"], x).reshape(3, HEADS, -1)
    past = slice(t - CONTEXT + 1, t + 1)
    keys, values, times = rlfx.series(key)[past], rlfx.series(value)[past], rlfx.series(t.now)[past]
    scores = jnp.einsum("thw,hw->th", keys, query) / query.shape[-1] ** 0.5 + layer["age"][t.now - times]
    return mlp(layer["out"], jnp.einsum("th,thw->hw", jax.nn.softmax(scores, axis=0), values).ravel())


def model(params, to_go, obs, before, t):
    """The action, ``[ACTIONS]``, given the return to go and the action before."""
    told = jnp.stack([to_go / RETURN, t.now / t.length])
    x = mlp(params["embed"], jnp.concatenate([told, obs, before]))
    for layer in params["layers"]:
        x = x + attend(layer, normed(x), t)
        x = x + mlp(layer["mlp"], normed(x))
    return jnp.tanh(mlp(params["act"], normed(x)))


# -- the programs


def learn(told, both, before, t):
    """The loss of a timestep of a logged episode, whose rewards have SAC's scale."""
    params, episode = both
    x = rlfx.inputs(episode)[t]
    reward = rlfx.series(x.reward / sac.PENDULUM.scale)
    to_go = rlfx.discounted_sum(reward[t:], 1.0) if told else jnp.float32(0.0)
    return ((model(params, to_go, x.obs, before, t) - x.action) ** 2).sum(), x.action


class Carry(NamedTuple):
    state: Any
    to_go: jax.Array
    before: jax.Array


def act(params, carry, t):
    """Of the return asked for, what was received is no longer to go."""
    action = model(params, carry.to_go, env.observe(carry.state), carry.before, t)
    state, step = env.step(t.key_for("env"), carry.state, action)
    return Carry(state, jnp.minimum(carry.to_go - step.reward, ASKED), action), step.reward


# -- the learner


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    log: Any  # [episode, episodes]


def in_episodes(log, length, share):
    """``[T, B] -> [length, episodes]``, the best ones: environments begin together, and no episode ends before its time."""

    def cut(x):
        x = x.reshape(-1, length, *x.shape[1:])
        return jnp.moveaxis(x, 0, 1).reshape(length, -1, *x.shape[3:])

    log = jax.tree.map(cut, log)
    returns = log.reward.sum(0)
    best = jnp.argsort(-returns)[: max(1, round(share * returns.size))]
    return jax.tree.map(lambda x: x[:, best], log)


def make(
    learns=TOLD, *, sac_updates=SAC_UPDATES, updates=None, width=WIDTH, episode=EPISODE, episodes=EPISODES, mesh=None,
    **sizes,
):  # fmt: skip
    """Its own number of updates where none is given; ``sizes`` are SAC's."""
    updates = updates or learns.updates
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, updates // 20, updates)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    of_episodes = rlfx.compile(partial(learn, learns.told), length=episode, batch=episodes, mesh=mesh)

    def init(key):
        params_key, log_key = jax.random.split(key)
        params = init_params(params_key, width)
        log = in_episodes(logged(log_key, sac_updates, **sizes), episode, learns.share)
        return Agent(params, optimizer.init(params), log)

    def update(agent, key):
        which = jax.random.randint(key, (episodes,), 0, agent.log.reward.shape[1])
        drawn = jax.tree.map(lambda x: x[:, which], agent.log)
        loss = lambda params: of_episodes((params, drawn), jnp.zeros((episodes, ACTIONS)))[0]  # noqa: E731
        value, grads = jax.value_and_grad(loss)(agent.params)
        changes, opt_state = optimizer.update(grads, agent.opt_state, agent.params)
        return Agent(optax.apply_updates(agent.params, changes), opt_state, agent.log), {"loss": value}

    def score(agent, key, episodes):
        """The mean return of so many episodes: none ends before its last timestep."""
        env_key, act_key = jax.random.split(key)
        states = jax.vmap(env.reset)(jax.random.split(env_key, episodes))
        begin = Carry(states, jnp.full(episodes, ASKED), jnp.zeros((episodes, ACTIONS)))
        _, rewards = rlfx.unroll(act, length=episode, batch=episodes)(agent.params, begin, act_key)
        return rewards.sum(0).mean()

    return Recipe(learns.name, env.name, init, update, None, updates, 50, 200, 1, BAR, score=score)


FAMILY = {"told": make, "cloning_best": partial(make, CLONES)}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
