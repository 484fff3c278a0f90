"""Environments as pure functions: one protocol, adaptors, wrappers, and fast environments of our own."""

from rlfx._jaxpr_prng import fast_prng
from rlfx.envs import spaces
from rlfx.envs.base import STEP_SCOPE, Environment, Spaces, Step
from rlfx.envs.episodes import Wrapper, auto_reset, stop_gradient, time_limit
from rlfx.envs.gymnax import GymnaxEnvironment
from rlfx.envs.registry import list_envs, make

__all__ = [
    "STEP_SCOPE",
    "Environment",
    "GymnaxEnvironment",
    "Spaces",
    "Step",
    "Wrapper",
    "auto_reset",
    "fast_prng",
    "list_envs",
    "make",
    "spaces",
    "stop_gradient",
    "time_limit",
]
