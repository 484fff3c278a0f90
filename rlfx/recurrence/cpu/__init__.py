"""Rewrites of jaxprs that only XLA:CPU needs."""
