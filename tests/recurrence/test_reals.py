"""Complex numbers by their parts: the values and gradients of complex arithmetic, with none left in what a CPU runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.cpu.complex_parts import Parts, by_parts
from rlfx.recurrence.rewrite.reals import with_reals
from tests import strategies
from tests.sampling import spread

CPU = rlfx.target("cpu")
ALWAYS, WITHOUT = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, reals=n)) for n in (1, 0))
T, B, N = 5, 3, 2


@pytest.fixture(autouse=True)
def lenient():
    """Real numbers beside complex ones, as jax allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def complex_array(key, *shape):
    re, im = jax.random.split(key)
    return jax.lax.complex(jax.random.normal(re, shape), jax.random.normal(im, shape))


# -- jaxprs: every rule -------------------------------------------------------------------------------------------------------


def looped(z, w, x):
    """A loop that carries a complex number, a real one and zeros, over complex and real values."""

    def body(carry, at):
        turned, count, zeros = carry
        a, b = at
        turned = turned * a + z * b
        return (turned, count + b, zeros + 1j * b), (turned * count, b)

    start = (w, jnp.zeros(3), jnp.zeros(3, jnp.complex64))
    carry, ys = jax.lax.scan(body, start, (jnp.stack([z, w]), jnp.stack([x, 2 * x])), reverse=True)
    return sum(map(jnp.sum, (*carry, *ys)))


#: Of ``z, w`` complex64[3] and ``x`` float32[3].
FUNCTIONS = {
    "sums": lambda z, w, x: z + w - 2.0 * z - (-w) + jnp.sum(z) + jnp.cumsum(w),
    "product": lambda z, w, x: z * w * x * (1 + 2j) * 1j,
    "squares": lambda z, w, x: z**2 + jnp.square(w) + z**3,
    "quotients": lambda z, w, x: z / (1 + x**2) + w / (2 + 1j + z * z),
    "conjugate": lambda z, w, x: z * jnp.conj(w) + jnp.conj(x.astype(jnp.complex64)),
    "parts": lambda z, w, x: jnp.real(z) * jnp.imag(w) + jnp.real(z * w) + jnp.imag(x.astype(jnp.complex64)),
    "products of matrices": lambda z, w, x: jnp.outer(z, x) @ jnp.outer(w, z) @ w,
    "a real matrix": lambda z, w, x: jnp.outer(x, x) @ z + x @ jnp.outer(w, z),
    "moves": lambda z, w, x: jnp.concatenate([z[::-1], w[1:], jnp.stack([z, w])[:, 0], jnp.roll(w, 1), jnp.pad(z, 1)]),
    "choices": lambda z, w, x: jnp.where(x > 0, z, w) + jnp.where(x > 0, 0.0, z),
    "lookups": lambda z, w, x: (
        z[jnp.argmax(x)] * w + jax.lax.dynamic_slice(w, (jnp.argmin(x),), (1,)) + z[jnp.argsort(x)]
    ),
    "no rule": lambda z, w, x: jnp.abs(z) * jnp.exp(w) + jnp.sin(z),
    "custom": lambda z, w, x: jax.nn.relu(jnp.real(z)) * w,
    "stopped": lambda z, w, x: jax.lax.stop_gradient(z) * w,
    "loop": looped,
    "branch": lambda z, w, x: jax.lax.cond(x[0] > 0, lambda z: z * w, lambda z: z - w, z),
    "call": lambda z, w, x: jax.jit(lambda z, w: z * w + 1.0)(z, w),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_by_parts_is_the_same_function(name):
    fn, k = FUNCTIONS[name], jax.random.split(jax.random.key(1), 3)
    args = complex_array(k[0], 3), complex_array(k[1], 3), jax.random.normal(k[2], (3,))
    closed = jax.make_jaxpr(fn)(*args)

    def again(*args):
        (out,) = by_parts(closed.jaxpr, closed.consts, args)
        return out.whole if isinstance(out, Parts) else out

    weigh = lambda y: jnp.sum(jnp.real(y * jnp.arange(1, y.size + 1).reshape(y.shape) * (0.3 - 0.7j)))  # noqa: E731
    np.testing.assert_allclose(again(*args), fn(*args), rtol=1e-5, atol=1e-5)
    slopes = [jax.grad(lambda *args, f=f: weigh(f(*args)), argnums=(0, 1, 2))(*args) for f in (fn, again)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4), *slopes)


def test_what_is_zero_is_not_multiplied():
    closed = jax.make_jaxpr(lambda z, x: jnp.real((z * x) @ (2.0 * jnp.outer(x, x))))(
        jnp.zeros(3, jnp.complex64), jnp.ones(3)
    )
    run = lambda re, im, x: by_parts(closed.jaxpr, closed.consts, [Parts(re, im), x])  # noqa: E731
    found = jax.jit(run).lower(*[jnp.ones(3)] * 3).as_text()
    assert "complex" not in found
    assert found.count("dot_general") == 1  # of the real part alone


# -- programs -----------------------------------------------------------------------------------------------------------------


def unit(p, h, x, done):
    """A linear recurrence, mixed, and what is read of it."""
    h = jnp.exp(p["rate"]) * h + x @ p["in"]
    y = jnp.real(h @ p["out"]) + jnp.abs(h) ** 2
    return y, jnp.where(done, 0.0, h)


def program(p, carry, t):
    x = rlfx.inputs(p["x"])[t]
    y, h = unit(p, carry["h"], x, x[0] > 1.0)
    turned = rlfx.series(p["turn"] * h)
    ahead = turned[rlfx.minimum(t + 2, t.length - 1)] + turned[t - 1 : t + 1].sum(0)
    return jnp.sum(y) + jnp.sum(jnp.real(ahead * h)), {"h": h, "n": carry["n"] + 1}, (h, jnp.imag(ahead))


def arguments():
    k = jax.random.split(jax.random.key(0), 6)
    p = {
        "rate": 0.3 * complex_array(k[0], N) - 0.5, "in": complex_array(k[1], 2, N), "out": complex_array(k[2], N, N) / 2,
        "turn": complex_array(k[3]), "x": jax.random.normal(k[4], (T, B, 2)),
    }  # fmt: skip
    return p, {"h": complex_array(k[5], B, N), "n": jnp.zeros(B, jnp.int32)}


def by_hand(p, carry):
    total, last = 0.0, []
    for b in range(B):
        h, states, losses = carry["h"][b], [], []
        turned = []
        for t in range(T):
            x = p["x"][t, b]
            y, h = unit(p, h, x, x[0] > 1.0)
            states.append(h)
            losses.append(jnp.sum(y))
            turned.append(p["turn"] * h)
        for t in range(T):
            ahead = turned[min(t + 2, T - 1)] + sum(turned[max(t - 1, 0) : t + 1])
            losses[t] += jnp.sum(jnp.real(ahead * states[t]))
        total += sum(losses)
        last.append(h)
    return total / (T * B), jnp.stack(last)


def compiled(**options):
    return rlfx.compile(program, length=T, batch=B, **options)


@pytest.mark.parametrize("plan", [None, rlfx.Plan("one pass")], ids=str)
def test_values_and_gradients_are_those_of_loops(plan):
    """Those of parameters and of the carry too, of real and of complex ones, and through the last carry."""
    p, carry = arguments()
    fn = compiled(plan=plan, target=ALWAYS)

    def weighed(run, p, h):
        loss, last = run(p, {**carry, "h": h})
        return loss + jnp.sum(jnp.real(last * (0.2 + 0.4j)))

    ours = lambda p, c: (lambda loss, rest: (loss, rest[0]["h"]))(*fn(p, c))  # noqa: E731
    found = jax.jit(jax.value_and_grad(functools.partial(weighed, ours), argnums=(0, 1)))(p, carry["h"])
    expected = jax.value_and_grad(functools.partial(weighed, by_hand), argnums=(0, 1))(p, carry["h"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


def test_the_reference_agrees_and_differences_do():
    p, carry = arguments()
    fn = compiled(target=ALWAYS)
    loss, (last, (h, _)) = fn(p, carry)
    expected, (final, (states, _)) = rlfx.reference(rlfx.trace(program, p, carry, length=T, batch=B))(p, carry)
    for a, b in ((loss, expected), (last["h"], final["h"]), (h, states)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    slope = jax.jit(jax.grad(lambda turn: fn({**p, "turn": turn}, carry)[0]))(p["turn"])
    at = lambda turn: float(fn({**p, "turn": turn}, carry)[0])  # noqa: E731
    step = 1e-2
    sides = [(at(p["turn"] + d) - at(p["turn"] - d)) / (2 * step) for d in (step, 1j * step)]
    np.testing.assert_allclose(
        [slope.real, -slope.imag], sides, rtol=1e-2, atol=1e-3
    )  # jax's gradient is df/dx - i df/dy


def test_a_cpu_runs_no_complex_products_and_others_do():
    p, carry = arguments()
    text = lambda target: str(compiled(target=target).trace(p, carry))  # noqa: E731
    assert not [
        line for line in text(ALWAYS).splitlines() if "c64" in line and ("mul" in line or "dot_general" in line)
    ]
    assert [line for line in text(WITHOUT).splitlines() if "c64" in line and "dot_general" in line]
    assert text(CPU) == text(WITHOUT)  # of so few numbers they are slower
    assert not rlfx.target("h200").rewrites.reals


def test_programs_without_complex_numbers_stay():
    found = rlfx.trace(lambda w, x, t: (w * x, x * 0.5), 2.0, jnp.float32(1.0), length=3)
    assert with_reals(found) is found


def test_it_is_done_once():
    p, carry = arguments()
    once = with_reals(rlfx.trace(program, p, carry, length=T, batch=B))
    assert len(with_reals(once).equations) <= len(once.equations)


# -- generated programs, turned -----------------------------------------------------------------------------------------------


def turning(generated):
    """A generated program whose carry has a complex number more, that its own values turn."""
    inner = generated.function

    def run(p, carry, t):
        z, carry = carry["z"], {k: v for k, v in carry.items() if k != "z"}
        loss, after, aux = inner(p, carry, t)
        now = z * jax.lax.complex(p["w"][0], p["a"]) + jax.lax.complex(jnp.sin(loss), p["w"][1])
        ever = rlfx.series(now, start=0.5j)
        more = jnp.real(ever[t - 1] * jnp.conj(now)) + 0.1 * jnp.abs(ever[rlfx.minimum(t + 1, t.length - 1)] ** 2)
        return loss + more, {**after, "z": now * 0.5 * jax.lax.complex(jnp.cos(p["a"]), jnp.float32(0.2))}, aux

    return run


@pytest.mark.parametrize("seed", spread(range(12), 3))
def test_generated_programs_are_the_same_with_and_without(seed):
    generated = next(
        g for s in range(1000 * seed, 1000 * seed + 200) if (g := strategies.program(s)).until is None and g.loss
    )
    params, carry, key = generated.arguments()
    lead = () if generated.batch is None else (generated.batch,)
    z = complex_array(jax.random.key(seed), *lead)
    inexact = {k: v for k, v in params.items() if k in ("a", "w")}

    def gradient(target):
        fn = rlfx.compile(turning(generated), target=target, **generated.options())

        def loss(inexact, z):
            return fn({**params, **inexact}, {**carry, "z": z}, key)[0]

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(inexact, z)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient(ALWAYS), gradient(WITHOUT)
    )
