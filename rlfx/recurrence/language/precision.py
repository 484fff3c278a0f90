"""In which dtype sums over timesteps and environments are accumulated: at least float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The dtype in which numbers of this one are added up.

    Example:
      >>> import numpy as np
      >>> [np.dtype(wide(d)).name for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8)]
      ['float32', 'float32', 'float32', 'int8']
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype("float32") if narrow else dtype


def widened(x: Any) -> Any:
    """The array in the dtype in which it is added up."""
    dtype = wide(x.dtype)
    return x if dtype == x.dtype else x.astype(dtype)


def narrowed(x: Any, dtype: Any) -> Any:
    """What was added up, in its own dtype again."""
    return x if x.dtype == dtype else x.astype(dtype)
