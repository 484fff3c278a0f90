"""What is imported when it is first used: modules of packages, and networkx, longer than the rest of ``import rlfx``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx
else:

    class _WhenUsed:
        """A module by name, whose attributes import it."""

        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    nx = _WhenUsed("networkx")

__all__ = ["modules", "nx"]


def modules(package: str, *names: str) -> Callable[[str], Any]:
    """``__getattr__`` of a package: these modules of it are imported where they are first named.

    Example:
      >>> modules("rlfx", "errors")("errors").__name__
      'rlfx.errors'
    """

    def named(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return named
