"""Distributions of actions, of one environment: the last axis is one action's.

numpyro.distributions was measured first (0.22, beside jax 0.10.2). It has no tanh. One composed of its sigmoid is right
where the value before squashing comes along; from the action alone its gradients are wrong from 8 on and NaN at -20. A
log-probability and its gradient trace three times as long, there is no divergence of what was squashed, importing it takes
0.8 CPU-seconds, and it brings two packages. What policies need of it is below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.errors import ProgramError, located

_LOG_SQRT_2_PI, _LOG_2 = 0.5 * math.log(2 * math.pi), math.log(2.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normal:
    """Independent normal distributions of the elements of an action: ``mean[..., n]``, ``log_std[..., n]`` or ``[n]``.

    Example:
      >>> policy = Normal(jnp.zeros(2), jnp.zeros(2))
      >>> round(float(policy.log_prob(jnp.array([0.0, 1.0]))), 4), round(float(policy.entropy()), 4)
      (-2.3379, 2.8379)
    """

    mean: Any
    log_std: Any

    def sample(self, key: jax.Array) -> jax.Array:
        """One action, differentiable in the parameters (the reparametrisation); ``key`` is used once."""
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def mode(self) -> jax.Array:
        """The most likely action."""
        return self.mean

    def log_prob(self, x: jax.Array) -> jax.Array:
        """The log-density of an action, summed over its elements."""
        scaled = (x - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * scaled**2 - self.log_std - _LOG_SQRT_2_PI, axis=-1)

    def entropy(self) -> jax.Array:
        """The differential entropy, in nats."""
        return jnp.sum(0.5 + _LOG_SQRT_2_PI + self.log_std + jnp.zeros_like(self.mean), axis=-1)

    def kl(self, other: Normal) -> jax.Array:
        """``KL(self || other)``, in nats."""
        ratio = jnp.exp(2 * (self.log_std - other.log_std))
        gap = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return 0.5 * jnp.sum(ratio + gap**2 - 1 - 2 * (self.log_std - other.log_std), axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TanhNormal:
    """``tanh`` of a normal distribution: actions in (-1, 1) (Haarnoja et al. 2018, appendix C).

    Samples are the values *before* ``tanh``, and log-probabilities are those of the action ``squash(u)``: at saturation
    a float32 action is exactly 1 and says nothing of where it came from; ``u`` does. So values and gradients are right
    at any distance.

    Example:
      >>> policy = TanhNormal(jnp.array([60.0]), jnp.array([0.0]))
      >>> u = policy.sample(jax.random.key(0))
      >>> policy.squash(u), bool(jnp.isfinite(policy.log_prob(u)))
      (Array([1.], dtype=float32), True)
    """

    mean: Any
    log_std: Any

    @property
    def before(self) -> Normal:
        """The normal distribution that is squashed."""
        return Normal(self.mean, self.log_std)

    @staticmethod
    def squash(u: jax.Array) -> jax.Array:
        """The action in [-1, 1]."""
        return jnp.tanh(u)

    @staticmethod
    def unsquash(action: jax.Array) -> jax.Array:
        """A ``u`` of an action of which nothing else is known; one of float32's ±1 is taken to be at ±9."""
        return jnp.clip(jnp.arctanh(jnp.clip(action, -1 + 2**-24, 1 - 2**-24)), -9.0, 9.0)

    def sample(self, key: jax.Array) -> jax.Array:
        """One ``u``, differentiable in the parameters; ``key`` is used once."""
        return self.before.sample(key)

    def mode(self) -> jax.Array:
        """The ``u`` of the median action (where policies are evaluated; the density of actions may have its mode elsewhere)."""
        return self.mean

    def log_prob(self, u: jax.Array) -> jax.Array:
        """The log-density of the action ``squash(u)``, summed over its elements."""
        return self.before.log_prob(u) - jnp.sum(_log_slope(u), axis=-1)

    def kl(self, other: TanhNormal) -> jax.Array:
        """``KL(self || other)``, in nats: that of the values before, since ``tanh`` is one to one."""
        return self.before.kl(other.before)


def _log_slope(u: jax.Array) -> jax.Array:
    """``log(1 - tanh(u)^2)``, without a difference of near equals."""
    return 2 * (_LOG_2 - u - jax.nn.softplus(-2 * u))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Categorical:
    """The categories of ``logits[..., n]``.

    Args:
      logits: unnormalised log-probabilities. One of -inf is a category that is masked.
      mask: ``bool[..., n]``, which categories may be chosen. The others have probability zero: they are no sample and no
        mode, have no part in the entropy, and no gradient reaches their logits.

    Example:
      >>> policy = Categorical(jnp.array([5.0, 0.0, 0.0]), mask=jnp.array([False, True, True]))
      >>> int(policy.mode()), round(float(policy.entropy()), 4)
      (1, 0.6931)
    """

    logits: Any
    mask: Any = None

    def __post_init__(self):
        if self.mask is None or not hasattr(self.mask, "dtype"):
            return
        if self.mask.dtype != np.bool_ or self.mask.shape != self.logits.shape:
            fact = f"Categorical: the mask is {self.mask.dtype}{list(self.mask.shape)} for logits {list(self.logits.shape)}."
            raise ProgramError(located(fact, fix="Give a boolean for each category: which may be chosen."))

    @property
    def log_probs(self) -> jax.Array:
        """Log-probabilities, ``[..., n]``; of what is masked, the lowest float (finite, so that 0 times it is 0)."""
        logits = jnp.asarray(self.logits)
        lowest = jnp.finfo(logits.dtype).min
        allowed = logits != -jnp.inf if self.mask is None else self.mask & (logits != -jnp.inf)
        chosen = jax.nn.log_softmax(jnp.where(allowed, logits, lowest))
        return jnp.where(allowed, chosen, lowest)

    def sample(self, key: jax.Array) -> jax.Array:
        """One category, int32; ``key`` is used once."""
        return jax.random.categorical(key, self.log_probs, axis=-1).astype(jnp.int32)

    def mode(self) -> jax.Array:
        """The most likely category, int32."""
        return jnp.argmax(self.log_probs, axis=-1).astype(jnp.int32)

    def log_prob(self, x: jax.Array) -> jax.Array:
        """The log-probability of a category."""
        return jnp.take_along_axis(self.log_probs, jnp.asarray(x)[..., None], axis=-1)[..., 0]

    def entropy(self) -> jax.Array:
        """The entropy, in nats."""
        log_probs = self.log_probs
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, other: Categorical) -> jax.Array:
        """``KL(self || other)``, in nats; both allow the same categories."""
        log_probs = self.log_probs
        return jnp.sum(jnp.exp(log_probs) * (log_probs - other.log_probs), axis=-1)
