"""What a point may compute besides layers: conditions, loops, derivatives, matrices, orders, densities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.parts import HIDDEN, IN, LAYERS, TOKENS, hidden, network, square, weights

MATRIX = weights(1, IN, 16)


def positive(p, x):
    """A positive definite matrix ``[4, 4]``."""
    m = (x @ p["a"]).reshape(4, 4)
    return m @ m.T + jnp.eye(4)


@network(**LAYERS)
def condition(p, x):
    one, other = (lambda f=f: square(f(x @ p["a"]) @ p["b"]) for f in (jnp.tanh, jax.nn.relu))
    return lax.cond(x[0] > 0, one, other)


@network(a=weights(1, 4, IN, HIDDEN), c=weights(2, HIDDEN, 4))
def switch(p, x):
    branches = [lambda k=k: square(jnp.tanh(x @ p["a"][k]) @ p["c"]) for k in range(4)]
    return lax.switch((jnp.abs(x[0]) * 10.0).astype(int) % 4, branches)


@network(TOKENS, IN, a=weights(1, IN, 32), u=weights(2, 32, 32))
def inner_recurrence(p, x):
    return square(lax.scan(lambda h, e: (jnp.tanh(e @ p["a"] + h @ p["u"]), None), jnp.zeros(32), x)[0])


@network(**LAYERS)
def iterations(p, x):
    y = x @ p["a"]
    return square(lax.fori_loop(0, 10, lambda i, z: jnp.tanh(y + z @ p["b"]), y))


@network(**LAYERS)
def integration(p, x):
    """Five steps of Runge and Kutta."""
    f = lambda z: jnp.tanh(z @ p["a"]) @ p["c"]  # noqa: E731

    def step(z, _):
        k1 = f(z)
        k2 = f(z + 0.05 * k1)
        k3 = f(z + 0.05 * k2)
        return z + 0.1 / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + f(z + 0.1 * k3)), None

    return square(lax.scan(step, x, None, length=5)[0])


@network(a=weights(1, IN, 64))
def sinkhorn(p, x):
    def iterate(_, m):
        m = m - jax.nn.logsumexp(m, 0, keepdims=True)
        return m - jax.nn.logsumexp(m, 1, keepdims=True)

    return square(jnp.exp(lax.fori_loop(0, 8, iterate, (x @ p["a"]).reshape(8, 8))))


@network(a=weights(1, IN, 64))
def power_iterations(p, x):
    m = (x @ p["a"]).reshape(8, 8)

    def iterate(v, _):
        v = m @ v
        return v / jnp.linalg.norm(v), None

    return square(m @ lax.scan(iterate, jnp.ones(8), None, length=5)[0])


@network(**LAYERS)
def slope_of_the_input(p, x):
    return square(jax.grad(lambda z: jnp.sum(hidden(p, z) @ p["c"]))(x))


@network(a=weights(1, IN, 32), b=weights(2, 32, 8))
def jacobian(p, x):
    return square(jax.jacfwd(lambda z: jnp.tanh(z @ p["a"]) @ p["b"])(x))


@network(a=weights(1, 8, 32), b=weights(2, 32))
def hessian(p, x):
    return square(jax.hessian(lambda z: jnp.tanh(z @ p["a"]) @ p["b"])(x[:8]))


@network(a=MATRIX, c=weights(3, 4, IN))
def triangular_system(p, x):
    low = jnp.linalg.cholesky(positive(p, x))
    z = jax.scipy.linalg.solve_triangular(low, p["c"] @ x, lower=True)
    return square(z) + jnp.log(jnp.diag(low)).sum()


@network(a=MATRIX, c=weights(3, 4, IN))
def linear_system(p, x):
    return square(jnp.linalg.solve(positive(p, x), p["c"] @ x))


@network(a=MATRIX)
def inverse_and_determinant(p, x):
    m = positive(p, x)
    return jnp.linalg.slogdet(m)[1] + square(jnp.linalg.inv(m))


@network(a=MATRIX)
def eigenvalue(p, x):
    return jnp.linalg.eigvalsh(positive(p, x))[-1]


@network(**LAYERS)
def fourier_transform(p, x):
    return square(jnp.abs(jnp.fft.rfft(hidden(p, x))))


@network(**LAYERS)
def cumulative_sum(p, x):
    return square(jnp.cumsum(hidden(p, x)) @ p["c"])


@network(**LAYERS)
def order(p, x):
    return square(jnp.sort(hidden(p, x)) @ p["c"])


@network(**LAYERS)
def largest(p, x):
    return square(lax.top_k(hidden(p, x), 4)[0])


@network(**LAYERS)
def scan_of_pairs(p, x):
    y = hidden(p, x)
    pair = lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1])  # noqa: E731
    return square(lax.associative_scan(pair, (jax.nn.sigmoid(y[:32]), y[32:]))[1])


@network(**LAYERS)
def interpolated(p, x):
    return square(jnp.interp(jnp.linspace(-1.0, 1.0, 8), jnp.sort(hidden(p, x)[:IN]), x))


@network(**LAYERS)
def mixture(p, x):
    y = hidden(p, x)
    density = jax.scipy.stats.norm.logpdf(0.2, y[8:16], jnp.exp(y[16:24]))
    return jax.nn.logsumexp(jax.nn.log_softmax(y[:8]) + density)


@network(a=weights(1, IN, 51))
def projected_distribution(p, x):
    """C51's target: what moves falls between two places."""
    share = jax.nn.softmax(lax.stop_gradient(x @ p["a"]))
    b = (jnp.clip(x[0] + 0.9 * jnp.linspace(-5.0, 5.0, 51), -5.0, 5.0) + 5.0) / 0.2
    low, high = jnp.floor(b).astype(int), jnp.ceil(b).astype(int)
    m = jnp.zeros(51).at[low].add(share * (high - b + (low == high))).at[high].add(share * (b - low))
    return -m @ jax.nn.log_softmax(x @ p["a"])


@network(**LAYERS)
def straight_through(p, x):
    logits = hidden(p, x) @ p["c"]
    y = jax.nn.softmax(logits)
    return square((jax.nn.one_hot(jnp.argmax(logits), IN) + y - lax.stop_gradient(y)) @ p["a"])


@network(**LAYERS)
def squashed_normal(p, x):
    mean, spread = jnp.split(hidden(p, x) @ p["c"], 2)
    u = mean + jnp.exp(jnp.clip(spread, -5.0, 2.0)) * x[:8]
    return jnp.sum(jax.scipy.stats.norm.logpdf(u, mean, jnp.exp(spread)) - jnp.log(1.0 - jnp.tanh(u) ** 2 + 1e-6))
