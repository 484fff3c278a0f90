"""What a time needs of its program: its domain, and its keys."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ProgramError, located
from rlfx.recurrence.language.domain import Domain, levels
from rlfx.recurrence.language.names import told

_SHARED = 0x7FFFFFFF  # where b would stand in the key of a value shared by all environments


class Context:
    """What a Time needs of its program: its domain, its keys, and how many programs are around it."""

    def __init__(self, domain: Domain, base_key: Any, b: Any):
        self.domain, self._base_key, self._b, self.level = domain, base_key, b, levels()[-1]
        self._names: dict[tuple[int, int], str | None] = {}

    # Programs are traced once: two contexts are the same only if they are one object, which is what a pytree's static
    # part needs.
    @property
    def _call(self) -> str:
        """A call of the program, with a key."""
        *_, around, here = (None, *levels())
        if around is None:
            return "loss_fn(params, carry, jax.random.key(0))"
        return f"{here.program}(params, carry, {around.names.dim}.key)"

    def key(self, now: Any, name: str | None, *, shared: bool) -> jax.Array:
        if self._base_key is None:
            raise ProgramError(
                located(
                    "The program uses random keys, but no key was given.",
                    where=J.here(),
                    fix=f"Call the compiled function with a key: {self._call}.",
                )
            )
        if name is not None and not isinstance(name, str):
            raise ProgramError(
                located(f"t.key_for takes a name (str), got {name!r}.", where=J.here(), fix="Name the use.")
            )
        # Generators whose folds commute (unsafe_rbg) tell b and t apart as well: one is folded in as an odd number, the other
        # as an even one. Only the last fold depends on t: the others are computed once.
        named = functools.reduce(jax.random.fold_in, self._words(name), self._base_key)
        at_b = jax.random.fold_in(named, _twice(_SHARED if shared else self._b) + np.uint32(1))
        return jax.random.fold_in(at_b, _twice(now))

    def position(self, axis: str) -> Any:
        names = self.domain.names
        if axis != names.axis or self.domain.batch is None:
            has = f"its parallel axis is {names.axis!r}" if self.domain.batch is not None else "it has no parallel axis"
            number = f"the number of {names.dim} is {names.dim}.now" if axis == names.dim else "name the axis it has"
            fact = f"index({axis!r}) asks for a position on a parallel axis of the program, and {has}."
            raise told(DomainError(located(fact, where=J.here(), fix=f"Give batch={{{axis!r}: n}}, or {number}.")))
        return self._b

    def _words(self, name: str | None) -> tuple[int, int]:
        """What stands for a name in this program, and for no other."""
        words = name_words(name)
        known = self._names.setdefault(words, name)
        if known != name:
            raise ProgramError(
                located(
                    f"t.key_for({known!r}) and t.key_for({name!r}) would be the same key: their names have the same hash.",
                    where=J.here(),
                    fix="Rename one of them.",
                )
            )
        return words


def name_words(name: str | None) -> tuple[int, int]:
    """A hash of the name of a use of keys, in two words of 32 bits; ``t.key`` has no name, which is not the empty one."""
    text = b"t.key" if name is None else b"t.key_for:" + name.encode("utf8", "surrogatepass")
    low, high = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4")
    return int(low), int(high)


def _twice(x: Any) -> Any:
    """``2 x`` as a word of 32 bits, for x from 0 to 2**31 - 1."""
    return jnp.asarray(x).astype(jnp.uint32) * np.uint32(2)


def told_together(what: str, generator: str, where: str) -> ProgramError:
    """The error of random numbers that are others if others are drawn with them."""
    fact = (
        f"{what}: under jax.vmap the numbers of {generator} depend on all that is drawn together, so those of a program would "
        "depend on its plan, and on how many environments there are."
    )
    fix = "Take another generator, jax.random.key(seed, impl='threefry2x32'), or rlfx.envs.fast_prng, which is faster."
    return ProgramError(located(fact, where=where, fix=fix))
