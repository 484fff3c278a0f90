"""An ensemble of critics (REDQ) on two cores: one update, written as for one device, whose critics are placed.

    python examples/placed_ensemble.py [--updates 200] [--critics 10] [--hidden 256]

Notice that nothing in `update` says what runs where. `assign_stages` groups it into stages, measures them on both devices, and
decides; weights and Adam's moments stay on the device that updates them. The critics are a list: under `jax.vmap` an ensemble
would be one program on one device. Transitions are drawn at random here: how an update is placed does not depend on them.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlfx.place import assign_stages, core_devices

OBS, ACTION = 17, 6  # as HalfCheetah's
GAMMA, POLYAK, TEMPERATURE = 0.99, 0.005, 0.1
TARGETS = 2  # the minimum is over so many critics, drawn in each update
optimizer = optax.adam(3e-4)


class State(NamedTuple):
    critics: Any
    targets: Any
    critic_opt: Any
    actor: Any
    actor_opt: Any


def network(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (n, m)) * jnp.sqrt(2.0 / n), jnp.zeros(m)) for k, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def apply(weights, x):
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return x @ w + b


def init(key, critics=10, hidden=256):
    actor, *keys = jax.random.split(key, critics + 1)
    ensemble = [network(k, (OBS + ACTION, hidden, hidden, 1)) for k in keys]
    actor = network(actor, (OBS, hidden, hidden, 2 * ACTION))
    targets = jax.tree.map(jnp.copy, ensemble)
    return State(ensemble, targets, [optimizer.init(w) for w in ensemble], actor, optimizer.init(actor))


def act(actor, obs, key):
    """A squashed Gaussian's sample, and its log-probability."""
    mean, log_std = jnp.split(apply(actor, obs), 2, axis=-1)
    log_std = jnp.clip(log_std, -5.0, 2.0)
    noise = jax.random.normal(key, mean.shape)
    raw = mean + jnp.exp(log_std) * noise
    density = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    correction = 2.0 * (jnp.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
    return jnp.tanh(raw), jnp.sum(density - correction, axis=-1)


def value(critic, obs, action):
    return apply(critic, jnp.concatenate([obs, action], axis=-1))[:, 0]


def update(state, batch, key):
    """One update of all critics, their targets and the actor."""
    next_key, subset_key, actor_key = jax.random.split(key, 3)
    action, log_prob = act(state.actor, batch["next"], next_key)
    following = jnp.stack([value(target, batch["next"], action) for target in state.targets])
    chosen = jax.random.permutation(subset_key, len(state.targets))[:TARGETS]
    goal = batch["reward"] + GAMMA * (following[chosen].min(axis=0) - TEMPERATURE * log_prob)

    critics, opts, losses = [], [], []
    for critic, opt in zip(state.critics, state.critic_opt, strict=True):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((value(w, batch["obs"], batch["action"]) - goal) ** 2))(critic)
        step, opt = optimizer.update(slope, opt, critic)
        critics.append(optax.apply_updates(critic, step))
        opts.append(opt)
        losses.append(loss)

    def actor_loss(actor):
        action, log_prob = act(actor, batch["obs"], actor_key)
        mean = sum(value(critic, batch["obs"], action) for critic in critics) / len(critics)
        return jnp.mean(TEMPERATURE * log_prob - mean)

    slope = jax.grad(actor_loss)(state.actor)
    step, actor_opt = optimizer.update(slope, state.actor_opt, state.actor)
    targets = [optax.incremental_update(new, old, POLYAK) for new, old in zip(critics, state.targets, strict=True)]
    return State(critics, targets, opts, optax.apply_updates(state.actor, step), actor_opt), jnp.stack(losses)


def transitions(key, batch=256):
    keys = jax.random.split(key, 4)
    return {
        "obs": jax.random.normal(keys[0], (batch, OBS)),
        "next": jax.random.normal(keys[1], (batch, OBS)),
        "action": jnp.tanh(jax.random.normal(keys[2], (batch, ACTION))),
        "reward": jax.random.normal(keys[3], (batch,)),
    }


def seconds(step, state, batch, keys):
    """Of an update: the state is donated, and each call waited for."""
    state, losses = jax.block_until_ready(step(state, batch, keys[0]))  # compiles
    begin = time.perf_counter()
    for key in keys[1:]:
        state, losses = jax.block_until_ready(step(state, batch, key))
    return (time.perf_counter() - begin) / (len(keys) - 1), losses


def main(argv=None):
    parser = argparse.ArgumentParser(description="an ensemble of critics, placed on two cores")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--critics", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args(argv)
    key, batch_key, *keys = jax.random.split(jax.random.key(0), args.updates + 3)
    batch = transitions(batch_key, args.batch)

    def start():
        return init(key, args.critics, args.hidden)

    cores = core_devices(2)
    placed = assign_stages(update, start(), batch, keys[0], carry=1, donate_argnums=(0,), devices=cores)
    print(placed.explain())

    one = jax.jit(update, donate_argnums=0)
    times = {
        "one program, one core": seconds(one, *jax.device_put((start(), batch, keys), cores[0])),
        "one program, all cores": seconds(one, start(), batch, keys),
        "placed on two cores": seconds(placed, start(), batch, keys),
    }
    for name, (taken, losses) in times.items():
        print(f"{name:<24} {1e3 * taken:8.2f} ms an update, mean loss {losses.mean():.4f}")
    return {name: losses for name, (_, losses) in times.items()}


if __name__ == "__main__":
    main()
