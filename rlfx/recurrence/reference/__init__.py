"""The meaning of a program: point by point, on demand, eagerly."""
