"""Craftax under the protocol: its versions without automatic reset."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlfx.envs.outside import Outside, built, names
from rlfx.envs.spaces import Discrete
from rlfx.errors import EnvError, located

NAMES = ("Craftax-Classic-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Symbolic-v1")
_NEVER = 2**31 - 1


class CraftaxEnvironment(Outside):
    """A game of Craftax. Its end by the number of steps truncates, death terminates; Craftax itself does not tell them apart."""

    def __init__(self, name: str, env: Any, params: Any):
        self.params, self.endless = params, params.replace(max_timesteps=_NEVER)
        super().__init__(name, env, Discrete(int(env.num_actions)))

    def first(self, key):
        return self.env.reset_env(key, self.params)

    def following(self, key, state, action):
        obs, after, reward, done, info = self.env.step_env(key, state, action, self.params)
        died = self.env.is_terminal(after, self.endless)
        return obs, after, reward, done & died, done & ~died, info


def available() -> tuple[str, ...]:
    """Craftax' four environments; none if it is not installed."""
    return names("craftax", lambda: NAMES)


def make(name: str, **kwargs: Any) -> CraftaxEnvironment:
    """The environment ``name`` of Craftax, such as ``"Craftax-Symbolic-v1"``; ``kwargs`` are fields of its ``EnvParams``.

    Raises:
      EnvError: Craftax is not installed, has no such environment, or no such parameter.
    """

    def build(name):
        from craftax.craftax_env import make_craftax_env_from_name

        return make_craftax_env_from_name(name, auto_reset=False)

    env = built("craftax", name, available(), build, {})
    known = [field.name for field in dataclasses.fields(env.default_params)]
    unknown = [k for k in kwargs if k not in known]
    if unknown:
        fact = f"craftax/{name} has no parameter {unknown[0]!r}."
        raise EnvError(located(fact, fix=f"Its parameters are {', '.join(known)}."))
    return CraftaxEnvironment(f"craftax/{name}", env, env.default_params.replace(**kwargs))
