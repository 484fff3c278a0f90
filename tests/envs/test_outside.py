"""Jumanji, JaxMARL and MuJoCo Playground: where they are installed, the protocol; where not, the line that installs them."""

import importlib.util

import jax
import pytest

import rlfx.envs
from rlfx.errors import EnvError

ENVS = {
    "jumanji/Snake-v1": {"num_rows": 4, "num_cols": 4},
    "jaxmarl/MPE_simple_spread_v3": {},
    "playground/CartpoleBalance": {},
}


def package_of(name):
    family = name.partition("/")[0]
    return {"playground": "mujoco_playground"}.get(family, family)


@pytest.mark.parametrize("name", ENVS)
def test_a_package_that_is_not_there_says_how_to_install_it(name, monkeypatch):
    family, needed = name.partition("/")[0], package_of(name)
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == needed else there(package))
    with pytest.raises(EnvError, match=rf"{name} needs {needed}, which is not installed") as error:
        rlfx.envs.make(name)
    assert f"pip install 'rlfx[{family}]'" in str(error.value)


@pytest.mark.parametrize("name", ENVS)
def test_the_protocol(name):
    pytest.importorskip(package_of(name))
    env = rlfx.envs.make(name, **ENVS[name])
    rlfx.envs.check(env)
    with pytest.raises(EnvError, match="has no environment 'nothing'"):
        rlfx.envs.make(name.partition("/")[0] + "/nothing")


def test_a_time_limit_of_jaxmarl_truncates():
    pytest.importorskip("jaxmarl")
    env = rlfx.envs.make("jaxmarl/MPE_simple_spread_v3", auto_reset=False, max_steps=2)
    state, flags = env.reset(jax.random.key(0)), []
    for i in range(3):  # JaxMARL looks at its limit before it counts the step
        action = jax.tree.map(lambda space: space.sample(jax.random.key(i)), env.action_space)
        state, step = env.step(jax.random.key(i), state, action)
        flags.append((bool(step.terminated), bool(step.truncated)))
    assert flags == [(False, False), (False, False), (False, True)]
    assert set(step.info["rewards"]) == set(env.action_space)


def test_a_time_limit_and_the_configuration_of_playground():
    pytest.importorskip("mujoco_playground")
    env = rlfx.envs.make("playground/CartpoleBalance", auto_reset=False, episode_length=2)
    step_of, state = jax.jit(env.step), jax.jit(env.reset)(jax.random.key(0))
    flags = []
    for i in range(2):
        state, step = step_of(jax.random.key(i), state, env.action_space.sample(jax.random.key(i)))
        flags.append((bool(step.terminated), bool(step.truncated)))
    assert flags == [(False, False), (False, True)]
    with pytest.raises(EnvError, match="playground/CartpoleBalance does not take impl='jax', nothing=1"):
        rlfx.envs.make("playground/CartpoleBalance", nothing=1)
