"""Local search and simulated annealing over devices and run-time order, compiled, at a counted simulator budget."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._checks import KEY, POSITIVE, Kind, expect, instance, number, reals, shown
from rlfx.errors import PlacementError, located
from rlfx.place.baselines import Assignment
from rlfx.place.critical import Chain, chain
from rlfx.place.problem import PROBLEM, Problem
from rlfx.place.simulate import bucketed, judged


class Moves(NamedTuple):
    """How a neighbour of an assignment is drawn: relative weights of the moves, and where they begin.

    Attributes:
      device: one task to another device.
      follow: one task to the device of a task that it reads or feeds.
      swap: two tasks that run at the same time on two devices exchange them, which keeps the devices' loads.
      order: two tasks exchange places in the run-time order.
      ahead: a task exchanges places with the one that its device ran right before it.
      critical: the probability that the (first) task is drawn from the critical chain instead of from all tasks.
    """

    device: float = 1.0
    follow: float = 1.0
    swap: float = 1.0
    order: float = 1.0
    ahead: float = 0.0
    critical: float = 0.0


def _weighed(value: Any) -> Moves:
    if not isinstance(value, Moves):
        raise TypeError
    weights = [number(0).take(weight) for weight in value[:5]]
    number(0, 1).take(value.critical)
    if not any(weights):
        raise ValueError
    return value


DEVICES = Moves(device=1.0, follow=0.0, swap=0.0, order=0.0)


class State(NamedTuple):
    """C chains: current and best assignments, int32 ``[C, V]``, and their costs in seconds, float32 ``[C]``.

    ``hold`` is what holds the current ones up, ``start`` and ``finish`` when their tasks run, ``[C, V]``.
    """

    device: jax.Array
    order: jax.Array
    cost: jax.Array
    hold: Chain
    start: jax.Array
    finish: jax.Array
    best_device: jax.Array
    best_order: jax.Array
    best_cost: jax.Array


TRIES = 8  # proposals a step; the first that changes anything is simulated


class Edit(NamedTuple):
    """Devices and places in the run-time order, int32 ``[2]`` each, of two tasks ``at``, which may be one."""

    at: jax.Array
    device: jax.Array
    order: jax.Array


def _drawn(uniform: jax.Array, among: jax.Array) -> jax.Array:
    """A task of a set, bool ``[V]``, uniformly, by one number in [0, 1)."""
    rank = jnp.cumsum(among, dtype=jnp.int32)
    return jnp.searchsorted(rank, 1 + _below(uniform, rank[-1])).astype(jnp.int32)


def _below(uniform: jax.Array, size: jax.Array | int) -> jax.Array:
    """An integer in [0, size), by one number in [0, 1)."""
    return jnp.minimum((uniform * jnp.asarray(size, jnp.float32)).astype(jnp.int32), jnp.asarray(size, jnp.int32) - 1)


def _propose(kind: jax.Array, draws: jax.Array, state: State, near: jax.Array, D: int, moves: Moves) -> Edit:
    """What a move changes in one assignment (a state without its leading axis), by five numbers in [0, 1)."""
    device, order, hold = state.device, state.order, state.hold
    V = device.shape[0]
    along, anywhere, aside, to, whom = draws
    # What is left of the first number, once it has decided, is a number in [0, 1) again.
    critical = along < moves.critical
    v = jnp.where(critical, _drawn(along / jnp.maximum(moves.critical, 1e-9), hold.on), _below(anywhere, V))
    fresh = (device[v] + 1 + _below(to, max(D, 2) - 1)) % D
    neighbour = near[v, _below(to, near.shape[1])]
    one = jnp.where(kind == 0, fresh, device[neighbour])
    meanwhile = (state.start < state.finish[v]) & (state.finish > state.start[v]) & (device != device[v])
    partner = jnp.where(jnp.any(meanwhile), _drawn(whom, meanwhile), v)
    other = jnp.where(
        kind == 4, hold.before[v], jnp.where(kind == 3, _below(aside, V), jnp.where(kind == 2, partner, v))
    )
    at = jnp.stack([v, other])
    there, places = device[at], order[at]
    return Edit(
        at,
        jnp.where(kind <= 1, one, jnp.where(kind == 2, there[::-1], there)),
        jnp.where(kind >= 3, places[::-1], places),
    )


def _changed(key: jax.Array, state: State, near: jax.Array, D: int, moves: Moves) -> tuple[jax.Array, jax.Array]:
    """A neighbour that differs from where it began: no simulator call is spent on an assignment that is known."""
    k_kind, k_draws = jax.random.split(key)
    kinds = jax.random.categorical(k_kind, jnp.log(jnp.asarray(moves[:5], jnp.float32)), shape=(TRIES,))
    draws = jax.random.uniform(k_draws, (TRIES, 5), jnp.float32)
    edits = jax.vmap(lambda kind, u: _propose(kind, u, state, near, D, moves))(kinds, draws)
    differs = jnp.any((edits.device != state.device[edits.at]) | (edits.order != state.order[edits.at]), axis=1)
    edit = jax.tree.map(lambda x: x[jnp.argmax(differs)], edits)
    return state.device.at[edit.at].set(edit.device), state.order.at[edit.at].set(edit.order)


def neighbours(problem: Problem, width: int = 8) -> np.ndarray:
    """For each task, ``width`` tasks that it reads or feeds, repeated cyclically, int32 ``[V, width]``."""
    out = np.zeros((problem.tasks, width), np.int32)
    for v in range(problem.tasks):
        ids = np.concatenate([problem.preds[v], problem.succs[v]])
        out[v] = np.resize(ids if len(ids) else [v], width)
    return out


@partial(jax.jit, static_argnames=("steps", "limited", "guided"))
def _search(problem: Problem, key: jax.Array, state: State, near: jax.Array, temperatures: jax.Array, moves: Moves, *,
            steps: int, limited: bool, guided: bool) -> tuple[State, jax.Array]:  # fmt: skip
    D = problem.exec_time.shape[1]

    def step(state: State, inputs: tuple) -> tuple[State, jax.Array]:
        key, temperature = inputs
        k_move, k_accept = jax.random.split(key)
        chains = state.cost.shape[0]
        device, order = jax.vmap(lambda k, s: _changed(k, s, near, D, moves))(jax.random.split(k_move, chains), state)
        cost, schedules = judged(problem, device, order, limited=limited)
        threshold = -temperature * jnp.log(jax.random.uniform(k_accept, (chains,), jnp.float32, minval=1e-12))
        take = cost <= state.cost + threshold
        better = cost < state.best_cost
        hold = jax.vmap(lambda d, s: chain(problem, d, s))(device, schedules) if guided else state.hold

        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(take[:, None], new, old)

        state = State(
            pick(device, state.device),
            pick(order, state.order),
            jnp.where(take, cost, state.cost),
            jax.tree.map(pick, hold, state.hold),
            pick(schedules.start, state.start),
            pick(schedules.finish, state.finish),
            jnp.where(better[:, None], device, state.best_device),
            jnp.where(better[:, None], order, state.best_order),
            jnp.where(better, cost, state.best_cost),
        )
        return state, jnp.min(state.best_cost)

    return jax.lax.scan(step, state, (jax.random.split(key, steps), temperatures))


def initial(problem: Problem, starts: list[Assignment], costs: np.ndarray, chains: int) -> State:
    """Chains at the best of some evaluated assignments, cyclically.

    Raises:
      PlacementError: no assignments, other than a cost of each, or no chains.
    """
    expect("problem", problem, PROBLEM, PlacementError, of="initial")
    chains = expect("chains", chains, POSITIVE, PlacementError, of="initial")
    costs = np.asarray(expect("costs", costs, reals(1, "[starts]"), PlacementError, of="initial"))
    fits = isinstance(starts, list) and 0 < len(starts) == len(costs) and all(isinstance(s, Assignment) for s in starts)
    if not fits:
        fact = f"initial: starts is {shown(starts)}, for {len(costs)} costs."
        raise PlacementError(
            located(fact, fix="Give a list of assignments, and the cost of each: evaluate(problem, starts).")
        )
    picks = np.resize(np.argsort(costs, kind="stable"), chains)
    device = jnp.asarray(np.stack([starts[i].device for i in picks]), jnp.int32)
    order = jnp.asarray(np.stack([starts[i].order for i in picks]), jnp.int32)
    cost = jnp.asarray(costs[picks], jnp.float32)
    # Until the first move that is taken, every task is on the chain and runs at any time.
    hold = Chain(
        jnp.ones(device.shape, bool), jnp.broadcast_to(jnp.arange(problem.tasks, dtype=jnp.int32), device.shape)
    )
    start, finish = jnp.zeros(device.shape, jnp.float32), jnp.full(device.shape, jnp.inf, jnp.float32)
    return State(device, order, cost, hold, start, finish, device, order, cost)


_STATE = instance(State, "the State of some chains", "initial(problem, starts, costs, chains=1)")
_MOVES = Kind("Moves with weights that are not negative, one of them positive", "Moves()", _weighed)


def anneal(
    problem: Problem,
    key: jax.Array,
    state: State,
    calls: int,
    *,
    hot: float = 0.0,
    cold: float = 0.0,
    moves: Moves = Moves(),
) -> tuple[State, np.ndarray]:
    """Run every chain for an equal share of ``calls`` simulator calls.

    Args:
      problem: the problem.
      key: used once.
      state: where the chains are; see :func:`initial`.
      calls: simulator calls in all.
      hot, cold: first and last temperature, as fractions of the best cost, geometric between; 0 is local search, which
        takes a neighbour that is no worse.
      moves: the neighbourhood.

    Returns:
      The chains afterwards, and the best cost after each step, float32 ``[steps]``, seconds.

    Raises:
      PlacementError: an argument is not of its kind.
    """
    expect("problem", problem, PROBLEM, PlacementError, of="anneal")
    expect("state", state, _STATE, PlacementError, of="anneal")
    key, calls = expect("key", key, KEY, PlacementError, of="anneal"), expect("calls", calls, POSITIVE, PlacementError)
    hot = expect("hot", hot, number(0), PlacementError, of="anneal")
    cold = expect("cold", cold, number(above=0) if hot > 0 else number(0), PlacementError, of="anneal")
    expect("moves", moves, _MOVES, PlacementError, of="anneal")
    chains = state.cost.shape[0]
    steps = max(1, calls // chains)
    scale = float(state.best_cost.min())
    temperatures = np.geomspace(hot, cold, steps) * scale if hot > 0 else np.zeros(steps)
    near = jnp.asarray(neighbours(problem))
    return _search(
        bucketed(problem), key, state, near, jnp.asarray(temperatures, jnp.float32), moves, steps=steps,
        limited=problem.memory_may_bind, guided=moves.ahead > 0.0 or moves.critical > 0.0,
    )  # fmt: skip


def winner(state: State) -> tuple[Assignment, float]:
    """The best assignment over all chains, and its cost in seconds."""
    i = int(jnp.argmin(state.best_cost))
    return Assignment(np.asarray(state.best_device[i]), np.asarray(state.best_order[i])), float(state.best_cost[i])
