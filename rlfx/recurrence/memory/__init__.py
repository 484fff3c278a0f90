"""Temporary bytes of a jaxpr without compiling it, over time and at most."""
