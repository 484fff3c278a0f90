"""One pass: the acting loop is differentiated; the same values and gradients as of the reference."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import ScheduleError
from tests.recurrence.test_through_time import BATCH, LENGTH, PROGRAMS, assert_close, gradient, small, weights

ONE_PASS = rlfx.Plan("one pass")


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_pass_has_the_gradient_of_the_reference(name):
    program, carry = PROGRAMS[name]
    assert_close(gradient(rlfx.compile, program, carry, plan=ONE_PASS), gradient(rlfx.reference, program, carry))


def policy(p, h, t):
    """It acts on samples, and returns them; their advantages run backwards."""
    h = jnp.tanh(p["w"] @ h + p["u"] @ jax.random.normal(t.key_for("obs"), (2,)))
    action = jax.random.categorical(t.key_for("action"), jax.lax.stop_gradient(h))
    value = rlfx.series(p["v"] @ h)
    advantage = jax.lax.stop_gradient(rlfx.discounted_sum(value[t:], 0.9))
    return -jax.nn.log_softmax(h)[action] * advantage, h, {"action": action, "h": h}


def test_cotangents_of_all_outputs():
    def outputs(make, plan):
        fn = make(policy, length=LENGTH, batch=BATCH, **plan)

        def total(p, h):
            loss, (last, aux) = fn(p, h, jax.random.key(1))
            return loss + jnp.sum(last**2) + jnp.sum(jnp.sin(aux["h"])), aux["action"]

        return jax.value_and_grad(total, (0, 1), has_aux=True)(weights(), small())

    assert_close(outputs(rlfx.compile, {"plan": ONE_PASS}), outputs(rlfx.reference, {}))


def test_a_recurrence_runs_forward_once():
    def loops(plan):
        fn = rlfx.compile(policy, length=LENGTH, batch=BATCH, plan=plan)
        step = jax.grad(lambda p: fn(p, small(), jax.random.key(1))[0])
        return str(jax.make_jaxpr(step)(weights())).count("scan[")

    assert loops(ONE_PASS) == loops(rlfx.Plan()) - 1


def test_explain_shows_one_loop():
    fn = rlfx.compile(policy, length=LENGTH, batch=BATCH, plan=ONE_PASS)
    text = str(fn.explain(weights(), small(), jax.random.key(1), verbose=True))
    assert text.count("forward scan") == 1
    assert "plan: the acting loop is differentiated, a recurrence runs forward once" in text


def test_where_there_is_none():
    def feed_forward(p, x, t):
        return jnp.sum(p["v"] * x), jax.lax.stop_gradient(x)

    def printing(p, h, t):
        jax.debug.print("{}", h[0])
        return jnp.sum(h * p["v"]), jnp.tanh(h)

    for f, why in ((feed_forward, "the gradient flows through no recurrence"), (printing, "has an effect")):
        with pytest.raises(ScheduleError, match=f"cannot run by the plan 'one pass': .*{why}"):
            gradient(rlfx.compile, f, small(), plan=ONE_PASS, wrt=(0, 1) if f is printing else 0)
    until = {"until": lambda h: h[0] > 2.0, "plan": ONE_PASS}
    with pytest.raises(ScheduleError, match="environments end at different timesteps"):
        gradient(rlfx.compile, policy, small(), **until)
    with pytest.raises(ScheduleError, match="a block belongs to every form but at once and one pass"):
        rlfx.Plan("one pass", 4)
