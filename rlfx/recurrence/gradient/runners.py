"""What runs loops in place of their iterations one by one: in blocks, keeping the state before each; from a given state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rlfx._target import Target
from rlfx.recurrence.execute.loops import RunningLoop
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.schedule.physical import Runner
from rlfx.recurrence.schedule.schedule import REGISTER, Loop


def registers(loop: Loop) -> list[Var]:
    """The series of which a loop keeps the value of the previous iteration."""
    return [v for v, depth in loop.depth.items() if depth == REGISTER]


@dataclass(eq=False)
class Kept:
    """Runs the forward loops of the acting pass block by block, and keeps their registers before each block.

    Attributes:
      block: how many timesteps.
      inner: what runs the loops within a block, or None.
      only: the loop; None: every one.
      states: of each register before the whole blocks, [n, ...].
      last: before the timesteps that are left.
    """

    block: int
    inner: Runner | None
    only: Loop | None = None
    states: dict[Var, Value] = field(default_factory=dict)
    last: dict[Var, Value] = field(default_factory=dict)
    whole = False

    def __str__(self) -> str:
        return f"scan of blocks of {self.block}"

    @property
    def rewritable(self) -> bool:
        """Whether the loops may have other equations than the schedule's."""
        return self.inner is None or self.inner.rewritable

    def of(self, program: Program, loop: Loop, target: Target) -> tuple[Runner | None, str | None]:
        """It runs the forward loops that have registers; what is said is of what runs within a block."""
        inner, said = (None, None) if self.inner is None else self.inner.of(program, loop, target)
        others = self.only is not None and loop is not self.only
        if others or loop.direction != "forward" or not registers(loop):
            return inner, said
        return Kept(self.block, inner, loop, self.states, self.last), said

    def run(self, running: RunningLoop, state: Sequence, times: Any, slices: Sequence) -> tuple:
        """As :meth:`RunningLoop.advance`."""
        advance = running.by(self.inner).advance
        mine = registers(running.loop)
        places = [list(running.loop.depth).index(v) for v in mine]
        whole, rest = divmod(times.shape[0], self.block)

        def one(state, xs):
            after, ys = advance(state, *xs)
            return after, ([state[i] for i in places], ys)

        cut = lambda x: x[: whole * self.block].reshape(whole, self.block, *x.shape[1:])  # noqa: E731
        state, (before, ys) = jax.lax.scan(one, list(state), (cut(times), [cut(x) for x in slices]))
        ys = [y.reshape(whole * self.block, *y.shape[2:]) for y in ys]
        dims = [running.state_dims[v] for v in mine]
        self.states |= {v: Value(x, d | {"t"}) for v, x, d in zip(mine, before, dims, strict=True)}
        self.last |= {v: Value(state[i], d) for v, i, d in zip(mine, places, dims, strict=True)}
        if rest:
            state, more = advance(state, times[-rest:], [x[-rest:] for x in slices])
            ys = [jnp.concatenate([y, z]) for y, z in zip(ys, more, strict=True)]
        return state, ys

    def before(self, var: Var, block: Any) -> Value:
        """A register before a block; None: before the timesteps that are left."""
        if block is None:
            return self.last[var]
        return Value(self.states[var].data[block], self.states[var].dims - {"t"})


@dataclass(eq=False)
class Resumed:
    """Runs loops from a state, and remembers the state after them.

    Attributes:
      before, after: of each register.
    """

    before: Mapping[Var, Any]
    after: dict[Var, Any] = field(default_factory=dict)
    rewritable = False
    whole = False

    def __str__(self) -> str:
        return "scan from a state"

    def of(self, program: Program, loop: Loop, target: Target) -> tuple[Resumed, None]:
        """It runs every loop."""
        return self, None

    def run(self, running: RunningLoop, state: Sequence, times: Any, slices: Sequence) -> tuple:
        """As :meth:`RunningLoop.advance`, from the state of ``before``."""
        names = list(running.loop.depth)
        begin = [jnp.broadcast_to(self.before[v], x.shape) for v, x in zip(names, state, strict=True)]
        after, ys = running.by(None).advance(begin, times, slices)
        self.after.update(zip(names, after, strict=True))
        return after, ys
