"""Returns of what another policy did, written as lambda returns: Retrace, Q(lambda), UPGO.

Each takes the environment's ``Step`` and is right at terminations, truncations and the end of the rollout, as `returns` are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.recurrence.language.operands import type_of
from rlfx.recurrence.language.returns import _check_step, _continues, _next, _numbers, lambda_return
from rlfx.recurrence.language.series import series
from rlfx.recurrence.language.solve import solve


def retrace(
    step: Any, q: Any, next_value: Any, log_rho: Any, *, gamma: Any, lam: Any = 1.0, clip: Any = 1.0
) -> jax.Array:
    """Retrace targets for action values: ``G = r + gamma (v' + c[t + 1] (G[t + 1] - q[t + 1]))``.

    All arguments are values of one timestep of one environment: no time axis, no batch axis.

    Args:
      step: the environment's Step: ``reward`` ``float[]``, ``terminated`` and ``truncated`` ``bool[]``.
      q: the value of the action taken, ``float[]``.
      next_value: the expected value of the next observation under the target policy, ``sum_a pi(a) q(obs', a)``, from
        :func:`next_value`, ``float[]``.
      log_rho: log of the ratio of target to behaviour policy for the action taken, ``float[]``.
      gamma: the discount, a number or ``float[]``; it may vary with t.
      lam: the trace parameter, likewise: ``c = lam * min(rho, clip)``.
      clip: the largest weight, a number.

    Returns:
      G at t, ``float[]``, differentiable in all arguments (the learner's target is ``jax.lax.stop_gradient`` of it). It compiles
      to one backward recurrence over T.

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Munos et al. 2016, eq. 4. Traces end at terminations and truncations; at the latter ``next_value`` stands for what follows.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.retrace(step, 1.0, 2.0, jnp.log(0.5), gamma=0.5)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      Array([2.25, 2.  , 7.  , 9.  ], dtype=float32)
    """
    _check_step(step, "retrace")
    values = {"q": q, "next_value": next_value, "log_rho": log_rho, "gamma": gamma, "lam": lam, "clip": clip}
    _numbers("retrace", reward=step.reward, **values)
    alive, going = _continues(step, jnp.asarray(step.reward).dtype)
    delta = step.reward + gamma * alive * next_value - q
    carried = gamma * going
    weight = lam * jnp.minimum(jnp.exp(log_rho), clip)
    # What a timestep passes to the one before it: its own weight is in it, so that no weight is read ahead.
    nothing = jnp.zeros((), jnp.result_type(delta, weight))
    passed = solve(lambda p: weight * (delta + carried * _next(p)), end=nothing)
    return q + delta + carried * _next(series(passed, end=nothing))


def q_lambda(step: Any, next_value: Any, greedy: Any, *, gamma: Any, lam: Any) -> jax.Array:
    """Q(lambda): lambda returns of action values, cut before an action that was not greedy.

    Args:
      step: the environment's Step.
      next_value: the largest value of the next observation, ``max_a q(obs', a)``, from :func:`next_value`.
      greedy: whether the action taken is the best one, ``bool[]`` (Watkins' Q(lambda)); ``True`` cuts nowhere (Peng's).
      gamma: the discount, a number or ``float[]``; it may vary with t.
      lam: the mixing parameter, likewise.

    Returns:
      G at t, as :func:`lambda_return` of a ``lam`` that is 0 where the next action explored.

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Sutton and Barto 2018, section 12.10; PQN (Gallici et al. 2024, eq. 5) is Peng's.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.q_lambda(step, 10.0, t != 3, gamma=0.5, lam=1.0)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      Array([ 2.,  2.,  9., 13.], dtype=float32)
    """
    _check_step(step, "q_lambda")
    dtype = jnp.asarray(step.reward).dtype
    _numbers("q_lambda", reward=step.reward, next_value=next_value, gamma=gamma, lam=lam)
    found = type_of(greedy, "q_lambda(greedy=)")
    if found.dtype != jnp.bool_:
        fact = f"q_lambda(greedy=) takes a boolean, got {J.short_dtype(found.dtype)}{list(found.shape)}."
        raise ProgramError(located(fact, where=J.here(), fix="Give action == jnp.argmax(q), or True."))
    goes_on = jnp.asarray(greedy).astype(dtype)
    following = _next(series(goes_on, end=jnp.ones_like(goes_on)))
    return lambda_return(step, next_value, gamma=gamma, lam=lam * following)


def upgo(step: Any, value: Any, next_value: Any, *, gamma: Any) -> jax.Array:
    """Upgoing returns: rewards are followed as long as they are better than expected, and the value from there.

    ``G = r + gamma G[t + 1]`` where the next step's ``r + gamma v'`` is at least its value, and ``r + gamma v'`` elsewhere.

    Args:
      step: the environment's Step.
      value: the value of this observation, ``float[]``.
      next_value: that of the next one, likewise (see :func:`next_value`).
      gamma: the discount, a number or ``float[]``; it may vary with t.

    Returns:
      G at t, in the shape and dtype of the reward. The advantage is ``G - value``.

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Vinyals et al. 2019 (AlphaStar), Methods, with the value of the next observation as in its pseudocode.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 4, truncated=t == 4)
      ...     return carry, rlfx.upgo(step, 4.0, 4.0, gamma=0.5)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 0.0, 8.0]), None)[1]
      Array([ 3.,  4.,  5., 10.], dtype=float32)
    """
    _check_step(step, "upgo")
    _numbers("upgo", reward=step.reward, value=value, next_value=next_value, gamma=gamma)
    dtype = jnp.asarray(step.reward).dtype
    alive, _ = _continues(step, dtype)
    better = (step.reward + gamma * alive * next_value >= value).astype(dtype)
    following = _next(series(better, end=jnp.ones_like(better)))
    return lambda_return(step, next_value, gamma=gamma, lam=following)
