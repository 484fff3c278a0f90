"""Small tasks that recipes need beside the classic ones: forbidden actions, goals, patience, memory, two agents, a board.

Notice that a task is a frozen dataclass with `reset`, `observe` and `transition` of one environment: nothing else makes it
one that rlfx batches, evaluates and resets.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.envs import Environment, Step
from rlfx.envs.spaces import Box, Discrete

NO = np.zeros((), bool)


# -- a choice of which most is forbidden


class Packing(NamedTuple):
    value: jax.Array
    weight: jax.Array
    taken: jax.Array
    room: jax.Array
    best: jax.Array


@dataclass(frozen=True)
class Knapsack(Environment):
    """Take things until none fits. The return is the share of the best value there is, by trying all subsets.

    An observation is ``[items, 3]``: the value, the weight as a share of the room left, and whether the thing may be taken.
    """

    items: int = 8

    name = "Knapsack"

    @property
    def observation_space(self):
        return Box(-jnp.inf, jnp.inf, (self.items, 3))

    @property
    def action_space(self):
        return Discrete(self.items)

    def reset(self, key):
        of_values, of_weights = jax.random.split(key)
        value = jax.random.uniform(of_values, (self.items,), minval=0.1)
        weight = jax.random.uniform(of_weights, (self.items,), minval=0.1)
        subsets = (jnp.arange(2**self.items)[:, None] >> jnp.arange(self.items)) & 1
        room = 0.5 * weight.sum()
        best = jnp.where(subsets @ weight <= room, subsets @ value, 0.0).max()
        return Packing(value, weight, jnp.zeros(self.items, bool), room, best)

    def observe(self, state):
        fits = self.allowed(state)
        return jnp.stack([state.value, state.weight / jnp.maximum(state.room, 0.05), fits.astype(jnp.float32)], axis=-1)

    @staticmethod
    def allowed(state):
        return ~state.taken & (state.weight <= state.room)

    def transition(self, key, state, action):
        right = self.allowed(state)[action]
        taken = state.taken | (jnp.arange(self.items) == action)
        room = state.room - jnp.where(right, state.weight[action], 0.0)
        after = state._replace(taken=jnp.where(right, taken, state.taken), room=room)
        reward = jnp.where(right, state.value[action] / state.best, 0.0)
        return after, Step(reward, ~right | ~self.allowed(after).any(), NO, self.observe(after))


# -- goals


class Bits(NamedTuple):
    bits: jax.Array
    goal: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class BitFlip(Environment):
    """Turn bits, one a step, until they are the goal's; a reward of 1 there alone (Andrychowicz et al. 2017, section 3.1)."""

    size: int = 10

    name = "BitFlip"

    @property
    def observation_space(self):
        return Box(0.0, 1.0, (2, self.size))  # the bits, and the goal

    @property
    def action_space(self):
        return Discrete(self.size)

    def reset(self, key):
        bits, goal = jax.random.bernoulli(key, 0.5, (2, self.size)).astype(jnp.float32)
        return Bits(bits, goal, jnp.int32(0))

    def observe(self, state):
        return jnp.stack([state.bits, state.goal])

    @staticmethod
    def reached(bits, goal):
        return (bits == goal).all(-1)

    def transition(self, key, state, action):
        turned = jnp.where(jnp.arange(self.size) == action, 1.0 - state.bits, state.bits)
        after = Bits(turned, state.goal, state.time + 1)
        reached = self.reached(turned, state.goal)
        return after, Step(
            reached.astype(jnp.float32), reached, ~reached & (after.time >= self.size), self.observe(after)
        )


# -- patience


class Slope(NamedTuple):
    place: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class Climb(Environment):
    """Each step up costs ``effort``, the top is worth 1. Actions: rest, up; after ``2 * height`` steps the episode is cut.

    Climbing is worth it from the bottom only to whom ``sum(gamma**k, k < height) * effort < gamma**(height - 1)``.
    An observation is ``[place, 1]``, the place as a share of the height.
    """

    height: int = 8
    effort: float = 0.05

    name = "Climb"
    observation_space = Box(0.0, 1.0, (2,))
    action_space = Discrete(2)

    def reset(self, key):
        return Slope(jnp.int32(0), jnp.int32(0))

    def observe(self, state):
        return jnp.stack([state.place / self.height, jnp.ones(())]).astype(jnp.float32)

    def transition(self, key, state, action):
        after = Slope(state.place + action, state.time + 1)
        top = after.place == self.height
        reward = jnp.where(top, 1.0, 0.0) - self.effort * action
        return after, Step(reward, top, after.time >= 2 * self.height, self.observe(after))


# -- memory


class Walk(NamedTuple):
    sign: jax.Array
    place: jax.Array
    time: jax.Array


@dataclass(frozen=True)
class TMaze(Environment):
    """A corridor whose first place shows to which side to turn at its end: 1 for the right side, -1 for the other (Bakker 2002).

    Actions: stay, on, left, right. Turning before the end does nothing; ``2 * length`` steps end the episode with -1.
    An observation is ``[sign, at the end]``; the sign is 0 but at the first step.
    """

    length: int = 8

    name = "TMaze"
    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(4)

    def reset(self, key):
        sign = jnp.where(jax.random.bernoulli(key), jnp.int32(1), -1)
        return Walk(sign, jnp.int32(0), jnp.int32(0))

    def observe(self, state):
        sign = jnp.where(state.time == 0, state.sign, 0)
        return jnp.stack([sign, state.place == self.length]).astype(jnp.float32)

    def transition(self, key, state, action):
        at_end, turns = state.place == self.length, action >= 2
        place = jnp.where(action == 1, jnp.minimum(state.place + 1, self.length), state.place)
        after = Walk(state.sign, place, state.time + 1)
        right = (2 * action - 5) == state.sign
        turned, late = at_end & turns, after.time >= 2 * self.length
        reward = jnp.where(turned, jnp.where(right, 1.0, -1.0), jnp.where(late, -1.0, 0.0))
        return after, Step(reward, turned | late, NO, self.observe(after))


# -- two agents


class Places(NamedTuple):
    agents: jax.Array  # [2, 2]
    goals: jax.Array  # [2, 2]
    time: jax.Array


@dataclass(frozen=True)
class Meeting(Environment):
    """Two agents on a grid: at each step 1 if there is one on each of two goals, whoever it is; 20 steps.

    An action is one of five moves of each agent. An observation is ``[2, 8]``: of each agent, itself first, its place,
    the other's, and the goals.
    """

    size: int = 4
    limit: int = 20

    name = "Meeting"
    observation_space = Box(-1.0, 1.0, (2, 8))
    action_space = Discrete(5), Discrete(5)

    def reset(self, key):
        places = jax.random.choice(key, self.size**2, (4,), replace=False)
        at = jnp.stack([places // self.size, places % self.size], axis=-1).astype(jnp.int32)
        return Places(at[:2], at[2:], jnp.int32(0))

    def observe(self, state):
        scaled = lambda x: 2.0 * x.astype(jnp.float32) / (self.size - 1) - 1.0  # noqa: E731
        agents, goals = scaled(state.agents), scaled(state.goals).ravel()
        return jnp.stack([jnp.concatenate([agents[i], agents[1 - i], goals]) for i in (0, 1)])

    def transition(self, key, state, action):
        moves = jnp.array([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]], jnp.int32)
        agents = jnp.clip(state.agents + moves[jnp.stack(action)], 0, self.size - 1)
        after = Places(agents, state.goals, state.time + 1)
        met = lambda first: (agents[0] == state.goals[first]).all() & (agents[1] == state.goals[1 - first]).all()  # noqa: E731
        reward = (met(0) | met(1)).astype(jnp.float32)
        return after, Step(reward, NO, after.time >= self.limit, self.observe(after))


# -- a board


LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])


@dataclass(frozen=True)
class TicTacToe(Environment):
    """Three in a row win. Who is to move sees the board as his own: the state is ``[9]``, 1 of the mover's, -1 of the other's.

    The reward is the mover's, 1 for a win; a place that is taken loses at once. An observation is ``[18]``: the places of
    the mover, and those of the other.
    """

    name = "TicTacToe"
    observation_space = Box(0.0, 1.0, (18,))
    action_space = Discrete(9)

    def reset(self, key):
        return jnp.zeros(9, jnp.int32)

    def observe(self, state):
        return jnp.concatenate([state == 1, state == -1]).astype(jnp.float32)

    @staticmethod
    def allowed(state):
        return state == 0

    def transition(self, key, state, action):
        right = self.allowed(state)[action]
        board = jnp.where(right & (jnp.arange(9) == action), 1, state)
        won = (board[LINES] == 1).all(-1).any()
        after = -board
        reward = jnp.where(right, won.astype(jnp.float32), -1.0)
        return after, Step(reward, ~right | won | (board != 0).all(), NO, self.observe(after))


def made(task: Any) -> Any:
    """The task as `rlfx.envs.make` would give it: episodes begin anew by themselves, no gradients pass."""
    from rlfx.envs import auto_reset, stop_gradient

    return stop_gradient(auto_reset(task))
