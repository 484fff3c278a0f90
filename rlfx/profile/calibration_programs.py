"""What `calibrate` measures: small programs with different mixtures of the events that a profile records."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlfx.profile.annotate import operation
from rlfx.profile.rules import BACKEND, CALLBACK, TRANSFER

Program = Callable[[], object]


def empty_loop(count: int, annotated: bool) -> Program:
    """Python alone, with and without the annotation: what it costs outside a capture counts as well."""

    def loop() -> None:
        for _ in range(count):
            if annotated:
                with operation("calibration"):
                    pass

    return loop


def repeated(function: Callable[..., object], arguments: tuple, count: int) -> Program:
    """`count` calls, waiting for each."""

    def loop() -> None:
        for _ in range(count):
            jax.block_until_ready(function(*arguments))

    return loop


def random_numbers(count: int) -> Program:
    """Very many short instructions, a few different ones again and again."""

    def body(key, _):
        key, noise = jax.random.split(key)
        return key, jax.random.normal(noise, (16,)).sum()

    return _scan(body, jax.random.key(0), count)


def layers(count: int) -> Program:
    """Small layers, forwards and backwards, `count` times."""
    ws = [jnp.zeros((16, 16))] * 3

    def body(x, _):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x + jax.grad(lambda a: jnp.tanh(a @ ws[0]).sum())(x), x.sum(axis=0)

    return _scan(body, jnp.zeros((16, 16)), count)


def learner(count: int, jitted: bool) -> Program:
    """A learner in small: act, simulate a cart with a pole, take a gradient step; several hundred instructions.

    One program, or (`jitted`) a Python loop over three jitted functions.
    """
    optimizer = optax.adam(1e-3)
    shapes = ((4, 64), (64, 64), (64, 2))
    piece = jax.jit if jitted else lambda f: f

    def policy(ws, obs):
        for w in ws[:-1]:
            obs = jnp.tanh(obs @ w)
        return obs @ ws[-1]

    @piece
    def act(key, ws, obs):
        key, noise = jax.random.split(key)
        return key, jax.random.categorical(noise, policy(ws, obs))

    @piece
    def simulate(key, obs, action):
        key, noise = jax.random.split(key)
        x, v, angle, spin = obs.T
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        push = (action * 2 - 1).astype(jnp.float32) + 0.05 * spin**2 * sine
        turn = (9.8 * sine - cosine * push) / (0.67 - 0.05 * cosine**2)
        moved = jnp.stack([x + 0.02 * v, v + 0.02 * (push - turn * cosine), angle + 0.02 * spin, spin + 0.02 * turn], 1)
        done = (jnp.abs(moved[:, 0]) > 2.4) | (jnp.abs(moved[:, 2]) > 0.2)
        fresh = jax.random.uniform(noise, obs.shape, minval=-0.05, maxval=0.05)
        return key, jnp.where(done[:, None], fresh, moved), (~done).astype(jnp.float32)

    def loss(ws, obs, action, reward):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(policy(ws, obs)), action[:, None], axis=1)
        return -(chosen[:, 0] * reward).mean()

    @piece
    def learn(ws, state, obs, action, reward):
        updates, state = optimizer.update(jax.grad(loss)(ws, obs, action, reward), state)
        return optax.apply_updates(ws, updates), state

    def step(carry, _):
        key, ws, state, obs = carry
        key, action = act(key, ws, obs)
        key, moved, reward = simulate(key, obs, action)
        ws, state = learn(ws, state, obs, action, reward)
        return (key, ws, state, moved), None

    ws = [jnp.full(shape, 0.01) for shape in shapes]
    first = jax.random.key(0), ws, optimizer.init(ws), jnp.zeros((16, 4))
    if not jitted:
        return _scan(step, first, count)

    def loop() -> object:
        carry = first
        for _ in range(count):
            carry, _ = step(carry, None)
        return jax.block_until_ready(carry)

    return loop


def _scan(body: Callable, carry: object, length: int) -> Program:
    program = jax.jit(lambda c: jax.lax.scan(body, c, None, length=length))
    return lambda: jax.block_until_ready(program(carry))


def mixtures() -> dict[str, tuple[Program, Program]]:
    """`name: (uninstrumented, instrumented)`, a few ms to 30 ms each: different mixtures of events."""
    wide = jax.jit(lambda *a: tuple(b + 1 for b in a))
    same = {
        "calls of many arguments": repeated(wide, (jnp.zeros(8),) * 20, 500),
        "random numbers": random_numbers(1_000),
        "layers": layers(1_000),
        "learner, one program": learner(100, jitted=False),
        "learner, jit per step": learner(50, jitted=True),
    }
    return {
        "annotations": (empty_loop(10_000, False), empty_loop(10_000, True)),
        **{name: (program, program) for name, program in same.items()},
    }


def calls() -> dict[str, Program]:
    """By type of call: programs of that type alone."""
    x = jnp.zeros(8)
    call = jax.jit(lambda a: a + 1)
    back = jax.jit(lambda a: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(a.shape, a.dtype), a))
    return {
        BACKEND: repeated(call, (x,), 2_000),
        TRANSFER: repeated(jax.device_put, (np.zeros(8, np.float32),), 2_000),
        CALLBACK: repeated(back, (x,), 500),
    }
