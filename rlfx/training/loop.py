"""``run``: an update, repeated: jitted, scanned and donated, and what happens between the calls as values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import NATURAL, POSITIVE, expect, function
from rlfx._tracing import ASKED
from rlfx.errors import TrainingError, located
from rlfx.recurrence.language.operands import same_type, type_of
from rlfx.training.cache import kept_programs

tree = jax.tree_util

After = Callable[["Call"], "str | None"]
"""What a callback does after a call; a string ends the run, and is the reason."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A run before its first call.

    Attributes:
      update: ``update(agent, key) -> (agent, metrics)``.
      agent: what the first update begins with.
      key: of the whole run; update ``i`` gets ``fold_in(key, i)``.
      updates: how many there will be in all.
      per_call: how many a call of the compiled program makes.
      done: how many were made before: those of a run that is resumed.
    """

    update: Callable[..., Any]
    agent: Any
    key: jax.Array
    updates: int
    per_call: int
    done: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the compiled program, which may still be running: to read an array waits for it.

    Attributes:
      begun: updates made before it.
      done: updates made after it.
      agent: after it; its memory belongs to the next call, so copy what you keep.
      metrics: what its updates returned, each leaf with a leading axis of ``done - begun``.
      last: whether the run has made all its updates.
    """

    begun: int
    done: int
    agent: Any
    metrics: Any
    last: bool

    def reaches(self, every: int) -> bool:
        """Whether a multiple of ``every`` updates was made in this call."""
        return self.begun // every != self.done // every


class Callback:
    """What happens between calls. A value: whatever it opens, counts or remembers belongs to one run.

    Override :meth:`begin` to change what a run begins with, and :meth:`opened` for what happens after each call.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Log(Callback):
      ...     @contextmanager
      ...     def opened(self, loop):
      ...         yield lambda call: print(call.done)  # a string would end the run, with this reason
      >>> update = lambda agent, key: (agent + 1, agent)
      >>> result = run(update, jnp.int32(0), jax.random.key(0), updates=4, per_call=2, callbacks=[Log()])
      2
      4
    """

    #: Callbacks run in the order given, those of a lower rank first: what finds errors, before what saves.
    rank: ClassVar[int] = 1

    def begin(self, loop: Loop) -> Loop:
        """The run that is made of ``loop``."""
        return loop

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        """A context around the run, which gives what to do after each call."""
        del loop
        yield lambda call: None


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      agent: after the last update.
      done: how many updates were made, those before a resumption included.
      reason: ``"finished"``, or what a callback gave as the reason to stop.
    """

    agent: Any
    done: int
    reason: str


def run(
    update: Callable[[Any, jax.Array], tuple[Any, Any]],
    agent: Any,
    key: jax.Array,
    *,
    updates: int,
    per_call: int = 1,
    callbacks: Sequence[Callback] = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> Result:
    """Make ``updates`` updates of an agent.

    ``per_call`` updates are one call of one compiled program, a scan, whose memory goes from call to call (it is donated:
    a copy of ``agent`` is made first, so yours stays as it is). Nothing waits for the device between calls but the
    callbacks that have to, and never more than two calls are under way.

    Update ``i`` gets ``jax.random.fold_in(key, i)``: results depend on neither ``per_call`` nor on where a run was resumed.

    Args:
      update: ``update(agent, key) -> (agent, metrics)``. ``jax.vmap`` of one trains many agents (of an array of keys).
      agent: everything that an update changes: parameters, optimiser, environments, buffers, moments, counters.
      key: a typed key, or an array of them for a vmapped update.
      updates: how many in all; a resumed run makes what is missing.
      per_call: updates a call. Callbacks cost a share of a second a call.
      callbacks: :class:`Progress`, :class:`Metrics`, :class:`Evaluate`, :class:`Stop`, :class:`Checkpoints`,
        :class:`NaNGuard`, :class:`Interrupt`, or your own :class:`Callback`.
      cache_dir: a directory for what the run compiles: started again, it reads it from there.

    Returns:
      :class:`Result`.

    Raises:
      TrainingError: an argument is not what it should be, or a callback can't do what it is for.
      ProgramError: ``update`` returns another agent than it takes, in structure, shapes or dtypes, or metrics that are no arrays.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def update(total, key):
      ...     return total + 1.0, {"total": total}
      >>> result = run(update, jnp.zeros(()), jax.random.key(0), updates=10, per_call=4)
      >>> float(result.agent), result.done, result.reason
      (10.0, 10, 'finished')
    """
    expect("update", update, function("agent", "key"), TrainingError)
    updates = expect("updates", updates, NATURAL, TrainingError)
    per_call = expect("per_call", per_call, POSITIVE, TrainingError)
    _check_key(key)
    try:
        hash(update)
    except TypeError:
        fact = f"update is {type(update).__name__}, which can't be hashed, so what is compiled for it can't be found again."
        raise TrainingError(located(fact, where=J.here(), fix="Give a function, or a frozen dataclass.")) from None
    if not isinstance(callbacks, Iterable):
        fact = f"callbacks is {type(callbacks).__name__} ({callbacks!r}), not a list of callbacks."
        fix = f"Give callbacks=[{type(callbacks).__name__}(...)], or none."
        raise TrainingError(located(fact, where=J.here(), fix=fix))
    for callback in callbacks:
        if not isinstance(callback, Callback):
            fact = f"callbacks has {type(callback).__name__} ({callback!r}), which is no rlfx.training.Callback."
            raise TrainingError(located(fact, where=J.here(), fix="Give values such as rlfx.training.Progress()."))
    callbacks = sorted(callbacks, key=lambda callback: callback.rank)

    with ExitStack() as stack:
        if cache_dir is not None:
            stack.enter_context(kept_programs(cache_dir))
        loop = Loop(update, owned(agent), key, updates, per_call)
        for callback in callbacks:
            loop = callback.begin(loop)
        agent, done, reason, previous = loop.agent, loop.done, "finished", None
        afters = [stack.enter_context(callback.opened(loop)) for callback in callbacks]
        loop = dataclasses.replace(loop, agent=None)  # its memory is the first call's
        while done < updates and reason == "finished":
            count = min(per_call, updates - done)
            begun, done = done, done + count
            agent, metrics = _call(update, count, agent, key, jnp.uint32(begun))
            jax.block_until_ready(previous)
            previous = metrics
            call = Call(begun, done, agent, metrics, done >= updates)
            reasons = [after(call) for after in afters]
            reason = next(filter(None, reasons), reason)
    return Result(agent, done, reason)


def key_of(key: jax.Array, i: Any) -> jax.Array:
    """The key of update ``i`` (uint32): one for each of an array of keys."""
    folded = jax.vmap(lambda k: jax.random.fold_in(k, i))(key.reshape(-1)) if key.ndim else jax.random.fold_in(key, i)
    return folded.reshape(key.shape)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _call(update, count, agent, key, begun):
    def one(agent, i):
        return _checked(update, asked(update, "update", agent, key_of(key, begun + i)), agent)

    return jax.lax.scan(one, agent, jnp.arange(count, dtype=jnp.uint32))


def _checked(update: Callable[..., Any], given: Any, agent: Any) -> tuple[Any, Any]:
    """What ``update`` returned, while it is traced: an agent like the one it was given, and metrics."""
    where = J.function_source(update)
    if not (isinstance(given, tuple) and len(given) == 2):
        fact, fix = (
            f"update returned {type(given).__name__}, not (agent, metrics).",
            "Return the next agent, and metrics or None.",
        )
        raise TrainingError(located(fact, where=where, fix=fix))
    fix = "Return the agent with the structure, shapes and dtypes that it was given with."
    same_type(given[0], agent, "The agent that update returns", "the agent that it was given", fix, where=where)
    _check_arrays(given[1], "The metrics that update returns", where)
    return given


def asked(fn: Callable[..., Any], name: str, *args: Any) -> Any:
    """What a function of the user's returns while it is traced; that it asks for a value then is said at its line."""
    try:
        return fn(*args)
    except ASKED as error:
        where = J.source_in_traceback(error) or J.function_source(fn)
        fact = f"{name} is jitted, and Python or NumPy (float, int, if, np) asks for the value of an array in it."
        fix = "Return arrays: x.mean() where you have float(x.mean()); and compute with jnp, jnp.where in the place of if."
        raise TrainingError(located(fact, where=where, fix=fix)) from error


def arrays_of(fn: Callable[..., Any], name: str, what: str, *args: Any) -> Any:
    """What :func:`asked` gives, a pytree of arrays or refused."""
    found = asked(fn, name, *args)
    _check_arrays(found, f"The {what} that {name} returns", J.function_source(fn))
    return found


def _check_arrays(value: Any, what: str, where: str) -> None:
    for path, leaf in tree.tree_flatten_with_path(value)[0]:
        type_of(leaf, what + tree.keystr(path), where)


@jax.jit
def _copied(agent):
    return tree.tree_map(jnp.copy, agent)


def owned(agent: Any) -> Any:
    """A copy in memory of its own, leaf by leaf, of strong types: what may be donated."""
    return _copied(tree.tree_map(strong, agent))


def strong(leaf: Any) -> Any:
    """A leaf of an agent as an array of a strong type; or it is refused."""
    kind = type_of(leaf, "agent")
    return leaf if jnp.issubdtype(kind.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(leaf, kind.dtype)


def _check_key(key: Any) -> None:
    if not (isinstance(key, jax.Array) and J.is_key(key)):
        fact = f"key must be a typed key, got {type(key).__name__}."
        raise TrainingError(located(fact, where=J.here(), fix="Give key=jax.random.key(0), or an array of keys."))
