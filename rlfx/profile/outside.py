"""Operations named from outside: functions of packages are wrapped when a script imports them, and the script stays as it is."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from rlfx.errors import ProfileError, located
from rlfx.profile.annotate import operation


class Named(NamedTuple):
    """`operation`s around the calls of `path` in `module`; with `made`, around those of the functions that it returns."""

    operation: str
    module: str
    path: tuple[str, ...]
    made: bool = False


def parse(text: str) -> Named:
    """Read `NAME=MODULE:FUNCTION`.

    Raises:
      ProfileError: it is not of that form, or no name of an operation.

    Example:
      >>> parse("simulation=gymnasium.vector:SyncVectorEnv.step")
      Named(operation='simulation', module='gymnasium.vector', path=('SyncVectorEnv', 'step'), made=False)
      >>> parse("backpropagation=jax:value_and_grad()").made
      True
    """
    found = re.fullmatch(r"([^=]+)=([\w.]+):([\w.]+)(\(\))?", text)
    if not found:
        raise ProfileError(
            located(
                f"--operation {text!r} does not say which function is which operation.",
                fix="Write NAME=MODULE:FUNCTION, as in simulation=gymnasium.vector:SyncVectorEnv.step; with () after it, "
                "the functions that it returns are meant.",
            )
        )
    name, module, path, made = found.groups()
    operation(name)
    return Named(name, module, tuple(path.split(".")), bool(made))


@contextlib.contextmanager
def naming(wanted: Sequence[Named]) -> Iterator[set[Named]]:
    """Wrap the functions when their modules are imported; yields those that were not found yet."""
    missing = set(wanted)
    originals: list[tuple[Any, str, Any]] = []

    def imported(module: ModuleType) -> None:
        for named in [n for n in missing if n.module == module.__name__]:
            owner: Any = module
            for part in named.path[:-1]:
                owner = getattr(owner, part, None)
            function = vars(owner).get(named.path[-1]) if owner is not None else None
            if callable(function):
                originals.append((owner, named.path[-1], function))
                setattr(owner, named.path[-1], _wrapped(function, named))
                missing.discard(named)

    for name in {n.module for n in wanted} & sys.modules.keys():
        imported(sys.modules[name])
    finder = _Finder({n.module for n in missing}, imported)
    sys.meta_path.insert(0, finder)
    try:
        yield missing
    finally:
        sys.meta_path.remove(finder)
        for owner, name, function in reversed(originals):
            setattr(owner, name, function)


def _wrapped(function: Callable, named: Named) -> Callable:
    if not named.made:
        return operation(named.operation)(function)

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return operation(named.operation)(made) if callable(made) else made

    return make


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the others do, and says when one that is wanted has been executed."""

    def __init__(self, names: set[str], imported: Callable[[ModuleType], None]):
        self._names, self._imported = names, imported

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
