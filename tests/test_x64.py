"""With ``JAX_ENABLE_X64=1`` (``make test-x64``): the numbers, types and episodes of 32 bits, whatever jax's default width."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.envs import fast_prng, spaces
from rlfx.prng import seeded

X64 = jax.config.jax_enable_x64
pytestmark = pytest.mark.skipif(not X64, reason="shows something with JAX_ENABLE_X64=1 only: make test-x64")
OWN = [
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Catch-bsuite",
    "Breakout-MinAtar",
    "SyntheticImages-v0",
    "CartPole-parametric",
]
GYMNAX = [name for name in rlfx.envs.list_envs() if name.startswith("gymnax/") and "MNIST" not in name]  # a download
ROLLOUTS = ["CartPole-v1", "MountainCar-v0", "Catch-bsuite", "Breakout-MinAtar", "gymnax/CartPole-v1"]


def numbers():
    """What must not depend on the width: rollouts, the generators, samples of spaces, replay."""
    from rlfx.place import replay

    out = {}
    for name in ROLLOUTS:
        s = rlfx.envs.random_rollout(name, num_envs=4, num_steps=120, backend="vmap")(jax.random.key(0))
        out[name] = [float(x) for x in s]
    for impl in (None, fast_prng):
        key = jax.random.key(3) if impl is None else jax.random.key(3, impl=impl)
        keys = [key, jax.random.fold_in(key, 5), *jax.random.split(key, 3), seeded(key, fast_prng)]
        out[f"keys {impl is None}"] = [jax.random.key_data(k).tolist() for k in keys]
        for space in (
            spaces.Discrete(7),
            spaces.Discrete(1000),
            spaces.Box(-2.0, 2.0, (3,)),
            spaces.Box(0, 255, (3,), np.uint8),
        ):
            out[f"{space} {impl is None}"] = np.asarray(space.sample(key), np.float64).tolist()
    ring = replay.insert(replay.make_replay(20, jnp.float32(0)), jnp.arange(9, dtype=jnp.float32))
    ring = replay.update_priorities(ring, jnp.arange(9), jnp.arange(9, dtype=jnp.float32))
    drawn = replay.sample(ring, jax.random.key(0), 8)
    out["replay"] = [drawn.indices.tolist(), replay.sample_uniform(ring, jax.random.key(0), 8).indices.tolist()]
    out["weights"] = replay.importance_weights(drawn.probability, ring.size, 0.4).tolist()
    return out


def test_numbers_do_not_depend_on_the_width():
    """The same program in a Python of the other width."""
    code = "import json, tests.test_x64 as t; print(json.dumps(t.numbers()))"
    env = {**os.environ, "JAX_ENABLE_X64": "0" if X64 else "1"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = numbers(), json.loads(done.stdout.splitlines()[-1])
    assert list(ours) == list(theirs)
    for label, values in ours.items():
        np.testing.assert_allclose(
            np.ravel(values).astype(float), np.ravel(theirs[label]).astype(float), rtol=1e-5, err_msg=label
        )
    assert 10 < ours["CartPole-v1"][2] < 40


@pytest.mark.parametrize("name", OWN)
def test_samples_and_observations_lie_in_their_spaces(name):
    env = rlfx.envs.make(name, auto_reset=False)

    def one(key):
        state = env.reset(key)
        action = spaces.sample(env.action_space, key)
        after, step = env.step(key, state, action)
        inside = env.observation_space.contains(env.observe(state)) & env.observation_space.contains(step.final_obs)
        return inside & env.action_space.contains(action), action, env.observe(after)

    inside, actions, obs = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 64))
    assert bool(inside.all())
    assert len(np.unique(actions)) > 1
    assert float(jnp.abs(obs.astype(jnp.float32)).sum(axis=tuple(range(1, obs.ndim))).min()) > 0  # no empty board


def wide(jaxpr):
    """The types of 64 bits in a jaxpr, those of Python's own numbers (weak) excepted."""
    found = set()
    for equation in jaxpr.eqns:
        for v in equation.outvars:
            dtype = getattr(v.aval, "dtype", None)
            extended = dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended)
            if not extended and np.dtype(dtype).itemsize == 8 and not v.aval.weak_type:
                found.add(f"{v.aval} of {equation.primitive}")
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                found |= wide(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize("name", [*OWN, *GYMNAX])
def test_environments_compute_with_32_bits(name):
    """No draw, constant, state, observation or reward has 64 bits; FrozenLake's directions are gymnax's own constant."""
    env = rlfx.envs.make(name)

    def one(key):
        state = env.reset(key)
        return env.step(key, state, spaces.sample(env.action_space, key)), env.observe(state)

    jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(jax.random.key(0, impl="rbg"))
    assert not wide(jaxpr.jaxpr)
    assert all(np.dtype(x.dtype).itemsize < 8 for x in jax.tree.leaves(shapes))


def test_wrappers_and_placement_compute_with_32_bits():
    from rlfx.place import hardware, methods, workloads
    from rlfx.place.problem import build

    env = rlfx.envs.make("Pendulum-v1")
    for wrap in (rlfx.envs.normalize_observation, rlfx.envs.normalize_reward, rlfx.envs.episode_statistics):
        env = wrap(env)
    rlfx.envs.check(rlfx.envs.time_limit(rlfx.envs.frame_stack(env, 2), 5))
    bare = rlfx.envs.make("CartPole-v1", auto_reset=False)
    few = rlfx.envs.auto_reset(bare, reset="optimistic", ratio=2)
    keys = jax.random.split(jax.random.key(0), 4)
    states = jax.vmap(few.reset)(keys)
    assert jax.vmap(few.step)(keys, states, jnp.zeros(4, jnp.int32))[1].reward.dtype == jnp.float32
    problem = build(workloads.chainmm(size=16).graph(), hardware.p100_pcie())
    assert methods.solve(problem, "polish", jax.random.key(0), 16).cost >= problem.lower_bound() * (1 - 1e-6)


@pytest.mark.parametrize("promotion", ["strict", "standard"])
def test_an_absolute_time_meets_the_end_of_an_episode(promotion):
    """A time that is written as a number has the width of the clock."""

    def program(p, c, t):
        return p * rlfx.series(c, start=p, end=c)[1], c + 1.0

    with jax.numpy_dtype_promotion(promotion):
        fn = rlfx.compile(program, length=4, until=lambda c: c > 2.5)
        loss, _ = fn(jnp.float32(2.0), jnp.float32(1.0))
    np.testing.assert_allclose(loss, 2.0 * 2.0)
