"""Environments by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rlfx._checks import BOOLEAN, expect
from rlfx.envs import brax, episodes, gymnasium, gymnax, jaxmarl, jumanji, playground
from rlfx.envs.acrobot import Acrobot
from rlfx.envs.base import Environment, no_such
from rlfx.envs.breakout import Breakout
from rlfx.envs.cartpole import CartPole, ParametricCartPole
from rlfx.envs.catch import Catch
from rlfx.envs.mountain_car import MountainCar, MountainCarContinuous
from rlfx.envs.pendulum import Pendulum
from rlfx.envs.synthetic import SyntheticImages
from rlfx.errors import EnvError, located

_OWN: dict[str, Callable[..., Environment]] = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Catch-bsuite": Catch,
    "Breakout-MinAtar": Breakout,
    "SyntheticImages-v0": SyntheticImages,
    "CartPole-parametric": ParametricCartPole,
}

_FAMILIES = {
    "gymnax": gymnax, "brax": brax, "gymnasium": gymnasium,
    "jumanji": jumanji, "jaxmarl": jaxmarl, "playground": playground,
}  # fmt: skip
#: Those whose names always begin with theirs: that their package is missing explains no other name.
_BY_PREFIX = ("jumanji", "jaxmarl", "playground")
#: What installs a family's package, where the extra has another name.
_EXTRAS = {"gymnax": "envs", "brax": "envs"}


def list_envs() -> tuple[str, ...]:
    """Every name :func:`make` knows here: rlfx's own, gymnax's, and those of the other installed packages by prefix.

    Example:
      >>> "CartPole-v1" in list_envs()
      True
    """
    names = [*_OWN, *(name for name in gymnax.available() if name not in _OWN)]
    prefixed = [f"{family}/{name}" for family, module in _FAMILIES.items() for name in module.available()]
    return (*names, *prefixed)


def make(name: str, auto_reset: bool = True, differentiable: bool = False, **kwargs: Any) -> Environment:
    """The environment ``name``, for one environment: batch it with ``jax.vmap``.

    Args:
      name: a name of :func:`list_envs`. Plain names are rlfx's own environments, then gymnax's; a prefix chooses
        (``"gymnax/CartPole-v1"``, ``"brax/ant"``, ``"gymnasium/CartPole-v1"``).
      auto_reset: begin a new episode in the step in which the last one ended.
      differentiable: let gradients pass through the dynamics; otherwise ``step`` stops them.
      **kwargs: parameters of the environment.

    Raises:
      EnvError: no such environment (the message suggests the nearest), or its package is not installed.

    Example:
      >>> make("CartPole-v1").action_space.n
      2
      >>> make("CartPol-v1")
      Traceback (most recent call last):
      ...
      rlfx.errors.EnvError: There is no environment 'CartPol-v1'.
        Fix: Did you mean 'CartPole-v1'...
    """
    auto_reset = expect("auto_reset", auto_reset, BOOLEAN, EnvError, of="make")
    differentiable = expect("differentiable", differentiable, BOOLEAN, EnvError, of="make")
    env = _bare(name, kwargs)
    if auto_reset:
        env = episodes.auto_reset(env)
    return env if differentiable else episodes.stop_gradient(env)


def _bare(name: str, kwargs: dict[str, Any]) -> Environment:
    if not isinstance(name, str):
        fact = f"make takes the name of an environment, not {type(name).__name__} ({name!r})."
        raise EnvError(located(fact, fix="rlfx.envs.list_envs() names them."))
    family, _, rest = name.partition("/")
    if rest and family in _FAMILIES:
        return _FAMILIES[family].make(rest, **kwargs)
    if name in _OWN:
        return _own(name, kwargs)
    if name in gymnax.available():
        return gymnax.make(name, **kwargs)
    missing = [f for f, module in _FAMILIES.items() if f not in _BY_PREFIX and not module.available()]
    extras = dict.fromkeys(_EXTRAS.get(family, family) for family in missing)
    without = (
        f" Those of {', '.join(missing)} are not installed: pip install 'rlfx[{','.join(extras)}]'." if missing else ""
    )
    fact = f"There is no environment {name!r}.{without}"
    raise no_such(fact, name, list_envs(), "rlfx.envs.list_envs() names them.")


def _own(name: str, kwargs: dict[str, Any]) -> Environment:
    known = [f.name for f in dataclasses.fields(_OWN[name]) if f.init] if dataclasses.is_dataclass(_OWN[name]) else []
    unknown = [k for k in kwargs if k not in known]
    if unknown:
        has = f"Its parameters are {', '.join(known)}." if known else "It has none; gymnax/... has gymnax's."
        raise EnvError(located(f"{name} has no parameter {unknown[0]!r}.", fix=has))
    return _OWN[name](**kwargs)
