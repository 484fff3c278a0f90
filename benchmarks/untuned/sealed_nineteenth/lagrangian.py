"""Deep Lagrangian networks (DeLaN, Lutter et al. 2019; for planning and learning in models, Lutter and Peters 2023) of a robot's
arm from stored trajectories: a network tells a factor of the mass matrix and the potential, and derivatives of the Lagrangian
tell torques, as they were measured, and accelerations, by which the arm is simulated for some timesteps from every one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c

JOINTS, STEPS, DT, LEAST, FORESEEN = 3, 4, 0.05, 0.5, 10.0
BELOW = JOINTS * (JOINTS + 1) // 2
LOWER = np.tril_indices(JOINTS)


def params_of(key, hidden):
    p = c.mlp_params(key, (JOINTS, hidden, hidden, BELOW + 1))
    p[-1] = {"w": p[-1]["w"], "b": jnp.linspace(-0.5, 0.5, BELOW)}  # a potential has no origin
    return p


def factor_and_potential(p, q):
    """A lower triangular matrix, and a number, of one arm."""
    *hidden, last = p
    for layer in hidden:
        q = jnp.tanh(c.linear(layer, q))
    made = q @ last["w"]
    lower = jnp.zeros((JOINTS, JOINTS)).at[LOWER].set(made[:BELOW] + last["b"])
    on = jnp.eye(JOINTS, dtype=bool)
    return jnp.where(on, jax.nn.softplus(lower) + LEAST, lower), made[BELOW]


def mass(p, q):
    factor, _ = factor_and_potential(p, q)
    return factor @ factor.T


def lagrangian(p, q, speed):
    factor, potential = factor_and_potential(p, q)
    return 0.5 * ((factor.T @ speed) ** 2).sum() - potential


def forces(p, q, speed):
    """Of Coriolis, centrifugal and of gravity: how momentum changes with where the arm is, less the Lagrangian's slope."""
    _, changing = jax.jvp(lambda q: mass(p, q) @ speed, (q,), (speed,))
    return changing - jax.grad(lagrangian, 1)(p, q, speed)


def torque_of(p, q, speed, acceleration):
    return mass(p, q) @ acceleration + forces(p, q, speed)


def acceleration_of(p, q, speed, torque):
    return jnp.linalg.solve(mass(p, q), torque - forces(p, q, speed))


def loss_of(p, x, torques, following, going):
    """Of one timestep; ``torques[STEPS, JOINTS]``, positions and speeds that follow, and ``going[STEPS]``."""
    inverse = ((torque_of(p, x["q"], x["speed"], x["acceleration"]) - x["torque"]) ** 2).mean()

    def step(state, torque):
        q, speed = state
        speed = speed + DT * acceleration_of(p, q, speed, torque)
        state = q + DT * speed, speed
        return state, state

    _, foreseen = jax.lax.scan(step, (x["q"], x["speed"]), torques)
    missed = sum(((a - b) ** 2).mean(-1) for a, b in zip(foreseen, following, strict=True))
    return inverse + FORESEEN * (going * missed).mean()


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    torques = rlfx.series(x["torque"]).window(0, STEPS, fill=0.0)
    following = tuple(rlfx.series(x[name]).window(1, STEPS + 1, fill=0.0) for name in ("q", "speed"))
    going = jnp.cumprod(rlfx.series(1.0 - x["done"]).window(0, STEPS, fill=0.0))
    return loss_of(p, x, torques, following, going), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def windows(x, first):
    """``[T, B, STEPS, ...]`` of ``x[T, B, ...]``, from ``first`` on; zeros behind the end."""
    padded = jnp.concatenate([x, jnp.zeros((STEPS + first, *x.shape[1:]))])
    return jnp.stack([padded[first + i : first + i + len(x)] for i in range(STEPS)], 2)


def told(data):
    """What a timestep's loss is of."""
    following = windows(data["q"], 1), windows(data["speed"], 1)
    return data, windows(data["torque"], 0), following, jnp.cumprod(windows(1.0 - data["done"], 0), 2)


def plain(length, batch):
    every = jax.vmap(jax.vmap(loss_of, (None, 0, 0, 0, 0)), (None, 0, 0, 0, 0))

    def run(p, data):
        return jax.value_and_grad(lambda p: every(p, *told(data)).mean())(p)

    return run
