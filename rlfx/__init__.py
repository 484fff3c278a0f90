"""rlfx: composable RL transforms for JAX."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from rlfx.recurrence.compile import compile as compile
from rlfx.recurrence.compile import lower as lower
from rlfx.recurrence.compile import trace as trace
from rlfx.recurrence.compile import unroll as unroll
from rlfx.recurrence.cores import use_all_cores as use_all_cores
from rlfx.recurrence.epochs import minibatch_epochs as minibatch_epochs
from rlfx.recurrence.history import History as History
from rlfx.recurrence.plan import Plan as Plan
from rlfx.recurrence.reductions import Shared as Shared
from rlfx.recurrence.reductions import every as every
from rlfx.recurrence.reductions import last as last
from rlfx.recurrence.reductions import max as max
from rlfx.recurrence.reductions import mean as mean
from rlfx.recurrence.reductions import min as min
from rlfx.recurrence.reductions import shared as shared
from rlfx.recurrence.reductions import std as std
from rlfx.recurrence.reductions import sum as sum
from rlfx.recurrence.reference import reference as reference
from rlfx.recurrence.returns import discounted_sum as discounted_sum
from rlfx.recurrence.returns import gae as gae
from rlfx.recurrence.returns import lambda_return as lambda_return
from rlfx.recurrence.returns import n_step_return as n_step_return
from rlfx.recurrence.returns import next_value as next_value
from rlfx.recurrence.returns import vtrace as vtrace
from rlfx.recurrence.series import inputs as inputs
from rlfx.recurrence.series import series as series
from rlfx.recurrence.series import solve as solve
from rlfx.recurrence.shuffle import shuffle as shuffle
from rlfx.recurrence.time import maximum as maximum
from rlfx.recurrence.time import minimum as minimum
from rlfx.transforms.fuse_steps import fuse_steps as fuse_steps
from rlfx.transforms.incrementalize import incrementalize as incrementalize
from rlfx.transforms.offload import offload as offload
from rlfx.transforms.vectorize import vectorize as vectorize

if _TYPE_CHECKING:
    from rlfx import envs as envs
    from rlfx import place as place
    from rlfx import profile as profile

#: Packages that are imported where they are first named: ``import rlfx; rlfx.envs.make(...)``.
_PACKAGES = ("envs", "place", "profile")


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"rlfx.{name}")
    raise AttributeError(f"module 'rlfx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
