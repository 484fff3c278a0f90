"""AlphaZero on tic-tac-toe: at each timestep a tree search by mctx, whose moves the policy learns (Silver et al. 2017).

Notice that a search is a part of the timestep, as any function of jax: it goes through the environment's own transitions, from
the state as it is, and uses the parameters as they are. Both sides are one policy, which sees the board as the mover's. So
what follows counts negatively: the discount is -1, in the tree and in the returns that the critic learns. A quarter of the moves
is drawn from all that are allowed, or one line of play is all that is learned; `rlfx.q_lambda` cuts returns before those.
"""

import sys
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from loops import Agent, falling_adam, over_rollouts
from networks import critic, init_actor_critic, mlp
from recipes import Recipe, main
from tasks import LINES, TicTacToe, made

import rlfx

LENGTH, ENVS, EPOCHS, MINIBATCHES, UPDATES = 16, 128, 4, 8, 200
SIMULATIONS, EXPLORE, RATE = 32, 0.25, 3e-3
BAR = 0.95  # of 100 games against a perfect opponent not lost, without a search

task = TicTacToe()
env = made(task)


def empty(boards):
    """What all games begin with."""
    return jnp.zeros((boards, 9), jnp.int32)


def logits(params, state):
    """Of the moves, those that are not allowed far below."""
    return jnp.where(task.allowed(state), mlp(params["actor"], task.observe(state)), -1e9)


def search(params, state, key):
    """``(move, weights)``: one to play, and how likely each should be (Danihelka et al. 2022)."""

    def nodes(states):
        """What a node begins with: the policy's logits, and the critic's value."""
        of_one = lambda state: {"prior_logits": logits(params, state), "value": critic(params, task.observe(state))}  # noqa: E731
        return jax.vmap(of_one)(states)

    def follow(_, key, moves, states):
        after, step = jax.vmap(lambda state, move: task.transition(key, state, move))(states, moves)
        discount = jnp.where(step.terminated, 0.0, -1.0)
        return mctx.RecurrentFnOutput(reward=step.reward, discount=discount, **nodes(after)), after

    root = mctx.RootFnOutput(**nodes(state[None]), embedding=state[None])
    found = mctx.gumbel_muzero_policy(
        None, key, root, follow, SIMULATIONS, invalid_actions=~task.allowed(state)[None]
    )  # fmt: skip
    return found.action[0], found.action_weights[0]


class Sample(NamedTuple):
    state: Any
    weights: jax.Array
    own: jax.Array  # whether the search's move was played
    target: jax.Array


def act(params, state, t):
    found, weights = search(params, state, t.key_for("search"))
    explore = jax.random.bernoulli(t.key_for("explore"), EXPLORE)
    anything = jax.random.categorical(t.key_for("any"), jnp.where(task.allowed(state), 0.0, -1e9))
    move = jnp.where(explore, anything, found)
    value = critic(params, task.observe(state))
    after, step = env.step(t.key_for("env"), state, move)
    next_value = rlfx.next_value(lambda obs: critic(params, obs), step, value)
    target = rlfx.q_lambda(step, next_value, ~explore, gamma=-1.0, lam=1.0)
    return after, (Sample(state, weights, ~explore, target), step.reward)


def loss(params, batch):
    def one(x):
        wrong = -(x.weights * jax.nn.log_softmax(logits(params, x.state))).sum()
        error = critic(params, task.observe(x.state)) - x.target
        return wrong + jnp.where(x.own, error**2, 0.0)

    return jax.vmap(one)(batch).mean()


# -- what it is judged by


@cache
def perfect():
    """``bool[3**9, 9]``: the best moves in each state, as `number` counts them; by trying all games."""
    best = np.zeros((3**9, 9), bool)

    @cache
    def value(board):
        """Of who is to move."""
        state = np.array(board)
        if (state[LINES] == -1).all(-1).any():
            return -1
        if (state != 0).all():
            return 0
        values = {i: -value(tuple(-np.where(np.arange(9) == i, 1, state))) for i in np.flatnonzero(state == 0)}
        most = max(values.values())
        best[number(state), [i for i, v in values.items() if v == most]] = True
        return most

    value((0,) * 9)
    return best


def number(state):
    return ((state + 1) * 3 ** np.arange(9)).sum(-1)


class Game(NamedTuple):
    state: Any
    mine: jax.Array  # whether the agent is to move
    over: jax.Array


def play(params, game, t):
    """A move of a game against a perfect opponent, who takes any of the best; whether it loses the game."""
    theirs = jnp.where(jnp.asarray(perfect())[number(game.state)], 0.0, -1e9)
    move = jnp.where(
        game.mine, logits(params, game.state).argmax(), jax.random.categorical(t.key_for("move"), theirs)
    )  # fmt: skip
    after, step = task.transition(t.key_for("env"), game.state, move)
    lost = ~game.over & jnp.where(game.mine, step.reward < 0, step.reward > 0)
    return Game(after, ~game.mine, game.over | step.terminated), lost


def make(*, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    optimizer = falling_adam(RATE, updates * EPOCHS * MINIBATCHES)
    update = over_rollouts(
        act, loss, optimizer, length=length, envs=envs, epochs=EPOCHS, minibatches=MINIBATCHES, mesh=mesh
    )

    def init(key):
        params = init_actor_critic(key, (18, *hidden, 9))
        return Agent(params, optimizer.init(params), empty(envs))

    def score(agent, key, episodes):
        """The share of games that are not lost; every other one begins with the opponent's move."""
        first = Game(empty(episodes), jnp.arange(episodes) % 2 == 0, jnp.zeros(episodes, bool))
        _, lost = rlfx.unroll(play, length=9, batch=episodes)(agent.params, first, key)
        return 1.0 - lost.any(0).mean()

    return Recipe("search", task.name, init, update, None, updates, 10, 10, length * envs, BAR, score=score)


if __name__ == "__main__":
    sys.exit(main(make))
