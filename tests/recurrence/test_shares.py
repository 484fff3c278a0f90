"""Numbers of the loss that are functions of sums over time: derivatives of any order, in every plan, and what stays as it is.

Oracle: the same losses in jnp, of arrays with all timesteps and environments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.recurrence.language.primitives import aside_p
from rlfx.recurrence.rewrite.shares import with_shares

T, B, D = 6, 4, 3
X = jax.random.normal(jax.random.key(0), (T, B, D))
P = {"w": jax.random.normal(jax.random.key(1), (D, D)), "a": jnp.float32(0.7)}
#: Timesteps of each environment, where they end.
LENGTHS = np.array([2, 6, 3, 1])
BOTH = (0, 1)


def uneven(m):
    return m.var() / m.mean() ** 2


#: ``name: (of z [D] at a point, by rlfx; of all z [T, B, D] and 1 where there is one, in jnp)``.
NUMBERS = {
    "mean": (lambda z, a: rlfx.mean(z.sum()), lambda z, on, a: mean(z.sum(-1), on)),
    "unevenness": (lambda z, a: uneven(rlfx.mean(z)), lambda z, on, a: uneven(mean(z, on))),
    "two sums, and a parameter": (
        lambda z, a: a * jnp.sin(rlfx.mean(z)).sum() * rlfx.sum(z[0]),
        lambda z, on, a: a * jnp.sin(mean(z, on)).sum() * (z[..., 0] * on).sum(),
    ),
    "entropy of a mean": (
        lambda z, a: (rlfx.mean(jax.nn.softmax(z)) * jnp.log(rlfx.mean(jax.nn.softmax(z)))).sum(),
        lambda z, on, a: (mean(jax.nn.softmax(z), on) * jnp.log(mean(jax.nn.softmax(z), on))).sum(),
    ),
    "functions with rules": (
        lambda z, a: jax.nn.logsumexp(rlfx.mean(z)) - jax.nn.softplus(rlfx.mean(a * z[1])),
        lambda z, on, a: jax.nn.logsumexp(mean(z, on)) - jax.nn.softplus(mean(a * z[..., 1], on)),
    ),
    "multiplier": (
        lambda z, a: jax.lax.stop_gradient(a) * rlfx.mean(z[0]) - a * jax.lax.stop_gradient(rlfx.mean(z[0])),
        lambda z, on, a: (
            jax.lax.stop_gradient(a) * mean(z[..., 0], on) - a * jax.lax.stop_gradient(mean(z[..., 0], on))
        ),
    ),
    "of each environment": (
        lambda z, a: a * rlfx.mean(z, "t").prod(),
        lambda z, on, a: over_environments(a * mean(z, on, 0).prod(-1), on),
    ),
    "sums of each environment": (
        lambda z, a: -2.0 * jnp.log(1.0 + rlfx.sum(z**2, "t").sum()),
        lambda z, on, a: over_environments(-2.0 * jnp.log(1.0 + (z**2 * on[..., None]).sum((0, 2))), on),
    ),
    "of the mean at each timestep": (
        lambda z, a: a * jnp.sin(z[0] * rlfx.mean(z[1])),
        lambda z, on, a: mean(a * jnp.sin(z[..., 0] * mean(z[..., 1], on)), on),
    ),
    "weights of each environment, and a mean of all": (
        lambda z, a: jnp.exp(z[0]) / rlfx.sum(jnp.exp(z[0]), "t") * z[1] * rlfx.mean(a * z[2]),
        lambda z, on, a: mean(weights(z[..., 0], on) * z[..., 1] * mean(a * z[..., 2], on), on),
    ),
    "a preference": (
        lambda z, a: jax.nn.softplus(jnp.where(z[2] > 0, 1.0, -1.0) * (rlfx.sum(z[0], "t") - a * rlfx.sum(z[1], "t"))),
        lambda z, on, a: mean(jax.nn.softplus(jnp.where(z[..., 2] > 0, 1.0, -1.0) * total(z, on, a)), on),
    ),
}


EACH = {
    "w": jax.random.normal(jax.random.key(1), (len(NUMBERS), D, D)),
    "a": jnp.linspace(0.5, 1.5, len(NUMBERS)),
}


def mean(z, on, axes=BOTH):
    on = on.reshape(on.shape + (1,) * (z.ndim - 2))
    return (z * on).sum(axes) / on.sum(axes)


def weights(z, on):
    return jnp.exp(z) * on / (jnp.exp(z) * on).sum(0, keepdims=True)


def total(z, on, a):
    return ((z[..., 0] - a * z[..., 1]) * on).sum(0, keepdims=True)


def over_environments(numbers, on):
    """The mean over points of what each environment has one of."""
    return (numbers * on.sum(0)).sum() / on.sum()


def program(p, left, t):
    """All numbers, each with its own weights. The carry counts the timesteps that are left."""
    x, loss = rlfx.inputs(X)[t], jnp.float32(0.0)
    for w, a, (number, _) in zip(p["w"], p["a"], NUMBERS.values(), strict=True):
        z = jnp.tanh(x @ w)
        loss = loss + (z**2).sum() - 0.5 * number(z, a)
    return loss, left - 1


def by_jnp(on, reduce):
    def loss(p):
        total = 0.0
        for w, a, (_, number) in zip(p["w"], p["a"], NUMBERS.values(), strict=True):
            z = jnp.tanh(X @ w)
            total += mean((z**2).sum(-1), on) - 0.5 * number(z, on, a)
        return total * (on.sum() if reduce == "sum" else 1.0)

    return loss


def squares_of_gradient(loss):
    return lambda p: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(p)))


def close(found, expected):
    """Each number's own derivatives are of about the same size."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


def loss_of(reduce, **how):
    compiled = rlfx.compile(program, length=T, batch=B, reduce=reduce, **how)
    return lambda p: compiled(p, jnp.asarray(LENGTHS))[0]


def test_every_number_is_shared():
    given = rlfx.trace(program, EACH, jnp.asarray(LENGTHS), length=T, batch=B, loss=True)
    assert sum(e.op is aside_p for e in with_shares(given).equations) >= len(NUMBERS)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_values_and_derivatives(reduce):
    expected = by_jnp(jnp.ones((T, B)), reduce)
    at = jax.value_and_grad(expected)(EACH)
    for plan in (None, Plan(), Plan("blocks", 4, 2)):
        close(jax.value_and_grad(loss_of(reduce, plan=plan))(EACH), at)


def test_second_derivatives_and_many_at_once():
    mine, expected = loss_of("mean"), by_jnp(jnp.ones((T, B)), "mean")
    close(*(jax.jit(jax.grad(squares_of_gradient(f)))(EACH) for f in (mine, expected)))
    half = jax.tree.map(lambda v: 0.5 * v, EACH)
    both = jax.vmap(jax.grad(mine))(jax.tree.map(lambda *v: jnp.stack(v), EACH, half))
    close(jax.tree.map(lambda v: v[1], both), jax.grad(expected)(half))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_environments_that_end(reduce):
    at = jax.value_and_grad(by_jnp(jnp.asarray(np.arange(T)[:, None] < LENGTHS, jnp.float32), reduce))(EACH)
    for plan in (None, Plan("blocks", 4)):
        close(jax.value_and_grad(loss_of(reduce, plan=plan, until=lambda left: left <= 0))(EACH), at)


def test_devices_share_the_environments():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    expected = jax.value_and_grad(by_jnp(jnp.ones((T, B)), "mean"))(EACH)
    close(jax.value_and_grad(loss_of("mean", mesh=mesh))(EACH), expected)


def test_through_a_recurrence():
    """Acting finds the mean of what a recurrence gives; the learner goes back through it."""

    def f(p, h, t):
        h = jnp.tanh(rlfx.inputs(X)[t] @ p["w"] + 0.5 * h)
        return (h**2).sum() - p["a"] * uneven(rlfx.mean(h)), h

    def expected(p):
        _, h = jax.lax.scan(lambda h, x: (jnp.tanh(x @ p["w"] + 0.5 * h),) * 2, jnp.zeros((B, D)), X)
        return (h**2).sum(-1).mean() - p["a"] * uneven(h.mean(BOTH))

    for plan in (None, Plan(), Plan("blocks", 2), Plan("blocks", 3, 2), Plan("one pass")):
        compiled = rlfx.compile(f, length=T, batch=B, plan=plan)
        found = jax.value_and_grad(lambda p, f=compiled: f(p, jnp.zeros((B, D)))[0])(P)
        close(found, jax.value_and_grad(expected)(P))


def test_outputs_beside_the_loss_have_their_own_derivative():
    """Of the number itself, and of the loss at each point."""

    def f(p, left, t):
        z = jnp.tanh(rlfx.inputs(X)[t] @ p["w"])
        number = uneven(rlfx.mean(z))
        loss = (z**2).sum() - 0.5 * number
        return loss, left, (number, loss)

    weights = jnp.linspace(0.0, 1.0, T * B).reshape(T, B)

    def found(p):
        loss, (_, (number, losses)) = rlfx.compile(f, length=T, batch=B)(p, jnp.asarray(LENGTHS))
        return loss + 3.0 * number + (weights * losses).sum()

    def expected(p):
        z = jnp.tanh(X @ p["w"])
        number = uneven(z.mean(BOTH))
        losses = (z**2).sum(-1) - 0.5 * number
        return losses.mean() + 3.0 * number + (weights * losses).sum()

    close(jax.value_and_grad(found)(P), jax.value_and_grad(expected)(P))


def rewritten(loss, batch=B):
    """Whether the rewrite changes a program; it changes none a second time."""

    def f(p, left, t):
        return loss(jnp.tanh(rlfx.inputs(X if batch else X[:, 0])[t] @ p["w"]), p["a"], t), left

    given = rlfx.trace(f, P, jnp.asarray(LENGTHS) if batch else jnp.int32(6), length=T, batch=batch, loss=True)
    found = with_shares(given)
    assert with_shares(found) is found
    assert (found is given) == all(e.op is not aside_p for e in found.equations)
    return found is not given


def test_what_is_shared():
    assert rewritten(lambda z, a, t: rlfx.mean(z.sum()))
    assert rewritten(lambda z, a, t: z[0] - (a * uneven(rlfx.mean(z)) - z[1]) / 3.0)
    assert rewritten(lambda z, a, t: z[0] + rlfx.mean(z, "t").prod())
    assert rewritten(lambda z, a, t: z[0] + t.astype(jnp.float32) * rlfx.mean(z[1]))
    assert rewritten(lambda z, a, t: z[0] + (rlfx.mean(z) @ P["w"]).sum())
    assert rewritten(lambda z, a, t: z[0] + uneven(rlfx.mean(z)), batch=None)


def test_what_stays_as_it_is():
    stays = {
        "a variance": lambda z, a, t: z[0] + rlfx.std(z[1]),
        "a maximum": lambda z, a, t: z[0] + rlfx.max(z[1]),
        "over one another": lambda z, a, t: z[0] + rlfx.mean(rlfx.sum(z[1], "t"), "b"),
        "products at each timestep": lambda z, a, t: z[0] + ((rlfx.mean(z) * z) @ P["w"]).sum(),
        "over environments": lambda z, a, t: z[0] + rlfx.mean(z[1], "b") ** 2,
        "stopped": lambda z, a, t: z[0] + jax.lax.stop_gradient(rlfx.mean(z[1])),
        "of data": lambda z, a, t: z[0] + a * rlfx.mean(t.astype(jnp.float32)),
        "a loop": lambda z, a, t: z[0] + jax.lax.fori_loop(0, 3, lambda i, m: jnp.sin(m), rlfx.mean(z[1])),
    }
    assert not [name for name, loss in stays.items() if rewritten(loss)]


def test_a_program_that_is_called_with_a_sum():
    """It has a derivative in reverse alone (the gradient was refused as if it had been asked for forwards)."""

    def inner(k, h, t):
        h = jnp.tanh(0.5 * h + k)
        return h, h

    def f(p, left, t):
        z = rlfx.inputs(p["x"])[t]
        return z[0] + rlfx.unroll(inner, length=3)(p["a"] * z[1], rlfx.mean(z[2], "t"))[1].sum(), left

    def expected(p):
        h = jnp.broadcast_to(p["x"][..., 2].mean(0), (T, B))
        total = p["x"][..., 0]
        for _ in range(3):
            h = jnp.tanh(0.5 * h + p["a"] * p["x"][..., 1])
            total += h
        return total.mean()

    p = {"x": X, "a": P["a"]}
    for fn in (rlfx.compile(f, length=T, batch=B), rlfx.compile(f, length=T, batch=B, plan=Plan())):
        close(jax.value_and_grad(lambda p, fn=fn: fn(p, jnp.zeros(B))[0])(p), jax.value_and_grad(expected)(p))


def test_what_one_timestep_carries_is_no_function_of_its_sums():
    """Of one timestep a sum may be carried, and the loss read what is carried (it found no way from the sum to it)."""

    def program(p, carry, t):
        x = rlfx.series(p * carry, end=-0.4)
        return 0.5 * x[t + 1] + 0.1 * carry, jnp.tanh(0.2 * rlfx.sum(p * carry, "t") + carry)

    def found(make):
        fn = make(program, length=1, batch=B)
        return jax.value_and_grad(lambda p, h: fn(p, h)[0], (0, 1))(1.3, jnp.linspace(0.1, 0.7, B))

    close(found(rlfx.compile), found(rlfx.reference))


def test_blocks_are_legal_and_chosen():
    """A penalty on a mean asked for all timesteps at once."""

    def f(p, left, t):
        h = jax.nn.relu(rlfx.inputs(data)[t] @ p["w"])
        return (h @ p["out"]) ** 2 + uneven(rlfx.mean(jax.nn.softmax(h[:8]))), left

    length, batch, width = 512, 64, 256
    data = jnp.ones((length, batch, 32))
    p = {"w": jnp.ones((32, width)), "out": jnp.ones(width)}
    compiled = rlfx.compile(f, length=length, batch=batch)
    assert "blocks" in str(compiled.explain(p, jnp.zeros(batch)))


# -- numbers that nobody wrote


SUMS = {
    "mean": (lambda x: rlfx.mean(x), lambda x, on: mean(x, on)),
    "sum": (lambda x: 0.1 * rlfx.sum(x), lambda x, on: 0.1 * (x * on).sum()),
    "mean over t": (lambda x: rlfx.mean(x, "t"), lambda x, on: mean(x, on, 0)),
    "sum over t": (lambda x: 0.3 * rlfx.sum(x, "t"), lambda x, on: 0.3 * (x * on).sum(0)),
}
FUNCTIONS = [jnp.sin, jnp.tanh, lambda x: x**2, jax.nn.softplus, lambda x: jnp.where(x > 0.1, x, 0.2 * x), jnp.negative]
PAIRS = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, lambda x, y: x / (1.0 + y**2)]


def grown(rng, depth, inside=False):
    """A random number, of ``(z, a)`` by rlfx and of ``(z, on, a)`` in jnp: sums, of what has no sums in it mostly."""
    pick = lambda x: x[rng.integers(len(x))]  # noqa: E731
    if depth == 0 or rng.random() < 0.1:
        i = rng.integers(D)
        return [(lambda z, a: z[i], lambda z, on, a: z[..., i]), (lambda z, a: a, lambda z, on, a: a)][rng.random() < 0.2]
    kind = rng.random()
    if kind < (0.05 if inside else 0.45):
        (mine, theirs), (f, g) = pick(list(SUMS.values())), grown(rng, depth - 1, True)
        return lambda z, a: mine(f(z, a)), lambda z, on, a: theirs(jnp.broadcast_to(g(z, on, a), on.shape), on)
    if kind < 0.7:
        h, (f, g) = pick(FUNCTIONS), grown(rng, depth - 1, inside)
        return lambda z, a: h(f(z, a)), lambda z, on, a: h(g(z, on, a))
    h, (f, g), (k, m) = pick(PAIRS), grown(rng, depth - 1, inside), grown(rng, depth - 1, inside)

    def both(z, on, a):
        return h(*(jnp.broadcast_to(x, on.shape) for x in (g(z, on, a), m(z, on, a))))

    return lambda z, a: h(f(z, a), k(z, a)), both


def check_grown(seed):
    number, other = grown(np.random.default_rng(seed), 4)

    def f(p, left, t):
        z = jnp.tanh(rlfx.inputs(X)[t] @ p["w"])
        return (z**2).sum() + number(z, p["a"]), left - 1

    def loss(p, on):
        z = jnp.tanh(X @ p["w"])
        return mean((z**2).sum(-1) + jnp.broadcast_to(other(z, on, p["a"]), on.shape), on)

    args = P, jnp.asarray(LENGTHS)
    shared = with_shares(given := rlfx.trace(f, *args, length=T, batch=B, loss=True)) is not given
    for how, on in (({}, np.ones((T, B))), ({"until": lambda left: left <= 0}, np.arange(T)[:, None] < LENGTHS)):
        on = jnp.asarray(on, jnp.float32)
        expected = jax.value_and_grad(lambda p, on=on: loss(p, on))(P)
        for plan in (None, Plan("blocks", 4)) if shared else (None,):
            compiled = rlfx.compile(f, length=T, batch=B, plan=plan, **how)
            close(jax.value_and_grad(lambda p, f=compiled: f(p, args[1])[0])(P), expected)
    return shared


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 400, 8))])
def test_grown_numbers(first):
    """At least one of eight is shared."""
    shared = [check_grown(seed) for seed in range(first, first + 8)]
    assert any(shared)
