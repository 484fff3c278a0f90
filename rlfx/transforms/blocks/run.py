"""Run a plan: equations for the whole batch as they are, the others in ``lax.scan`` over the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.language.precision import narrowed, widened
from rlfx.transforms.blocks.flat import Array, Axis, Block, Const, Equation, join, take, unstack
from rlfx.transforms.blocks.plan import Loop, Part, Plan, Whole

#: ``(the inputs that live on the host, by position) -> their blocks on the device``
Fetch = Callable[[Any, Axis, Block], Any]


def run_plan(plan: Plan, block_size: int, inputs: Sequence[Any], fetched: Mapping[int, Fetch] | None = None) -> list:
    """The results of a program on whole inputs, computed in blocks of ``block_size`` examples.

    Args:
      fetched: how a block of an input (by position) is read, where that is no slice; read one block ahead.
    """
    env: dict[Array, Any] = dict(zip(plan.flat.inputs, inputs, strict=True))
    fetch = {plan.flat.inputs[i]: read for i, read in (fetched or {}).items()}
    for value in plan.read_whole().intersection(fetch):
        env[value] = fetch.pop(value)(env[value], Axis(0), Block(0, plan.n, True))
    for i, equations in enumerate(plan.whole):
        run_whole(equations, env)
        if i < len(plan.loops):
            _run_loop(plan, plan.loops[i], block_size, env, fetch)
    return results(plan, env)


def run_whole(equations: Sequence[Equation], env: dict[Array, Any]) -> None:
    """Evaluate equations on whole values."""
    for equation in equations:
        ins = [v.value if isinstance(v, Const) else env[v] for v in equation.ins]
        env.update(zip(equation.outs, equation.bind(ins), strict=True))


def results(plan: Plan, env: Mapping[Array, Any]) -> list:
    """What the program returns."""
    return [jnp.asarray(v.value) if isinstance(v, Const) else env[v] for v in plan.flat.outputs]


def start(loop: Loop, env: Mapping[Array, Any]) -> tuple[list, list]:
    """The accumulators before the first block."""
    sums = [widened(_zeros(s.value.aval)) for s in loop.sums]
    return sums, [_start(step, env) for step in loop.folds]


def advance(
    plan: Plan, loop: Loop, env: Mapping[Array, Any], state: tuple, block: Block, loaded: Mapping[Part, Any]
) -> tuple[tuple, list]:
    """One block: ``(accumulators, what is kept of the block)``."""
    local: dict[Any, Any] = dict(loaded)

    def read(slot: Any, demand: Any) -> Any:
        if isinstance(slot, Const):
            cut = isinstance(demand, Axis) and slot.shape
            return take(jnp.asarray(slot.value), demand, block) if cut else slot.value
        return env[slot.value] if isinstance(slot, Whole) else local[slot]

    for step in loop.steps:
        if step.rule is None:
            (slot,) = step.outs
            if slot not in local:
                value = read(step.ins[0], None)
                local[slot] = take(value, slot.axis, block) if isinstance(slot, Part) else value
            continue
        assert step.rule.run is not None
        ins = [read(s, d) for s, d in zip(step.ins, step.rule.demands, strict=True)]
        local.update(zip(step.outs, step.rule.run(block, ins), strict=True))
    sums, folds = state
    each = [widened(jnp.asarray(local[s])) for s in loop.sums]
    sums = [x if s.same else old + x for s, old, x in zip(loop.sums, sums, each, strict=True)]
    new_folds = []
    for step, old in zip(loop.folds, folds, strict=True):
        assert step.rule is not None
        assert step.rule.fold is not None
        ins = [read(s, d) for s, d in zip(step.ins, step.rule.demands, strict=True)]
        new_folds.append(step.rule.fold.step(old, block, ins))
    return (sums, new_folds), [local[Part(v, axis_of(plan, v))] for v in loop.kept]


def finish(plan: Plan, loop: Loop, env: dict[Array, Any], state: tuple, parts: Sequence[Sequence[Any]]) -> None:
    """Add to ``env`` what a loop has computed; ``parts``: the consecutive blocks of each value that is kept."""
    sums, folds = state
    env.update((s.value, narrowed(x, s.value.aval.dtype)) for s, x in zip(loop.sums, sums, strict=True))
    for step, final in zip(loop.folds, folds, strict=True):
        assert step.rule is not None
        assert step.rule.fold is not None
        assert step.equation is not None
        env.update(zip(step.equation.outs, step.rule.fold.finish(final), strict=True))
    for value, collected in zip(loop.kept, parts, strict=True):
        env[value] = join(collected, axis_of(plan, value))


def _run_loop(plan: Plan, loop: Loop, size: int, env: dict[Array, Any], fetch: Mapping[Array, Fetch]) -> None:
    blocks, rest = divmod(plan.n, size)
    ahead = slices_of(loop, set(fetch))

    def load(block: Block) -> list:
        return [fetch[slot.value](env[slot.value], slot.axis, block) for slot in ahead]

    def compute(state: tuple, block: Block, loaded: list) -> tuple[tuple, list]:
        return advance(plan, loop, env, state, block, dict(zip(ahead, loaded, strict=True)))

    state = start(loop, env)
    parts: list[list] = [[] for _ in loop.kept]
    if blocks > 1:

        def scanned(carry: tuple, c: Any) -> tuple[tuple, list]:
            state, loaded = carry
            following = jnp.minimum(c + 1, blocks - 1)
            later = load(Block(following * size, size, False)) if ahead else loaded
            state, kept = compute(state, Block(c * size, size, c == 0), loaded)
            return (state, later), kept

        first = load(Block(0, size, True))
        (state, _), stacks = jax.lax.scan(scanned, (state, first), jnp.arange(blocks, dtype=jnp.int32))
        for collected, value, stack in zip(parts, loop.kept, stacks, strict=True):
            collected.append(unstack(stack, axis_of(plan, value)))
    remaining = [Block(blocks * size, rest, blocks == 0)] if rest else []
    for block in [Block(0, size, True)] * (blocks == 1) + remaining:
        state, kept = compute(state, block, load(block))
        for collected, part in zip(parts, kept, strict=True):
            collected.append(part)
    finish(plan, loop, env, state, parts)


def slices_of(loop: Loop, values: set[Array]) -> list[Part]:
    """The blocks of ``values`` that a loop reads."""
    found = (step.outs[0] for step in loop.steps if step.rule is None and isinstance(step.ins[0], Whole))
    return [slot for slot in found if isinstance(slot, Part) and slot.value in values]


def axis_of(plan: Plan, value: Array) -> Axis:
    """Where the batch is in a value that is kept."""
    axis = plan.axes[value]
    assert axis is not None
    return axis


def _zeros(aval: Any) -> Any:
    if J.is_key(aval):
        return J.zero_keys(aval.shape, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def _start(step: Any, env: Mapping[Array, Any]) -> Any:
    ins = [s.value if isinstance(s, Const) else env[s.value] if isinstance(s, Whole) else None for s in step.ins]
    return step.rule.fold.start(ins)
