"""Environments as pure functions: one protocol, adaptors, wrappers, and fast environments of our own."""

from rlfx.envs import spaces
from rlfx.envs.acrobot import Acrobot
from rlfx.envs.actions import rescale_action
from rlfx.envs.base import STEP_SCOPE, Environment, Spaces, Step
from rlfx.envs.brax import BraxEnvironment
from rlfx.envs.breakout import Breakout
from rlfx.envs.cartpole import CartPole, ParametricCartPole
from rlfx.envs.catch import Catch
from rlfx.envs.episodes import Wrapper, auto_reset, stop_gradient, time_limit
from rlfx.envs.evaluation import Evaluation, evaluate
from rlfx.envs.gymnasium import GymnasiumEnvironment
from rlfx.envs.gymnax import GymnaxEnvironment
from rlfx.envs.mountain_car import MountainCar, MountainCarContinuous
from rlfx.envs.pendulum import Pendulum
from rlfx.envs.registry import list_envs, make
from rlfx.envs.render import render, save_frames, save_gif
from rlfx.envs.rollout import RolloutStatistics, check, random_rollout
from rlfx.envs.synthetic import SyntheticImages
from rlfx.envs.wrappers import (
    action_repeat,
    check_actions,
    clip_action,
    clip_reward,
    episode_statistics,
    frame_stack,
    normalize_observation,
    normalize_reward,
)
from rlfx.prng import fast_prng

__all__ = [
    "STEP_SCOPE",
    "Acrobot",
    "BraxEnvironment",
    "Breakout",
    "CartPole",
    "Catch",
    "Environment",
    "Evaluation",
    "GymnasiumEnvironment",
    "GymnaxEnvironment",
    "MountainCar",
    "MountainCarContinuous",
    "ParametricCartPole",
    "Pendulum",
    "RolloutStatistics",
    "Spaces",
    "Step",
    "SyntheticImages",
    "Wrapper",
    "action_repeat",
    "auto_reset",
    "check",
    "check_actions",
    "clip_action",
    "clip_reward",
    "episode_statistics",
    "evaluate",
    "fast_prng",
    "frame_stack",
    "list_envs",
    "make",
    "normalize_observation",
    "normalize_reward",
    "random_rollout",
    "render",
    "rescale_action",
    "save_frames",
    "save_gif",
    "spaces",
    "stop_gradient",
    "time_limit",
]
