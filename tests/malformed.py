"""Malformed calls, generated: one valid call of every public function, and every wrong value for each of its arguments.

A :class:`Signature` is a function, one valid call, and what each argument takes. Every value of ``WRONG`` that an argument
does not take is a malformed call. Its outcome must be an error of rlfx that says what to do, and every value that an argument
takes must be accepted: the table is the list of what is accepted, with the reason.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from rlfx.errors import RlfxError

#: Values of every kind, by name.
WRONG: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "1": 1,
    "-1": -1,
    "2.5": 2.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1j": 1j,
    "2**40": 2**40,
    "np.int64": np.int64(2),
    "np.float64": np.float64(2.5),
    "np.bool_": np.bool_(True),
    "a name": "no such name",
    "empty": "",
    "bytes": b"t",
    "()": (),
    "[1, 2, 3]": [1, 2, 3],
    "{}": {},
    "dict": {"a": 1.0},
    "set": {1},
    "object": object(),
    "class": int,
    "module": types,
    "lambda:": lambda: 0,
    "lambda 7": lambda a, b, c, d, e, f, g: 0,
    "[5]": np.ones(5, np.float32),
    "i32[5]": np.arange(5, dtype=np.int32),
    "[2, 7]": np.ones((2, 7), np.float32),
    "text array": np.array(["a"]),
    "objects": np.array([object()]),
    "key": jax.random.key(0),
    "Plan": rlfx.Plan("blocks", 2),
    "mesh": jax.make_mesh((1,), ("other",)),
}

_ALL = tuple(WRONG)


def _names(text: str) -> frozenset[str]:
    """``"None, [1, 2, 3]"``: names of ``WRONG``, separated by ``|``."""
    found = frozenset(name.strip() for name in text.split("|") if name.strip())
    assert found <= set(WRONG), found - set(WRONG)
    return found


@dataclass(frozen=True)
class Takes:
    """What an argument takes of ``WRONG``, on purpose.

    Attributes:
      names: of the values.
      reason: why they are accepted.
      unasked: names of values for which the reason says who else answers.
    """

    names: frozenset[str]
    reason: str
    unasked: frozenset[str] = frozenset()

    def __or__(self, other: Takes) -> Takes:
        return Takes(self.names | other.names, f"{self.reason}; {other.reason}", self.unasked | other.unasked)


def takes(names: str, reason: str, unasked: str = "") -> Takes:
    return Takes(_names(names), reason, _names(unasked))


NOTHING = takes("", "")
OPTIONAL = takes("None", "may be left out")
COUNT = takes("1 | np.int64", "a positive int32, NumPy's too")
BYTES = COUNT | takes("2**40", "more than an int32")
NATURAL = BYTES | takes("0", "zero, too")
FLAG = takes("True | np.bool_", "a boolean, NumPy's too")
NAME = takes("a name", "any name")
FUNCTION = takes("", "what a function of the user's raises is the user's", unasked="class | mesh")
ANY_FUNCTION = takes("lambda: | lambda 7 | class | mesh", "a function of whatever it is called with")
FLOATS = takes("2.5 | nan | inf | np.float64", "of the dtype that is there")
NUMBER = takes("0 | 1 | -1 | np.int64", "arithmetic: any real number; of a traced one nothing is known") | FLOATS
ENDS = NUMBER | takes("True | np.bool_", "promoted as in jax")
SHAPED = takes("[5] | i32[5] | [2, 7]", "arrays broadcast")
BROADCAST = NUMBER | SHAPED
TREE = BROADCAST | takes("True | np.bool_ | 1j | None | () | [1, 2, 3] | {} | dict", "a pytree of arrays")
KEYED = TREE | takes("key", "keys are arrays")


@dataclass(frozen=True)
class Signature:
    """A function and one valid call of it.

    Attributes:
      valid: the arguments of the valid call by name; for a call inside of a per-timestep program, a function of its t.
      takes: for each argument that is varied, what it takes.
      positional: names of the arguments that are given by position, in order.
    """

    name: str
    function: Callable
    valid: Any
    takes: dict[str, Takes] = field(default_factory=dict)
    positional: tuple[str, ...] = ()

    def malformed(self) -> Iterator[tuple[str, str]]:
        """Which argument has which value."""
        yield from (
            (name, wrong)
            for name, kind in self.takes.items()
            for wrong in _ALL
            if wrong not in kind.names | kind.unasked
        )

    def accepted(self) -> Iterator[tuple[str, str]]:
        yield from ((name, wrong) for name, kind in self.takes.items() for wrong in _ALL if wrong in kind.names)

    def call(self, given: dict[str, Any]) -> Any:
        """The call with these arguments."""
        args = [given[name] for name in self.positional]
        return self.function(*args, **{k: v for k, v in given.items() if k not in self.positional})

    def outcomes(self, calls: list[tuple[str, str]]) -> list[str]:
        """What each call gives: "accepted", the error of rlfx, or what else was raised."""
        if not callable(self.valid):
            return [outcome(lambda c=c: self.call({**self.valid, c[0]: WRONG[c[1]]})) for c in calls]
        found: list[str] = []

        def all_calls(p, c, t):
            valid = self.valid(t)
            found[:] = [outcome(lambda n=n, w=w: self.call({**valid, n: WRONG[w]})) for n, w in calls]
            return jnp.float32(0), c

        _trace(all_calls)
        # What is raised inside of the program may be put into words where it is traced: those calls have their own program.
        said = ("rlfx", "accepted")
        return [text if text.startswith(said) else self._alone(*c) for text, c in zip(found, calls, strict=True)]

    def _alone(self, name: str, wrong: str) -> str:
        def f(p, c, t):
            self.call({**self.valid(t), name: WRONG[wrong]})
            return jnp.float32(0), c

        return outcome(lambda: _trace(f))


def _trace(f: Callable) -> Any:
    return rlfx.trace(f, None, jnp.zeros(3), length=4, batch=3)


def outcome(call: Callable[[], Any]) -> str:
    """What a call gives, in a word and its text."""
    try:
        call()
    except RlfxError as error:
        text = str(error)
        return (
            f"rlfx {type(error).__name__}: {text}" if "\n  Fix: " in text else f"no fix {type(error).__name__}: {text}"
        )
    except Exception as error:
        return f"other {type(error).__name__}: {error}"
    return "accepted"
