"""The gymnax adaptor gives gymnax's trajectories, with true final observations and carries a scan accepts."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.envs import spaces

COSTLY = {"Asterix-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar"}  # seconds to compile
NAMES = [n for n in gymnax.registration.registered_envs if n != "MNISTBandit-bsuite"]  # MNIST needs a download


def trajectories(name, length=40):
    """Our scan and gymnax's, from one key and the same actions."""
    ours = rlfx.envs.make(f"gymnax/{name}")
    keys = jax.random.split(jax.random.key(1), length)
    actions = [spaces.sample(ours.action_space, k) for k in jax.random.split(jax.random.key(2), length)]
    actions = jax.tree.map(lambda *xs: jnp.stack(xs), *actions)

    def body(state, x):
        state, step = ours.step(*(x[0], state, x[1]))
        return state, (ours.observe(state), step)

    state = ours.reset(jax.random.key(0))
    _, (obs, step) = jax.lax.scan(body, state, (keys, actions))

    # gymnax is written for 32 bits
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        env, params = gymnax.make(name)
        theirs, their_state = [], env.reset(jax.random.key(0), params)[1]
        for i in range(length):
            out = env.step(keys[i], their_state, actions[i], params)
            their_state = out[1]
            theirs.append((out[0], out[2], out[3], out[4], out[5]["final_observation"]))
    return (obs, step.reward, step.terminated, step.truncated, step.final_obs), theirs


def kind(x):
    return x.shape, x.dtype, x.weak_type


def close(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    np.testing.assert_allclose(ours, theirs.reshape(ours.shape), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in COSTLY)) for n in NAMES])
def test_same_trajectory_as_gymnax(name):
    ours, theirs = trajectories(name)
    for field, values in zip(ours, zip(*theirs, strict=True), strict=True):
        expected = jax.tree.map(lambda *xs: np.stack([np.asarray(x).reshape(np.shape(x)) for x in xs]), *values)
        jax.tree.map(close, field, expected)


@pytest.mark.parametrize("name", NAMES)
def test_carry_is_stable_and_step_is_scoped(name):
    env = rlfx.envs.make(f"gymnax/{name}")
    state = jax.eval_shape(env.reset, jax.random.key(0))
    action = jax.eval_shape(lambda k: spaces.sample(env.action_space, k), jax.random.key(0))
    jaxpr, shapes = jax.make_jaxpr(env.step, return_shape=True)(jax.random.key(0), state, action)
    assert jax.tree.map(kind, state) == jax.tree.map(kind, shapes[0])
    assert all(
        "rlfx.env.step" in str(e.source_info.name_stack)
        for e in jaxpr.jaxpr.eqns
        if str(e.primitive) not in ("convert_element_type", "broadcast_in_dim")
    )
    assert shapes[1].terminated.dtype == shapes[1].truncated.dtype == bool
    assert kind(shapes[1].reward) == ((), jnp.float32, False)
