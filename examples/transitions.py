"""What an agent that learns from replay keeps of a timestep."""

from typing import NamedTuple

import jax


class Transition(NamedTuple):
    """One timestep, and what followed."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    next_obs: jax.Array
