"""LOLA (Foerster et al. 2018) by DiCE, in the coin game: one agent's loss is of games against an opponent that has learnt from
games before, and its gradient goes through what the opponent learnt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

SIDE, ACTIONS, GAMMA, RATE = 5, 4, 0.96, 8.0
PLACES = SIDE * SIDE
OBS = 4 * PLACES
AGENTS = "red", "blue"


def params_of(key, hidden):
    keys = jax.random.split(key)
    return {name: c.mlp_params(k, (OBS, hidden, hidden, ACTIONS)) for name, k in zip(AGENTS, keys, strict=True)}


def reset(key):
    """Where the agents and the coin are, and whose coin it is: 0 is the red one's."""
    red, blue, coin = jax.random.randint(key, (3,), 0, PLACES)
    return {"red": red, "blue": blue, "coin": coin, "owner": coin % 2}


def observed(state):
    ones = lambda place: jax.nn.one_hot(place, PLACES)  # noqa: E731
    coin = ones(state["coin"])
    owner = state["owner"].astype(jnp.float32)
    return jnp.concatenate([ones(state["red"]), ones(state["blue"]), (1.0 - owner) * coin, owner * coin])


def went(place, action):
    """Up, down, left, right; what leaves the board comes in again."""
    row, column = place // SIDE, place % SIDE
    row = row + jnp.where(action == 0, -1, jnp.where(action == 1, 1, 0))
    column = column + jnp.where(action == 2, -1, jnp.where(action == 3, 1, 0))
    return (row % SIDE) * SIDE + column % SIDE


def played(key, state, red_action, blue_action):
    """The next state, and both rewards: a coin is worth 1, and who loses a coin to the other loses 2."""
    red, blue = went(state["red"], red_action), went(state["blue"], blue_action)
    red_takes, blue_takes, owner = red == state["coin"], blue == state["coin"], state["owner"]
    red_reward = red_takes * 1.0 - 2.0 * (blue_takes & (owner == 0))
    blue_reward = blue_takes * 1.0 - 2.0 * (red_takes & (owner == 1))
    taken = red_takes | blue_takes
    coin = jnp.where(taken, jax.random.randint(key, (), 0, PLACES), state["coin"])
    state = {"red": red, "blue": blue, "coin": coin, "owner": jnp.where(taken, 1 - owner, owner)}
    return state, jnp.stack([red_reward, blue_reward])


def magic_box(x):
    return jnp.exp(x - stop_gradient(x))


def game_of(agent):
    """The loss of one of both agents."""

    def program(params, state, t):
        obs, log_probs, actions = observed(state), [], []
        for name, net in zip(AGENTS, params, strict=True):
            logits = c.mlp(net, obs)
            actions.append(jax.random.categorical(t.key_for(name), logits))
            log_probs.append(jax.nn.log_softmax(logits)[actions[-1]])
        state, rewards = played(t.key_for("coin"), state, *actions)
        log_prob = rlfx.series(sum(log_probs))
        return -(GAMMA**t) * magic_box(log_prob[: t + 1].sum()) * rewards[agent], state

    return program


def learnt_by(net, grads):
    return jax.tree.map(lambda w, g: w - RATE * g, net, grads)


def by_rlfx(length, batch):
    red_loss, blue_loss = (rlfx.compile(game_of(agent), length=length, batch=batch) for agent in range(2))

    def run(p, state, key):
        before, after = jax.random.split(key)

        def loss(red):
            grads = jax.grad(lambda blue: blue_loss((red, blue), state, before)[0])(p["blue"])
            return red_loss((red, learnt_by(p["blue"], grads)), state, after)[0]

        return jax.value_and_grad(loss)(p["red"])

    return run


# -- by hand, as usual


def game(red, blue, state, key, length):
    """Observations, actions and rewards of both, ``[T, B, ...]``."""
    batch = len(state["red"])
    streams = c.streams(key, batch, *AGENTS, "coin")

    def body(state, t):
        red_keys, blue_keys, coin_keys = (c.at(k, t) for k in streams)
        obs = jax.vmap(observed)(state)
        actions = c.categorical(red_keys, c.mlp(red, obs)), c.categorical(blue_keys, c.mlp(blue, obs))
        after, rewards = jax.vmap(played)(coin_keys, state, *actions)
        return after, (obs, actions, rewards)

    return stop_gradient(jax.lax.scan(body, state, jnp.arange(length))[1])


def log_prob_of(logits, action):
    return c.pick(jax.nn.log_softmax(logits), action)


def plain(length, batch):
    discount = GAMMA ** jnp.arange(length)[:, None]

    def dice(red, blue, games, agent):
        obs, actions, rewards = games
        log_prob = log_prob_of(c.mlp(red, obs), actions[0]) + log_prob_of(c.mlp(blue, obs), actions[1])
        return -(discount * magic_box(jnp.cumsum(log_prob, 0)) * rewards[..., agent]).mean()

    def run(p, state, key):
        before, after = jax.random.split(key)

        def loss(red):
            games = game(red, p["blue"], state, before, length)
            blue = learnt_by(p["blue"], jax.grad(dice, 1)(red, p["blue"], games, 1))
            return dice(red, blue, game(red, blue, state, after, length), 0)

        return jax.value_and_grad(loss)(p["red"])

    return run
