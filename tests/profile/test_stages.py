"""Stages in profiles have the numbers that `explain` gives them, and what is in them the user's names and lines."""

import re

import jax
import jax.numpy as jnp

import rlfx
from rlfx.profile.scopes import parse


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


def lowered(fn, *args):
    return jax.jit(fn).lower(*args).as_text(debug_info=True)


def test_equations_of_a_compiled_program_come_from_the_lines_of_the_user():
    program = rlfx.compile(act, length=4, batch=2)
    text = lowered(jax.grad(lambda *args: program(*args)[0]), jnp.ones((3, 2)), jnp.ones((2, 3)))
    first = act.__code__.co_firstlineno
    found = {int(n) - first for n in re.findall(r'test_stages\.py":(\d+)', text)}
    assert {2, 3, 4, 5} <= found  # tanh and its derivative, the reward, the next state, the loss


def test_the_learner_of_minibatches_has_the_name_of_its_update():
    def learn(carry, batch):
        return carry + jnp.tanh(batch).sum(), None

    def train(data):
        return rlfx.minibatch_epochs(learn, 0.0, data, epochs=1, minibatches=2, key=jax.random.key(0))[0]

    names = re.findall(r'loc\("([^"]*)"', lowered(train, jnp.ones((3, 2))))
    (tanh,) = {name for name in names if name.endswith("/tanh")}
    assert parse(tanh).path[-1] == "learn"
    assert any(parse(name).path == ("minibatch_epochs",) for name in names)  # what shuffles and gathers
