"""One schedule as a JAX function: loops, reads, values of many points, slices of symbolic length."""
