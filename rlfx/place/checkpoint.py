"""Saving and loading a trained policy with orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from rlfx._checks import ARRAYS, PATH, expect
from rlfx.errors import PlacementError, located


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as missing:
        raise PlacementError(located("Checkpoints need orbax.", fix="pip install 'rlfx[place]'")) from missing
    return orbax.checkpoint


def save_policy(path: str | Path, params: Any) -> None:
    """Write a policy's parameters to a directory that does not exist yet.

    Raises:
      PlacementError: the directory exists, the parameters are no arrays, or orbax is not installed.
    """
    directory = Path(expect("path", path, PATH, PlacementError, of="save_policy")).absolute()
    expect("params", params, ARRAYS, PlacementError, of="save_policy")
    if directory.exists():
        raise PlacementError(located(f"There is something at {path} already.", fix="Give a new path."))
    with _orbax().StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, params)


def load_policy(path: str | Path, like: Any) -> Any:
    """Read a policy's parameters.

    Args:
      path: what :func:`save_policy` wrote.
      like: parameters of the same networks, for their shapes: ``initialise(key, features(problem), policy)``.

    Raises:
      PlacementError: there is no checkpoint.
    """
    directory = Path(expect("path", path, PATH, PlacementError, of="load_policy")).absolute()
    like = expect("like", like, ARRAYS, PlacementError, of="load_policy")
    if not directory.exists():
        raise PlacementError(located(f"There is no policy checkpoint at {path}.", fix="Write one with save_policy."))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with _orbax().StandardCheckpointer() as checkpointer:
        return checkpointer.restore(directory, abstract)
