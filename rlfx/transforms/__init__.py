"""Functions from programs, or from per-timestep functions, to programs with the same meaning."""

from typing import TYPE_CHECKING

from rlfx._lazy import modules

if TYPE_CHECKING:
    from rlfx.transforms import fuse_steps as fuse_steps

#: ``rlfx.transforms.fuse_steps.supported(env)`` without an import of its own.
__getattr__ = modules(__name__, "fuse_steps")
