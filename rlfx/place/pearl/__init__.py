"""PEARL's runtime: actors, experience memory, replay manager and learner at work together, each on its device."""

from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.parts import Call
from rlfx.place.pearl.report import Report
from rlfx.place.pearl.runtime import composed, measured, run, workload
from rlfx.place.pearl.sequential import reference
from rlfx.place.pearl.system import State, System, Transition

__all__ = [
    "Call",
    "HostEnvironment",
    "Report",
    "State",
    "System",
    "Transition",
    "composed",
    "measured",
    "reference",
    "run",
    "workload",
]
