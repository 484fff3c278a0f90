"""What a user writes, with every type said: test_downstream.py checks this file by pyright in strict mode, and runs it.

jax's own functions are not known in strict mode (``jnp.zeros``, ``jax.value_and_grad``): those lines say so.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
import rlfx.errors
from rlfx.envs import Environment, Step, evaluate, make, save_gif
from rlfx.recurrence.api.compiled import Compiled
from rlfx.recurrence.language.time import Time
from rlfx.training import (
    CSV,
    Call,
    Callback,
    Categorical,
    Checkpoints,
    Evaluate,
    Loop,
    Metrics,
    Priorities,
    Progress,
    TanhNormal,
    run,
)

Params = dict[str, jax.Array]

env: Environment = rlfx.envs.time_limit(make("CartPole-v1"), 200)


class Sample(NamedTuple):
    obs: jax.Array
    action: jax.Array
    advantage: jax.Array
    target: jax.Array


def logits_of(params: Params, obs: jax.Array) -> jax.Array:
    return jnp.tanh(obs @ params["hidden"]) @ params["logits"]


def value_of(params: Params, obs: jax.Array) -> jax.Array:
    return jnp.tanh(obs @ params["hidden"]) @ params["value"]


def act(params: Params, state: Any, t: Time) -> tuple[Any, Sample]:
    obs: jax.Array = env.observe(state)
    policy = Categorical(logits_of(params, obs))
    action = policy.sample(t.key_for("action"))
    step: Step
    state, step = env.step(t.key_for("env"), state, action)
    value = value_of(params, obs)

    def critic(obs: jax.Array) -> jax.Array:
        return value_of(params, obs)

    following = rlfx.next_value(critic, step, value)
    advantage = rlfx.gae(step, value, following, gamma=0.99, lam=0.95)
    target = rlfx.lambda_return(step, following, gamma=0.99, lam=0.95)
    return state, Sample(obs, action, advantage, target)


def reinforce(params: Params, state: Any, t: Time) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    log_probs = jax.nn.log_softmax(logits_of(params, env.observe(state)))
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)
    reward = rlfx.series(step.reward)
    discount = rlfx.series(0.99 * (1.0 - step.done))
    returns = rlfx.discounted_sum(reward[t : t + 8], discount[t : t + 8])
    baseline = rlfx.mean(returns, over="b")
    previous = rlfx.series(step.reward, start=0.0)[t - 1]
    until = rlfx.minimum(t + 4, 16)
    aux = {"reward": step.reward, "most": reward[t:until].max(), "before": previous}
    return -log_probs[action] * (returns - baseline), state, aux


rollout: Compiled = rlfx.unroll(act, length=16, batch=8)
loss_fn: Compiled = rlfx.compile(reinforce, length=16, batch=8, memory_budget=2**20, plan=None)
planned = rlfx.compile(reinforce, length=16, batch=8, plan=rlfx.Plan("blocks", 4))
target = rlfx.target("cpu")


def learn(learner: Params, sample: Sample) -> tuple[Params, jax.Array]:
    def loss(params: Params) -> jax.Array:
        log_probs = jax.nn.log_softmax(jax.vmap(logits_of, (None, 0))(params, sample.obs))
        chosen = jnp.take_along_axis(log_probs, sample.action[:, None], 1)[:, 0]
        return -jnp.mean(chosen * sample.advantage)

    value, grads = jax.value_and_grad(loss)(learner)  # pyright: ignore[reportUnknownMemberType]
    return {name: weights - 0.01 * grads[name] for name, weights in learner.items()}, value


@dataclass(frozen=True)
class Log(Callback):
    """A callback of one's own, as docs/training.md has it."""

    path: pathlib.Path

    @contextmanager
    def opened(self, loop: Loop) -> Generator[Callable[[Call], str | None]]:
        with self.path.open("a") as file:
            yield lambda call: print(call.done, file=file)


def update(agent: tuple[Params, Any], key: jax.Array) -> tuple[tuple[Params, Any], dict[str, jax.Array]]:
    params, state = agent
    act_key, shuffle_key = jax.random.split(key)
    state, samples = rollout(params, state, act_key)
    params, losses = rlfx.minibatch_epochs(learn, params, samples, epochs=2, minibatches=2, key=shuffle_key)
    return (params, state), {"loss": jnp.mean(losses)}


def place(devices: list[Any]) -> rlfx.place.Placement:
    """Not called: it takes two devices."""
    return rlfx.place.assign(squared, zeros(8, 8), devices=devices, budget=8)


def zeros(*shape: int) -> jax.Array:
    return jnp.asarray(np.zeros(shape, np.float32))  # pyright: ignore[reportUnknownMemberType]


def greedy(params: Params, obs: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.argmax(logits_of(params, obs)).astype(jnp.int32)


def squared(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x.T)


def main(folder: pathlib.Path) -> None:
    params = {"hidden": zeros(4, 8), "logits": zeros(8, 2), "value": zeros(8)}
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 8))
    gradient = jax.value_and_grad(loss_fn, has_aux=True)  # pyright: ignore[reportUnknownMemberType]
    (loss, (state, aux)), grads = gradient(params, state, jax.random.key(1))
    print(loss, aux["reward"].shape, jax.tree.map(jnp.shape, grads))
    print(loss_fn.explain(params, state, verbose=True), str(rlfx.trace(reinforce, params, state, length=16, batch=8)))
    kept = loss_fn.plan(params, state)
    assert rlfx.Plan.from_json(kept.to_json()) == kept
    assert json.loads(kept.to_json())
    callbacks = [
        Progress("ppo"),
        Log(folder / "log"),
        Metrics(CSV(folder / "metrics.csv")),
        Checkpoints(folder / "checkpoints", every=2),
        Evaluate(lambda agent, key: agent[0]["value"].sum(), every=2, until=lambda value: bool(value > 1e9)),
    ]
    result = run(update, (params, state), jax.random.key(2), updates=4, per_call=2, callbacks=callbacks)
    score = evaluate(env, greedy, result.agent[0], jax.random.key(3), episodes=4)
    print(float(score.mean_return), result.done, result.reason)
    save_gif(env, folder / "cartpole.gif", jax.random.key(4), steps=4)
    policy = TanhNormal(zeros(1), zeros(1))
    print(policy.log_prob(policy.sample(jax.random.key(5))), Priorities.of(16, batch=8, length=2))
    graph = rlfx.place.explode(squared, zeros(8, 8))
    machine = rlfx.place.hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e9)
    print(len(graph.nodes), rlfx.place.build(graph, machine))
    with rlfx.profile.capture(folder / "profile"), rlfx.profile.operation("learn"):
        learn(params, Sample(zeros(4, 4), zeros(4).astype(jnp.int32), zeros(4), zeros(4)))
    print(rlfx.profile.read(folder / "profile"))
    try:
        rlfx.compile(reinforce, length=0)
    except rlfx.errors.DomainError as error:
        print(error)
