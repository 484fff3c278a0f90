"""The forward loops of a compiled program as fused steps: the body of a loop as a function of one environment."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._target import Target
from rlfx.recurrence.execute.loops import RunningLoop
from rlfx.recurrence.execute.values import Value, evaluate
from rlfx.recurrence.ir.program import Equation, Lit, Program, Var
from rlfx.recurrence.language.index import Point
from rlfx.recurrence.schedule.schedule import REGISTER, Loop
from rlfx.transforms.steps.program import trace_step
from rlfx.transforms.steps.scan import fuse_scan, kernel_of, unsupported_by

#: What is started for itself wherever it is: a step that does not need it has no place for it.
_APART = frozenset(map(J.primitive, ("dot_general", "conv_general_dilated", "scan", "while", "cond")))

#: Numbers of one environment up to which a value is one of a few scalars: wider ones are best of all timesteps at once.
_FEW = 16


#: Bytes of weights that a kernel multiplies with in a timestep, at most. An H200 takes 0.8 ms for 128 timesteps of 1,024
#: environments with 19 KiB of them, 3.8 with 134 and 21.5 with 268, where the loop takes 2.5 to 3.7. With far more, kernels take
#: minutes to compile. (``benchmarks/results/gpu/widths.json``, ``benchmarks/kernel_limits.py``)
MOST_WEIGHTS = 256 * 1024


def products_prevail(multiplications: int, n: int) -> bool:
    """Whether a CPU spends a timestep of n environments in matrix products of so many multiplications each.

    Seconds on one core, fitted to rollouts of PPO: fusing saves dispatch, and passes over the environments' values. Where
    the products take more than three times that, nothing is left to gain: two networks of 64 x 64 and 1024 environments.
    """
    saved = 8e-6 + 25e-9 * n
    return multiplications * n / 70e9 > 3 * saved


@dataclasses.dataclass(frozen=True)
class FusedLoops:
    """How the loops of an acting pass run: fused where their body is supported.

    Attributes:
      backend, tile: of :func:`fuse_scan`.
      parts: of the loop that it runs: what is fused, and what follows from that; None before it was given one.
      kernel: which kernel its steps are; None: operations of XLA.
    """

    backend: str = "auto"
    tile: int | None = None
    parts: tuple[Loop, Loop] | None = None
    kernel: str | None = None
    rewritable = False
    whole = False

    def __str__(self) -> str:
        return "fused scan"

    def of(self, program: Program, loop: Loop, target: Target) -> tuple[FusedLoops | None, str | None]:
        """What runs a forward loop whose steps have a scalar form, and that it is fused; or why it is not."""
        if loop.direction != "forward":
            return None, None
        kernel = kernel_of(self.backend, target)
        parts = self._parts(program, loop, target, kernel)
        body = None if isinstance(parts, str) else _Body.of(program, parts[0], program.dims_of, kernel)
        why = parts if body is None else _primitives(body, target, kernel)
        if why is not None:
            return None, f"not fused: {why}"
        checked = ", compared with the plain scan where it first runs" if self.backend == "auto" else ""
        form = "scalarised program" if kernel is None else f"kernel ({kernel}){checked}"
        return dataclasses.replace(self, parts=parts, kernel=kernel), f"fused: its steps are one {form}"

    def takes(self, e: Equation) -> bool:
        """Whether the one program of its steps is the place for an equation that the next step does not need."""
        return e.is_pointwise and not e.has_effects and _is_small(e) and not J.contains(e.op, dict(e.params), _APART)

    def run(self, running: RunningLoop, state: Sequence, times: Any, slices: Sequence) -> tuple:
        """The loop's final state and stacked values, as ``RunningLoop.advance`` gives them."""
        assert self.parts is not None
        core, rest = (
            RunningLoop(running.run, dataclasses.replace(running.node, loop=part, runner=None)) for part in self.parts
        )
        known = dict(zip(running.operands[0], slices, strict=True))
        final, stacked = self._fused(core, state, times, known)
        known.update(zip(core.loop.stacked, stacked, strict=True))
        known.update(zip(rest.loop.stacked, _after(rest, core.loop.stacked, times, known), strict=True))
        return final, [known[v] for v in running.loop.stacked]

    def _parts(self, program: Program, loop: Loop, target: Target, kernel: str | None) -> tuple[Loop, Loop] | str:
        parts = _split(loop)
        if self.backend != "auto" or isinstance(parts, str):
            return parts
        costs = {e: _multiplications(e, program) for e in parts[0].body}
        total, n = sum(costs.values()), program.domain.batch or 1
        if target.platform == "cpu" and products_prevail(total, n):
            many = f"{total * n / 1e6:.1f} million multiplications a timestep ({_dearest(costs)})"
            return f'on a CPU its time is that of matrix products, {many}; backend="scan" fuses around them'
        if kernel is not None and 4 * total > MOST_WEIGHTS:
            many = f"{4 * total / 1024:.0f} KiB of weights ({_dearest(costs)})"
            return f'a kernel with {many} is slower than the loop; backend="triton" fuses it nevertheless'
        return parts

    def _fused(self, running: RunningLoop, state: Sequence, times: Any, slices: dict) -> tuple:
        run, loop = running.run, running.loop
        program, n = run.program, run.extent.batch
        body = _Body.of(program, loop, lambda v: run.env[v].dims, self.kernel)

        def each(data, dims, axis=0):  # what all environments share, once for each of them
            return data if "b" in dims else jnp.broadcast_to(jnp.expand_dims(data, axis), _widened(data, axis, n))

        kept = [each(x, running.state_dims[v]) for v, x in zip(loop.depth, state, strict=True)]
        own = [run.env[v].data for v in body.own]
        xs = [each(slices[v], run.env[v].dims, 1) for v in body.moving]
        scan = fuse_scan(body.point, times.shape[0], backend=self.backend, tile=self.tile)
        shared = [run.env[v].data for v in body.shared]
        (_, kept), ys = scan(shared, (own, kept), xs, t0=run.t0 + times[0], b0=run.extent.first)
        final = [x if "b" in running.state_dims[v] else x[0] for v, x in zip(loop.depth, kept, strict=True)]
        stacked = [y if "b" in program.dims_of(v) else y[:, 0] for v, y in zip(loop.stacked, ys, strict=True)]
        return final, stacked


def _dearest(costs: dict[Equation, int]) -> str:
    """Where most is multiplied."""
    return max(costs, key=costs.__getitem__).where


def _multiplications(e: Equation, program: Program) -> int:
    """Of one environment, in a product with weights that all share."""
    if e.op is not J.primitive("dot_general") or e.is_ragged:
        return 0
    weights = [v for v in e.inputs if isinstance(v, Var) and not program.dims_of(v)]
    return max((math.prod(v.shape) for v in weights if len(v.shape) > 1), default=0)


def _after(rest: RunningLoop, stacked: Sequence[Var], times: Any, known: dict) -> list:
    """The stacked values of what runs after a fused loop, given the values of that loop at these timesteps."""
    if not rest.loop.body:
        return []
    run, whole = rest.run, dict(rest.run.env)
    run.env.update({v: Value(known[v], run.program.dims_of(v) | {"t"}) for v in stacked})
    _, ys = rest.advance([], times, [known[v] for v in rest.operands[0]])
    run.env.clear()
    run.env.update(whole)
    return ys


def _widened(x: Any, axis: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:axis], n, *x.shape[axis:])


@dataclasses.dataclass(frozen=True, eq=False)
class _Body:
    """The body of a loop for one environment.

    Attributes:
      made: what a kernel makes itself of what it uses: small constants, keys of its environments.
      shared, own: what it uses of what does not change with t: the same for all environments, or each its own.
      moving: what changes with t.
    """

    program: Program
    loop: Loop
    made: tuple[Equation, ...]
    shared: tuple[Var, ...]
    own: tuple[Var, ...]
    moving: tuple[Var, ...]

    @classmethod
    def of(cls, program: Program, loop: Loop, dims: Callable[[Var], frozenset], kernel: str | None) -> _Body:
        given = {program.now, program.b, *(v for e in loop.body for v in e.outputs)}
        used = [v for e in loop.body for v in e.point_inputs if isinstance(v, Var)]
        made = () if kernel is None else _made(program, [v for v in used if v not in given])
        given.update(v for e in made for v in e.outputs)
        used += [v for e in made for v in e.inputs if isinstance(v, Var)]
        outside = [v for v in dict.fromkeys(used) if v not in given]
        return cls(program, loop, made, tuple(v for v in outside if not dims(v)),
                   tuple(v for v in outside if dims(v) == {"b"}), tuple(v for v in outside if "t" in dims(v)))  # fmt: skip

    def point(self, shared: Sequence, t: Any, b: Any, carry: tuple, x: Sequence) -> tuple:
        """One timestep: ``fuse_scan``'s body. ``carry`` is (what each environment owns, the registers)."""
        own, state = carry
        registers = dict(zip(self.loop.depth, state, strict=True))
        here = dict(zip((*self.shared, *self.own, *self.moving), (*shared, *own, *x), strict=True))
        here |= {self.program.now: t, self.program.b: b}
        for e in (*self.made, *self.loop.body):
            if e in self.loop.reads:
                here[e.outputs[0]] = registers[e.source]
                continue
            operands = [a.value if isinstance(a, Lit) else here[a] for a in e.inputs]
            here.update(zip(e.outputs, evaluate(e, operands), strict=True))
        return (own, [here[v] for v in self.loop.depth]), [here[v] for v in self.loop.stacked]


def _is_small(e: Equation) -> bool:
    return all(math.prod(v.shape) <= _FEW for v in e.outputs)


def _made(program: Program, used: Sequence[Var]) -> tuple[Equation, ...]:
    """What follows from nothing, or from the number of the environment and keys that all environments share.

    Nothing is started to make it, and it is made once: compilers move it before the first timestep.
    """
    definition = program.definitions()

    @functools.cache
    def follows(v: Var) -> bool:
        e = definition.get(v)
        if e is None:
            return v is program.b or (J.is_key(v) and not program.dims_of(v))
        return e.is_pointwise and _is_small(e) and all(follows(u) for u in e.inputs if isinstance(u, Var))

    found: set[Equation] = set()
    todo = [v for v in used if follows(v)]
    while todo:
        v = todo.pop()
        e = definition.get(v)
        if e is not None and e not in found:
            found.add(e)
            todo += [u for u in e.inputs if isinstance(u, Var)]
    return tuple(e for e in program.equations if e in found)


def _split(loop: Loop) -> tuple[Loop, Loop] | str:
    """A forward loop in two: the recurrence with what is a function of one environment, and the rest; or why there is none.

    The rest cannot be said of one environment, or depends on what cannot, and the recurrence does not use it.
    """
    reasons: dict[Equation, str] = {}
    behind: dict[Var, str] = {}
    for e in loop.body:
        what = _not_pointwise(e, loop)
        why = f"{what} ({e.where or e.op.name})" if what else next((behind[v] for v in e.inputs if v in behind), None)
        if why is not None and e not in loop.reads:
            reasons[e] = why
            behind.update(dict.fromkeys(e.outputs, why))
        elif why is not None and what is not None:
            return why
    for v in loop.depth:
        if v in behind:
            return behind[v]
    core, rest = (tuple(e for e in loop.body if (e in reasons) is after) for after in (False, True))
    needed = {v for e in rest for v in e.inputs}
    stacked = tuple(v for e in core for v in e.outputs if v in loop.stacked or v in needed)
    later = tuple(v for v in loop.stacked if v in behind)
    return (dataclasses.replace(loop, body=core, stacked=stacked),
            dataclasses.replace(loop, body=rest, reads=(), depth={}, stacked=later, last=()))  # fmt: skip


def _not_pointwise(e: Equation, loop: Loop) -> str | None:
    if e in loop.reads:
        near = isinstance(e.access, Point) and loop.depth[e.source] == REGISTER
        return None if near else "it reads more than one timestep back"
    if e.is_read:
        return "it reads a complete series at random"
    if e.has_effects:
        return f"it has an effect, {e.op.name}"
    if e.is_ragged:
        return "the length of an axis depends on t"
    return None if e.is_pointwise else "it reduces over the environments"


def _primitives(body: _Body, target: Target, kernel: str | None) -> str | None:
    """Which primitive has no form there, and where; or that the program is too large."""

    def struct(v, lead=()):
        return jax.ShapeDtypeStruct((*lead, *v.shape), v.dtype)

    carry = [struct(v, (1,)) for v in body.own], [struct(v, (1,)) for v in body.loop.depth]
    supported = functools.partial(_unsupported, kernel=kernel, dense_matmul=target.platform == "cpu")
    why = supported(body.point, [struct(v) for v in body.shared], carry, [struct(v, (1, 1)) for v in body.moving])
    if why is None:
        return None
    for e in body.loop.body:
        if not e.is_read and supported(*_alone(e)) is not None:
            return f"the primitive {e.op.name!r} has no scalar form here ({e.where})"
    return why.splitlines()[0].removeprefix("fuse_steps: ")


def _alone(e: Equation) -> tuple[Callable, Any, Any, Any]:
    """One equation as a body, on arrays that differ between environments."""
    inputs = [v for v in dict.fromkeys(e.inputs) if isinstance(v, Var)]

    def point(shared, t, b, carry, x):
        here = dict(zip(inputs, carry, strict=True))
        return carry, evaluate(e, [a.value if isinstance(a, Lit) else here[a] for a in e.inputs])

    return point, None, [jax.ShapeDtypeStruct((1, *v.shape), v.dtype) for v in inputs], None


def _unsupported(
    point: Callable, shared: Any, carry: Any, xs: Any, kernel: str | None, dense_matmul: bool
) -> str | None:
    return unsupported_by(trace_step(point, shared, carry, xs), kernel, dense_matmul)
