"""What Python asks a number for, and a timestep has not: the words in which it is refused."""

from __future__ import annotations

from collections.abc import Callable

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located

ONCE = "and the program is traced once for all timesteps: it is known only when it runs."
TRUTH = "Python's if, and, or, not, in, min and max"
CHOOSE = (
    "Write jnp.where(t > 2, a, b) or jax.lax.cond for if, rlfx.minimum and rlfx.maximum for min and max, (t == 0) | "
    "(t == 2) for `t in (0, 2)`; for `if t % n == 0`, rlfx.every(n, fn, otherwise=v)."
)
COUNT = (
    "Read a series with t, rlfx.series(v)[t], of a tuple each one in it, and arrays with t.now; the number of timesteps is "
    "t.length; a loop with t rounds is jax.lax.fori_loop(0, t.now, ...), a sum over the past that of a slice, x[:t]."
)

#: What asks, and what to write.
NOT_PYTHON = {
    "bool": (f"{TRUTH} ask whether t is true, {ONCE}", CHOOSE),
    "index": (f"range, a shape, or an index of an array or of a tuple asks for t as a Python integer, {ONCE}", COUNT),
    "int": (
        f"int(t), or an operation that counts, asks for t as a Python integer, {ONCE}",
        "In arithmetic t is an int32 already; to count in a program write t.now: jax.lax.fori_loop(0, t.now, ...).",
    ),
    "float": (f"float(t) asks for t as a Python float, {ONCE}", "Write t.astype(jnp.float32), or 1.0 * t."),
    "complex": (f"complex(t) asks for t as a Python number, {ONCE}", "Write t.astype(jnp.complex64)."),
    "hash": (f"A set or a dict asks for t as a Python value, {ONCE}", CHOOSE),
}


def refusal_of(name: str) -> Callable:
    """The method ``__name__`` of a Time."""
    fact, fix = NOT_PYTHON[name]

    def refuse(self):
        raise ProgramError(located(fact, where=J.here(), fix=fix))

    return refuse
