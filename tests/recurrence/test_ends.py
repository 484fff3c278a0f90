"""What only the value behind the last timestep needs is computed at the last timestep: values, gradients, and what stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.ends import with_ends_alone

T, B, D, H = 7, 3, 4, 5
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "x": jax.random.normal(K[0], (T, B, D)), "w": jax.random.normal(K[1], (D, H)), "u": jax.random.normal(K[2], (H,)),
    "k": jax.random.normal(K[3], (D, D)) / 2.0,
}  # fmt: skip
CARRY = jnp.linspace(-0.5, 0.5, B * D).reshape(B, D)
DOT = J.primitive("dot_general")


def critic(p, x):
    return jnp.tanh(x @ p["w"]) @ p["u"]


def program(p, h, t, end=lambda p, h, t: critic(p, h), stop=stop_gradient):
    """A critic of a state, and of the one behind; returns go back from there."""
    x = rlfx.inputs(p["x"])[t]
    after = jnp.tanh(h @ p["k"] + x)
    value = rlfx.series(critic(p, h), end=stop(end(p, after, t)))
    returns = rlfx.solve(lambda g: x[0] + 0.9 * (0.2 * value[t + 1] + 0.8 * g[t + 1]), end=value[t + 1])
    return (value[t] - stop_gradient(returns)) ** 2 + after[0], after


def by_hand(p, h):
    """Timestep by timestep."""
    states, losses = [h], []
    for t in range(T):
        states.append(jnp.tanh(states[-1] @ p["k"] + p["x"][t]))
    values = [critic(p, h) for h in states]
    returns = stop_gradient(values[T])
    for t in reversed(range(T)):
        returns = stop_gradient(p["x"][t][:, 0] + 0.9 * (0.2 * values[t + 1] + 0.8 * returns))
        losses.append((values[t] - returns) ** 2 + states[t + 1][:, 0])
    return jnp.stack(losses).mean()


def products(program):
    """Whether the products with weights vary with t."""
    return ["t" in program.dims_of(e.outputs[0]) for e in program.equations if e.op is DOT]


def traced(f, until=None, length=T):
    return rlfx.trace(f, PARAMS, CARRY, length=length, batch=B, until=until)


@pytest.mark.parametrize("plan", [None, rlfx.Plan(), rlfx.Plan("one pass")])
def test_values_and_gradients_are_those_of_loops(plan):
    fn = rlfx.compile(program, length=T, batch=B, plan=plan)
    found = jax.jit(jax.value_and_grad(lambda p, h: fn(p, h)[0], argnums=(0, 1)))(PARAMS, CARRY)
    expected = jax.value_and_grad(by_hand, argnums=(0, 1))(PARAMS, CARRY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def test_the_critic_is_that_of_the_last_timestep_alone():
    given = traced(program)
    found = with_ends_alone(given)
    assert products(given) == [True] * 5
    assert sorted(products(found)) == [False] * 2 + [True] * 3
    assert with_ends_alone(found) is found
    fn = rlfx.compile(program, length=64, batch=B)
    data = PARAMS | {"x": jnp.zeros((64, B, D))}
    text = jax.jit(lambda p: fn(p, CARRY)[0]).lower(data).as_text()
    assert f"tensor<{B}x{D}xf32>, tensor<{D}x{H}xf32>" in text


def test_of_environments_alike_and_of_the_first_timestep():
    """What ends have no batch, and starts, which were computed at the first timestep before."""

    def f(p, h, t):
        x = rlfx.inputs(p["x"][:, 0], axes="t")[t]
        value = rlfx.series(critic(p, x), start=critic(p, x + 1.0), end=stop_gradient(critic(p, x + h)))
        returns = rlfx.solve(lambda g: 0.9 * g[t + 1] + value[t - 1], end=value[t + 1])
        return (value[t] - stop_gradient(returns)) ** 2, h

    h = jnp.float32(0.5)
    fn, reference = (make(f, length=T) for make in (rlfx.compile, rlfx.reference))
    found, expected = (jax.value_and_grad(lambda p, fn=fn: fn(p, h)[0])(PARAMS) for fn in (fn, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)
    given = rlfx.trace(f, PARAMS, h, length=T)
    assert products(with_ends_alone(given)).count(False) == 2


def test_two_series_share_an_end_and_a_part_of_it_is_read_elsewhere():
    def f(p, h, t):
        x = rlfx.inputs(p["x"])[t]
        after = jnp.tanh(h @ p["k"] + x)
        hidden = stop_gradient(jnp.tanh(after @ p["w"]))
        end = hidden @ stop_gradient(p["u"])
        a, b = rlfx.series(critic(p, h), end=end), rlfx.series(critic(p, x), end=end * 2.0)
        returns = rlfx.solve(lambda g: 0.9 * g[t + 1] + a[t + 1] + b[t + 1], end=a[t + 1])
        return (a[t] - stop_gradient(returns)) ** 2 * hidden[0], after

    fn, reference = (make(f, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    found, expected = (jax.value_and_grad(lambda p, fn=fn: fn(p, CARRY)[0])(PARAMS) for fn in (fn, reference))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)
    assert products(with_ends_alone(traced(f))).count(False) == 1  # of what is hidden


def test_what_stays():
    noisy = lambda p, h, t: critic(p, h + jax.random.normal(t.key_for("noise"), (D,)))  # noqa: E731

    def returned(p, h, t):
        x = rlfx.inputs(p["x"])[t]
        after = jnp.tanh(h @ p["k"] + x)
        end = stop_gradient(critic(p, after))
        value = rlfx.series(critic(p, h), end=end)
        returns = rlfx.solve(lambda g: 0.9 * g[t + 1] + value[t + 1], end=0.0)
        return (value[t] - stop_gradient(returns)) ** 2, after, end

    def one_step(p, h, t):
        """Nothing goes back: this may be learned from while it acts."""
        after = jnp.tanh(h @ p["k"] + rlfx.inputs(p["x"])[t])
        value = rlfx.series(critic(p, h), end=stop_gradient(critic(p, after)))
        return (value[t] - stop_gradient(value[t + 1])) ** 2, stop_gradient(after)

    def cheap(p, h, t):
        return program(p, h, t, end=lambda p, h, t: jnp.tanh(h[0]))

    def learnt(p, h, t):
        x = rlfx.inputs(p["x"])[t]
        value = rlfx.series(critic(p, h), end=critic(p, h + x))
        returns = rlfx.solve(lambda g: 0.9 * g[t + 1] + value[t + 1], end=0.0)
        return (value[t] - returns) ** 2, h

    for f in (returned, one_step, cheap, learnt):
        given = traced(f)
        assert with_ends_alone(given) is given, f.__name__
    drawn = traced(lambda p, h, t: program(p, h, t, end=noisy))
    draws = lambda p: [e for e in p.equations if e.op in J.RANDOM and "t" in p.dims_of(e.outputs[0])]  # noqa: E731
    assert draws(with_ends_alone(drawn)) == draws(drawn) != []
    ending = traced(program, until=lambda h: h[0] > 2.0)
    assert with_ends_alone(ending) is ending


def test_in_blocks_of_a_timestep():
    def acting(p, h, t):
        after = jnp.tanh(0.9 * h + jax.random.normal(t.key_for("step"), (D,)))
        value = rlfx.series(critic(p, h), end=stop_gradient(critic(p, after)))
        returns = rlfx.discounted_sum(rlfx.series(after[0])[t:], 0.9) + value[t + 1]
        return (value[t] - stop_gradient(returns)) ** 2, stop_gradient(after)

    fn = rlfx.compile(acting, length=T, batch=B, plan=rlfx.Plan("blocks", 1))
    reference = rlfx.reference(acting, length=T, batch=B)
    of = lambda fn: jax.value_and_grad(lambda p: fn(p, CARRY, K[0])[0])(PARAMS)  # noqa: E731
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), of(fn), of(reference))
