"""Returns and advantages, written in the language: discounted sums, n-step and lambda returns, GAE, V-trace.

Each takes the environment's ``Step`` (``reward``, ``terminated``, ``truncated``, ``final_obs``) and is right at all three
kinds of end: a termination has no future; a truncation has one, from the observation before the reset; and so has the end
of the rollout, by demand extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, expect, function
from rlfx.errors import DomainError, ProgramError, located
from rlfx.recurrence.language.domain import current_domain
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.language.operands import as_array, same_type, type_of
from rlfx.recurrence.language.precision import wide
from rlfx.recurrence.language.primitives import discounted_sum_p, reduce_p
from rlfx.recurrence.language.series import Series, series
from rlfx.recurrence.language.solve import solve

_NEXT, _HERE = Point(TIME + 1), Point(TIME)


def _next(x: Series) -> Any:
    return x._read(_NEXT)


def _here(x: Series) -> Any:
    return x._read(_HERE)


def discounted_sum(rewards: jax.Array, discount: Any) -> jax.Array:
    """``sum_k rewards[k] * prod_{j < k} discount[j]`` over a slice.

    Args:
      rewards: a slice ``r[t:]``, ``r[t:t + n]``, ...: [n] or [n, ...], of numbers or booleans.
      discount: a slice of the same timesteps (of booleans, too), or a scalar. The last of them has no part in the sum.

    Returns:
      The sum, without the leading axis, in the dtype of ``jnp.sum(rewards * discount)``. Over ``r[t:]`` it compiles to one
      backward recurrence.

    TimeRL, Alg. 1, line 16; there the sum is over a dynamic range, executed as such.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def returns(rewards, carry, t):
      ...     return carry, rlfx.discounted_sum(rlfx.inputs(rewards)[t:], 0.5)
      >>> rlfx.unroll(returns, length=3)(jnp.array([1.0, 2.0, 4.0]), None)[1]
      Array([3., 4., 4.], dtype=float32)
    """
    current_domain("rlfx.discounted_sum")
    rewards = as_array(rewards, "discounted_sum")
    if rewards.ndim == 0:
        raise DomainError(
            located("discounted_sum takes a slice of rewards, got a scalar.", where=J.here(), fix="Write reward[t:].")
        )
    if not (getattr(discount, "dtype", None) == jnp.bool_ and jnp.ndim(discount)):  # a mask: which timesteps go on
        _numbers("discounted_sum", discount=discount)
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(rewards, discount)
    # What jnp.sum of such numbers gives: of small integers and booleans, wider ones.
    dtype = jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((1,), dtype)).dtype
    rewards, discount = rewards.astype(wide(dtype)), jnp.asarray(discount).astype(wide(dtype))
    if discount.ndim not in (0, rewards.ndim) or (discount.ndim and str(discount.shape[0]) != str(rewards.shape[0])):
        raise DomainError(
            located(
                f"discounted_sum takes the discounts of the same timesteps as the rewards; their shapes are "
                f"{rewards.shape} and {discount.shape}.",
                where=J.here(),
                fix="Slice both alike: discounted_sum(reward[t:], discount[t:]).",
            )
        )
    return discounted_sum_p.bind(rewards, jnp.broadcast_to(discount, rewards.shape)).astype(dtype)


def _check_step(step: Any, name: str) -> None:
    current_domain(f"rlfx.{name}")
    fields = ("reward", "terminated", "truncated", *(("final_obs",) if name == "next_value" else ()))
    missing = [field for field in fields if not hasattr(step, field)]
    fact = f"has no {', '.join(missing)}" if missing else None
    for field in () if missing else ("terminated", "truncated"):
        found = type_of(getattr(step, field), f"{name}: step.{field}")
        if found.dtype != jnp.bool_:
            fact = f"has {J.short_dtype(found.dtype)}{list(found.shape)} for {field}, which is no boolean"
    if fact is not None:
        raise ProgramError(
            located(
                f"{name} takes the environment's Step; this {type(step).__name__} {fact}.",
                where=J.here(),
                fix="Give the second result of env.step(key, state, action).",
            )
        )


def _numbers(name: str, **values: Any) -> None:
    """Check that the values are real numbers, or arrays of them whose shapes go together."""
    types = {argument: type_of(value, f"{name}({argument}=)") for argument, value in values.items()}
    for argument, found in types.items():
        if not (jnp.issubdtype(found.dtype, jnp.floating) or jnp.issubdtype(found.dtype, jnp.integer)):
            fact = f"{name}({argument}=) takes real numbers, got {J.short_dtype(found.dtype)}{list(found.shape)}."
            raise ProgramError(located(fact, where=J.here(), fix="Give a number, or an array of numbers."))
    try:
        jnp.broadcast_shapes(*(found.shape for found in types.values()))
    except ValueError:
        shapes = ", ".join(f"{argument} {list(found.shape)}" for argument, found in types.items())
        fact = f"The shapes of the arguments of {name} do not go together: {shapes}."
        raise ProgramError(
            located(fact, where=J.here(), fix="Give those of one timestep of one environment.")
        ) from None


def _continues(step: Any, dtype: Any) -> tuple[Any, Any]:
    """``(1 - terminated, 1 - done)`` as numbers: what bootstraps, and what goes on accumulating."""
    terminated, truncated = jnp.asarray(step.terminated), jnp.asarray(step.truncated)
    return 1 - terminated.astype(dtype), 1 - (terminated | truncated).astype(dtype)


def next_value(critic: Callable[..., Any], step: Any, value: Any) -> jax.Array:
    """The value of the observation that followed: ``value[t + 1]``, and at a truncation the critic on ``final_obs``.

    Args:
      critic: ``critic(obs) -> value``, of one observation.
      step: the environment's Step; ``step.final_obs`` is the last observation of the episode, before the reset.
      value: ``critic(obs)`` at t (or a Series of it).

    Returns:
      A value like ``value``. It is not masked at terminations: the returns below do that. At the end of the rollout it is
      the critic on the observation of the final carry.

    Raises:
      ProgramError: ``step`` is no Step, or ``critic`` is no function of an observation that gives values like ``value``.

    Pardo et al. 2018: what follows a truncation has a value.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx.envs
      >>> env = rlfx.envs.make("CartPole-v1")
      >>> def f(_, state, t):
      ...     critic = lambda obs: obs[0]  # the position of the cart
      ...     value = critic(env.observe(state))
      ...     state, step = env.step(t.key_for("env"), state, jnp.int32(1))
      ...     return state, (value, rlfx.next_value(critic, step, value))
      >>> key = jax.random.key(0)
      >>> _, (value, following) = rlfx.unroll(f, length=4)(None, env.reset(key), key)
      >>> bool(jnp.allclose(following[:-1], value[1:]))
      True
    """
    _check_step(step, "next_value")
    fix = "Give the critic itself: lambda obs: value(params, obs)."
    expect("critic", critic, function("obs"), ProgramError, of="next_value", fix=fix)
    following = _next(value if isinstance(value, Series) else series(value))
    truncated = jnp.asarray(step.truncated) & ~jnp.asarray(step.terminated)
    # A real branch: inside the acting loop the critic sees `final_obs` only at timesteps where some episode is cut.
    some = (
        truncated
        if current_domain("rlfx.next_value").batch is None
        else reduce_p.bind(truncated, op="any", over=("b",))
    )
    where = J.here()

    def at_end() -> Any:
        last = critic(step.final_obs)
        fix = "Give critic(obs) as value: both of one observation, with the same shape."
        same_type(last, following, "What critic returns on step.final_obs", "value", fix, where=where)
        return last

    last = jax.lax.cond(some, at_end, lambda: jnp.zeros_like(following))
    return jnp.where(truncated, last, following)


def lambda_return(step: Any, next_value: Any, *, gamma: Any, lam: Any) -> jax.Array:
    """The lambda return: ``G = r + gamma ((1 - lam) v' + lam G[t + 1])``.

    All arguments are values of one timestep of one environment: no time axis, no batch axis.

    Args:
      step: the environment's Step: ``reward`` ``float[]`` (or ``[...]``: several rewards), ``terminated`` and ``truncated``
        ``bool[]``.
      next_value: the value of the next observation, ``float[]`` or like ``reward``, from :func:`next_value`; of stored
        sequences ``rlfx.series(value, end=v)[t + 1]``, where v is that of what follows the last timestep.
      gamma: the discount, a number or ``float[]``; it may vary with t.
      lam: the mixing parameter, likewise; 1.0 gives Monte-Carlo returns, 0.0 one-step targets.

    Returns:
      G at t, in the shape and dtype of the reward. A termination has no future, a truncation ``next_value`` in its place;
      so has the end of the rollout. It compiles to one backward recurrence over T, and is differentiable in all arguments.

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Sutton and Barto 2018, eq. 12.18, with the value after a truncation as in Pardo et al. 2018.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.lambda_return(step, 10.0, gamma=0.5, lam=1.0)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      Array([ 2. ,  2. , 10.5, 13. ], dtype=float32)
    """
    _check_step(step, "lambda_return")
    _numbers("lambda_return", reward=step.reward, next_value=next_value, gamma=gamma, lam=lam)
    reward = jnp.asarray(step.reward)
    alive, going = _continues(step, reward.dtype)
    bootstrap = gamma * alive * next_value
    carried = gamma * lam * going
    one_step = reward + bootstrap - carried * next_value
    # Beyond the rollout the return is the last value, which makes the last step's return its one-step target.
    return solve(lambda g: one_step + carried * _next(g), end=next_value)


def n_step_return(step: Any, next_value: Any, *, gamma: Any, n: int) -> jax.Array:
    """The n-step return: n rewards, then the value; shorter where an episode or the rollout ends before.

    ``r[t] + gamma r[t + 1] + ... + gamma^(n - 1) r[t + n - 1] + gamma^n v[t + n]``. All arguments are values of one timestep
    of one environment: no time axis, no batch axis.

    Args:
      step: the environment's Step: ``reward`` ``float[]`` (or ``[...]``: several rewards), ``terminated`` and ``truncated``
        ``bool[]``.
      next_value: the value of the next observation, ``float[]`` or like ``reward``, from :func:`next_value`; of stored
        sequences ``rlfx.series(value, end=v)[t + 1]``, where v is that of what follows the last timestep.
      gamma: the discount, a number or ``float[]``; it may vary with t.
      n: the number of rewards, at least 1. More than T are T.

    Returns:
      The return at t, in the shape and dtype of the reward: n - 1 shifted sums over all timesteps, and no loop.

    Raises:
      DomainError: ``n`` is no positive integer, or outside of a per-timestep function.
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.

    Sutton and Barto 2018, eq. 7.1; it ends at terminations, and with ``next_value`` at truncations.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.n_step_return(step, 10.0, gamma=0.5, n=2)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      Array([ 2. ,  2. , 10.5, 13. ], dtype=float32)
    """
    _check_step(step, "n_step_return")
    _numbers("n_step_return", reward=step.reward, next_value=next_value, gamma=gamma)
    n = expect("n", n, POSITIVE, of="n_step_return", fix="Give n=5.")
    domain = current_domain("rlfx.n_step_return")
    n = min(n, domain.length)
    reward = jnp.asarray(step.reward)
    alive, going = _continues(step, reward.dtype)
    # G_1 = r + gamma v'; G_k[t] = r + gamma G_{k-1}[t + 1], cut where the episode ends: there the value stands in.
    target = reward + gamma * alive * next_value
    carried = gamma * going
    for _ in range(n - 1):
        target = reward + gamma * (alive - going) * next_value + carried * _next(series(target, end=next_value))
    return target


def gae(step: Any, value: Any, next_value: Any, *, gamma: Any, lam: Any) -> jax.Array:
    """Generalised advantage estimation: ``A = delta + gamma lam A[t + 1]``, ``delta = r + gamma v' - v``.

    All arguments are values of one timestep of one environment: no time axis, no batch axis.

    Args:
      step: the environment's Step: ``reward`` ``float[]`` (or ``[...]``: several rewards), ``terminated`` and ``truncated``
        ``bool[]``.
      value: the value of this observation, ``float[]`` or like ``reward``; or a Series of it.
      next_value: that of the next one, likewise (see :func:`next_value`).
      gamma: the discount, a number or ``float[]``; it may vary with t.
      lam: the mixing parameter, likewise: 0.0 gives one-step errors, 1.0 Monte-Carlo returns minus the value.

    Returns:
      The advantage at t, in the shape of ``reward`` and the promoted dtype of the arguments. ``A + value`` is the critic's
      target. It compiles to one backward recurrence over T. It is differentiable in the values; apply
      ``jax.lax.stop_gradient`` where the advantage is a constant, as in PPO.

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Schulman et al. 2016, eq. 16; cut at terminations and truncations, and bootstrapped at the latter.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.gae(step, 1.0, 1.0, gamma=0.5, lam=0.5)
      >>> rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      Array([0.75 , 1.   , 5.375, 7.5  ], dtype=float32)
    """
    _check_step(step, "gae")
    value = _here(value) if isinstance(value, Series) else value
    _numbers("gae", reward=step.reward, value=value, next_value=next_value, gamma=gamma, lam=lam)
    alive, going = _continues(step, jnp.asarray(step.reward).dtype)
    delta = step.reward + gamma * alive * next_value - value
    carried = gamma * lam * going
    return solve(lambda a: delta + carried * _next(a), end=jnp.zeros((), jnp.result_type(delta)))


def vtrace(
    step: Any,
    value: Any,
    next_value: Any,
    log_rho: Any,
    *,
    gamma: Any,
    lam: Any = 1.0,
    clip_rho: Any = 1.0,
    clip_c: Any = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, eqs. 1 and 4).

    All arguments are values of one timestep of one environment: no time axis, no batch axis.

    Args:
      step: the environment's Step: ``reward`` ``float[]``, ``terminated`` and ``truncated`` ``bool[]``.
      value: the value of this observation, ``float[]``; or a Series of it.
      next_value: that of the next one, ``float[]`` (see :func:`next_value`).
      log_rho: log of the ratio of target to behaviour policy for the action taken, ``float[]``.
      gamma: the discount, a number or ``float[]``; it may vary with t.
      lam: the trace parameter, likewise.
      clip_rho: the truncation level of the weights in the target, a number; ``jnp.inf`` for none.
      clip_c: that of the weights that are multiplied over time, likewise.

    Returns:
      ``(target, advantage)``: the critic's target, and ``clipped rho * (r + gamma target' - value)``, both ``float[]``. Both
      depend on ``value`` and ``log_rho`` and are differentiable in them; IMPALA treats them as constants
      (``jax.lax.stop_gradient``).

    Raises:
      ProgramError: ``step`` is no Step, an argument holds no real numbers, or their shapes do not broadcast.
      DomainError: outside of a per-timestep function.

    Traces end at terminations and truncations; at the latter ``next_value`` stands for what follows.

    Example:
      >>> import types, jax.numpy as jnp, rlfx
      >>> def f(rewards, carry, t):
      ...     step = types.SimpleNamespace(reward=rlfx.inputs(rewards)[t], terminated=t == 1, truncated=t == 3)
      ...     return carry, rlfx.vtrace(step, 1.0, 1.0, jnp.log(0.5), gamma=0.5)
      >>> target, advantage = rlfx.unroll(f, length=4)(jnp.array([1.0, 2.0, 4.0, 8.0]), None)[1]
      >>> target.shape, advantage.shape
      ((4,), (4,))
    """
    _check_step(step, "vtrace")
    value = _here(value) if isinstance(value, Series) else value
    values = {"value": value, "next_value": next_value, "log_rho": log_rho, "gamma": gamma, "lam": lam}
    _numbers("vtrace", reward=step.reward, **values, clip_rho=clip_rho, clip_c=clip_c)
    reward = jnp.asarray(step.reward)
    alive, going = _continues(step, reward.dtype)
    rho = jnp.exp(log_rho)
    clipped = jnp.minimum(rho, clip_rho)
    delta = clipped * (reward + gamma * alive * next_value - value)
    trace = gamma * going * lam * jnp.minimum(rho, clip_c)
    correction = solve(lambda c: delta + trace * _next(c), end=jnp.zeros((), jnp.result_type(delta)))
    target = correction + value
    # Where the episode ends, and after the rollout, the next target is the next value.
    following = going * _next(series(target, end=next_value)) + (alive - going) * next_value
    return target, clipped * (reward + gamma * following - value)
