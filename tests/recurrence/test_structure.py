"""What a program compiles to: no [T, T] for what is linear, contractions instead of sums of gradients, readable prints.

``python -m tests.recurrence.test_structure`` rewrites the golden prints.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import _jaxpr as J
from tests import strategies

GOLDEN = pathlib.Path(__file__).parent / "golden"
T, B, IN, OUT = 89, 3, 11, 13  # primes: a shape names what it belongs to
KEY = jax.random.key(0)


# -- programs ---------------------------------------------------------------------------------------------------------


def everything(jaxpr):
    """The equations of a jaxpr and of those inside."""
    return [x for e in jaxpr.eqns for x in (e, *(y for sub, _ in J.sub_jaxprs(e.params) for y in everything(sub)))]


def reinforce(params, state, t):
    """Monte-Carlo policy gradient on a linear environment."""
    logits = params["w"] @ jnp.tanh(state)
    action = jax.random.categorical(t.key_for("action"), logits)
    pushed = 0.1 * action.astype(jnp.float32)
    reward = rlfx.series(state[0] * pushed)
    done = jax.random.bernoulli(t.key_for("done"), 0.1)
    discount = rlfx.series(0.99 * (1.0 - done.astype(jnp.float32)))
    returns = rlfx.discounted_sum(reward[t:], discount[t:])
    log_prob = jax.nn.log_softmax(logits)[action]
    return -log_prob * jax.lax.stop_gradient(returns), jax.lax.stop_gradient(jnp.roll(state, 1) * 0.9 + pushed)


def scalar_discount(params, state, t):
    """The same sum with one discount."""
    reward = rlfx.series(jnp.tanh(params["w"] @ state).sum())
    return rlfx.discounted_sum(reward[t:], 0.97), 0.9 * state


def actor_critic(params, state, t):
    """Generalised advantages with a critic, normalised."""
    hidden = jnp.tanh(params["w"] @ state)
    value = rlfx.series(hidden.sum())
    delta = state[0] + 0.99 * value[t + 1] - value[t]
    advantage = rlfx.solve(lambda a: delta + 0.95 * a[t + 1], end=0.0)
    advantage = jax.lax.stop_gradient((advantage - rlfx.mean(advantage)) / rlfx.std(advantage))
    return hidden[0] * advantage + delta**2, jax.lax.stop_gradient(jnp.roll(state, 1))


def frames(params, state, t):
    """A window of the last three observations."""
    x = rlfx.series(state)
    stacked = x.window(-2, 1, fill=0.0).mean(0) + x[t - 2 : t + 1].sum(0)
    return jnp.tanh(params["w"] @ stacked).sum(), 0.9 * state


def attention(params, state, t):
    """Attention over the episode's past."""
    keys = rlfx.series(jnp.tanh(params["w"] @ state))
    past = keys[: t + 1]
    return (jax.nn.softmax(past @ keys[t]) @ past).sum(), 0.9 * state


def schedule_and_target(params, carry, i):
    """An iteration-level program: a learning rate and a target network."""
    lr = rlfx.solve(lambda lr: 0.98 * lr[i - 1], start=0.1)
    target = rlfx.every(4, lambda: params["w"], otherwise=carry)
    return lr * jnp.sum((params["w"] - target) ** 2), target


PROGRAMS = [reinforce, scalar_discount, actor_critic, frames, attention]
PARAMS = {"w": jax.random.normal(KEY, (OUT, IN)) / 4}
STATE = jax.random.normal(KEY, (B, IN))


def gradient(f, length=T):
    fn = rlfx.compile(f, length=length, batch=B)
    return jax.grad(lambda p: fn(p, STATE, KEY)[0])


# -- structure --------------------------------------------------------------------------------------------------------


def equations(jaxpr, inside=()):
    """Every equation, with the scans (as their lengths) around it."""
    for e in jaxpr.eqns:
        yield e, inside
        within = (*inside, e.params["length"]) if e.primitive.name == "scan" else inside
        within = (*within, "while") if e.primitive.name == "while" else within
        for value in e.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from equations(sub, within)


def shapes(fn, *args):
    return {
        tuple(v.aval.shape)
        for e, _ in equations(jax.make_jaxpr(fn)(*args).jaxpr)
        for v in e.outvars
        if hasattr(v.aval, "shape")
    }


@pytest.mark.parametrize("f", [reinforce, scalar_discount, actor_critic, frames], ids=lambda f: f.__name__)
@pytest.mark.optimised
def test_linear_programs_have_no_quadratic_buffer(f):
    for fn in (gradient(f), lambda p: rlfx.compile(f, length=T, batch=B)(p, STATE, KEY)):
        assert not [s for s in shapes(fn, PARAMS) if s.count(T) > 1]
    assert not re.search(rf"\[(\d+,)*{T},(\d+,)*{T}[,\]]", jax.jit(gradient(f)).lower(PARAMS).compile().as_text())


@pytest.mark.parametrize("f", [scalar_discount, reinforce, frames, actor_critic, attention], ids=lambda f: f.__name__)
def test_parameter_gradients_are_contractions_over_many_timesteps(f):
    """No loop with one iteration for each timestep carries or makes a gradient of the parameters."""
    made = [(e, inside) for e, inside in equations(jax.make_jaxpr(gradient(f))(PARAMS).jaxpr)]
    weights = [
        (e, inside)
        for e, inside in made
        if any(getattr(v.aval, "shape", ())[-2:] in ((OUT, IN), (IN, OUT)) for v in e.outvars)
    ]
    per_step = [
        e for e, inside in weights if T in inside and e.primitive.name in ("dot_general", "add_any", "add", "mul")
    ]
    assert not per_step, per_step
    assert any(e.primitive.name == "dot_general" for e, _ in weights)
    assert not [s for s in shapes(gradient(f), PARAMS) if T in s and s[-2:] == (OUT, IN)], (
        "a gradient for each timestep"
    )


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_one_program_without_callbacks(f):
    text = jax.jit(gradient(f)).lower(PARAMS).as_text()
    assert "custom_call @xla_python" not in text
    assert "callback" not in text


def test_acting_keeps_only_what_the_loss_needs():
    """The wide observation does not travel out of the loop when only its reward is used later."""

    def f(p, state, t):
        wide = jnp.sin(state[:, None] * jnp.arange(59.0)[None, :])
        reward = rlfx.series(wide.sum())
        return p * jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.9)), 0.9 * state

    fn = rlfx.compile(f, length=T, batch=B)
    stacked = [s for s in shapes(jax.grad(lambda p: fn(p, STATE)[0]), 1.0) if T in s and 59 in s]
    assert not stacked


def test_the_gradient_through_time_keeps_only_the_recurrence_in_its_loop():
    """The loss is smaller than the state it is computed from; but what it is computed from is kept for its derivative."""

    def f(params, state, t):
        return jnp.sin(params["w"] @ state).sum(), jnp.tanh(state)

    fn = rlfx.compile(f, length=T)
    params, state = {"w": jnp.ones((OUT, IN))}, jnp.ones(IN)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p, s: fn(p, s)[0], (0, 1)))(params, state)
    loops = [e for e in everything(jaxpr.jaxpr) if e.primitive.name == "scan"]
    inside = {e.primitive.name for loop in loops for e in loop.params["jaxpr"].jaxpr.eqns}
    assert "tanh" in inside
    assert not inside & {"sin", "cos", "dot_general"}


def test_a_loss_without_gradient_does_not_evaluate_the_learner_twice():
    calls = []

    def f(p, c, t):
        jax.debug.callback(lambda x: calls.append(1), c)
        return p * c, c + 1.0

    rlfx.compile(f, length=5)(1.0, jnp.float32(0.0))
    jax.effects_barrier()
    assert len(calls) == 5


def test_one_timestep_at_a_time_has_no_axis_for_it():
    """Where a block is one timestep, what it computes is ``[B, ...]``: with an axis of one XLA:CPU's reductions are slow."""

    def pairs(p, carry, t):
        x = p["w"] @ rlfx.inputs(p["obs"])[t]
        return jnp.mean(jnp.abs(x[:, None] - x[None]), -1).sum(), carry

    params = {"w": jnp.ones((OUT, IN)), "obs": jnp.ones((T, B, IN))}
    fn = rlfx.compile(pairs, length=T, batch=B, plan=rlfx.Plan("blocks", 1))
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: fn(params | {"w": w}, jnp.zeros(B))[0]))(params["w"])
    shapes = {v.aval.shape for e in everything(jaxpr.jaxpr) for v in e.outvars}
    assert (B, OUT, OUT) in shapes
    assert (1, B, OUT, OUT) not in shapes


# -- golden prints ----------------------------------------------------------------------------------------------------


def printed(f) -> str:
    batch, carry, params = B, STATE, PARAMS
    if f is schedule_and_target:
        batch, carry = None, PARAMS["w"]
    return str(rlfx.compile(f, length=8, batch=batch).trace(params, carry, KEY)) + "\n"


@pytest.mark.parametrize("f", [*PROGRAMS, schedule_and_target], ids=lambda f: f.__name__)
def test_programs_print_readably(f):
    assert printed(f) == (GOLDEN / f"{f.__name__}.txt").read_text()


def test_a_program_is_lowered_to_the_same_text_every_time():
    """Nothing hangs on the addresses of objects: files of compiled programs are found again."""

    def text(seed):
        p = strategies.program(seed, 3)
        params, carry, key = p.arguments()
        fn = rlfx.compile(p.function, **p.options())
        try:
            return jax.jit(jax.grad(lambda x: fn(x, carry, key)[0], allow_int=True)).lower(params).as_text()
        except rlfx.errors.RlfxError as error:
            return type(error).__name__

    seeds = range(12)
    first, again = ([text(seed) for seed in seeds] for _ in range(2))
    assert sum(len(t) > 200 for t in first) >= 8
    assert [seed for seed in seeds if first[seed] != again[seed]] == []


if __name__ == "__main__":
    for program in [*PROGRAMS, schedule_and_target]:
        (GOLDEN / f"{program.__name__}.txt").write_text(printed(program))
