"""A batch in host memory, driven from Python: one jitted call a block, the next block on its way meanwhile.

Unlike the form inside one program, this does not depend on how XLA treats host buffers in loops, and the batch may be
larger than what one program can address: NumPy arrays, memory-mapped files, or arrays in pinned host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from rlfx.errors import ScheduleError, located
from rlfx.transforms.blocks.flat import Array, Block
from rlfx.transforms.blocks.loss import Blocks, Traced, check, is_float, spec, trace, value_and_grads
from rlfx.transforms.blocks.offloaded import require_host_memory
from rlfx.transforms.blocks.plan import Loop, Part, Plan
from rlfx.transforms.blocks.run import advance, finish, results, run_whole, slices_of, start


@dataclass(frozen=True)
class Driven:
    """A function that is computed by several jitted calls; see :func:`rlfx.offload`.

    Attributes:
      compiled: the jitted calls of arguments seen before, as ``jax.jit`` keeps them.
    """

    fn: Callable
    blocks: Blocks
    compiled: dict[Any, _Driver] = field(default_factory=dict, compare=False, repr=False)

    @property
    def __wrapped__(self) -> Callable:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        require_host_memory(jax.devices()[0])
        leaves, structure = jax.tree.flatten((args, kwargs))
        key = (structure, *((spec(x).shape, spec(x).dtype, getattr(jax.typeof(x), "weak_type", False)) for x in leaves))
        batch = [x for i in self.blocks.argnums if i < len(args) for x in jax.tree.leaves(args[i])]
        if any(isinstance(x, jax.core.Tracer) for x in batch):
            raise ScheduleError(
                located(
                    "The driver form makes several jitted calls and reads the batch between them: the batch cannot be "
                    "traced or differentiated.",
                    where=_name(self.fn),
                    fix='Call it outside of jax.jit and vmap, or use rlfx.offload(..., form="program").',
                )
            )
        if key not in self.compiled:
            traced = trace(self.fn, [_plain(a) for a in args], kwargs, self.blocks.argnums)
            check(traced.plan(), self.fn, strict=False)
            self.compiled[key] = _Driver(traced, self.blocks.block_size(traced.n))
        driver = self.compiled[key]
        return jax.tree.unflatten(driver.traced.out_tree, driver(leaves))


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _plain(arg: Any) -> Any:
    """The argument with concrete arrays in place of tracers of ``jax.grad``: only shapes matter for tracing."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.core.Tracer) else x, arg)


@dataclass
class _Driver:
    """The jitted calls for one structure of arguments."""

    traced: Traced
    size: int
    plans: dict[tuple[int, ...], _Steps] = field(default_factory=dict)

    def __call__(self, leaves: Sequence[Any]) -> list:
        traced = self.traced
        consts = len(traced.inputs) - len(leaves)
        inputs = [*traced.inputs[:consts], *leaves]
        batch = {i: _on_host(x) for i, x in enumerate(inputs) if traced.batched[i]}
        shared = [i for i in range(len(inputs)) if i not in batch]

        def whole(values: Sequence[Any]) -> list:
            found: list[Any] = [batch.get(i) for i in range(len(inputs))]
            for i, value in zip(shared, values, strict=True):
                found[i] = value
            return found

        @jax.custom_vjp
        def f(*values: Any) -> list:
            return self.steps(())(whole(values))

        def forward(*primals: Any) -> tuple[list, Any]:
            wanted = tuple(i for i, p in zip(shared, primals, strict=True) if p.perturbed and is_float(p.value))
            found = self.steps(wanted)(whole([p.value for p in primals]))
            outs = len(found) - len(wanted)
            return found[:outs], dict(zip(wanted, found[outs:], strict=True))

        def backward(grads: dict[int, Any], cts: Sequence[Any]) -> tuple:
            if any(not isinstance(ct, SymbolicZero) and is_float(ct) and np.any(np.asarray(ct)) for ct in cts[1:]):
                raise ScheduleError(
                    located(
                        "The driver form differentiates its first result, the loss; another result has a cotangent, too.",
                        fix='Return the sum of what is to be differentiated, or use rlfx.offload(..., form="program").',
                    )
                )
            scale = cts[0]
            if isinstance(scale, SymbolicZero):
                return (None,) * len(shared)
            return tuple(grads[i] * scale.astype(grads[i].dtype) if i in grads else None for i in shared)

        f.defvjp(forward, backward, symbolic_zeros=True)
        return f(*(inputs[i] for i in shared))

    def steps(self, wanted: tuple[int, ...]) -> _Steps:
        """The calls that compute the results, and the gradients of the first for the inputs ``wanted``."""
        if wanted not in self.plans:
            fn = self.traced.function()
            if wanted:
                loss = jax.eval_shape(fn, *map(spec, self.traced.inputs))[0]
                if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
                    raise ScheduleError(
                        located(
                            f"The first result is differentiated, and must be a real scalar: it is {loss.dtype}"
                            f"{list(loss.shape)}. A loss is a reduction over the batch.",
                            fix="Return a mean or a sum over the batch first.",
                        )
                    )
                fn = functools.partial(value_and_grads, fn, wanted)
            self.plans[wanted] = _Steps(self.traced.plan(fn), self.size, len(self.traced.inputs))
        return self.plans[wanted]


@dataclass
class _Steps:
    """One jitted call for what comes before a loop, and one for a block of each loop. Accumulators are donated."""

    plan: Plan
    size: int
    inputs: int
    jitted: dict[Any, Callable] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Any]) -> list:
        plan = self.plan
        env: dict[Array, Any] = dict(zip(plan.flat.inputs[-self.inputs :], inputs, strict=True))
        assert len(plan.flat.inputs) == self.inputs
        hosted = {v for v in plan.flat.inputs if isinstance(env[v], _Hosted)}
        for value in hosted & plan.read_whole():
            env[value] = env[value].block(0, plan.n)
        for i, equations in enumerate(plan.whole):
            needed = [v for e in equations for v in e.ins if isinstance(v, Array) and v in env]
            self.evaluate(i, equations, list(dict.fromkeys(needed)), env)
            if i < len(plan.loops):
                self.loop(i, plan.loops[i], env, hosted)
        return results(plan, env)

    def evaluate(self, i: int, equations: Sequence[Any], needed: list[Array], env: dict[Array, Any]) -> None:
        outs = [v for e in equations for v in e.outs]

        def run(values: list) -> list:
            local = dict(zip(needed, values, strict=True))
            run_whole(equations, local)
            return [local[v] for v in outs]

        if equations:
            call = self.jitted.setdefault(("whole", i), jax.jit(run))
            env.update(zip(outs, call([env[v] for v in needed]), strict=True))

    def loop(self, i: int, loop: Loop, env: dict[Array, Any], hosted: set[Array]) -> None:
        plan = self.plan
        ahead = slices_of(loop, {v for v in hosted if isinstance(env[v], _Hosted)})
        sliced = slices_of(loop, {v for v in env if v not in hosted or not isinstance(env[v], _Hosted)})
        wholes = list(dict.fromkeys([*(s.value for s in loop.wholes()), *(s.value for s in sliced)]))

        def step(size: int, state: Any, values: list, loaded: list, first: Any) -> Any:
            local = dict(zip(wholes, values, strict=True))
            block = Block(first, size, first == 0)
            return advance(plan, loop, local, state, block, dict(zip(ahead, loaded, strict=True)))

        call = self.jitted.setdefault(("step", i), jax.jit(step, static_argnums=0, donate_argnums=1))
        begin = self.jitted.setdefault(
            ("start", i), jax.jit(lambda values: start(loop, dict(zip(wholes, values, strict=True))))
        )
        values = [env[v] for v in wholes]
        state = begin(values)
        bounds = [(first, min(self.size, plan.n - first)) for first in range(0, plan.n, self.size)]
        following = [_read(env, slot, *bounds[0]) for slot in ahead]
        parts: list[list] = [[] for _ in loop.kept]
        for c, (first, size) in enumerate(bounds):
            loaded = following
            if c + 1 < len(bounds):  # on its way while this block is computed with
                following = [_read(env, slot, *bounds[c + 1]) for slot in ahead]
            state, kept = call(size, state, values, loaded, jnp.int32(first))
            for collected, part in zip(parts, kept, strict=True):
                collected.append(part)
        finish(plan, loop, env, state, parts)


def _read(env: dict[Array, Any], slot: Part, first: int, size: int) -> Any:
    assert slot.axis.dim == 0
    return env[slot.value].block(first, size)


@dataclass(frozen=True)
class _Hosted:
    """A leaf of the batch: a NumPy array, or one in pinned host memory."""

    whole: Any

    def block(self, first: int, size: int) -> Any:
        """Examples ``[first, first + size)``, on their way to the device."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if isinstance(self.whole, np.ndarray):
            pinned = jax.device_put(self.whole[first : first + size], device.with_memory_kind("pinned_host"))
            return jax.device_put(pinned, device)
        return _cut(self.whole, first, size)


@functools.partial(jax.jit, static_argnums=2)
def _cut(x: Any, first: Any, size: int) -> Any:
    return jax.device_put(jax.lax.dynamic_slice_in_dim(x, first, size), jax.memory.Space.Device)


def _on_host(x: Any) -> _Hosted:
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space != jax.memory.Space.Host:
        return _Hosted(jax.device_put(x, jax.memory.Space.Host))
    return _Hosted(x if isinstance(x, jax.Array) else np.asarray(x))
