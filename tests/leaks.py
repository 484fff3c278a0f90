"""``jax.checking_leaks`` in a process with many objects."""

import contextlib
import gc
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def checking_leaks() -> Iterator[None]:
    """jax looks for what refers to a trace among all objects: here, among those made since (else seconds a trace).

    Nothing is collected first: what is garbage already refers to no trace to come, and a collection of all takes seconds.
    """
    with among_new_objects(), jax.checking_leaks():
        yield


@contextlib.contextmanager
def among_new_objects() -> Iterator[None]:
    """Whoever looks through all objects meets only those made since."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
