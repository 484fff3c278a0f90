"""Awkward shapes of program, each written twice: per timestep, and by hand as a jax user would.

``AWKWARD[name]()`` is ``(program, by hand, params, carry, options of compile)``. The loss is a mean over T timesteps, and
over environments if there are some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import rlfx

T = 12
S = rlfx.series
AWKWARD: dict[str, Callable] = {}


def awkward(name: str, params=0.7, carry=(0.3, -0.2, 0.5), **options):
    """Register ``make() -> (program, by hand)`` of float32 params and carry."""

    def register(make: Callable) -> Callable:
        arrays = lambda x: jax.tree.map(jnp.float32, x, is_leaf=lambda y: isinstance(y, tuple))  # noqa: E731
        AWKWARD[name] = lambda: (*make(), arrays(params), arrays(carry), options)
        return make

    return register


def chain(n, x):
    for _ in range(n):
        x = jnp.sin(x)
    return x


def diamonds(n, x):
    for _ in range(n):
        x = jnp.sin(x) + 0.5 * jnp.cos(x)
    return x


def wide(n, x):
    return sum(jnp.sin(x + 0.1 * i) for i in range(n)) / n


def rollout(step, c):
    """The carries at 0 ... T - 1."""
    return lax.scan(lambda c, t: (step(c, t), c), c, jnp.arange(T))[1]


def decay(c, t=None):
    return jax.tree.map(lambda x: 0.9 * x, c)


def back(x, k):
    """x[t - k], 0 before the start."""
    return jnp.concatenate([jnp.zeros((min(k, T), *x.shape[1:])), x[: T - min(k, T)]])


def ahead(x):
    return jnp.concatenate([x[1:], jnp.zeros((1, *x.shape[1:]))])


def backwards(step, x, init):
    """y[t] = step(y[t + 1], x[t])."""
    return lax.scan(lambda y, x: (step(y, x),) * 2, init, x, reverse=True)[1]


def forwards(step, x, init):
    return lax.scan(lambda y, x: (step(y, x),) * 2, init, x)[1]


def unary(name: str, fn: Callable) -> None:
    """A function in the loop, and one on the way of the gradient."""

    @awkward(f"{name} in the loop")
    def _():
        return (
            lambda p, c, t: (p * c.sum(), fn(c)),
            lambda p, c: jnp.mean(p * rollout(lambda c, t: fn(c), c).sum(-1)),
        )

    @awkward(f"{name} with parameters")
    def _():
        return (
            lambda p, c, t: (fn(p * c).sum(), decay(c)),
            lambda p, c: jnp.mean(jax.vmap(lambda c: fn(p * c).sum())(rollout(decay, c))),
        )


def nested_conds(x):
    for i in range(8):
        x = lax.cond(x.sum() > 0.1 * i, functools.partial(lambda i, y: jnp.sin(y) + 0.01 * i, i), jnp.cos, x)
    return x


def nested_scans(x):
    def inner(depth, x):
        step = (lambda y: jnp.sin(y)) if depth == 0 else functools.partial(inner, depth - 1)
        return lax.scan(lambda y, _: (step(y), None), x, None, length=2)[0]

    return inner(4, x)


def nested_jits(x):
    fn = jnp.sin
    for _ in range(40):
        fn = jax.jit(lambda y, fn=fn: 0.99 * fn(y))
    return fn(x)


unary("a deep chain", functools.partial(chain, 150))
unary("deep diamonds", functools.partial(diamonds, 60))
unary("something wide", functools.partial(wide, 100))
unary("conds in a row", nested_conds)
unary("scans in scans", nested_scans)
unary("jits in jits", nested_jits)


@awkward("200 reads of one series")
def _():
    def f(p, c, t):
        x = S(p * c, start=0.0)
        return sum((i + 1) * x[t - 1 - i % 3].sum() for i in range(200)), decay(c)

    def hand(p, c):
        x = p * rollout(decay, c)
        return jnp.mean(sum((i + 1) * back(x, 1 + i % 3).sum(-1) for i in range(200)))

    return f, hand


@awkward("40 reads of one series at different distances")
def _():
    def f(p, c, t):
        x = S(p * c, start=0.0)
        return sum((i + 1) * x[t - 1 - i].sum() for i in range(40)), decay(c)

    def hand(p, c):
        x = p * rollout(decay, c)
        return jnp.mean(sum((i + 1) * back(x, 1 + i).sum(-1) for i in range(40)))

    return f, hand


@awkward("many index expressions")
def _():
    indices = [lambda t, i=i: (t * (1 + i % 3) + i) // (2 + i % 4) for i in range(20)]

    def f(p, c, t):
        x = S(p * c)
        return sum(x[rlfx.minimum(at(t), T - 1)].sum() for at in indices), decay(c)

    def hand(p, c):
        x, times = p * rollout(decay, c), jnp.arange(T)
        return jnp.mean(sum(x[jnp.minimum(at(times), T - 1)].sum(-1) for at in indices))

    return f, hand


@awkward("50 series")
def _():
    def f(p, c, t):
        return sum(S(p * c + 0.1 * i, start=0.0)[t - 1].sum() for i in range(50)), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum(back(p * c + 0.1 * i, 1).sum(-1) for i in range(50)))

    return f, hand


@awkward("50 suffixes")
def _():
    def f(p, c, t):
        return sum(jnp.sum(S(jnp.sin(p * c + 0.1 * i))[t:]) for i in range(50)), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum(lax.cumsum(jnp.sin(p * c + 0.1 * i).sum(-1), reverse=True) for i in range(50)))

    return f, hand


@awkward("20 discounted sums")
def _():
    def f(p, c, t):
        return sum(rlfx.discounted_sum(S(jnp.sin(p * c + i).sum())[t:], 0.9 - 0.01 * i) for i in range(20)), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(
            sum(
                backwards(lambda y, x, i=i: x + (0.9 - 0.01 * i) * y, jnp.sin(p * c + i).sum(-1), 0.0)
                for i in range(20)
            )
        )

    return f, hand


@awkward("20 maxima of the past")
def _():
    def f(p, c, t):
        return sum(S(jnp.sin(p * c + i))[: t + 1].max(0).sum() for i in range(20)), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum(lax.cummax(jnp.sin(p * c + i)).sum(-1) for i in range(20)))

    return f, hand


@awkward("30 windows")
def _():
    def f(p, c, t):
        x = S(p * c.sum())
        return sum((x.window(-i, 2) * jnp.arange(i + 2.0)).sum() for i in range(1, 31)), decay(c)

    def hand(p, c):
        x = p * rollout(decay, c).sum(-1)

        def window(i):
            padded = jnp.concatenate([jnp.zeros(i), x, jnp.zeros(1)])
            return jax.vmap(lambda t: lax.dynamic_slice_in_dim(padded, t, i + 2))(jnp.arange(T)) @ jnp.arange(i + 2.0)

        return jnp.mean(sum(map(window, range(1, 31))))

    return f, hand


@awkward("series of series")
def _():
    def f(p, c, t):
        x = p * c.sum()
        for _ in range(30):
            x = S(1.1 * x, start=0.1)[t - 1]
        return x, decay(c)

    def hand(p, c):
        x = p * rollout(decay, c).sum(-1)
        for _ in range(30):
            x = jnp.concatenate([jnp.full(1, 0.1), 1.1 * x[:-1]])
        return jnp.mean(x)

    return f, hand


@awkward("solves in parallel")
def _():
    def f(p, c, t):
        x = jnp.sin(p * c.sum())
        return sum(rlfx.solve(lambda y, i=i: jnp.tanh(y[t + 1]) + i * x, end=0.0) for i in range(20)), decay(c)

    def hand(p, c):
        x = jnp.sin(p * rollout(decay, c).sum(-1))
        step = lambda i: lambda y, x: jnp.tanh(y) + i * x  # noqa: E731
        return jnp.mean(sum(backwards(step(i), x, jnp.float32(0.0)) for i in range(20)))

    return f, hand


@awkward("solves there and back")
def _():
    def f(p, c, t):
        x = jnp.sin(p * c.sum())
        for _ in range(6):
            x = rlfx.solve(lambda y, x=x: 0.5 * jnp.tanh(y[t - 1]) + x, start=0.0)
            x = rlfx.solve(lambda y, x=x: 0.5 * jnp.tanh(y[t + 1]) + x, end=0.0)
        return x, decay(c)

    def hand(p, c):
        x = jnp.sin(p * rollout(decay, c).sum(-1))
        for _ in range(6):
            x = forwards(lambda y, x: 0.5 * jnp.tanh(y) + x, x, jnp.float32(0.0))
            x = backwards(lambda y, x: 0.5 * jnp.tanh(y) + x, x, jnp.float32(0.0))
        return jnp.mean(x)

    return f, hand


def _tree(x, depth=5):
    return x if depth == 0 else {"a": _tree(x + 0.1 * depth, depth - 1), "b": (_tree(x - 0.1, depth - 1), [])}


@awkward("nested trees")
def _():
    def f(p, c, t):
        x = S(_tree(p * c), end=0.0)[t + 1]
        return sum(y.sum() for y in jax.tree.leaves(x)), decay(c)

    def hand(p, c):
        x = jax.tree.map(ahead, _tree(p * rollout(decay, c)))
        return jnp.mean(sum(y.sum(-1) for y in jax.tree.leaves(x)))

    return f, hand


@awkward("a carry of 60 leaves", carry={f"k{i:02}": 0.1 * i for i in range(60)})
def _():
    def f(p, c, t):
        return p * c["k59"], dict(zip(c, [jnp.sin(c["k59"]), *c.values()], strict=False))

    def hand(p, c):
        c = rollout(lambda c, t: dict(zip(c, [jnp.sin(c["k59"]), *c.values()], strict=False)), c)
        return jnp.mean(p * c["k59"])

    return f, hand


@awkward("100 parameters", params={f"p{i}": 0.1 * i for i in range(100)})
def _():
    def f(p, c, t):
        return sum(jnp.sin(x * c).sum() for x in p.values()), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum(jnp.sin(x * c).sum(-1) for x in p.values()))

    return f, hand


@awkward("60 inputs", params={f"p{i}": tuple(0.1 * i + 0.01 * t for t in range(T)) for i in range(60)})
def _():
    def f(p, c, t):
        x = rlfx.inputs(p, axes="t")[t]
        return sum((y * c).sum() for y in x.values()), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum((y[:, None] * c).sum(-1) for y in p.values()))

    return f, hand


@awkward("60 results")
def _():
    def f(p, c, t):
        return p * c.sum(), decay(c), tuple(jnp.sin(c + i) for i in range(60))

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(p * c.sum(-1)), tuple(jnp.sin(c + i) for i in range(60))

    return f, hand


@awkward("a deep network", params={f"w{i}": ((0.3, 0.1, 0.2),) * 3 for i in range(20)})
def _():
    def network(p, x):
        for w in p.values():
            x = jnp.tanh(x @ w)
        return x.sum()

    return (
        lambda p, c, t: (network(p, c), decay(c)),
        lambda p, c: jnp.mean(jax.vmap(functools.partial(network, p))(rollout(decay, c))),
    )


@awkward("attention in four layers", params={f"w{i}": ((0.3, 0.1, 0.2),) * 3 for i in range(4)})
def _():
    def f(p, c, t):
        x = c
        for w in p.values():
            keys = S(x @ w)[: t + 1]
            x = x + jax.nn.softmax(keys @ x) @ keys
        return x.sum(), decay(c)

    def hand(p, c):
        x, past = rollout(decay, c), jnp.tril(jnp.ones((T, T), bool))
        for w in p.values():
            keys = x @ w
            x = x + jax.nn.softmax(jnp.where(past, x @ keys.T, -jnp.inf)) @ keys
        return jnp.mean(x.sum(-1))

    return f, hand


@awkward("means over environments", carry=((0.3, -0.2), (0.5, 0.1), (0.2, 0.7)), batch=3)
def _():
    def f(p, c, t):
        x = jnp.sin(p * c.sum())
        for _ in range(10):
            x = jnp.tanh((x - rlfx.mean(x, "b")) / (rlfx.std(x, "b") + 0.1))
        return x, decay(c)

    def hand(p, c):
        x = jnp.sin(p * rollout(decay, c).sum(-1))
        for _ in range(10):
            x = jnp.tanh((x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 0.1))
        return jnp.mean(x)

    return f, hand


@awkward("constants", carry=(0.3, -0.2, 0.5))
def _():
    many = [jnp.arange(3000.0).reshape(1000, 3) * i for i in range(30)]

    def f(p, c, t):
        return sum(jnp.tanh(k @ (p * c)).sum() for k in many), decay(c)

    def hand(p, c):
        c = rollout(decay, c)
        return jnp.mean(sum(jnp.tanh(p * c @ k.T).sum(-1) for k in many))

    return f, hand


@awkward("draws")
def _():
    def draw(key, x):
        return sum(jax.random.normal(jax.random.fold_in(key, i), x.shape) for i in range(20)) * x

    def f(p, c, t):
        return p * c.sum() * 0.0, decay(draw(t.key, c)) * 0.0 + c

    def hand(p, c):
        return jnp.mean(
            p
            * 0.0
            * rollout(lambda c, t: decay(draw(jax.random.fold_in(jax.random.key(0), t), c)) * 0.0 + c, c).sum(-1)
        )

    return f, hand
