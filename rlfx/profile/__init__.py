"""RL-Scope for JAX: where did the time go, attributed to the algorithm's own operations."""

from typing import TYPE_CHECKING

from rlfx._lazy import modules
from rlfx.profile.annotate import operation, phase
from rlfx.profile.capture import ProfileWarning, Session, capture
from rlfx.profile.report import Report, read
from rlfx.profile.sampled import Sampled, sampled

if TYPE_CHECKING:
    from rlfx.profile import attach as attach
    from rlfx.profile import calibration as calibration
    from rlfx.profile import plot as plot

__all__ = ["ProfileWarning", "Report", "Sampled", "Session", "capture", "operation", "phase", "read", "sampled"]

#: ``rlfx.profile.plot.bars(report)`` without an import of its own.
__getattr__ = modules(__name__, "attach", "calibration", "plot")
