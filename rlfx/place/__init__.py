"""Learned placement of JAX functions on devices (DOPPLER), composition of RL primitives (PEARL), prioritised replay."""

from typing import TYPE_CHECKING

from rlfx._lazy import modules
from rlfx.place import hardware, workloads
from rlfx.place.baselines import Assignment
from rlfx.place.explode import explode
from rlfx.place.graph import DataflowGraph, Node
from rlfx.place.hardware import Hardware, core_devices
from rlfx.place.placement import Placement, assign
from rlfx.place.problem import Problem, build
from rlfx.place.stages import StagedGraph, staged
from rlfx.place.staging import assign_stages

if TYPE_CHECKING:
    from rlfx.place import pearl as pearl
    from rlfx.place import replay as replay

__all__ = [
    "Assignment",
    "DataflowGraph",
    "Hardware",
    "Node",
    "Placement",
    "Problem",
    "StagedGraph",
    "assign",
    "assign_stages",
    "build",
    "core_devices",
    "explode",
    "hardware",
    "staged",
    "workloads",
]

#: ``rlfx.place.replay.insert(...)`` without an import of its own.
__getattr__ = modules(__name__, "pearl", "replay")
