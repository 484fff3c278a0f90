"""What the dimension and the parallel axis of a program are called.

Inside of the compiler they are the letters t and b, and all that it says is written in these. Here it is put into the words of
a program whose dimensions have other names: ``x[i - 1] is read before the first i``.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx._checks import Kind, expect
from rlfx.errors import DomainError, RlfxError, located

#: Both dimensions of a program, whatever they are called: the default of ``over=``.
BOTH = ("t", "b")


@dataclass(frozen=True)
class Names:
    """The names of a program's dimension and of its parallel axis.

    Example:
      >>> Names("i", "p").text("x[t - 1] is read before the first timestep: give over='t' or \\"b\\".")
      'x[i - 1] is read before the first i: give over=\\'t\\' or "p".'
    """

    dim: str = "t"
    axis: str = "b"

    def text(self, text: str) -> str:
        """What is written in t, b, timesteps and environments, in these names; quoted arguments stay."""
        return text if self == USUAL else self._pattern.sub(lambda found: self._words[found[0]], text)

    @functools.cached_property
    def _words(self) -> dict[str, str]:
        places = {"t": self.dim, "b": self.axis, "tb": self.dim + self.axis, "T": self.size[0], "B": self.size[1]}
        if self.axis == "b":
            return places | {"timestep": self.dim, "timesteps": self.dim}
        members = {"environment": f"member of {self.axis}", "environments": f"members of {self.axis}"}
        return places | {"timestep": self.dim, "timesteps": self.dim} | members

    @functools.cached_property
    def _pattern(self) -> re.Pattern:
        return re.compile(rf"(?<![\w'\-.])({'|'.join(sorted(self._words, key=len, reverse=True))})(?![\w'])")

    @property
    def size(self) -> tuple[str, str]:
        """What their lengths are called."""
        return self.dim.upper(), self.axis.upper()

    def of(self, letters: Iterable[str]) -> tuple[str, ...]:
        """The names of some of t and b, in this order."""
        letters = set(letters)
        return tuple(name for letter, name in zip("tb", (self.dim, self.axis), strict=True) if letter in letters)

    def joined(self, letters: Iterable[str]) -> str:
        """``tb``, or ``i p`` where a name has more than one letter."""
        names = self.of(letters)
        return ("" if all(len(n) == 1 for n in names) else " ").join(names)

    def letters(self, over: Any) -> str:
        """Which of t and b somebody names: one, both as a tuple, or one behind the other; ValueError for another."""
        known = {self.dim: "t", self.axis: "b", self.dim + self.axis: "tb", self.axis + self.dim: "tb"}
        if not isinstance(over, (str, tuple, list)) or not over:
            raise TypeError
        parts = over if not isinstance(over, str) else [over] if over in known else list(over)
        if not set(parts) <= set(known):
            raise ValueError
        found = "".join(known[part] for part in parts)
        return "".join(letter for letter in "tb" if letter in found)

    @contextlib.contextmanager
    def spoken(self) -> Iterator[None]:
        """In which an error of the compiler is told in these names; one that has been told in those of another program stays."""
        try:
            yield
        except RlfxError as error:
            if not getattr(error, "told", False):
                error.told = True  # type: ignore[attr-defined]
                if self != USUAL and error.args:
                    lines = str(error.args[0]).split("\n")
                    lines = [line if line.startswith("  at ") else self.text(line) for line in lines]
                    error.args = ("\n".join(lines), *error.args[1:])
            raise


#: What a program's dimensions are called if nobody says otherwise.
USUAL = Names()


def told(error: RlfxError) -> RlfxError:
    """An error that is written in the names of the user's programs already."""
    error.told = True  # type: ignore[attr-defined]
    return error


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError
    return value


NAME = Kind("a name", '"i"', _name)


def validate_names(dim: Any, batch: Any) -> tuple[Names, Any]:
    """The names of a program's dimensions, and its batch; or a DomainError."""
    dim, axis = expect("dim", dim, NAME), "b"
    if isinstance(batch, Mapping):
        axis, batch = expect("batch", batch, _AXIS)
        axis = expect("the name in batch=", axis, NAME, fix='Give batch={"p": 8}.')
    if dim == axis:
        fact = f"dim={dim!r} is the name of the parallel axis, too."
        fix = 'Give them names of their own: dim="i", batch={"p": 8}.'
        raise told(DomainError(located(fact, where=J.here(), fix=fix)))
    return Names(dim, axis), batch


def _one(value: Mapping) -> tuple:
    ((name, size),) = value.items()
    if size is None:
        raise ValueError
    return name, size


_AXIS = Kind("the size of one parallel axis, with its name or without", '{"p": 8}', _one)
