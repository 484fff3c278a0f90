"""Run a plan: equations for the whole batch as they are, the others in ``lax.scan`` over the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.transforms._blocks import Array, Atom, Axis, Block, Const, join, take, unstack
from rlfx.transforms._blocks_plan import Loop, Part, Plan, Sum, Whole

#: ``(the inputs that live on the host, by position) -> their blocks on the device``
Fetch = Callable[[Any, Axis, Block], Any]


def run_plan(plan: Plan, block_size: int, inputs: Sequence[Any], fetched: Mapping[int, Fetch] | None = None) -> list:
    """The results of a program on whole inputs, computed in blocks of ``block_size`` examples.

    Args:
      fetched: how a block of an input (by position) is read, where that is no slice; read one block ahead.
    """
    env: dict[Array, Any] = dict(zip(plan.flat.inputs, inputs, strict=True))
    fetch = {plan.flat.inputs[i]: read for i, read in (fetched or {}).items()}

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Const) else env[atom]

    for i, equations in enumerate(plan.whole):
        for equation in equations:
            env.update(zip(equation.outs, equation.bind([read(v) for v in equation.ins]), strict=True))
        if i < len(plan.loops):
            _run_loop(plan, plan.loops[i], block_size, env, fetch)
    return [jnp.asarray(read(v)) if isinstance(v, Const) else read(v) for v in plan.flat.outputs]


def _run_loop(plan: Plan, loop: Loop, size: int, env: dict[Array, Any], fetch: Mapping[Array, Fetch]) -> None:
    blocks, rest = divmod(plan.n, size)
    ahead = list(dict.fromkeys(slot for step in loop.steps for slot in step.outs if _is_fetched(slot, step, fetch)))

    def load(block: Block) -> dict[Part, Any]:
        return {slot: fetch[slot.value](env[slot.value], slot.axis, block) for slot in ahead}

    def body(state: tuple, block: Block, loaded: Mapping[Part, Any]) -> tuple[tuple, list]:
        local: dict[Any, Any] = dict(loaded)

        def read(slot: Any, demand: Any) -> Any:
            if isinstance(slot, Const):
                whole = isinstance(demand, Axis) and slot.shape
                return take(jnp.asarray(slot.value), demand, block) if whole else slot.value
            return env[slot.value] if isinstance(slot, Whole) else local[slot]

        for step in loop.steps:
            if step.rule is None:
                (slot,) = step.outs
                if slot not in local:
                    local[slot] = take(env[slot.value], slot.axis, block)
                continue
            assert step.rule.run is not None
            ins = [read(s, d) for s, d in zip(step.ins, step.rule.demands, strict=True)]
            local.update(zip(step.outs, step.rule.run(block, ins), strict=True))
        sums, folds = state
        sums = [local[s] if s.same else old + local[s] for s, old in zip(loop.sums, sums, strict=True)]
        new_folds = []
        for step, old in zip(loop.folds, folds, strict=True):
            assert step.rule is not None
            assert step.rule.fold is not None
            ins = [read(s, d) for s, d in zip(step.ins, step.rule.demands, strict=True)]
            new_folds.append(step.rule.fold.step(old, block, ins))
        kept = [local[Part(v, _axis(plan, v))] for v in loop.kept]
        return (sums, new_folds), kept

    state = (list(map(_zero, loop.sums)), [_start(step, env) for step in loop.folds])
    parts: list[list] = [[] for _ in loop.kept]
    if blocks > 1:

        def scanned(carry: tuple, c: Any) -> tuple[tuple, list]:
            state, loaded = carry
            block = Block(c * size, size, c == 0)
            following = jnp.minimum(c + 1, blocks - 1)
            later = load(Block(following * size, size, False)) if ahead else loaded
            state, kept = body(state, block, loaded)
            return (state, later), kept

        first = load(Block(0, size, True))
        (state, _), stacks = jax.lax.scan(scanned, (state, first), jnp.arange(blocks, dtype=jnp.int32))
        for collected, value, stack in zip(parts, loop.kept, stacks, strict=True):
            collected.append(unstack(stack, _axis(plan, value)))
    elif blocks == 1:
        block = Block(0, size, True)
        state, kept = body(state, block, load(block))
        for collected, part in zip(parts, kept, strict=True):
            collected.append(part)
    if rest:
        block = Block(blocks * size, rest, blocks == 0)
        state, kept = body(state, block, load(block))
        for collected, part in zip(parts, kept, strict=True):
            collected.append(part)

    sums, folds = state
    env.update(zip((s.value for s in loop.sums), sums, strict=True))
    for step, final in zip(loop.folds, folds, strict=True):
        assert step.rule is not None
        assert step.rule.fold is not None
        assert step.equation is not None
        env.update(zip(step.equation.outs, step.rule.fold.finish(final), strict=True))
    for value, collected in zip(loop.kept, parts, strict=True):
        env[value] = join(collected, _axis(plan, value))


def _is_fetched(slot: Any, step: Any, fetch: Mapping[Array, Fetch]) -> bool:
    return step.rule is None and isinstance(slot, Part) and slot.value in fetch


def _axis(plan: Plan, value: Array) -> Axis:
    axis = plan.axes[value]
    assert axis is not None
    return axis


def _zero(contribution: Sum) -> Any:
    return jnp.zeros(contribution.value.shape, contribution.value.aval.dtype)


def _start(step: Any, env: Mapping[Array, Any]) -> Any:
    ins = [s.value if isinstance(s, Const) else env[s.value] if isinstance(s, Whole) else None for s in step.ins]
    return step.rule.fold.start(ins)
