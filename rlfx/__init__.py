"""rlfx: composable RL transforms for JAX."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from rlfx._lazy import modules as _modules
from rlfx._target import target as target
from rlfx.cores import use_all_cores as use_all_cores
from rlfx.epochs import minibatch_epochs as minibatch_epochs
from rlfx.moments import Moments as Moments
from rlfx.moments import normalize as normalize
from rlfx.recurrence.api.compile import compile as compile
from rlfx.recurrence.api.compile import lower as lower
from rlfx.recurrence.api.compile import trace as trace
from rlfx.recurrence.api.compile import unroll as unroll
from rlfx.recurrence.api.explained import explain as explain
from rlfx.recurrence.language.effects import effect as effect
from rlfx.recurrence.language.history import History as History
from rlfx.recurrence.language.kept import Every as Every
from rlfx.recurrence.language.kept import Last as Last
from rlfx.recurrence.language.off_policy import q_lambda as q_lambda
from rlfx.recurrence.language.off_policy import retrace as retrace
from rlfx.recurrence.language.off_policy import upgo as upgo
from rlfx.recurrence.language.reductions import Shared as Shared
from rlfx.recurrence.language.reductions import every as every
from rlfx.recurrence.language.reductions import last as last
from rlfx.recurrence.language.reductions import max as max
from rlfx.recurrence.language.reductions import mean as mean
from rlfx.recurrence.language.reductions import min as min
from rlfx.recurrence.language.reductions import shared as shared
from rlfx.recurrence.language.reductions import std as std
from rlfx.recurrence.language.reductions import sum as sum
from rlfx.recurrence.language.returns import discounted_sum as discounted_sum
from rlfx.recurrence.language.returns import gae as gae
from rlfx.recurrence.language.returns import lambda_return as lambda_return
from rlfx.recurrence.language.returns import n_step_return as n_step_return
from rlfx.recurrence.language.returns import next_value as next_value
from rlfx.recurrence.language.returns import vtrace as vtrace
from rlfx.recurrence.language.series import inputs as inputs
from rlfx.recurrence.language.series import series as series
from rlfx.recurrence.language.shuffle import shuffle as shuffle
from rlfx.recurrence.language.solve import solve as solve
from rlfx.recurrence.language.time import maximum as maximum
from rlfx.recurrence.language.time import minimum as minimum
from rlfx.recurrence.reference.interpreter import reference as reference
from rlfx.recurrence.schedule.plan import Plan as Plan
from rlfx.transforms.store import store as store
from rlfx.transforms.vectorize import vectorize as vectorize

if _TYPE_CHECKING:
    from rlfx import envs as envs
    from rlfx import place as place
    from rlfx import profile as profile
    from rlfx import training as training
    from rlfx.transforms.fuse_steps import fuse_steps as fuse_steps
    from rlfx.transforms.incrementalize import incrementalize as incrementalize
    from rlfx.transforms.offload import offload as offload
    from rlfx.transforms.remat import remat as remat

#: Packages that are imported where they are first named, ``import rlfx; rlfx.envs.make(...)``; and the functions of such modules.
_PACKAGES = ("envs", "place", "profile", "training")
_packages = _modules("rlfx", *_PACKAGES)
_FUNCTIONS = ("fuse_steps", "incrementalize", "offload", "remat")


def __getattr__(name: str) -> _Any:
    if name in _FUNCTIONS:
        return globals().setdefault(name, getattr(_importlib.import_module(f"rlfx.transforms.{name}"), name))
    return _packages(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_FUNCTIONS})
