"""Ordinary JAX losses, and functions of a batch in general, in blocks of the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ScheduleError, located
from rlfx.recurrence.language.operands import type_of
from rlfx.transforms.blocks.flat import Axis, flatten
from rlfx.transforms.blocks.plan import Plan
from rlfx.transforms.blocks.run import Fetch, run_plan
from rlfx.transforms.blocks.schedule import make_plan


@dataclass(frozen=True)
class Report:
    """What :func:`incrementalize` does with a function.

    Attributes:
      batch, block_size: examples in all, and in a block.
      loops: passes over the blocks. More than one where something needs a statistic of the whole batch.
      kept: values kept for the whole batch: per-example results, what a later pass needs, operands of barriers.
      barriers: equations that have no rule for blocks, as ``"sort at file.py:12 (loss)"``: they run on the whole batch.
    """

    batch: int
    block_size: int
    loops: int
    kept: tuple[str, ...]
    barriers: tuple[str, ...]

    def __str__(self) -> str:
        blocks = math.ceil(self.batch / self.block_size)
        lines = [f"batch {self.batch} in {blocks} blocks of {self.block_size}, {self.loops} pass(es) over the blocks"]
        lines += [f"  kept for the whole batch: {v}" for v in self.kept]
        lines += [f"  not in blocks: {b}" for b in self.barriers]
        return "\n".join(lines)


@dataclass(frozen=True)
class Blocks:
    """How a batch is cut: ``size`` examples in a block, or into ``count`` blocks."""

    argnums: tuple[int, ...]
    size: int | None
    count: int | None

    def block_size(self, n: int) -> int:
        given, name = (self.size, "block_size") if self.size is not None else (self.count, "blocks")
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= n:
            raise DomainError(
                located(
                    f"{name}={given!r} is not an integer between 1 and the number of examples in the batch, {n}.",
                    fix=f"Give a divisor of {n}: the last block is shorter otherwise.",
                )
            )
        return given if self.size is not None else math.ceil(n / given)


def batch_size(args: Sequence[Any], argnums: Sequence[int]) -> int:
    """The leading axis that all leaves of the batch have in common.

    Raises:
      DomainError: naming the leaf that has none, or another one.
    """
    sizes: dict[str, int] = {}
    for i in argnums:
        if not 0 <= i < len(args):
            raise DomainError(
                located(f"batch_argnums={i}, but there are {len(args)} arguments.", fix="Pass the batch by position.")
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            name = f"argument {i}{jax.tree_util.keystr(path)}"
            if not type_of(leaf, name).shape:
                raise DomainError(
                    located(
                        f"{name} is a scalar: it has no batch axis.",
                        fix="Pass what all examples share as another argument.",
                    )
                )
            sizes[name] = type_of(leaf, name).shape[0]
    if not sizes:
        raise DomainError(located("The batch has no arrays.", fix="Name the batch with batch_argnums=."))
    (first, n), *rest = sizes.items()
    for name, size in rest:
        if size != n:
            raise DomainError(
                located(
                    f"The leaves of a batch have one leading axis: {first} has {n} examples, {name} has {size}.",
                    fix="Give every leaf the same leading axis, or pass it as another argument.",
                )
            )
    if n == 0:
        raise DomainError(located("The batch is empty.", fix="Give at least one example."))
    return n


@dataclass(frozen=True)
class Traced:
    """A function as a flat program on flat inputs: constants, then the leaves of its arguments.

    Attributes:
      batched: for each input whether it has the batch axis (the leading one).
    """

    jaxpr: Any
    inputs: tuple[Any, ...]
    batched: tuple[bool, ...]
    out_tree: Any
    n: int

    def function(self) -> Callable[..., list]:
        """The program on flat inputs."""
        consts = len(self.jaxpr.consts)
        return lambda *flat: jax.core.eval_jaxpr(self.jaxpr.jaxpr, list(flat[:consts]), *flat[consts:])

    def plan(self, fn: Callable[..., list] | None = None) -> Plan:
        """The plan of the program, or of another one on the same inputs."""
        made = jax.make_jaxpr(fn or self.function())(*map(spec, self.inputs))
        return make_plan(flatten(made.jaxpr), self.axes(len(made.consts)), self.n)

    def axes(self, consts: int = 0) -> list[Axis | None]:
        """Where the batch is in each input, after some constants."""
        return [None] * consts + [Axis(0) if b else None for b in self.batched]

    def in_blocks(
        self, fn: Callable[..., list], inputs: Sequence[Any], size: int, fetched: dict[int, Fetch] | None = None
    ) -> list:
        """``fn(*inputs)`` in blocks of ``size`` examples."""
        if self.n == 1 and not fetched:  # an axis of size 1 could be anywhere
            return fn(*inputs)
        made = jax.make_jaxpr(fn)(*map(spec, inputs))
        shift = len(made.consts)
        plan = make_plan(flatten(made.jaxpr), self.axes(shift), self.n)
        return run_plan(plan, size, [*made.consts, *inputs], {i + shift: f for i, f in (fetched or {}).items()})


def trace(fn: Callable, args: Sequence[Any], kwargs: dict, argnums: Sequence[int]) -> Traced:
    """Trace ``fn(*args, **kwargs)``; arrays that it captures become inputs, so that they can be differentiated."""
    n = batch_size(args, argnums)
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        type_of(leaf, f"argument {jax.tree_util.keystr(path)}")
    shapes = [jax.tree.map(spec, arg) if i in argnums else arg for i, arg in enumerate(args)]
    made, shape = jax.make_jaxpr(fn, return_shape=True)(*shapes, **kwargs)
    leaves = jax.tree.leaves((tuple(args), kwargs))
    batched = [i in argnums for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    batched += [False] * (len(leaves) - len(batched))
    inputs = (*made.consts, *(x if b else jnp.asarray(x) for x, b in zip(leaves, batched, strict=True)))
    return Traced(made, inputs, (*(False,) * len(made.consts), *batched), jax.tree.structure(shape), n)


def spec(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, wherever it is."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def in_blocks(jaxpr: Any, batched: Sequence[bool], blocks: Blocks) -> Any:
    """``jaxpr -> jaxpr`` that computes in blocks of the inputs that are ``batched``."""
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals]
    n = batch_size([[x for x, b in zip(specs, batched, strict=True) if b]], (0,))
    size = blocks.block_size(n)
    axes = [*(None,) * len(jaxpr.consts), *(Axis(0) if b else None for b in batched)]
    plan = make_plan(flatten(jaxpr.jaxpr), axes, n)
    return jax.make_jaxpr(lambda *args: run_plan(plan, size, [*jaxpr.consts, *args]))(*specs)


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


@dataclass(frozen=True)
class InBlocks:
    """A function that computes in blocks of its batch; see :func:`rlfx.incrementalize`."""

    fn: Callable
    blocks: Blocks
    strict: bool = False

    @property
    def __wrapped__(self) -> Callable:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = trace(self.fn, args, kwargs, self.blocks.argnums)
        size = self.blocks.block_size(traced.n)
        check(traced.plan(), self.fn, self.strict)
        outs = differentiable(traced, size)(*traced.inputs)
        return jax.tree.unflatten(traced.out_tree, outs)

    def explain(self, *args: Any, gradient: bool = False, **kwargs: Any) -> Report:
        """What happens on these arguments; ``gradient=True``: of ``value_and_grad`` for what is not the batch."""
        traced = trace(self.fn, args, kwargs, self.blocks.argnums)
        size = self.blocks.block_size(traced.n)
        fn = traced.function()
        if gradient:
            wanted = [
                i for i, (x, b) in enumerate(zip(traced.inputs, traced.batched, strict=True)) if is_float(x) and not b
            ]
            fn = functools.partial(value_and_grads, traced.function(), wanted)
        return report(traced.plan(fn), size)


def report(plan: Plan, size: int) -> Report:
    """A plan in words."""
    kept = tuple(f"{J.short_dtype(v.aval.dtype)}[{','.join(map(str, v.shape))}]" for v in plan.kept())
    barriers = tuple(f"{e.op} at {e.source}" for e in plan.barriers)
    return Report(plan.n, size, len(plan.loops), kept, barriers)


def check(plan: Plan, fn: Callable, strict: bool) -> None:
    """Raise if nothing depends on the batch; if ``strict``, at the first equation that does not run in blocks."""
    if not plan.loops and not plan.barriers:
        raise DomainError(
            located(
                "Nothing that the function returns depends on the batch.",
                where=J.function_source(fn),
                fix="Name the argument that is the batch with batch_argnums=.",
            )
        )
    for equation in plan.barriers if strict else ():
        raise ScheduleError(
            located(
                f"{equation.op} has no rule for blocks of the batch: it needs all {plan.n} examples at once.",
                where=equation.source,
                fix="Compute it outside of the loss, or drop strict=True: it then runs on the whole batch.",
            )
        )


def value_and_grads(fn: Callable[..., list], wanted: Sequence[int], *flat: Any) -> list:
    """All results, and the gradients of the first one for the inputs ``wanted``."""

    def first(chosen: Sequence[Any]) -> tuple[Any, list]:
        inputs = list(flat)
        for i, value in zip(wanted, chosen, strict=True):
            inputs[i] = value
        loss, *others = fn(*inputs)
        return loss, others

    (loss, others), grads = jax.value_and_grad(first, has_aux=True)([flat[i] for i in wanted])
    return [loss, *others, *grads]


def _pullback(fn: Callable[..., list], wanted: Sequence[int], given: Sequence[int], *flat_and_cts: Any) -> list:
    """The cotangents of the inputs ``wanted`` from those of the results ``given``."""
    flat = flat_and_cts[: len(flat_and_cts) - len(given)]
    cts = flat_and_cts[len(flat) :]

    def results(chosen: Sequence[Any]) -> list:
        inputs = list(flat)
        for i, value in zip(wanted, chosen, strict=True):
            inputs[i] = value
        outs = fn(*inputs)
        return [outs[i] for i in given]

    _, pull = jax.vjp(results, [flat[i] for i in wanted])
    return pull(list(cts))[0]


def differentiable(traced: Traced, size: int, fetched: dict[int, Fetch] | None = None) -> Callable[..., list]:
    """The program in blocks, on flat inputs; so is its derivative (reverse mode).

    If the first result is a real scalar, the loss, its gradient is computed with it, in the same blocks, and scaled in
    the backward pass. Cotangents of other results are honoured by another pass.
    """
    fn = traced.function()
    run = functools.partial(traced.in_blocks, size=size, fetched=fetched)

    @jax.custom_vjp
    def f(*flat: Any) -> list:
        return run(fn, flat)

    def forward(*primals: Any) -> tuple[list, Any]:
        flat = [p.value for p in primals]
        wanted = [i for i, p in enumerate(primals) if p.perturbed and is_float(p.value)]
        shapes = jax.eval_shape(fn, *map(spec, flat))
        if not (shapes and shapes[0].shape == () and jnp.issubdtype(shapes[0].dtype, jnp.floating)):
            return run(fn, flat), (flat, dict.fromkeys(wanted))
        found = run(functools.partial(value_and_grads, fn, wanted), flat)
        outs, grads = found[: len(shapes)], found[len(shapes) :]
        return outs, (flat, dict(zip(wanted, grads, strict=True)))

    def backward(residuals: Any, cts: Any) -> tuple:
        flat, grads = residuals
        wanted = list(grads)
        given = [i for i, ct in enumerate(cts) if not isinstance(ct, SymbolicZero) and is_float(ct)]
        total: list[Any] = [None] * len(flat)
        if given and given[0] == 0 and all(g is not None for g in grads.values()):
            for i in wanted:
                total[i] = grads[i] * cts[0].astype(grads[i].dtype)
            given = given[1:]
        if given and wanted:
            pulled = _pulled_in_blocks(traced, size, wanted, given, flat, [cts[i] for i in given])
            for i, ct in zip(wanted, pulled, strict=True):
                total[i] = ct if total[i] is None else total[i] + ct
        return tuple(ct if ct is None else _beside(ct, x) for ct, x in zip(total, flat, strict=True))

    f.defvjp(forward, backward, symbolic_zeros=True)
    return f


def _beside(ct: Any, x: Any) -> Any:
    """A cotangent in the memory of its primal."""
    on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(ct, jax.memory.Space.Host) if on_host else ct


def _pulled_in_blocks(
    traced: Traced, size: int, wanted: list[int], given: list[int], flat: Sequence[Any], cts: Sequence[Any]
) -> list:
    """Cotangents in blocks; those of results with the batch as their leading axis are cut with it."""
    axes = traced.axes()
    made = jax.make_jaxpr(functools.partial(_pullback, traced.function(), wanted, given))(*map(spec, (*flat, *cts)))
    along = make_plan(flatten(jax.make_jaxpr(traced.function())(*map(spec, flat)).jaxpr), axes, traced.n)
    outs = [along.axes.get(v) for v in along.flat.outputs]  # type: ignore[arg-type]
    plan = make_plan(flatten(made.jaxpr), [*(None,) * len(made.consts), *axes, *(outs[i] for i in given)], traced.n)
    return run_plan(plan, size, [*made.consts, *flat, *cts])
