"""Learned placement of JAX functions on devices (DOPPLER), composition of RL primitives (PEARL), prioritised replay."""

from rlfx.place import hardware, workloads
from rlfx.place.baselines import Assignment
from rlfx.place.explode import explode
from rlfx.place.graph import DataflowGraph, Node
from rlfx.place.hardware import Hardware
from rlfx.place.placement import Placement, assign
from rlfx.place.problem import Problem, build

__all__ = [
    "Assignment",
    "DataflowGraph",
    "Hardware",
    "Node",
    "Placement",
    "Problem",
    "assign",
    "build",
    "explode",
    "hardware",
    "workloads",
]
