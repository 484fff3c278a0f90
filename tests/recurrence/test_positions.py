"""What counts as an axis over other timesteps: that it comes from a slice, not that it is as long as there are timesteps."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.executor import execute
from rlfx.recurrence.execute.extent import whole_extent
from rlfx.recurrence.execute.loops import WhileGoing
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.physical import Together, physical
from rlfx.recurrence.schedule.tiling import Blocked, wide_equations

T = 64
CPU = rlfx.target("cpu")
#: Everything on slices runs in blocks.
SMALL = replace(CPU, room=replace(CPU.room, at_once=0, in_block=1 << 16))
W = jax.random.normal(jax.random.key(0), (T,)) / 8.0
X0 = jnp.linspace(-1.0, 1.0, 2 * T).reshape(2, T)


def image(w, x, t):
    """64 by 64 pixels at each of 64 timesteps, no slice."""
    pixels = jnp.tanh(rlfx.series(x)[t] * w)
    grid = jnp.sin(pixels[:, None] * jnp.arange(1.0 * T)[None] + pixels[None])
    return jnp.cos(x), (grid.T @ jnp.concatenate([pixels[:32], pixels[32:]])).sum() + grid.reshape(8, 8, T).max()


def shifted(w, x, t):
    """The point before: of the same 64 features."""
    before = rlfx.series(jnp.tanh(x * w), start=0.0)[t - 1]
    return jnp.cos(x), (before[:, None] * x[None]).sum()


def everything(w, x, t):
    """Attention over all 64 timesteps, of 64 features, masked by hand: scores, mask and weights have positions."""
    past = rlfx.series(jnp.sin(x * w))[:]
    scores = jnp.where(jnp.arange(T) <= t, past @ x, -1e9)
    out = jax.nn.softmax(scores) @ past
    return jnp.cos(x), jnp.tanh(out[:, None] * w[None]).sum()


def turned(w, x, t):
    """Positions that change their places: a product from the other side, reshaped, turned, joined, added up."""
    past = rlfx.series(jnp.sin(x * w))[:]
    scores = (past[None] * x[None, None]).reshape(T, 1, 4, 16).transpose(1, 2, 0, 3).sum((0, 1, 3))
    out = jnp.concatenate([past, past], 1).T @ jnp.cumsum(jnp.squeeze(scores[:, None], 1)) / T
    return jnp.cos(x), (out[:T, None] * w[None]).max(0).sum()


def sorted_(w, x, t):
    """An operation without a rule: every axis of the same length may be of positions."""
    past = rlfx.series(jnp.sin(x * w))[:]
    return jnp.cos(x), jnp.sort(past @ x)[3] + (w * x).sum()


def smoothed(w, x, t):
    """What reads positions as a whole, and gives as many: a convolution over them, and another order of them."""
    past = rlfx.series(jnp.sin(x * w))[:] * x[None]
    smooth = jax.lax.conv_general_dilated(
        past[None], jnp.ones((3, T, 8)) / T, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.cos(x), jnp.exp(jnp.take(smooth[0], jnp.argsort(jnp.sin(jnp.arange(1.0 * T))), axis=0)).sum()


#: The operations that are wide, without those that only change types and places; None: none is.
WIDE = {
    image: set(), shifted: set(), everything: {"dot_general", "le", "select_n", "sub", "exp", "div"},
    turned: {"mul", "reduce_sum", "cumsum"}, sorted_: {"dot_general", "sort"},
    smoothed: {"mul", "conv_general_dilated", "gather", "exp"},
}  # fmt: skip
PLACES = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "concatenate", "slice", "convert_element_type"}


@pytest.mark.parametrize("f", WIDE)
def test_wide_is_what_comes_from_slices(f):
    program = rlfx.trace(f, W, X0, length=T, batch=2, loss=False)
    wide = wide_equations(program, 2, SMALL.room)
    assert {e.op.name for e in wide} - PLACES == WIDE[f], program
    tail = {everything: {(T, T)}, turned: {(2 * T, T), (T, T)}}.get(f, set())  # after the product with the past
    assert not tail & {v.shape for e in wide if e.op.name in ("tanh", "reduce_max") for v in e.outputs}


@pytest.mark.parametrize("f", WIDE)
def test_only_what_is_wide_runs_in_blocks(f):
    program = rlfx.trace(f, W, X0, length=T, batch=2, loss=False)
    rule = GradientRule(program, Options(), SMALL)
    plan = physical(rule.forward, SMALL, WhileGoing(), batch=2)
    blocked = [p for n in plan.nodes if isinstance(n, Together) for p in n.parts if isinstance(p, Blocked)]
    assert bool(blocked) is bool(WIDE[f]), plan
    done = execute(plan, rule._env([W, *program.const_values, X0, jax.random.key(0)], whole_extent(program)), 0)
    (got,) = (done.env[v].data for v in program.aux)
    _, want = rlfx.reference(f, length=T, batch=2, loss=False)(W, X0)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_a_slice_of_a_part_is_wide_too():
    """It was not, since 96 is not T."""

    def f(w, x, t):
        scores = rlfx.series(jnp.sin(x * w))[32:] @ x
        return jnp.cos(x), jnp.exp(scores - scores.max()).sum()

    program = rlfx.trace(f, W, X0, length=128, batch=2, loss=False)
    assert {"dot_general", "sub", "exp"} <= {e.op.name for e in wide_equations(program, 2, SMALL.room)}
