"""networkx, imported when it is first used: it takes longer than the rest of ``import rlfx`` together."""

from __future__ import annotations

import importlib
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

__all__ = ["nx"]
