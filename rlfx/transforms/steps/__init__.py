"""Loops as fused, scalarised steps of one environment: on a CPU by XLA, on accelerators by Pallas."""
