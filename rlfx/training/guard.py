"""The update in which an agent became NaN, where, and the agent before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from rlfx import _jaxpr as J
from rlfx.errors import NotFiniteError, located
from rlfx.training.loop import After, Call, Callback, Loop, key_of, owned

tree = jax.tree_util

SMALL = 1 << 20  # bytes of a leaf

#: NumPy has these, too: where the device's memory is the host's nothing has to be compiled.
_OF_NUMPY = ((jnp.isnan, np.isnan), (jnp.isinf, np.isinf))


@dataclasses.dataclass(frozen=True)
class NaNGuard(Callback):
    """Stop at the update that makes a part of the agent NaN, with the agent as it was before.

    After each call it looks at the agent, and keeps a copy of a good one (so it takes the memory of one more agent, and
    waits for each call). When one is bad it makes the updates of the call again, one by one, to find the first bad one;
    that one once more with checks, to name the first equation that gave a NaN.

    Args:
      bad: ``bad(x) -> bool[...]``, of each number by itself (small arrays are looked at as one, flat);
        ``lambda x: ~jnp.isfinite(x)`` refuses infinities too. It is compiled, but for ``jnp.isnan`` and ``jnp.isinf``
        of what lies in the host's memory.

    Raises:
      NotFiniteError: with the ``agent`` before, and how many updates were ``done``. It names the first part that is bad.
    """

    bad: Callable[[jax.Array], jax.Array] = jnp.isnan

    rank = 0

    @contextmanager
    def opened(self, loop: Loop) -> Iterator[After]:
        any_bad = _looking(self.bad, loop.agent)
        good, done = owned(loop.agent), loop.done

        def after(call: Call) -> None:
            nonlocal good, done
            if any_bad(call.agent):
                raise self._found(loop, good, range(done, call.done), any_bad)
            good, done = owned(call.agent), call.done

        yield after

    def _found(self, loop: Loop, agent: Any, updates: range, any_bad: Callable[..., Any]) -> NotFiniteError:
        """The error, from a good agent and the updates after which it was bad."""
        step = jax.jit(lambda agent, i: loop.update(agent, key_of(loop.key, i))[0])
        where, first = J.function_source(loop.update), agent
        for done in updates:
            after = step(agent, jnp.uint32(done))
            if any_bad(after):
                break
            agent = after
        else:
            span = f"{updates.start + 1} to {updates.stop}"
            fact = f"The agent became bad in the updates {span}; made again one by one, it did not."
            fix = "The error has the agent before them (.agent): a race, or a sum in another order at the edge of what is finite."
            return NotFiniteError(located(fact, where=where, fix=fix), first, updates.start)
        named = ((name, np.asarray(leaf), np.asarray(self.bad(leaf))) for name, leaf in _floats(after))
        name, value = next((name, leaf[bad][0]) for name, leaf, bad in named if bad.any())
        fact = f"agent{name} became {value} in update {done + 1}."
        equation = _equation(lambda agent: loop.update(agent, key_of(loop.key, jnp.uint32(done))), agent)
        fact += f"\n  Its first NaN: {equation}" if equation else "\n  No equation of it gave a NaN."
        fix = "The error has the agent before it (.agent) and its number of updates (.done): look at what it computes there."
        return NotFiniteError(located(fact, where=where, fix=fix), agent, done)


def _floats(agent: Any) -> list[tuple[str, jax.Array]]:
    leaves = tree.tree_flatten_with_path(agent)[0]
    return [(tree.keystr(path), leaf) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _looking(bad: Callable[[Any], Any], like: Any) -> Callable[[Any], bool]:
    """``any_bad(agent)``, of agents that lie where ``like`` does."""
    look = next((of_numpy for of_jax, of_numpy in _OF_NUMPY if of_jax is bad), None)
    leaves = [leaf for _, leaf in _floats(like)]
    here = all(x.is_fully_addressable and {d.platform for d in x.devices()} == {"cpu"} for x in leaves)
    if look is not None and here:
        return lambda agent: any(look(part.data).any() for _, x in _floats(agent) for part in x.addressable_shards)
    compiled = jax.jit(lambda agent: [bad(x).any() for x in _joined(agent)])
    return lambda agent: bool(np.any(compiled(agent)))


def _joined(agent: Any) -> list[jax.Array]:
    """The floats: small leaves of a dtype as one array, since a reduction for each is most of what there is to compile."""
    small: dict[Any, list[jax.Array]] = {}
    large = []
    for _, leaf in _floats(agent):
        if leaf.nbytes > SMALL:
            large.append(leaf)  # joining copies: not what could be a buffer
        else:
            small.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
    return [*large, *map(jnp.concatenate, small.values())]


def _equation(update: Callable[..., Any], agent: Any) -> str | None:
    """The primitive that gave the first NaN, and its source line (equations of a program have none), as checkify finds them."""
    error, _ = jax.jit(checkify.checkify(update, errors=checkify.nan_checks))(agent)
    found = error.get_exception()
    if found is None:
        return None
    where = J.source_in_traceback(found.with_traceback(found.traceback_info.as_python_traceback()))
    return f"{str(error.get()).rstrip('.')}{f' at {where}' if where else ''}."
