"""Learned placement of JAX functions on devices (DOPPLER), composition of RL primitives (PEARL), prioritised replay."""

from rlfx.place import workloads
from rlfx.place.explode import explode
from rlfx.place.graph import DataflowGraph, Node

__all__ = ["DataflowGraph", "Node", "explode", "workloads"]
