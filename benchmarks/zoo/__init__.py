"""What a timestep may compute, one thing at a time, beside the same by hand: networks of points, and recurrences.

No learner: each is a few lines that somebody writes, so that a loss to plain JAX has one cause.
"""
