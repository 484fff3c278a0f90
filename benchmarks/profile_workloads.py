"""Small PPO, A2C, DQN and DDPG in hand-written JAX, in three ways to run them, for the profiler's case studies.

One text an algorithm: `Mode` decides whether its loops are Python's or `lax.scan`'s and what is jitted, so that runs
differ in their execution model alone (RL-Scope, section 4.1). Sizes are small: the subject is where time goes, not
scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from rlfx import profile


class Mode(NamedTuple):
    """How to run: `leaf` wraps each piece of an iteration, `loop` repeats, `whole` wraps an iteration."""

    name: str
    leaf: Callable
    loop: Callable
    whole: Callable


def python_loop(body, carry, n):
    outs = []
    for _ in range(n):
        carry, out = body(carry)
        outs.append(out)
    return carry, jax.tree.map(lambda *xs: jnp.stack(xs), *outs) if jax.tree.leaves(outs[0]) else None


def scan_loop(body, carry, n):
    return jax.lax.scan(lambda c, _: body(c), carry, None, length=n)


def same(f):
    return f


MODES = {
    "eager": Mode("eager", same, python_loop, same),
    "jit per step": Mode("jit per step", jax.jit, python_loop, same),
    "scan": Mode("scan", same, scan_loop, jax.jit),
}


class Env(NamedTuple):
    """N environments at once. `actions` is the number of discrete ones, 0 for one continuous in [-1, 1]."""

    name: str
    n: int
    obs: int
    actions: int
    reset: Callable  # key -> state, obs [N, obs]
    step: Callable  # key, state, action [N] -> state, obs, reward [N], done [N]


def gymnax_env(name: str, n: int) -> Env:
    import gymnax

    env, params = gymnax.make(name)
    discrete = hasattr(env.action_space(params), "n")

    def act(a):
        return a if discrete else 2.0 * a[None]  # Pendulum's torque

    def reset(key):
        obs, state = jax.vmap(env.reset, (0, None))(jax.random.split(key, n), params)
        return state, obs

    def step(key, state, action):
        keys = jax.random.split(key, n)
        obs, state, reward, terminated, truncated, _ = jax.vmap(lambda k, s, a: env.step(k, s, act(a), params))(
            keys, state, action
        )
        return state, obs, reward.astype(jnp.float32), terminated | truncated

    size = env.observation_space(params).shape[0]
    return Env(name, n, size, int(env.action_space(params).n) if discrete else 0, reset, step)


def brax_env(name: str, n: int) -> Env:
    import brax.envs

    env = brax.envs.get_environment(name)

    def reset(key):
        state = jax.vmap(env.reset)(jax.random.split(key, n))
        return state, state.obs

    def step(key, state, action):
        state = jax.vmap(env.step)(state, jnp.broadcast_to(action[:, None], (n, env.action_size)))
        return state, state.obs, state.reward.astype(jnp.float32), state.done > 0

    return Env(f"brax/{name}", n, env.observation_size, 0, reset, step)


def gymnasium_env(name: str, n: int) -> Env:
    """A host environment: one ordered callback a step for the whole batch."""
    import gymnasium

    envs = gymnasium.make_vec(name, num_envs=n, vectorization_mode="sync")
    size = envs.single_observation_space.shape[0]
    discrete = hasattr(envs.single_action_space, "n")
    f32 = jnp.float32
    shapes = (jax.ShapeDtypeStruct((n, size), f32), jax.ShapeDtypeStruct((n,), f32), jax.ShapeDtypeStruct((n,), bool))

    def host_reset():
        return np.asarray(envs.reset(seed=0)[0], np.float32)

    def host_step(action):
        action = np.asarray(action)
        obs, reward, terminated, truncated, _ = envs.step(action if discrete else 2.0 * action[:, None])
        return obs.astype(np.float32), reward.astype(np.float32), terminated | truncated

    def reset(key):
        return jnp.int32(0), io_callback(host_reset, shapes[0], ordered=True)

    def step(key, state, action):
        obs, reward, done = io_callback(host_step, shapes, action, ordered=True)
        return state + 1, obs, reward, done

    return Env(f"gymnasium/{name}", n, size, int(envs.single_action_space.n) if discrete else 0, reset, step)


def make_env(name: str, n: int) -> Env:
    kind, _, rest = name.partition("/")
    return {"brax": brax_env, "gymnasium": gymnasium_env}[kind](rest, n) if rest else gymnax_env(name, n)


def mlp_init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(sizes[:-1], sizes[1:], keys, strict=True)
    return [(jax.random.normal(k, (a, b)) * a**-0.5, jnp.zeros(b)) for a, b, k in pairs]


def mlp(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


class Annotate(NamedTuple):
    """What marks operations: the profiler's own, or nothing, for the uninstrumented runs."""

    operation: Callable


ANNOTATED = Annotate(profile.operation)
PLAIN = Annotate(lambda name: contextlib.nullcontext())


class OnPolicy(NamedTuple):
    """PPO, and A2C as one epoch over one batch without clipping."""

    steps: int = 32
    epochs: int = 4
    minibatches: int = 4
    clip: float = 0.2
    hidden: int = 64

    def samples(self, env: Env) -> int:
        return self.steps * env.n

    def build(self, env: Env, mode: Mode, note: Annotate = ANNOTATED):
        """`(init(key) -> train state, iterate(train state) -> train state)`."""
        opt = optax.adam(3e-4)
        discrete = env.actions > 0

        def log_prob(out, a):
            if discrete:
                return jnp.take_along_axis(jax.nn.log_softmax(out), a[..., None], axis=-1)[..., 0]
            return -0.5 * ((a - out[..., 0]) / 0.5) ** 2

        @mode.leaf
        def act(params, key, obs):
            out = mlp(params["pi"], obs)
            if discrete:
                a = jax.random.categorical(key, out)
            else:
                a = out[..., 0] + 0.5 * jax.random.normal(key, out.shape[:-1])
            return a, log_prob(out, a), mlp(params["v"], obs)[..., 0]

        sim = mode.leaf(env.step)

        @mode.leaf
        def advantages(reward, done, value, last):
            nxt = jnp.concatenate([value[1:], last[None]])
            delta = reward + 0.99 * nxt * (1 - done) - value

            def back(g, x):
                g = x[0] + 0.99 * 0.95 * (1 - x[1]) * g
                return g, g

            return jax.lax.scan(back, jnp.zeros_like(last), (delta, done), reverse=True)[1]

        def loss(params, obs, a, logp, adv, target):
            ratio = jnp.exp(log_prob(mlp(params["pi"], obs), a) - logp)
            clipped = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
            value = mlp(params["v"], obs)[..., 0]
            return -jnp.minimum(ratio * adv, clipped * adv).mean() + 0.5 * ((value - target) ** 2).mean()

        @mode.leaf
        def learn(params, state, batch):
            grads = jax.grad(loss)(params, *batch)
            updates, state = opt.update(grads, state)
            return optax.apply_updates(params, updates), state

        @mode.leaf
        def shuffle(key, batch):
            order = jax.random.permutation(key, batch[0].shape[0])
            return jax.tree.map(lambda x: x[order].reshape(self.minibatches, -1, *x.shape[1:]), batch)

        pick = mode.leaf(lambda batch, i: jax.tree.map(lambda x: x[i], batch))
        split3 = mode.leaf(lambda key: tuple(jax.random.split(key, 3)))

        def step(carry):
            params, key, state, obs = carry
            key, k1, k2 = split3(key)
            with note.operation("inference"):
                a, logp, v = act(params, k1, obs)
            with note.operation("simulation"):
                state, nxt, r, done = sim(k2, state, jax.lax.stop_gradient(a))
            return (params, key, state, nxt), (obs, a, logp, v, r, done.astype(jnp.float32))

        def epoch(carry):
            params, opt_state, key, batch = carry
            key, k1, _ = split3(key)
            shuffled = shuffle(k1, batch)

            def minibatch(carry):
                params, opt_state, i = carry
                return (*learn(params, opt_state, pick(shuffled, i)), i + 1), None

            (params, opt_state, _), _ = mode.loop(minibatch, (params, opt_state, jnp.int32(0)), self.minibatches)
            return (params, opt_state, key, batch), None

        @mode.whole
        def iterate(train):
            params, opt_state, key, state, obs = train
            with note.operation("rollout"):
                (_, key, state, obs), (o, a, logp, v, r, d) = mode.loop(step, (params, key, state, obs), self.steps)
                with note.operation("inference"):
                    last = act(params, key, obs)[2]
            with note.operation("advantages"):
                adv = advantages(r, d, v, last)
            with note.operation("backpropagation"):
                batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (o, a, logp, adv, adv + v))
                (params, opt_state, key, _), _ = mode.loop(epoch, (params, opt_state, key, batch), self.epochs)
            return params, opt_state, key, state, obs

        def init(key):
            k1, k2, k3, k4 = jax.random.split(key, 4)
            h = self.hidden
            params = {
                "pi": mlp_init(k1, (env.obs, h, h, max(env.actions, 1))),
                "v": mlp_init(k2, (env.obs, h, h, 1)),
            }
            return params, opt.init(params), k3, *env.reset(k4)

        return init, iterate


class OffPolicy(NamedTuple):
    """DQN (`critic_only`) and DDPG: a gradient step an environment step, from a uniform ring buffer."""

    critic_only: bool
    steps: int = 32
    batch: int = 64
    capacity: int = 4096
    hidden: int = 64

    def samples(self, env: Env) -> int:
        return self.steps * env.n

    def build(self, env: Env, mode: Mode, note: Annotate = ANNOTATED):
        """`(init(key) -> train state, iterate(train state) -> train state)`."""
        opt = optax.adam(1e-3)
        count = env.actions or 5  # DQN on continuous tasks: five levels

        def to_env(a):
            if self.critic_only:
                return a if env.actions else a.astype(jnp.float32) / 2 - 1
            return (a > 0).astype(jnp.int32) if env.actions else a

        def q(params, obs, a):
            if self.critic_only:
                return jnp.take_along_axis(mlp(params["q"], obs), a[:, None], axis=1)[:, 0]
            return mlp(params["q"], jnp.concatenate([obs, a[:, None]], axis=1))[:, 0]

        def best(params, obs):
            if self.critic_only:
                return mlp(params["q"], obs).max(axis=1)
            return q(params, obs, jnp.tanh(mlp(params["pi"], obs)[:, 0]))

        @mode.leaf
        def act(params, key, obs):
            k1, k2 = jax.random.split(key)
            if self.critic_only:
                explore = jax.random.uniform(k1, (obs.shape[0],)) < 0.1
                return jnp.where(
                    explore, jax.random.randint(k2, explore.shape, 0, count), mlp(params["q"], obs).argmax(1)
                )
            return jnp.tanh(mlp(params["pi"], obs)[:, 0]) + 0.1 * jax.random.normal(k1, (obs.shape[0],))

        @mode.leaf
        def insert(buffer, at, items):
            rows = (at + jnp.arange(env.n)) % self.capacity
            return jax.tree.map(lambda b, x: b.at[rows].set(x), buffer, items), at + env.n

        @mode.leaf
        def sample(key, buffer, at):
            rows = jax.random.randint(key, (self.batch,), 0, jnp.minimum(at, self.capacity))
            return jax.tree.map(lambda b: b[rows], buffer)

        def loss(params, target, obs, a, r, d, nxt):
            goal = r + 0.99 * (1 - d) * best(target, nxt)
            out = ((q(params, obs, a) - jax.lax.stop_gradient(goal)) ** 2).mean()
            if not self.critic_only:
                frozen = {**params, "q": jax.lax.stop_gradient(params["q"])}
                out = out - best(frozen, obs).mean()
            return out

        @mode.leaf
        def learn(params, target, state, batch):
            grads = jax.grad(loss)(params, target, *batch)
            updates, state = opt.update(grads, state)
            params = optax.apply_updates(params, updates)
            return params, optax.incremental_update(params, target, 0.01), state

        sim = mode.leaf(lambda key, state, a: env.step(key, state, to_env(a)))
        split4 = mode.leaf(lambda key: tuple(jax.random.split(key, 4)))

        def step(carry):
            params, target, opt_state, key, buffer, at, state, obs = carry
            key, k1, k2, k3 = split4(key)
            with note.operation("inference"):
                a = act(params, k1, obs)
            with note.operation("simulation"):
                state, nxt, r, d = sim(k2, state, a)
            with note.operation("replay"):
                buffer, at = insert(buffer, at, (obs, a, r, d.astype(jnp.float32), nxt))
                batch = sample(k3, buffer, at)
            with note.operation("backpropagation"):
                params, target, opt_state = learn(params, target, opt_state, batch)
            return (params, target, opt_state, key, buffer, at, state, nxt), None

        @mode.whole
        def iterate(train):
            with note.operation("training step"):
                return mode.loop(step, train, self.steps)[0]

        def init(key):
            k1, k2, k3, k4 = jax.random.split(key, 4)
            h, extra = self.hidden, 0 if self.critic_only else 1
            params = {"q": mlp_init(k1, (env.obs + extra, h, h, count if self.critic_only else 1))}
            if not self.critic_only:
                params["pi"] = mlp_init(k2, (env.obs, h, h, 1))
            zeros = jnp.zeros(self.capacity)
            action = zeros.astype(jnp.int32) if self.critic_only else zeros
            space = jnp.zeros((self.capacity, env.obs))
            target = jax.tree.map(jnp.copy, params)
            buffer = (space, action, zeros, zeros, space)
            return params, target, opt.init(params), k3, buffer, jnp.int32(0), *env.reset(k4)

        return init, iterate


ALGORITHMS = {
    "PPO": OnPolicy(),
    "A2C": OnPolicy(steps=8, epochs=1, minibatches=1, clip=1e9),
    "DQN": OffPolicy(critic_only=True),
    "DDPG": OffPolicy(critic_only=False),
}


def build(algorithm: str, env: str, mode: str, n: int = 16, note: Annotate = ANNOTATED):
    """`(train state, iterate, environment steps an iteration)`, compiled and warmed up."""
    made = make_env(env, n)
    config = ALGORITHMS[algorithm]
    init, iterate = config.build(made, MODES[mode], note)
    train = init(jax.random.key(0))
    for _ in range(2):
        train = jax.block_until_ready(iterate(train))
    return train, iterate, config.samples(made)


def profiled(
    train: Any, iterate: Callable, samples: int, iterations: int, directory=None
) -> tuple[Any, profile.Report]:
    """Capture a few iterations and report."""
    with profile.capture(directory, steps=samples * iterations) as session:
        for _ in range(iterations):
            train = iterate(train)
        jax.block_until_ready(train)
    return train, session.report()
