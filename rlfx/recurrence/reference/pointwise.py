"""Values of a program at one point of its domain, on demand, with memoisation: what a reference is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.errors import CausalityError, located
from rlfx.recurrence.execute.values import evaluate
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import Lookup, Point, Slice
from rlfx.recurrence.language.lookups import filled
from rlfx.recurrence.language.primitives import (
    across_p,
    custom_p,
    discounted_sum_p,
    inputs_p,
    read_p,
    reduce_p,
    series_p,
    whole_p,
)
from rlfx.recurrence.reference import control

#: Equations that are matched between the programs of different timesteps, by their order among their kind.
_MATCHED = (series_p, read_p, reduce_p, whole_p, across_p)


@dataclass(frozen=True, eq=False)
class AtPoint:
    """A program at one concrete timestep of an environment with ``stop`` timesteps, with its equations indexed."""

    program: Program
    definition: dict[Var, tuple[Equation, int]] = field(init=False)
    ordinal: dict[Equation, tuple[Any, int]] = field(init=False)
    matched: dict[tuple[Any, int], Equation] = field(init=False)

    def __post_init__(self):
        set_ = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_("definition", {v: (e, i) for e in self.program.equations for i, v in enumerate(e.outputs)})
        counts = dict.fromkeys(_MATCHED, 0)
        ordinal = {}
        for e in self.program.equations:
            if e.op in counts:
                ordinal[e] = (e.op, counts[e.op])
                counts[e.op] += 1
        set_("ordinal", ordinal)
        set_("matched", {k: e for e, k in ordinal.items()})


@dataclass(eq=False)
class Evaluation:
    """Values on demand. A demand is ``(variable, t, b)``.

    Attributes:
      program_at: ``(t, stop)`` to the program at a timestep of an environment with ``stop`` timesteps.
      inputs: ``(variable, program, t, b)`` to the value of an input.
      stops: how many timesteps each environment has.
      t0: the absolute time of timestep 0.
      memo: the values of the demands so far.
    """

    program_at: Callable[[int, int], AtPoint]
    domain: Domain
    batch: int
    inputs: Callable[[Var, Program, int, int], Any]
    stops: list[int]
    t0: int = 0
    memo: dict = field(default_factory=dict)

    def at(self, t: int, b: int) -> AtPoint:
        """The program at a point; after an environment's end, that of its last timestep."""
        stop = self.stops[b]
        return self.program_at(min(t, stop - 1), stop)

    def value(self, atom: Atom, t: int, b: int) -> Any:
        """The value at a point; everything it needs is evaluated first, without recursion."""
        if isinstance(atom, Lit):
            return atom.value
        stack, open_ = [(atom, t, b)], set()
        while stack:
            key = stack[-1]
            if key in self.memo:
                stack.pop()
                continue
            missing = [k for k in self._needs(*key) if not isinstance(k[0], Lit) and k not in self.memo]
            if missing:
                if any(k in open_ for k in missing):
                    raise CausalityError(
                        located(
                            f"The value at t = {key[1]} depends on itself.",
                            fix="Read a strictly earlier or later timestep.",
                        )
                    )
                open_.add(key)
                stack += missing
                continue
            self.memo[key] = self._compute(*key)
            open_.discard(key)
            stack.pop()
        return self.memo[atom, t, b]

    def _get(self, atom: Atom, t: int, b: int) -> Any:
        return atom.value if isinstance(atom, Lit) else self.memo[atom, t, b]

    # -- what a point needs

    def _needs(self, var: Var, t: int, b: int) -> list[tuple]:
        here = self.at(t, b)
        if var not in here.definition:
            return []
        equation, _ = here.definition[var]
        return self._points(equation, here, t, b)

    def _points(self, e: Equation, here: AtPoint, t: int, b: int) -> list[tuple]:
        if e.op is reduce_p:
            return [(v, s, c) for s, c in self._reduced(e, t, b) for v in self._twin(e, here, s, c).inputs]
        if e.op is whole_p:
            n = e.params["num_consts"]
            consts = [(a, t, b) for a in e.inputs[:n]]
            return consts + [(a, t, c) for c in range(self.batch) for a in self._twin(e, here, t, c).inputs[n:]]
        if e.op is across_p:
            everyone = [(self._twin(e, here, t, c).inputs[0], t, c) for c in range(self.batch)]
            return everyone + [(a, t, b) for a in e.inputs[1:]]
        if not e.is_read:
            return [(a, t, b) for a in e.inputs]
        if isinstance(e.access, Lookup):
            keys = [(a, t, b) for a in e.inputs[1:]]
            if all(isinstance(a, Lit) or (a, t, b) in self.memo for a in e.inputs[1:]):
                keys += [self._read_key(e, here, s, c) for s, c in self._looked_up(e, t, b)[0].reshape(-1, 2)]
            return keys
        if isinstance(e.access, Point):
            return [self._point_key(e, here, t, b)]
        keys = [self._read_key(e, here, s, b) for s in self._positions(e, t, b) if 0 <= s < self.stops[b]]
        return keys + [(a, t, b) for a in e.inputs[1:]]

    def _reduced(self, e: Equation, t: int, b: int) -> list[tuple[int, int]]:
        over = e.params["over"]
        if e.params["op"] == "last":
            return [(self.stops[b] - 1, b)]
        envs = range(self.batch) if "b" in over else (b,)
        if "t" not in over and not self.domain.until:
            return [(t, c) for c in envs]  # also at t = T, by demand extension
        return [(s, c) for c in envs for s in (range(self.stops[c]) if "t" in over else (t,)) if s < self.stops[c]]

    def _twin(self, e: Equation, here: AtPoint, t: int, b: int) -> Equation:
        """The same equation of the program at another point."""
        return self.at(t, b).matched[here.ordinal[e]]

    def _read_key(self, e: Equation, here: AtPoint, s: int, b: int) -> tuple:
        source = here.definition[e.source][0]
        return self._twin(source, here, int(s), int(b)).outputs[0], int(s), int(b)

    def _point_key(self, e: Equation, here: AtPoint, t: int, b: int) -> tuple:
        stop = self.stops[b]
        s = int(e.access.index.evaluate(t, stop, low=min, high=max))
        if s < 0:
            return self._twin(e, here, 0, b).start, 0, b
        if s < stop or not self._ahead(e.access):  # after its end an environment sees what it saw before
            return self._read_key(e, here, s, b)
        last = self._twin(e, here, stop - 1, b)
        if last.end is not None:
            return last.end, stop - 1, b
        return last.source, stop, b  # demand extension: its equation at t = T

    def _ahead(self, access: Point) -> bool:
        found = reach_in(access, self.domain)
        return found.future or found.after_end

    def _positions(self, e: Equation, t: int, b: int) -> Iterable[int]:
        if isinstance(e.access, Slice):
            stop = self.stops[b]
            lo, hi = (int(i.evaluate(t, stop, low=min, high=max)) for i in (e.access.first, e.access.stop))
            return range(lo, hi)
        return range(t + e.access.lo, t + e.access.hi)

    def _looked_up(self, e: Equation, t: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """The points of a lookup, the nearest that are there: [..., (s, b)]; and whether they are the ones asked for."""
        i = np.asarray(self._get(e.inputs[1], t, b), np.int64) - self.t0
        other = np.asarray(self._get(e.inputs[2], t, b)) if e.access.across_batch else np.full_like(i, b)
        oldest = 0 if e.access.back is None else max(0, t - e.access.back + 1)
        inside = (i >= oldest) & (i <= t) & (other >= 0) & (other < self.batch)
        return np.stack([np.clip(i, oldest, t), np.clip(other, 0, self.batch - 1)], -1), inside

    # -- its value

    def _compute(self, var: Var, t: int, b: int) -> Any:
        here = self.at(t, b)
        if var not in here.definition:
            return self.inputs(var, here.program, t, b)
        e, which = here.definition[var]
        return self._outputs(e, here, t, b)[which]

    def _outputs(self, e: Equation, here: AtPoint, t: int, b: int) -> Sequence[Any]:
        if e.op is reduce_p:
            values = [self._get(*k) for k in self._points(e, here, t, b)]
            outer, op, n = e.params.get("outer"), e.params["op"], len(e.inputs)
            points = stacked(values if outer is None else [outer.of_point(values[i : i + n]) for i in range(0, len(values), n)])
            return [points[-1] if op == "last" else getattr(jnp, op)(points, axis=0).astype(points.dtype)]
        if e.op is whole_p:
            n = e.params["num_consts"]
            args = [self._get(a, t, b) for a in e.inputs[:n]]
            for i in range(n, len(e.inputs)):
                args.append(stacked([self._get(self._twin(e, here, t, c).inputs[i], t, c) for c in range(self.batch)]))
            closed = e.params["jaxpr"]
            return control.body(closed.jaxpr, closed.consts)(*args)
        if e.op is across_p:
            data = stacked([self._get(self._twin(e, here, t, c).inputs[0], t, c) for c in range(self.batch)])
            return [data[array(self._get(e.inputs[2], t, b)), array(self._get(e.inputs[1], t, b))]]
        if e.is_read:
            return [self._read(e, here, t, b)]
        operands = [array(self._get(a, t, b)) for a in e.inputs]
        if e.op is series_p:
            return operands
        if e.op is discounted_sum_p:
            return [_discounted(*operands)]
        if e.op is inputs_p:
            index = {"t": t, "b": b}
            return [operands[0][tuple(index[a] for a in e.params["axes"])]]
        return evaluate(e, operands) if e.op is custom_p else control.run(e.op, e.params, operands)

    def _read(self, e: Equation, here: AtPoint, t: int, b: int) -> Any:
        if isinstance(e.access, Point):
            return array(self._get(*self._point_key(e, here, t, b)))
        if isinstance(e.access, Lookup):
            points, inside = self._looked_up(e, t, b)
            found = stacked([self._get(*self._read_key(e, here, s, c)) for s, c in points.reshape(-1, 2)])
            found = found.reshape(*points.shape[:-1], *e.outputs[0].shape[points.ndim - 1 :])
            return found if e.access.outside == "clip" else filled(jnp.asarray(inside), found)
        rows = []
        for s in self._positions(e, t, b):
            inside = 0 <= s < self.stops[b]
            rows.append(self._get(*self._read_key(e, here, s, b)) if inside else self._get(e.inputs[1], t, b))
        out = e.outputs[0]
        return stacked(rows) if rows else jnp.zeros((0, *out.shape[1:]), out.dtype)


def _discounted(rewards: Any, discounts: Any) -> Any:
    total = jnp.zeros(rewards.shape[1:], rewards.dtype)
    weight = jnp.ones_like(total)
    for k in range(rewards.shape[0]):
        total, weight = total + weight * rewards[k], weight * discounts[k]
    return total


def array(x: Any) -> jax.Array:
    """A value as an array. A tracer stays as it is: of one with a known value ``asarray`` would trace a conversion."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def stacked(values: Sequence[Any]) -> jax.Array:
    """Values of one shape and dtype along a new first axis; those of known values are copied and nothing is compiled."""
    arrays = [array(x) for x in values]
    if any(isinstance(x, jax.core.Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in arrays):
        return jax.lax.stack(arrays)  # one operation; ``jnp.stack`` would convert each value first
    return jax.device_put(np.stack([np.asarray(x) for x in arrays]))
