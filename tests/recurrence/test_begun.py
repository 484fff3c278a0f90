"""``jnp.where(t >= k, rlfx.every(n, learn, otherwise=old), old)`` is one branch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.begun import with_begun

T, N, FIRST = 9, 4, 4
W = jnp.linspace(-0.5, 0.5, N * N, dtype=jnp.float32).reshape(N, N)
CARRY = {"p": jnp.linspace(-1.0, 1.0, N, dtype=jnp.float32), "m": jnp.zeros(N, jnp.float32), "n": jnp.int32(0)}


def learned(w, old):
    """A step of a learner: parameters, moments, and how many there were."""
    moment = 0.9 * old["m"] + jnp.tanh(old["p"] @ w)
    return {"p": old["p"] - 0.1 * moment, "m": moment, "n": old["n"] + 1}


def chosen(condition, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


#: What is left of a timestep, ``(t, w, old)``; and at which timesteps the learner learns.
LATER = {
    "later": (lambda t, w, old: chosen(t.now >= FIRST, rlfx.every(2, lambda: learned(w, old), otherwise=old), old),
              lambda t: t % 2 == 0 and t >= FIRST),
    "until then": (lambda t, w, old: chosen(t.now < FIRST, rlfx.every(3, lambda: learned(w, old), otherwise=old), old),
                   lambda t: t % 3 == 0 and t < FIRST),
    "the other way": (lambda t, w, old: chosen(t.now < FIRST, old, rlfx.every(2, lambda: learned(w, old), otherwise=old)),
                      lambda t: t % 2 == 0 and t >= FIRST),
    "a branch of the user's": (
        lambda t, w, old: chosen(t.now >= FIRST, jax.lax.cond(t.now % 3 == 1, lambda: learned(w, old), lambda: old), old),
        lambda t: t % 3 == 1 and t >= FIRST),
    "two choices": (
        lambda t, w, old: chosen(
            t.now < 8, chosen(t.now >= FIRST, rlfx.every(2, lambda: learned(w, old), otherwise=old), old), old),
        lambda t: t % 2 == 0 and FIRST <= t < 8),
    "a switch": (
        lambda t, w, old: chosen(
            t.now >= FIRST,
            jax.lax.switch(t.now % 3, [lambda: old, lambda: learned(w, old), lambda: learned(w, learned(w, old))]), old),
        lambda t: t % 3 * (t >= FIRST)),
}  # fmt: skip


def program(leave):
    def one(w, old, t):
        return jnp.sum(old["p"] ** 2), leave(t, w, old)

    return one


def by_hand(times, t0):
    def loss(w):
        total, old = 0.0, CARRY
        for t in range(t0, t0 + T):
            total += jnp.sum(old["p"] ** 2)
            for _ in range(int(times(t))):
                old = learned(w, old)
        return total / T, old

    return loss


def branches(program):
    return [e for e in program.equations if e.op is J.COND]


@pytest.mark.parametrize("t0", [0, 3])
@pytest.mark.parametrize("name", LATER)
def test_values_and_gradients_are_those_of_loops(name, t0):
    leave, times = LATER[name]
    fn = rlfx.compile(program(leave), length=T)
    (loss, (own, *_)), gradient = jax.jit(jax.value_and_grad(lambda w: fn(w, CARRY, t0=t0), has_aux=True))(W)
    wanted = jax.value_and_grad(by_hand(times, t0), has_aux=True)(W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ((loss, own), gradient), wanted)


@pytest.mark.parametrize("name", LATER)
def test_nothing_is_chosen_number_by_number(name):
    traced = rlfx.trace(program(LATER[name][0]), W, CARRY, length=T)
    rewritten = with_begun(traced)
    assert [len(e.outputs) for e in branches(rewritten)] == [len(CARRY)]
    assert not any(e.op.name == "select_n" and e.outputs[0].shape for e in rewritten.equations)
    assert with_begun(rewritten) is rewritten


def test_of_a_batch_that_shares_what_is_learned():
    """With one more branch in the loop, and environments of their own."""

    def one(w, carry, t):
        kept = carry["shared"]
        new = chosen(t.now >= FIRST, rlfx.every(2, lambda: learned(w, kept), otherwise=kept), kept)
        target = rlfx.every(3, lambda: kept["p"], otherwise=carry["target"])
        state = jnp.tanh(carry["state"] + target)
        return jnp.sum((state - kept["p"]) ** 2), {"shared": rlfx.Shared(new), "target": rlfx.Shared(target), "state": state}

    carry = {"shared": rlfx.Shared(CARRY), "target": rlfx.Shared(jnp.ones_like(CARRY["p"])), "state": jnp.ones((3, N), W.dtype)}
    fns = (make(one, length=T, batch=3) for make in (rlfx.compile, rlfx.reference))
    found, wanted = (jax.jit(jax.value_and_grad(lambda w, fn=fn: fn(w, carry), has_aux=True))(W) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
    assert len(branches(with_begun(rlfx.trace(one, W, carry, length=T, batch=3)))) == 2


#: Each stays as it is.
APART = {
    "two conditions": lambda t, w, old: {
        k: jnp.where(t.now >= FIRST + (k == "n"), v, old[k])
        for k, v in rlfx.every(2, lambda: learned(w, old), otherwise=old).items()
    },
    "something else is kept": lambda t, w, old: chosen(
        t.now >= FIRST, rlfx.every(2, lambda: learned(w, old), otherwise=old), jax.tree.map(jnp.zeros_like, old)
    ),
    "one is not chosen": lambda t, w, old: (lambda new: chosen(t.now >= FIRST, new, old) | {"n": new["n"]})(
        rlfx.every(2, lambda: learned(w, old), otherwise=old)
    ),
    "a condition of the state": lambda t, w, old: chosen(
        old["p"] > 0.0, rlfx.every(2, lambda: {**learned(w, old), "n": learned(w, old)["p"]}, otherwise=old), old
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_no_such_choice_stays(name):
    carry = CARRY | {"n": CARRY["p"]} if name == "a condition of the state" else CARRY
    traced = rlfx.trace(program(APART[name]), W, carry, length=T)
    assert with_begun(traced) is traced
    fns = (make(program(APART[name]), length=T) for make in (rlfx.compile, rlfx.reference))
    found, wanted = (jax.jit(jax.value_and_grad(lambda w, fn=fn: fn(w, carry), has_aux=True))(W) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
