"""RL-Scope for JAX: where did the time go, attributed to the algorithm's own operations."""

from rlfx.profile.annotate import operation, phase
from rlfx.profile.capture import ProfileWarning, Session, capture
from rlfx.profile.report import Report, read
from rlfx.profile.sampled import Sampled, sampled

__all__ = ["ProfileWarning", "Report", "Sampled", "Session", "capture", "operation", "phase", "read", "sampled"]
