"""Generated stacks of layers, against plain loops: recurrences of all kinds, both ways, products, reads and windows between them.

``stack(seed)`` is always the same stack. Each layer is given once to rlfx, and once to loops over lists of timesteps, which share
no code with it.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ScheduleError
from tests.machines import AS_A_GPU
from tests.sampling import spread

W = 3
CPU = rlfx.target("cpu")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of ``W`` features.

    Attributes:
      name: what it is.
      rlfx: ``(w, x, d, t) -> y``: from a series of what is below, whether an episode ends, and the time.
      plain: ``(w, xs, ds) -> ys``: the same of one environment, from lists.
    """

    name: str
    rlfx: Callable
    plain: Callable


#: ``(w, h, x, d) -> h``: how states follow each other.
STEPS: dict[str, Callable] = {
    "gate": lambda w, h, x, d: (1 - jax.nn.sigmoid(x + w[0])) * h + jax.nn.sigmoid(x + w[0]) * jnp.tanh(x),
    "trace": lambda w, h, x, d: jnp.where(d, 0.0, 0.8) * h + x * w[1],
    "bounded": lambda w, h, x, d: jnp.tanh(0.7 * h + x * w[0]),
    "largest": lambda w, h, x, d: jnp.maximum(0.9 * h, x),
    "reset": lambda w, h, x, d: jnp.where(d, x, 0.5 * h + jnp.sin(x)),
    "weights": lambda w, h, x, d: jnp.tanh(0.5 * w @ h + x),
    "weights and gate": lambda w, h, x, d: jnp.where(d, 0.0, 1.0) * jnp.tanh(w @ h) * jax.nn.sigmoid(x) + 0.5 * x,
    "rotated": lambda w, h, x, d: 0.8 * jnp.roll(h, 1) + x,
}


def recurrence(name: str, back: bool) -> Layer:
    step, boundary = STEPS[name], "end" if back else "start"

    def by_rlfx(w, x, d, t):
        one = lambda h: step(w, h[t + 1 if back else t - 1], x[t], d)  # noqa: E731
        return rlfx.solve(one, **{boundary: jnp.full(W, 0.3)})

    def plain(w, xs, ds):
        h, found = jnp.full(W, 0.3), {}
        for t in sorted(range(len(xs)), reverse=back):
            found[t] = h = step(w, h, xs[t], ds[t])
        return [found[t] for t in range(len(xs))]

    return Layer(f"{name} {'backwards' if back else 'forwards'}", by_rlfx, plain)


def pointwise(name: str, fn: Callable) -> Layer:
    return Layer(name, lambda w, x, d, t: fn(w, x[t], d), lambda w, xs, ds: [fn(w, x, d) for x, d in zip(xs, ds, strict=True)])


def read(k: int) -> Layer:
    """The value of another timestep beside that of this one."""

    def plain(w, xs, ds):
        at = lambda t: xs[t] if 0 <= t < len(xs) else jnp.full(W, 0.1)  # noqa: E731
        return [jnp.tanh(x @ w) + at(t + k) for t, x in enumerate(xs)]

    return Layer(f"read at t{k:+d}", lambda w, x, d, t: jnp.tanh(x[t] @ w) + x[t + k], plain)


def window(k: int) -> Layer:
    """The largest of those that follow, and their mean."""

    def by_rlfx(w, x, d, t):
        some = x.window(0, k, fill=0.1)
        return some.max(0) + (some @ w).mean(0)

    def plain(w, xs, ds):
        # Pairs, since jax's own derivative of a maximum asks which element equals it, which XLA may have computed otherwise: NaN.
        beyond = [*xs, *[jnp.full(W, 0.1)] * k]
        some = [beyond[t : t + k] for t in range(len(xs))]
        return [functools.reduce(jnp.maximum, s) + sum(x @ w for x in s) / k for s in some]

    return Layer(f"window of {k}", by_rlfx, plain)


def sum_from_now() -> Layer:
    def plain(w, xs, ds):
        return [0.3 * sum(xs[t:]) + x * w[0] for t, x in enumerate(xs)]

    return Layer("sum from now on", lambda w, x, d, t: 0.3 * x[t:].sum(0) + x[t] * w[0], plain)


BETWEEN = [
    pointwise("product", lambda w, x, d: x @ w), pointwise("layer", lambda w, x, d: jnp.tanh(x @ w) + x),
    pointwise("elementwise", lambda w, x, d: jnp.sin(x) * w[0]),
    pointwise("stopped", lambda w, x, d: jax.lax.stop_gradient(x) @ w + x),
    read(1), read(-1), read(-2), read(2), window(3), sum_from_now(),
]  # fmt: skip
RECURRENCES = [recurrence(name, back) for name in STEPS for back in (False, True)]


@dataclasses.dataclass(frozen=True)
class Stack:
    """A program of layers, one above the other, whose sum of squares is the loss.

    Attributes:
      plan: one that is asked for, where it is legal.
    """

    seed: int
    layers: tuple[Layer, ...]
    length: int
    batch: int
    target: Any
    plan: Any

    def __repr__(self) -> str:
        names = "; ".join(layer.name for layer in self.layers)
        return f"stack({self.seed}): T={self.length}, B={self.batch}, {self.plan}: {names}"

    def arguments(self) -> tuple:
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(self.length, self.batch, W)).astype(np.float32)
        d = rng.random((self.length, self.batch)) < 0.3
        weights = 0.6 * rng.normal(size=(len(self.layers), W, W)).astype(np.float32)
        return list(map(jnp.asarray, weights)), jnp.asarray(x), jnp.asarray(d)

    def program(self) -> Callable:
        def run(params, carry, t):
            weights, x, d = params
            y, d = rlfx.inputs(x)[t], rlfx.inputs(d, axes="tb")[t]
            for w, layer in zip(weights, self.layers, strict=True):
                y = layer.rlfx(w, rlfx.series(y, start=0.1, end=0.1), d, t)
            return jnp.sum(y**2), carry, y

        return run

    def by_hand(self, weights: Any, x: Any, d: Any) -> tuple:
        def one(x, d):
            ys = list(x)
            for w, layer in zip(weights, self.layers, strict=True):
                ys = layer.plain(w, ys, list(d))
            return jnp.stack(ys)

        found = jax.vmap(one, 1, 1)(x, d)
        return (found**2).sum() / (self.length * self.batch), found


def stack(seed: int) -> Stack:
    """Two to four recurrences, with up to two other layers below, between and above."""
    chosen = random.Random(seed)
    layers: list[Layer] = []
    for _ in range(chosen.randint(2, 4)):
        layers += chosen.choices(BETWEEN, k=chosen.randint(0, 2))
        layers.append(chosen.choice(RECURRENCES))
    layers += chosen.choices(BETWEEN, k=chosen.randint(0, 1))
    plans = (None, rlfx.Plan(), rlfx.Plan("one pass"), rlfx.Plan("blocks", 1), rlfx.Plan("blocks", 2), rlfx.Plan(environments=2))
    length, batch = chosen.choice((1, 2, 3, 5, 6, 9)), chosen.choice((1, 2, 4))
    plan = chosen.choice(plans)
    if plan is not None and ((plan.environments or 1) > batch or (plan.block or 1) > length):
        plan = None
    return Stack(seed, tuple(layers), length, batch, chosen.choice((CPU, AS_A_GPU)), plan)


def gradients(fn: Callable, x: Any, d: Any, weights: Any, of_data: bool) -> Any:
    """The value, the last layer, and gradients: of weights alone (plans that data would forbid), or of both."""
    wanted = (0, 1) if of_data else 0
    run = jax.value_and_grad(lambda weights, x: fn(weights, x, d), wanted, has_aux=True)
    return jax.jit(run)(weights, x)


def compiled(s: Stack, plan: rlfx.Plan | None) -> Callable:
    fn = rlfx.compile(s.program(), length=s.length, batch=s.batch, target=s.target, plan=plan)

    def run(weights, x, d):
        loss, (_, y) = fn((weights, x, d), None)
        return loss, y

    return run


def check(s: Stack) -> None:
    """Compare, by its plan if that is legal."""
    weights, x, d = s.arguments()
    of_data = s.plan is None
    plan = None if of_data or not is_legal(s) else s.plan
    found, expected = (gradients(f, x, d, weights, of_data) for f in (compiled(s, plan), s.by_hand))

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max() + 1), err_msg=repr(s))

    jax.tree.map(close, found, expected)


def is_legal(s: Stack) -> bool:
    """Whether its plan is legal: of the others the compiler says why."""
    weights, x, d = s.arguments()
    try:
        jax.eval_shape(lambda weights: gradients(compiled(s, s.plan), x, d, weights, False), weights)
    except ScheduleError as refusal:
        return "cannot run by the plan" not in str(refusal)
    return True


CHUNK = 5


@pytest.mark.parametrize("chunk", spread(range(400), 3))
def test_stacks(chunk: int):
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        check(stack(seed))


def test_the_plans_of_some_are_legal():
    asked = [s for s in map(stack, range(12)) if s.plan is not None]
    assert {is_legal(s) for s in asked} == {True, False}


def test_the_generator_makes_everything():
    stacks = [stack(seed) for seed in range(300)]
    assert {layer.name for s in stacks for layer in s.layers} == {layer.name for layer in (*BETWEEN, *RECURRENCES)}
    assert {s.target.rewrites.unroll for s in stacks} == {1, 4}
    assert len({s.plan for s in stacks}) == 6
    assert max(len(s.layers) for s in stacks) > 8
