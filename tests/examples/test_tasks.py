"""The small tasks of examples/tasks.py: the protocol, rewards and ends, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tasks

import rlfx.envs

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


def test_small_tasks_keep_the_protocol_and_their_rewards():
    bag = tasks.Knapsack(4)
    for task in (bag, tasks.BitFlip(4), tasks.Climb(), tasks.TMaze(2), tasks.Meeting(), tasks.TicTacToe()):
        rlfx.envs.check(tasks.made(task))
    state = bag.reset(KEY)
    value, weight, total, order = np.float64(state.value), np.float64(state.weight), 0.0, []
    subsets = [[i for i in range(4) if n >> i & 1] for n in range(16)]
    best = max(value[s].sum() for s in subsets if weight[s].sum() <= state.room)
    while bool(bag.allowed(state).any()):
        action = int(jnp.argmax(bag.allowed(state)))
        state, step = bag.step(KEY, state, jnp.int32(action))
        order.append(action)
        total += float(step.reward)
    assert bool(step.terminated)
    np.testing.assert_allclose(total, value[order].sum() / best, rtol=1e-5)

    maze = tasks.TMaze(2)
    for turn, reward in ((3, 1.0), (2, -1.0)):
        state = tasks.Walk(jnp.int32(1), jnp.int32(0), jnp.int32(0))
        for action in (1, 1, turn):
            state, step = maze.step(KEY, state, jnp.int32(action))
        assert (float(step.reward), bool(step.terminated)) == (reward, True)

    slope = tasks.Climb(2, 0.25)
    for actions, total, end in (([1, 1], 0.5, (True, False)), ([1, 0, 0, 0], -0.25, (False, True))):
        state, reward = slope.reset(KEY), 0.0
        for action in actions:
            state, step = slope.step(KEY, state, jnp.int32(action))
            reward += float(step.reward)
        assert (reward, (bool(step.terminated), bool(step.truncated))) == (total, end)

    board = tasks.TicTacToe()
    for moves, last, end in (([0, 3, 1, 4, 2], 1.0, True), ([0, 3, 3], -1.0, True), ([0, 3, 1], 0.0, False),
                             ([0, 1, 2, 4, 3, 5, 7, 6, 8], 0.0, True)):  # fmt: skip
        state = board.reset(KEY)
        for move in moves:
            state, step = board.step(KEY, state, jnp.int32(move))
        assert (float(step.reward), bool(step.terminated)) == (last, end)
    seen = np.asarray(board.observe(jnp.array([1, -1] + 7 * [0])))
    assert np.flatnonzero(seen).tolist() == [0, 10]

    meeting, at = tasks.Meeting(), jnp.array([[0, 0], [3, 3]], jnp.int32)
    for goals, reward in ((at, 1.0), (at[::-1], 1.0), (at.at[0, 0].set(1), 0.0)):
        _, step = meeting.step(KEY, tasks.Places(at, goals, jnp.int32(0)), (jnp.int32(0), jnp.int32(0)))
        assert float(step.reward) == reward
