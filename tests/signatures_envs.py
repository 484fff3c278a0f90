"""One valid call of every public function of ``rlfx.envs``, and what each of its arguments takes: see tests/malformed.py."""

import contextlib
from unittest import mock

import gymnax
import jax
import jax.numpy as jnp
import numpy as np

import rlfx.envs
from rlfx.envs import spaces
from tests.malformed import (
    COUNT,
    FLAG,
    FUNCTION,
    NOTHING,
    OPTIONAL,
    Signature,
    takes,
)

KEY = jax.random.key(0)
CARTPOLE = rlfx.envs.make("CartPole-v1", auto_reset=False)
PENDULUM = rlfx.envs.make("Pendulum-v1", auto_reset=False)
RESETTING = rlfx.envs.auto_reset(CARTPOLE)
STATE = CARTPOLE.reset(KEY)
FRAME = np.zeros((2, 2, 3), np.uint8)
with jax.enable_x64(False):
    GYMNAX, PARAMS = gymnax.make("CartPole-v1")


class Played(Exception):
    """The arguments were accepted, and the episode would begin."""


def gif(**given):
    with mock.patch("rlfx.envs.render._played", side_effect=Played), contextlib.suppress(Played):
        rlfx.envs.save_gif(**given)


def frames(**given):
    with mock.patch("PIL.Image.fromarray", side_effect=Played), contextlib.suppress(Played):
        rlfx.envs.save_frames(**given)


def picture(**given):
    with mock.patch("matplotlib.figure.Figure", side_effect=Played), contextlib.suppress(Played):
        rlfx.envs.render(**given)


def fixed(call):
    """``call``, whose checks alone are of interest, without what it would trace."""

    def checked(**given):
        with mock.patch("rlfx.envs.rollout.supported", return_value=True):
            return call(**given)

    return checked


A_KEY = takes("key", "a key")
REAL = takes("0 | 1 | -1 | 2.5 | np.int64 | np.float64 | 2**40", "a finite number, NumPy's too")
ABOVE_ZERO = takes("1 | 2.5 | np.int64 | np.float64 | 2**40", "a finite number above zero")
BOUND = REAL | takes("inf", "no bound")
ENV = {"env": NOTHING}
INTEGERS = takes("class", "int is a dtype")
SHAPE = takes("() | [1, 2, 3] | set", "sizes")

ENVS = [
    Signature(
        "make",
        rlfx.envs.make,
        {"name": "CartPole-v1"},
        {"name": NOTHING, "auto_reset": FLAG, "differentiable": FLAG, "no_such_parameter": NOTHING},
    ),
    *(
        Signature(f"make {name}", rlfx.envs.make, {"name": name}, parameters)
        for name, parameters in {
            "CartPole-v1": {"gravity": REAL, "masspole": ABOVE_ZERO, "force_mag": REAL, "max_steps_in_episode": COUNT},
            "CartPole-parametric": {"compute_factor": COUNT, "state_factor": COUNT},
            "Pendulum-v1": {"g": REAL, "m": ABOVE_ZERO, "max_torque": ABOVE_ZERO, "max_steps_in_episode": COUNT},
            "Acrobot-v1": {"dt": ABOVE_ZERO, "max_vel_1": ABOVE_ZERO},
            "MountainCar-v0": {"goal_position": REAL, "max_speed": ABOVE_ZERO},
            "MountainCarContinuous-v0": {"power": REAL},
            "Catch-bsuite": {"rows": takes("np.int64", "two or more"), "columns": COUNT},
            "Breakout-MinAtar": {"max_steps_in_episode": COUNT},
            "SyntheticImages-v0": {
                "obs_shape": NOTHING,
                "obs_dtype": NOTHING,
                "num_actions": COUNT,
                "episode_length": COUNT,
            },
            "gymnax/CartPole-v1": {
                "gravity": REAL,
                "max_steps_in_episode": takes("0 | 1 | -1 | np.int64 ", "an integer"),
                "no_such_parameter": NOTHING,
            },
            "brax/fast": {"backend": OPTIONAL, "episode_length": COUNT},
            "gymnasium/CartPole-v1": {"no_such_parameter": NOTHING},
        }.items()
    ),
    Signature(
        "GymnaxEnvironment",
        rlfx.envs.GymnaxEnvironment,
        {"env": GYMNAX},
        {"env": NOTHING, "params": OPTIONAL, "store_observation": FLAG | OPTIONAL},
    ),
    Signature(
        "BraxEnvironment",
        rlfx.envs.BraxEnvironment,
        {"name": "fast", "env": object()},
        {"name": NOTHING, "env": NOTHING},
    ),
    Signature(
        "GymnasiumEnvironment",
        rlfx.envs.GymnasiumEnvironment,
        {"name": "CartPole-v1"},
        {"name": NOTHING, "resets": FLAG, "info": OPTIONAL | takes("{} | dict", "numbers by name")},
    ),
    Signature(
        "auto_reset", rlfx.envs.auto_reset, {"env": CARTPOLE}, {**ENV, "reset": NOTHING, "cache": COUNT, "ratio": COUNT}
    ),
    Signature("time_limit", rlfx.envs.time_limit, {"env": CARTPOLE, "steps": 5}, {**ENV, "steps": COUNT}),
    Signature("action_repeat", rlfx.envs.action_repeat, {"env": CARTPOLE, "repeats": 2}, {**ENV, "repeats": COUNT}),
    Signature("frame_stack", rlfx.envs.frame_stack, {"env": CARTPOLE, "frames": 2}, {**ENV, "frames": COUNT}),
    Signature(
        "clip_reward",
        rlfx.envs.clip_reward,
        {"env": CARTPOLE, "low": -(2.0**50), "high": 2.0**50},
        {**ENV, "low": REAL, "high": BOUND},
    ),
    Signature(
        "rescale_action",
        rlfx.envs.rescale_action,
        {"env": PENDULUM, "low": -(2.0**50), "high": 2.0**50},
        {**ENV, "low": REAL, "high": REAL},
    ),
    Signature("normalize_observation", rlfx.envs.normalize_observation, {"env": CARTPOLE}, {**ENV, "clip": ABOVE_ZERO}),
    Signature(
        "normalize_reward",
        rlfx.envs.normalize_reward,
        {"env": CARTPOLE},
        {**ENV, "clip": ABOVE_ZERO, "gamma": takes("0 | 1", "from 0 to 1")},
    ),
    *(
        Signature(name, getattr(rlfx.envs, name), {"env": PENDULUM}, ENV)
        for name in ("stop_gradient", "check_actions", "clip_action", "episode_statistics")
    ),
    Signature(
        "random_rollout",
        fixed(rlfx.envs.random_rollout),
        {"env": RESETTING, "num_envs": 2, "num_steps": 3},
        {
            "env": NOTHING,
            "num_envs": COUNT,
            "num_steps": COUNT,
            "backend": NOTHING,
            "tile": COUNT | OPTIONAL,
            "no_such_option": NOTHING,
        },
    ),
    Signature(
        "check",
        rlfx.envs.check,
        {"env": CARTPOLE, "steps": 0},
        {**ENV, "key": A_KEY | OPTIONAL, "steps": takes("0", "none", unasked="1 | np.int64")},
    ),
    Signature(
        "step",
        CARTPOLE.step,
        {"key": KEY, "state": STATE, "action": jnp.int32(1)},
        {"key": A_KEY, "action": takes("0 | 1", "one of two actions")},
    ),
    Signature(
        "step with a box",
        PENDULUM.step,
        {"key": KEY, "state": PENDULUM.reset(KEY), "action": jnp.zeros(1)},
        {"action": NOTHING},
    ),
    Signature("render", picture, {"env": CARTPOLE, "state": STATE}, {**ENV, "size": COUNT}),
    Signature(
        "save_gif",
        gif,
        {"env": CARTPOLE, "path": "a.gif", "key": KEY},
        {
            **ENV,
            "path": NOTHING,
            "key": A_KEY,
            "policy": FUNCTION | OPTIONAL,
            "steps": COUNT,
            "fps": ABOVE_ZERO,
            "size": COUNT,
        },
    ),
    Signature(
        "save_frames",
        frames,
        {"frames": [FRAME], "path": "a.gif"},
        {"frames": NOTHING, "path": NOTHING, "fps": ABOVE_ZERO},
    ),
    Signature("Discrete", spaces.Discrete, {"n": 3}, {"n": COUNT, "dtype": INTEGERS, "shape": SHAPE}),
    Signature(
        "Box",
        spaces.Box,
        {"low": -(2.0**50), "high": 2.0**50, "shape": (5,)},
        {
            "low": REAL | takes("True | np.bool_ | [5] | i32[5]", "numbers that broadcast"),
            "high": BOUND | takes("True | np.bool_ | [5] | i32[5]", "numbers that broadcast"),
            "shape": SHAPE,
            "dtype": INTEGERS,
        },
    ),
    Signature("sample", spaces.sample, {"space": spaces.Discrete(3), "key": KEY}, {"space": NOTHING, "key": A_KEY}),
    Signature("size", spaces.size, {"space": spaces.Discrete(3)}, {"space": NOTHING}),
]

#: Public names whose malformed calls are those of ``make``, or are no calls.
ELSEWHERE = {
    **dict.fromkeys(("CartPole", "ParametricCartPole", "Pendulum", "Acrobot", "MountainCar", "Catch"), "made by make"),
    **dict.fromkeys(("MountainCarContinuous", "Breakout", "SyntheticImages"), "made by make"),
    "Environment": "a protocol",
    "evaluate": "tests/envs/test_evaluation.py",
    "Evaluation": "made by evaluate",
    "Wrapper": "a protocol",
    "RolloutStatistics": "made by random_rollout",
    "Spaces": "made by an environment",
    "Step": "holds whatever a transition returns: rlfx.envs.check looks at it",
    "STEP_SCOPE": "a name",
    "fast_prng": "a generator",
    "list_envs": "takes nothing",
    "spaces": "a module: its functions are here",
}
