"""K environment steps, and the policy between them, as one program without arrays inside.

Implements and goes beyond "Optimizing Data Collection in Deep Reinforcement Learning", section 4: the paper fuses K
steps of a hand-written CUDA CartPole; here any supported per-environment step is scalarised (every array becomes one
value per element), so that K steps, random numbers, automatic resets and a small policy fit into one kernel, or into a
loop over a structure of arrays on CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _target
from rlfx._checks import KEY, POSITIVE, Kind, expect, function, one_of, scalar
from rlfx.errors import ProgramError, located
from rlfx.recurrence.ir.program import Program
from rlfx.transforms.steps.loop import FusedLoops
from rlfx.transforms.steps.program import trace_step
from rlfx.transforms.steps.scalarize import UnsupportedPrimitive
from rlfx.transforms.steps.scan import batch_of, check_backend, fuse_scan, fused, kernel_of, unsupported_by

__all__ = [
    "Statistics",
    "Support",
    "Transition",
    "UnsupportedPrimitive",
    "fuse_loops",
    "fuse_scan",
    "fuse_steps",
    "supported",
    "tune",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transition:
    """One step of a trajectory, leaves ``[K, N, ...]``.

    Attributes:
      obs: what the policy saw.
      action: what it did.
      step: what that led to, a :class:`rlfx.envs.Step`.
    """

    obs: Any
    action: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Running statistics of each environment over K steps, ``[N]`` (``[()]`` of one environment).

    Attributes:
      reward: sum of rewards, float32.
      episodes: how many episodes ended, int32.
      steps: steps in the episodes that ended, counted from the first of the K, int32.
      returns: rewards in the episodes that ended, likewise, float32.
      open_steps: steps in the episode not yet ended, int32.
      open_return: rewards in it, float32.
    """

    reward: Any
    episodes: Any
    steps: Any
    returns: Any
    open_steps: Any
    open_return: Any

    @classmethod
    def zeros(cls, n: int) -> Statistics:
        """Nothing seen yet, for n environments."""
        f, i = jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32)
        return cls(f, i, i, f, i, f)

    def after(self, step: Any) -> Statistics:
        """With one more step of one environment."""
        done = step.terminated | step.truncated
        steps, total = self.open_steps + 1, self.open_return + step.reward
        return Statistics(
            self.reward + step.reward,
            self.episodes + done.astype(jnp.int32),
            self.steps + jnp.where(done, steps, 0),
            self.returns + jnp.where(done, total, 0.0),
            jnp.where(done, 0, steps),
            jnp.where(done, 0.0, total),
        )


class Support(NamedTuple):
    """Whether a step can be fused: true or false as a condition.

    Attributes:
      ok: whether it can.
      reason: if not, why: the primitive, its source line, what to do.
    """

    ok: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.ok


@functools.singledispatch
def fuse_steps(
    env: Any, k: int, *, policy: Any = None, outputs: str = "final", backend: str = "auto", tile: int | None = None
) -> Any:
    """K steps of N environments as one program: ``run(key, states, extra=None, *, t0=0, b0=0)``.

    Given a traced program instead of an environment, ``fuse_steps(program, *, backend="auto", tile=None)`` is the program
    whose acting loops run fused, where their bodies are supported: ``rlfx.compile(f, ..., transform=fuse_steps)``. Values
    and gradients are those of the program up to floating-point contraction; ``explain`` says which loops are fused, and
    why not the others. See :func:`fuse_loops`.

    ``states`` has leaves ``[N, ...]``. With ``key_b = fold_in(key, b0 + b)``, environment b at step t draws its action
    from ``fold_in(key_b, 2 (t0 + t))`` and its step from ``fold_in(key_b, 2 (t0 + t) + 1)``, whatever the backend, the
    tile or N: the numbers are those of ``jax.random``.

    Args:
      env: an environment of ``rlfx.envs`` (``observe``, ``step``, ``action_space``).
      k: how many steps.
      policy: None: ``extra`` holds the actions, ``[K, N, ...]``. ``"random"``: uniform actions, no ``extra``. A
        function ``policy(params, key, obs) -> action`` of one observation: ``extra`` is ``params``; a multilayer
        perceptron runs inside the kernel.
      outputs: ``"final"``: ``run`` returns the states ``[N, ...]``. ``"statistics"``: ``(states, Statistics)``, leaves
        ``[N]``. ``"trajectory"``: ``(states, Transition)``, leaves ``[K, N, ...]``.
      backend, tile: as in :func:`fuse_scan`.

    Raises:
      ProgramError: no environment, key or whole number is where one belongs, K or N is not positive, no such policy or
        output, actions or states of the wrong shape, statistics of an environment that does not reset itself.
      UnsupportedPrimitive: the step has no scalar form; :func:`supported` asks first.

    Example:
      >>> import rlfx.envs
      >>> env = rlfx.envs.make("CartPole-v1")
      >>> run = jax.jit(fuse_steps(env, 100, policy="random", outputs="statistics"))
      >>> states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 8))
      >>> states, statistics = run(jax.random.key(1), states)
      >>> float(statistics.reward.sum()), bool(statistics.episodes.min() >= 1)
      (800.0, True)
    """
    outputs = expect("outputs", outputs, one_of(*_BODIES), ProgramError, of="fuse_steps")
    _check_environment("fuse_steps", env)
    if outputs == "statistics" and not getattr(env, "resets", True):
        fact = f"fuse_steps: statistics of {env.name}, which does not begin new episodes: each step after an end would be one."
        raise ProgramError(located(fact, fix="Fuse rlfx.envs.auto_reset(env), or say `resets = True` if it does."))
    act = _actor(env, policy)
    body = _BODIES[outputs](env, act)

    def first(made_up: tuple) -> tuple:
        keys, _, *statistics = made_up
        states = jax.vmap(env.reset)(keys)
        return (keys, states, *(Statistics.zeros(len(keys)) for _ in statistics))

    scan = fused(body, k, backend, tile, first)

    def run(key: jax.Array, states: Any, extra: Any = None, *, t0: Any = 0, b0: Any = 0):
        key = expect("key", key, KEY, ProgramError, of="fuse_steps")
        n = batch_of(states, None, k)
        b0 = expect("b0", b0, scalar(whole=True), ProgramError, of="fuse_steps")
        _check_states(env, key, states)
        if policy is None:
            _check_given(env, extra)
        index = jnp.asarray(b0, jnp.int32) + jnp.arange(n, dtype=jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
        shared, xs = (None, extra) if policy is None else (extra, None)
        carry = (keys, states, Statistics.zeros(n)) if outputs == "statistics" else (keys, states)
        (_, *carry), ys = scan(shared, carry, xs, t0=t0, b0=b0)
        return carry[0] if outputs == "final" else (carry[0], carry[1] if outputs == "statistics" else ys)

    return run


@fuse_steps.register
def fuse_loops(program: Program, *, backend: str = "auto", tile: int | None = None) -> Program:
    """``scan(vmap(body)) over t  ->  one scalarised program of T steps``, for the loops of a program's acting pass.

    A loop is fused if its body is a function of one environment and of the previous timestep, in scalar primitives: no
    reductions over environments, no rings of earlier timesteps, no callbacks, no loops on data. Others stay as they are,
    and so do backward loops and what is differentiated.

    Args:
      program: traced, with or without a loss.
      backend, tile: as in :func:`fuse_scan`.

    Raises:
      ProgramError: no such backend.

    data_collection section 7 asks for the fusion of simulation and inference: the loop's body is both.

    Example:
      >>> import rlfx
      >>> f = rlfx.unroll(lambda w, x, t: (w * x, x), length=3, batch=2, transform=fuse_steps)
      >>> f(2.0, jnp.ones(2))
      (Array([8., 8.], dtype=float32), Array([[1., 1.],
             [2., 2.],
             [4., 4.]], dtype=float32))
      >>> "fused: its steps are one scalarised program" in str(f.explain(2.0, jnp.ones(2)))
      True
    """
    check_backend(backend, tile)
    return dataclasses.replace(
        program, directives=dataclasses.replace(program.directives, loops=FusedLoops(backend, tile))
    )


def _environment(value: Any) -> Any:
    if isinstance(value, type) or not all(
        hasattr(value, name) for name in ("reset", "observe", "step", "action_space")
    ):
        raise TypeError
    return value


_ENVIRONMENT = Kind("an environment", 'rlfx.envs.make("CartPole-v1")', _environment)


def _check_environment(user: str, env: Any) -> None:
    fix = "Give what rlfx.envs.make returns (to a compilation: transform=fuse_steps)."
    expect("env", env, _ENVIRONMENT, ProgramError, of=user, fix=fix)


def _check_states(env: Any, key: jax.Array, states: Any) -> None:
    """Raise ProgramError unless the states are those of N environments (a scan checks their dtypes)."""
    one = jax.eval_shape(env.reset, key)
    wanted, given = jax.tree.structure(one), jax.tree.structure(states)
    if wanted != given:
        fact = f"fuse_steps: the states have structure {given}, those of {env.name} have {wanted}."
        raise ProgramError(located(fact, fix="Give jax.vmap(env.reset)(keys), or what a run returned."))
    for path, x, leaf in zip(*_paths(one), jax.tree.leaves(states), strict=True):
        if np.shape(leaf)[1:] != x.shape:
            fact = f"fuse_steps: states{path} is {list(np.shape(leaf))}, of one environment it is {list(x.shape)}."
            raise ProgramError(located(fact, fix="Give jax.vmap(env.reset)(keys), or what a run returned."))


def _paths(tree: Any) -> tuple[list[str], list[Any]]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path) for path, _ in paths], [leaf for _, leaf in paths]


def _check_given(env: Any, actions: Any) -> None:
    """Raise ProgramError where a given action, known now, is outside the space (the step checks shapes and dtypes)."""
    spaces, tree = jax.tree.flatten(env.action_space, is_leaf=lambda s: hasattr(s, "contains"))
    given, structure = jax.tree.flatten(actions)
    if tree != structure:
        fact = f"fuse_steps: without a policy, `extra` holds the actions [K, N, ...]; it has structure {structure}."
        raise ProgramError(located(fact, fix=f"Give values of {env.action_space}, or a policy."))
    for space, leaf in zip(spaces, given, strict=True):
        if isinstance(leaf, jax.core.Tracer) or np.shape(leaf)[2:] != space.shape:
            continue
        with jax.ensure_compile_time_eval():  # known, also while a function that closes over it is traced
            outside = np.argwhere(~jax.vmap(jax.vmap(space.contains))(leaf))
        for t, b in outside[:1]:
            fact = f"fuse_steps: the action {np.asarray(leaf)[t, b]} of step {t} and environment {b} is outside {space}."
            raise ProgramError(located(fact, fix="Clip the actions, or mask the logits they come from."))


_POLICY = function("params", "key", "obs")


def _actor(env: Any, policy: Any) -> Callable[..., Any]:
    """``(shared, key, state, given action) -> (observation, action)``."""

    def observed(act):
        def acting(shared, key, state, given):
            obs = env.observe(state)
            return obs, act(shared, key, obs)

        return acting

    if policy is None:
        return lambda shared, key, state, given: (env.observe(state), given)
    if isinstance(policy, str) and policy == "random":
        return observed(lambda shared, key, obs: _uniform(env.action_space, key))
    fix = 'Use None (actions are given), "random", or policy(params, key, obs).'
    return observed(expect("policy", policy, _POLICY, ProgramError, of="fuse_steps", fix=fix))


def _uniform(space: Any, key: jax.Array) -> Any:
    leaves, tree = jax.tree.flatten(space, is_leaf=lambda s: hasattr(s, "sample"))
    keys = [key] if len(leaves) == 1 else list(jax.random.split(key, len(leaves)))
    return jax.tree.unflatten(tree, [s.sample(k) for s, k in zip(leaves, keys, strict=True)])


def _advance(env: Any, act: Callable[..., Any], shared: Any, t: jax.Array, key: jax.Array, state: Any, given: Any):
    obs, action = act(shared, jax.random.fold_in(key, 2 * t), state, given)
    state, step = env.step(jax.random.fold_in(key, 2 * t + 1), state, action)
    return state, Transition(obs, action, step)


def _final(env, act):
    def body(shared, t, b, carry, given):
        key, state = carry
        return (key, _advance(env, act, shared, t, key, state, given)[0]), None

    return body


def _statistics(env, act):
    def body(shared, t, b, carry, given):
        key, state, statistics = carry
        state, transition = _advance(env, act, shared, t, key, state, given)
        return (key, state, statistics.after(transition.step)), None

    return body


def _trajectory(env, act):
    def body(shared, t, b, carry, given):
        key, state = carry
        state, transition = _advance(env, act, shared, t, key, state, given)
        return (key, state), transition

    return body


_BODIES = {"final": _final, "statistics": _statistics, "trajectory": _trajectory}


def supported(env: Any, *, policy: Any = None, params: Any = None, outputs: str = "final") -> Support:
    """Whether :func:`fuse_steps` can fuse the steps of ``env`` (and the policy, at the types of ``params``).

    Traces, and computes nothing. The answer is for the machine at hand: a GPU's kernel does less with networks than a CPU;
    and for what is to come out: where observations do not, what makes them is left out.

    Args:
      env, policy, outputs: as :func:`fuse_steps` takes them.
      params: of the policy, arrays or their types.

    Raises:
      ProgramError: no environment, policy or output.

    Example:
      >>> import rlfx.envs
      >>> bool(supported(rlfx.envs.make("CartPole-v1"), policy="random"))
      True
    """
    outputs = expect("outputs", outputs, one_of(*_BODIES), ProgramError, of="supported")
    _check_environment("supported", env)
    act = _actor(env, policy)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(env.reset, key)
    given = None
    if policy is None:
        given = jax.eval_shape(lambda key: _uniform(env.action_space, key), key)

    def lead(tree, axes):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)

    carry = lead((key, state), (1,))
    if outputs == "statistics":
        carry = (*carry, jax.eval_shape(lambda: Statistics.zeros(1)))
    program = trace_step(_BODIES[outputs](env, act), params, carry, lead(given, (1, 1)))
    machine = _target.target()
    reason = unsupported_by(program, kernel_of("auto", machine), dense_matmul=machine.platform == "cpu")
    return Support(reason is None, reason)


def _pairs(value: Any) -> tuple[tuple[Any, Any], ...]:
    pairs = tuple((backend, tile) for backend, tile in value)
    if not pairs or isinstance(value, (str, bytes)):
        raise ValueError
    return pairs


_CANDIDATES = Kind("pairs of a backend and a tile", '(("scan", None), ("tile", 64))', _pairs)
CANDIDATES = (("scan", None), ("tile", 64), ("tile", 256))


def tune(
    make: Callable[..., Any], *args: Any, candidates: tuple[tuple[str, int | None], ...] = CANDIDATES, repeat: int = 3
) -> tuple[tuple[str, int | None], dict[tuple[str, int | None], float]]:
    """The fastest of several backends for these arguments: ``(backend, tile)`` and the seconds of each.

    ``make(backend, tile)`` returns the function to time, which is compiled and run on ``args``. Tiles against a plain
    scan depends on N, the state's size and the machine: measure where it matters.

    Example:
      >>> import rlfx.envs
      >>> env = rlfx.envs.make("Catch-bsuite")
      >>> states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 128))
      >>> make = lambda backend, tile: fuse_steps(env, 8, policy="random", backend=backend, tile=tile)
      >>> best, seconds = tune(make, jax.random.key(0), states, candidates=(("scan", None), ("tile", 64)), repeat=1)
      >>> best in seconds
      True
    """
    expect("make", make, function("backend", "tile"), ProgramError, of="tune")
    candidates = expect("candidates", candidates, _CANDIDATES, ProgramError, of="tune")
    repeat = expect("repeat", repeat, POSITIVE, ProgramError, of="tune")
    seconds = {}
    for backend, tile in candidates:
        run = jax.jit(make(backend, tile))
        jax.block_until_ready(run(*args))
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times.append(time.perf_counter() - start)
        seconds[backend, tile] = min(times)
    return min(seconds, key=seconds.__getitem__), seconds
