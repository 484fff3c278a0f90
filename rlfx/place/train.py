"""Training the dual policy: stage I imitates, stage II learns from the simulator, stage III from real execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from rlfx.place.baselines import Assignment, list_schedule
from rlfx.place.episode import Episode, Place, Select, log_probability, rollout
from rlfx.place.features import Features, features
from rlfx.place.policy import DualPolicy, initialise
from rlfx.place.problem import Problem
from rlfx.place.simulate import objective


@dataclass(frozen=True)
class Training:
    """How to train. The paper's values where it gives them (section 7.1).

    Attributes:
      batch: episodes per update (the paper updates after each episode).
      learning_rate: first value, decays linearly to a thousandth. The paper's 1e-4 is for single episodes.
      epsilon: first share of random choices, decays linearly to 0.
      entropy: weight of the entropy bonus.
      imitation_steps: updates of stage I.
      select, place: replace SEL or PLC by the critical path's rule (the ablations of table 3).
    """

    batch: int = 32
    learning_rate: float = 1e-3
    epsilon: float = 0.2
    entropy: float = 1e-2
    imitation_steps: int = 200
    select: Select = "policy"
    place: Place = "policy"


class Learner(NamedTuple):
    """Parameters and optimiser state, and the best assignment seen.

    Attributes:
      params: of the policy.
      optimiser: optax state.
      device, order: int32 ``[V]``.
      cost: float32, seconds.
    """

    params: dict
    optimiser: optax.OptState
    device: Array
    order: Array
    cost: Array


def _optimiser() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def start(key: Array, problem: Problem, policy: DualPolicy = DualPolicy(), params: dict | None = None) -> Learner:
    """A fresh learner, or one that continues from another problem's parameters (transfer)."""
    params = initialise(key, features(problem), policy) if params is None else params
    zeros = jnp.zeros((problem.tasks,), jnp.int32)
    return Learner(params, _optimiser().init(params), zeros, zeros, jnp.asarray(jnp.inf, jnp.float32))


def _descend(loss: Callable[[dict], Array], learner: Learner, rate: Array) -> Learner:
    grads = jax.grad(loss)(learner.params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        updates, optimiser = _optimiser().update(grads, learner.optimiser, learner.params)
    params = jax.tree.map(lambda p, u: p - rate * u, learner.params, updates)
    return learner._replace(params=params, optimiser=optimiser)


@partial(jax.jit, static_argnames=("policy", "steps", "batch"))
def _imitate(policy: DualPolicy, learner: Learner, f: Features, episodes: Episode, key: Array, rate: Array, *,
             steps: int, batch: int) -> Learner:  # fmt: skip
    count = episodes.task.shape[0]

    def step(learner: Learner, key: Array) -> tuple[Learner, None]:
        picks = jax.random.randint(key, (batch,), 0, count, jnp.int32)
        chosen = jax.tree.map(lambda x: x[picks], episodes)

        def loss(params: dict) -> Array:
            select, place, _ = log_probability(policy, params, f, chosen, 1e-3)
            return -jnp.mean(select + place) / f.nodes.shape[0]

        return _descend(loss, learner, rate), None

    return jax.lax.scan(step, learner, jax.random.split(key, steps))[0]


def sequences(assignments: list[Assignment]) -> tuple[Array, Array]:
    """Tasks and devices by step, int32 ``[B, V]`` each, of assignments whose order is topological."""
    task = np.stack([np.argsort(a.order, kind="stable") for a in assignments]).astype(np.int32)
    device = np.stack([a.device[t] for a, t in zip(assignments, task, strict=True)]).astype(np.int32)
    return jnp.asarray(task), jnp.asarray(device)


@partial(jax.jit, static_argnames="policy")
def _replayed(policy: DualPolicy, params: dict, f: Features, forced: tuple[Array, Array]) -> Episode:
    return rollout(policy, params, f, jax.random.key(0), forced[0].shape[0], forced=forced)


def imitate(
    policy: DualPolicy,
    learner: Learner,
    problem: Problem,
    assignments: list[Assignment],
    key: Array,
    *,
    steps: int,
    batch: int = 8,
    rate: float = 1e-3,
) -> Learner:
    """Stage I: maximise the likelihood of given assignments, whose orders are topological (equation 2).

    States are the teacher's; the paper draws them from the policy.
    """
    f = features(problem)
    episodes = _replayed(policy, learner.params, f, sequences(assignments))
    return _imitate(policy, learner, f, episodes, key, jnp.asarray(rate, jnp.float32), steps=steps, batch=batch)


def imitate_critical_path(policy: DualPolicy, learner: Learner, problem: Problem, key: Array, *, steps: int,
                          teachers: int = 16) -> Learner:  # fmt: skip
    """Stage I as in the paper: the teacher is the randomised critical path."""
    k_teach, k_learn = jax.random.split(key)
    rng = np.random.default_rng(np.asarray(jax.random.bits(k_teach, (4,), jnp.uint32)).tolist())
    schedules = [list_schedule(problem, rng) for _ in range(teachers)]
    return imitate(policy, learner, problem, schedules, k_learn, steps=steps)


def _update(policy: DualPolicy, learner: Learner, f: Features, episode: Episode, cost: Array, epsilon: Array,
            rate: Array, config: Training) -> Learner:  # fmt: skip
    """One policy-gradient step on a batch (equation 3): advantages against the batch's mean, in standard deviations."""
    reward = -cost
    advantage = (reward - jnp.mean(reward)) / (jnp.std(reward) + 1e-9)

    def loss(params: dict) -> Array:
        select, place, entropy = log_probability(policy, params, f, episode, epsilon)
        chosen = (select if config.select == "policy" else 0.0) + (place if config.place == "policy" else 0.0)
        return -jnp.mean(advantage * chosen) / f.nodes.shape[0] - config.entropy * jnp.mean(entropy)

    best = jnp.argmin(cost)
    better = cost[best] < learner.cost
    learner = learner._replace(
        device=jnp.where(better, episode.assignment()[best], learner.device),
        order=jnp.where(better, episode.order()[best], learner.order),
        cost=jnp.minimum(cost[best], learner.cost),
    )
    return _descend(loss, learner, rate)


@partial(jax.jit, static_argnames=("policy", "config", "updates", "limited"))
def _learn(policy: DualPolicy, learner: Learner, problem: Problem, f: Features, key: Array, config: Training, *,
           updates: int, limited: bool) -> tuple[Learner, tuple[Array, Array]]:  # fmt: skip
    def step(learner: Learner, inputs: tuple) -> tuple[Learner, tuple[Array, Array]]:
        key, progress = inputs
        epsilon = config.epsilon * (1.0 - progress)
        rate = config.learning_rate * (1.0 - 0.999 * progress)
        episode = rollout(policy, learner.params, f, key, config.batch, epsilon, select=config.select,
                          place=config.place)  # fmt: skip
        cost = objective(problem, episode.assignment(), episode.order(), limited=limited)
        learner = _update(policy, learner, f, episode, cost, epsilon, rate, config)
        return learner, (jnp.mean(cost), learner.cost)

    progress = jnp.arange(updates, dtype=jnp.float32) / updates
    return jax.lax.scan(step, learner, (jax.random.split(key, updates), progress))


def learn(
    policy: DualPolicy, learner: Learner, problem: Problem, key: Array, *, episodes: int, config: Training = Training()
) -> tuple[Learner, tuple[np.ndarray, np.ndarray]]:
    """Stage II: policy gradients against the simulator, whole episodes and updates in one program.

    Args:
      policy, learner, problem: what to train, on what.
      key: used once.
      episodes: simulator calls; rounded down to whole batches.
      config: hyperparameters.

    Returns:
      The learner, and per update the mean cost of the batch and the best cost so far, float32 ``[updates]``, seconds.
    """
    updates = max(1, episodes // config.batch)
    learner, curves = _learn(
        policy, learner, problem, features(problem), key, config, updates=updates, limited=problem.memory_may_bind
    )
    return learner, (np.asarray(curves[0]), np.asarray(curves[1]))


@partial(jax.jit, static_argnames=("policy", "batch", "select", "place", "greedy"))
def _sample(policy: DualPolicy, params: dict, f: Features, key: Array, *, batch: int, select: Select, place: Place,
            greedy: bool) -> tuple[Array, Array]:  # fmt: skip
    episode = rollout(policy, params, f, key, batch, 0.0, select=select, place=place, greedy=greedy)
    return episode.assignment(), episode.order()


def sample(
    policy: DualPolicy,
    params: dict,
    problem: Problem,
    key: Array,
    batch: int,
    *,
    select: Select = "policy",
    place: Place = "policy",
    greedy: bool = False,
) -> list[Assignment]:
    """Assignments drawn from the policy; no simulator is called."""
    f = features(problem)
    device, order = _sample(policy, params, f, key, batch=batch, select=select, place=place, greedy=greedy)
    return [Assignment(np.asarray(d), np.asarray(o)) for d, o in zip(device, order, strict=True)]


def learn_online(
    policy: DualPolicy,
    learner: Learner,
    problem: Problem,
    run: Callable[[Assignment], float],
    key: Array,
    *,
    episodes: int,
    config: Training = Training(batch=8, learning_rate=3e-4, epsilon=0.05),
) -> tuple[Learner, np.ndarray]:
    """Stage III: the same updates with times observed from the real system.

    Args:
      policy, learner, problem: what to train, on what.
      run: executes an assignment and returns seconds.
      key: used once.
      episodes: executions.
      config: hyperparameters.

    Returns:
      The learner, whose best cost is now a measured one, and the time of every execution, float32 ``[episodes]``.
    """
    f = features(problem)
    learner = learner._replace(cost=jnp.asarray(jnp.inf, jnp.float32))
    updates, times = max(1, episodes // config.batch), []
    play = jax.jit(partial(rollout, policy, batch=config.batch, select=config.select, place=config.place))
    update = jax.jit(partial(_update, policy, config=config))
    for i, k in enumerate(jax.random.split(key, updates)):
        fraction = jnp.asarray(1.0 - i / updates, jnp.float32)
        epsilon = config.epsilon * fraction
        episode = play(learner.params, f, k, epsilon=epsilon)
        device, order = np.asarray(episode.assignment()), np.asarray(episode.order())
        cost = np.array([run(Assignment(d, o)) for d, o in zip(device, order, strict=True)], np.float32)
        learner = update(learner, f, episode, jnp.asarray(cost), epsilon, config.learning_rate * fraction)
        times.append(cost)
    return learner, np.concatenate(times)
