"""A per-environment step as a scalar program: from pytrees of arrays to flat lists of elements and back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.rules import DENSE_FROM, RULES
from rlfx.transforms.steps.scalarize import Dense, Interpreter, Target, UnsupportedPrimitive, array_of, cell, keys_of

_LEAF = jax.tree.structure(0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a pytree of one environment's arrays becomes a flat list of scalars (the words, for typed keys)."""

    tree: Any
    avals: tuple[Any, ...]

    @classmethod
    def of(cls, values: Any, lead: int) -> Layout:
        """The layout of arrays with ``lead`` leading axes (environments, timesteps)."""
        leaves, tree = jax.tree.flatten(values)
        return cls(tree, tuple(jax.ShapeDtypeStruct(x.shape[lead:], x.dtype) for x in leaves))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Per leaf, the shape of its scalars: a key's words are its last axes."""
        return [(*a.shape, *F.key_shape(a)) if J.is_key(a) else a.shape for a in self.avals]

    @property
    def dtypes(self) -> list[np.dtype]:
        """The dtype of each scalar."""
        return [
            d
            for a, s in zip(self.avals, self.shapes, strict=True)
            for d in [np.dtype("uint32") if J.is_key(a) else np.dtype(a.dtype)] * math.prod(s)
        ]

    @property
    def structs(self) -> Any:
        """The avals as a pytree."""
        return jax.tree.unflatten(self.tree, self.avals)

    def split(self, values: Any, lead: int) -> list[jax.Array]:
        """The scalars of arrays ``[*lead, ...]``, each ``[*lead]``."""
        out = []
        for x, aval, shape in zip(jax.tree.leaves(values), self.avals, self.shapes, strict=True):
            x = jax.random.key_data(x) if J.is_key(aval) else x
            x = x.reshape(*x.shape[:lead], math.prod(shape))
            out.extend(x[..., i] for i in range(x.shape[-1]))
        return out

    def join(self, flat: Sequence[jax.Array], lead: tuple[int, ...]) -> Any:
        """The inverse of :meth:`split`: ``lead`` is the shape of each scalar (a leaf of size 0 has none to tell)."""
        leaves, scalars = [], iter(flat)
        for aval, shape in zip(self.avals, self.shapes, strict=True):
            columns = [next(scalars) for _ in range(math.prod(shape))]
            empty = jnp.zeros((*lead, *shape), aval.dtype) if not columns else None
            x = columns[0] if not shape else empty if not columns else jnp.stack(columns, -1).reshape(*lead, *shape)
            leaves.append(F.wrap_key(x, aval) if J.is_key(aval) else x)
        return jax.tree.unflatten(self.tree, leaves)

    def elements(self, flat: Sequence[Any]) -> list[np.ndarray]:
        """A flat list of scalars as one array of elements for each leaf."""
        out, scalars = [], iter(flat)
        for aval, shape in zip(self.avals, self.shapes, strict=True):
            x = array_of([next(scalars) for _ in range(math.prod(shape))], shape)
            out.append(keys_of(x, aval.shape) if J.is_key(aval) else x)
        return out

    def flatten(self, ip: Interpreter, outputs: Sequence[Any]) -> list[jax.Array]:
        """Elements as a flat list of blocks, each of the scalar's dtype."""
        flat = [
            e
            for x in outputs
            for key in ip.elements(x).reshape(-1)
            for e in (key if isinstance(key, tuple) else (key,))
        ]
        return [ip.full(e).astype(d) for e, d in zip(flat, self.dtypes, strict=True)]

    def flatten_leaves(self, ip: Interpreter, outputs: Sequence[Any]) -> list[Any]:
        """For each leaf, its scalars; or one array ``[..., *block]``, where it is kept as one."""
        return [
            x.array if isinstance(x, Dense) and not x.uniform else Layout(None, (aval,)).flatten(ip, [x])
            for x, aval in zip(outputs, self.avals, strict=True)
        ]

    def join_leaves(self, leaves: Sequence[Any], lead: tuple[int, ...]) -> Any:
        """The inverse of :meth:`flatten_leaves`, the block as the last of the leading axes ``lead``."""
        out = [
            jnp.moveaxis(x, -1, len(lead) - 1) if hasattr(x, "ndim") else Layout(_LEAF, (aval,)).join(x, lead)
            for x, aval in zip(leaves, self.avals, strict=True)
        ]
        return jax.tree.unflatten(self.tree, out)


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """One timestep of one environment, traced: ``(shared, t, b, carry, x) -> (carry, y)``."""

    closed: Any
    shared: Layout
    carry: Layout
    xs: Layout
    ys: Layout

    @property
    def has_products(self) -> bool:
        """Whether its scalar form leaves matrix products, where the target has them."""
        return _has_products(self.closed.jaxpr)

    def scalar_step(self, target: Target) -> Callable:
        """``(shared leaves, t, b, flat carry, flat x) -> (flat carry, y)`` on blocks of environments.

        ``shared`` holds arrays that all environments share, or arrays of elements. ``y`` has an entry for each leaf,
        see :meth:`Layout.flatten_leaves`.
        """

        def step(shared: Sequence[Any], t: Any, b: Any, carry: Sequence[Any], x: Sequence[Any]):
            ip = Interpreter(target, RULES)
            uniform = [s if isinstance(s, (np.ndarray, Dense)) else ip.uniform(s) for s in shared]
            inputs = [*uniform, cell(t), cell(b), *self.carry.elements(carry), *self.xs.elements(x)]
            out = ip.run(self.closed.jaxpr, self.closed.consts, inputs)
            size = len(self.carry.avals)
            return self.carry.flatten(ip, out[:size]), self.ys.flatten_leaves(ip, out[size:])

        return step

    def unsupported(self, dense_matmul: bool = False) -> str | None:
        """What has no scalar form, where, and what to do; None if everything has. Computes nothing."""
        block = (4,)
        step = self.scalar_step(Target(block, dense_matmul=dense_matmul))

        def blocks(dtypes):
            return [jax.ShapeDtypeStruct(block, d) for d in dtypes]

        index = jax.ShapeDtypeStruct((), jnp.int32), *blocks([jnp.int32])
        try:
            jax.eval_shape(step, list(self.shared.avals), *index, blocks(self.carry.dtypes), blocks(self.xs.dtypes))
        except UnsupportedPrimitive as error:
            return str(error)
        return None


def _has_products(jaxpr: Any) -> bool:
    dot = J.primitive("dot_general")
    products = (e for e in J.equations_in({"jaxpr": jaxpr}) if e.primitive is dot)
    return any(max(math.prod(v.aval.shape) for v in e.invars) >= DENSE_FROM for e in products)


@contextlib.contextmanager
def reporting_leaks() -> Iterator[None]:
    """Raise ProgramError where a step uses a value that leaked from another trace."""
    try:
        yield
    except J.UnexpectedTracerError as error:
        fact = "fuse_steps: the step uses a value that leaked from another trace, so it is not pure."
        fix = "Keep what the next step needs in the state, and nothing outside."
        raise ProgramError(located(fact, where=J.leaked_from(error), fix=fix)) from error


def trace_step(body: Callable, shared: Any, carry: Any, xs: Any) -> StepProgram:
    """Trace ``body(shared, t, b, carry, x) -> (carry, y)`` at the types of batched arguments.

    Raises:
      ProgramError: the carry that comes back differs in structure, shape or dtype.
    """
    layouts = Layout.of(shared, 0), Layout.of(carry, 1), Layout.of(xs, 2)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    avals = [*layouts[0].avals, index, index, *layouts[1].avals, *layouts[2].avals]
    sizes = np.cumsum([len(layouts[0].avals), 2, len(layouts[1].avals)])
    trees: list[Any] = []

    def flat(*leaves):
        first, second, third = sizes
        t, b = leaves[first:second]
        new, y = body(
            jax.tree.unflatten(layouts[0].tree, leaves[:first]),
            t,
            b,
            jax.tree.unflatten(layouts[1].tree, leaves[second:third]),
            jax.tree.unflatten(layouts[2].tree, leaves[third:]),
        )
        y = jax.tree.map(jnp.asarray, y)
        trees.extend([jax.tree.structure(new), jax.tree.structure(y)])
        return [*jax.tree.leaves(new), *jax.tree.leaves(y)]

    closed = F.trace(flat, *avals)
    new_tree, y_tree = trees[:2]
    if new_tree != layouts[1].tree:
        fact = f"The step returns a carry of structure {new_tree}, and it was given {layouts[1].tree}."
        raise ProgramError(located(fact, fix="Return the state with the structure it came in."))
    size = len(layouts[1].avals)
    out = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.out_avals]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(layouts[1].structs)[0]]
    for path, given, returned in zip(paths, layouts[1].avals, out, strict=False):
        if (given.shape, given.dtype) != (returned.shape, returned.dtype):
            fact = (
                f"carry{path} is {given.dtype}{list(given.shape)} and comes back as "
                f"{returned.dtype}{list(returned.shape)}."
            )
            raise ProgramError(located(fact, fix="Return it with the type it came in (astype, reshape)."))
    return StepProgram(closed, *layouts, Layout(y_tree, tuple(out[size:])))
