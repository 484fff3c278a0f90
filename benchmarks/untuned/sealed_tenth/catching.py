"""PQN (Gallici et al. 2024): Q(lambda) of many environments without a replay buffer and without a target network; layers are
normalised. The world is the game of catch: a ball falls on a board, of which a network sees the cells."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

ROWS, COLUMNS, ACTIONS, GAMMA, LAMBDA, EPSILON = 10, 8, 3, 0.99, 0.65, 0.2
CELLS = ROWS * COLUMNS
relu = jax.nn.relu


def params_of(key, hidden):
    return c.mlp_params(key, (CELLS, hidden, hidden, ACTIONS))


def reset(key):
    """Row and column of the ball, and the paddle's column."""
    ball, paddle = jax.random.randint(key, (2,), 0, COLUMNS)
    return {"row": jnp.int32(0), "ball": ball, "paddle": paddle}


def observed(state):
    cells = jnp.arange(CELLS)
    ball, paddle = state["row"] * COLUMNS + state["ball"], (ROWS - 1) * COLUMNS + state["paddle"]
    return ((cells == ball) | (cells == paddle)).astype(jnp.float32)


def step_of(key, state, action):
    row, paddle = state["row"] + 1, jnp.clip(state["paddle"] + action - 1, 0, COLUMNS - 1)
    done = row == ROWS - 1
    reward = jnp.where(done, jnp.where(state["ball"] == paddle, 1.0, -1.0), 0.0)
    moved = {"row": row, "ball": state["ball"], "paddle": paddle}
    after = jax.tree.map(lambda a, b: jnp.where(done, a, b), reset(key), moved)
    return after, c.Step(reward, done, jnp.zeros_like(done))


def normed(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def values(p, obs):
    return c.mlp(p, obs, lambda x: relu(normed(x)))


def program(p, state, t):
    q = values(p, observed(state))
    explores = jax.random.uniform(t.key_for("explores")) < EPSILON
    random = jax.random.randint(t.key_for("random"), (), 0, ACTIONS)
    action = jnp.where(explores, random, jnp.argmax(q))
    after, step = step_of(t.key_for("env"), state, action)
    best = rlfx.series(stop_gradient(q.max()))
    target = rlfx.lambda_return(step, best[t + 1], gamma=GAMMA, lam=LAMBDA)
    return 0.5 * (q[action] - target) ** 2, after


# -- by hand, as usual


def targets(p, net, end, q, reward, done):
    """Q(lambda)."""
    best = c.shifted(q.max(-1), net(p, end).max(-1))
    going = GAMMA * (1.0 - done.astype(jnp.float32))
    delta = (reward + (1.0 - LAMBDA) * going * best).at[-1].add(LAMBDA * going[-1] * best[-1])
    return c.discounted(delta, LAMBDA * going)


def plain(length, batch):
    batched = jax.vmap(observed)

    def run(p, state, key):
        explores_keys, random_keys, env_keys = c.streams(key, batch, "explores", "random", "env")

        def body(state, t):
            obs = batched(state)
            q = values(p, obs)
            explores = jax.vmap(jax.random.uniform)(c.at(explores_keys, t)) < EPSILON
            random = jax.vmap(lambda k: jax.random.randint(k, (), 0, ACTIONS))(c.at(random_keys, t))
            action = jnp.where(explores, random, jnp.argmax(q, -1))
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            return after, (obs, action, q, step.reward, step.terminated)

        end, (obs, action, q, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        target = targets(p, lambda p, s: values(p, batched(s)), end, q, reward, done)
        loss = lambda p: (0.5 * (c.pick(values(p, obs), action) - target) ** 2).mean()  # noqa: E731
        return *jax.value_and_grad(loss)(p), end

    return run
