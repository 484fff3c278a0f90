"""Stages in profiles have the numbers that `explain` gives them."""

import re

import jax
import jax.numpy as jnp

import rlfx


def act(w, x, t):
    """Acting with a state; returns from the next reward; a loss that does not go through the state."""
    action = jnp.tanh(x @ w)
    reward = rlfx.series(-jnp.sum(jax.lax.stop_gradient(action) ** 2), end=0.0)
    following = jax.lax.stop_gradient(jnp.roll(x, 1) * 0.9 + 0.1 * action.sum())
    return jnp.sum(action) * jax.lax.stop_gradient(reward[t] + reward[t + 1]), following


def test_numbers_go_on_from_acting_to_learning():
    program = rlfx.compile(act, length=4, batch=2)
    args = jnp.ones((3, 2)), jnp.ones((2, 3))
    stages = program.explain(*args).stages
    text = jax.jit(jax.value_and_grad(program, has_aux=True)).lower(*args).as_text(debug_info=True)
    found = {int(n): kind for n, kind in re.findall(r"rlfx\.stage/(\d+) (all t|forward scan|reverse scan)", text)}
    assert {stage.part for stage in stages} == {"acting", "learner"}
    assert set(found) == set(range(1, len(stages) + 1))
    for number, kind in found.items():
        assert kind == stages[number - 1].kind.replace("once", "all t")
