"""Random rollouts on the fastest path of the platform, and a check that an environment keeps the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import INT32, KEY, POSITIVE, expect, integer, optional
from rlfx._tracing import ASKED
from rlfx.envs.base import Environment, Step, checked_environment
from rlfx.envs.registry import make
from rlfx.envs.spaces import sample
from rlfx.errors import EnvError, located
from rlfx.prng import fast_prng, seeded
from rlfx.transforms.fuse_steps import fuse_steps, supported

_FIELDS: dict[str, Any] = {"reward": jnp.float32, "terminated": bool, "truncated": bool}


class RolloutStatistics(NamedTuple):
    """Of all environments and steps.

    Attributes:
      mean_reward: of a step, float32.
      episodes: how many ended, int32.
      mean_length: of those that ended, in steps, float32.
      mean_return: of those that ended, float32.
    """

    mean_reward: Any
    episodes: Any
    mean_length: Any
    mean_return: Any


def random_rollout(env: str | Environment, num_envs: int, num_steps: int, **options: Any) -> Callable[..., Any]:
    """A jitted function from a key to :class:`RolloutStatistics` of uniformly random actions.

    Steps are fused where the environment is supported (``fuse_steps``), else ``scan(vmap(step))``. Random numbers come
    from the fast generator, seeded by the key.

    Args:
      env: a name, or an automatically resetting environment.
      num_envs: N.
      num_steps: K.
      **options: of ``fuse_steps`` (``backend``, ``tile``).

    Raises:
      EnvError: no such environment, it does not reset itself, or N or K is not positive.

    Example:
      >>> statistics = random_rollout("CartPole-v1", num_envs=32, num_steps=100)(jax.random.key(0))
      >>> float(statistics.mean_reward), 10 < float(statistics.mean_length) < 40
      (1.0, True)
    """
    env = make(env) if isinstance(env, str) else env
    checked_environment("random_rollout", env)
    if not env.resets:
        fact = f"random_rollout of {env.name}, which does not begin new episodes by itself."
        raise EnvError(located(fact, fix="Roll out rlfx.envs.auto_reset(env), or say `resets = True` if it does."))
    num_envs = expect("num_envs", num_envs, POSITIVE, EnvError, of="random_rollout")
    num_steps = expect("num_steps", num_steps, POSITIVE, EnvError, of="random_rollout")
    unknown = [name for name in options if name not in ("backend", "tile")]
    if unknown:
        fact = f"random_rollout has no option {unknown[0]!r}."
        raise EnvError(located(fact, fix="Its options are those of fuse_steps: backend and tile."))
    if not options and not supported(env, policy="random", outputs="statistics"):
        options = {"backend": "vmap"}
    steps = fuse_steps(env, num_steps, policy="random", outputs="statistics", **options)

    @jax.jit
    def run(key: jax.Array) -> RolloutStatistics:
        key = seeded(key, fast_prng)
        states = jax.vmap(env.reset)(jax.random.split(key, num_envs))
        _, s = steps(jax.random.fold_in(key, 0), states)
        episodes = s.episodes.sum(dtype=jnp.int32)
        ended = jnp.maximum(episodes, 1).astype(jnp.float32)
        length = s.steps.astype(jnp.float32).sum() / ended
        return RolloutStatistics((s.reward / num_steps).mean(), episodes, length, s.returns.sum() / ended)

    return run


def check(env: Environment, key: jax.Array | None = None, steps: int = 3) -> None:
    """Check that an environment keeps the protocol: call it in the tests of your own environments.

    Steps are pure (no leaked tracers, equal results twice), the carry keeps its structure, shapes and dtypes, the
    observation and ``final_obs`` have one type, reward and flags are scalars of the right dtype.

    Raises:
      EnvError: naming the first thing that is wrong, and how to mend it.

    Example:
      >>> check(make("Catch-bsuite"))
    """
    checked_environment("check", env)
    key = expect("key", key, optional(KEY), EnvError, of="check")
    key = jax.random.key(0) if key is None else key
    steps = expect("steps", steps, integer(0, INT32), EnvError, of="check")

    def refuse(fact: str, fix: str):
        raise EnvError(located(f"{env.name}: {fact}", fix=fix))

    numbers: dict[str, Any] = {}

    def once(key):
        state = env.reset(key)
        found = env.step(key, state, sample(env.action_space, key))
        if not (isinstance(found, tuple) and len(found) == 2):
            what = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            refuse(f"step returns {what}, not the state and a Step.", "Return (state, rlfx.envs.Step(...)).")
        after, step = found
        if not isinstance(step, Step):
            refuse(f"step returns {type(step).__name__} beside the state.", "Return (state, rlfx.envs.Step(...)).")
        fields = ((field, getattr(step, field)) for field in _FIELDS)
        numbers.update({field: x for field, x in fields if isinstance(x, (bool, int, float))})
        return (after, step), state

    def traced(fn, *args):
        try:
            return jax.eval_shape(lambda *args: fn(*args), *args)
        except ASKED as error:
            use = "jnp.where(c, a, b) or jax.lax.cond in the place of if, and jnp in the place of np."
            fact = f"{env.name}: Python, or NumPy, asks for the value of an array, which is not known while the step is traced."
            raise EnvError(located(fact, where=J.source_in_traceback(error), fix=f"Use {use}")) from error

    try:
        with jax.checking_leaks():
            (after, step), state = jax.eval_shape(once, key)
    except Exception:  # jax says that a tracer leaked, or trips over its own description of where to
        with contextlib.suppress(jax.errors.UnexpectedTracerError):
            traced(once, key)  # what else is wrong is raised here again
        refuse("step or reset leaks a tracer: it is not pure.", "Return what the next step needs in the state.")
    if jax.tree.structure(after) != jax.tree.structure(state):
        refuse("step returns a state of another structure than reset.", "Return the same pytree from both.")
    for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
        if (a.shape, a.dtype, a.weak_type) != (b.shape, b.dtype, b.weak_type):
            fact = f"the state's types differ: reset gives {_kind(a)}, step {_kind(b)}"
            at = jax.tree_util.keystr(path)
            refuse(f"{fact}{f' for {at}' if at else ''}.", f"Make both {a.dtype}{list(a.shape)}, with astype in reset or step.")
    for field, x in numbers.items():
        fact = f"Step.{field} is {x!r}, a value of Python's, and no array."
        refuse(fact, f"Give {'jnp.float32' if field == 'reward' else 'jnp.bool_'}({x!r}).")
    for field, dtype in _FIELDS.items():
        got = getattr(step, field)
        if (got.shape, got.dtype) != ((), dtype):
            refuse(f"Step.{field} is {got.dtype}{list(got.shape)}.", f"It is one {jnp.dtype(dtype).name}.")
    obs = traced(env.observe, state)
    if jax.tree.map(lambda x: (x.shape, x.dtype), obs) != jax.tree.map(lambda x: (x.shape, x.dtype), step.final_obs):
        refuse(f"observe gives {obs}, final_obs is {step.final_obs}.", "final_obs is what observe gives then.")
    for k in jax.random.split(key, steps):
        a, b = once(k), once(k)
        same = jax.tree.map(lambda x, y: bool(jnp.array_equal(_plain(x), _plain(y))), a, b)
        if not jax.tree.all(same):
            refuse("two steps with equal arguments differ.", "Take randomness from the key, and keep no state outside.")


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" + (", weakly typed (made of Python's numbers alone)" if x.weak_type else "")


def _plain(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
