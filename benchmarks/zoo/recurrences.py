"""Recurrences: cells, linear and gated states, memories, filters, models that are rolled out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.zoo.parts import HIDDEN, IN, recurrence, square, weights

GATES = {"w": weights(1, IN, 3 * HIDDEN), "u": weights(2, HIDDEN, 3 * HIDDEN), "o": weights(4, HIDDEN, 4)}
KEYS = {name: weights(i, IN, 16) for i, name in enumerate("qkvg")} | {"o": weights(5, 16, 4)}
STATE, MEMORY = jnp.zeros(HIDDEN), jnp.zeros((16, 16))


def ends(x):
    return x[0] > 1.2


@recurrence(STATE, **GATES)
def gru(p, h, x):
    (a, b, c), (i, j, k) = jnp.split(x @ p["w"], 3), jnp.split(h @ p["u"], 3)
    u = jax.nn.sigmoid(b + j)
    h = (1.0 - u) * jnp.tanh(c + jax.nn.sigmoid(a + i) * k) + u * h
    return square(h @ p["o"]), h


@recurrence(STATE, **GATES)
def gru_that_begins_anew(p, h, x):
    return gru(p, lax.cond(ends(x), lambda: jnp.zeros(HIDDEN), lambda: h), x)


@recurrence(jnp.zeros((1, HIDDEN)), **GATES)
def gru_of_a_batch_of_one(p, h, x):
    (a, b, c), (i, j, k) = jnp.split(x[None] @ p["w"], 3, -1), jnp.split(h @ p["u"], 3, -1)
    u = jax.nn.sigmoid(b + j)
    h = (1.0 - u) * jnp.tanh(c + jax.nn.sigmoid(a + i) * k) + u * h
    return square(h @ p["o"]), h


@recurrence((STATE, STATE), w=weights(1, IN + HIDDEN, 4 * HIDDEN), o=weights(4, HIDDEN, 4))
def lstm(p, state, x):
    h, c = state
    i, f, g, o = jnp.split(jnp.concatenate([x, h]) @ p["w"], 4)
    c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return square(h @ p["o"]), (h, c)


@recurrence((STATE, STATE, jnp.zeros(HIDDEN)), **GATES)
def slstm(p, state, x):
    """Exponential gates, and their largest exponent."""
    h, c, m = state
    z, i, f = jnp.split(x @ p["w"] + h @ p["u"], 3)
    kept = jax.nn.log_sigmoid(f) + m
    m = jnp.maximum(kept, i)
    c = jnp.exp(kept - m) * c + jnp.exp(i - m) * jnp.tanh(z)
    h = jnp.tanh(c)
    return square(h @ p["o"]), (h, c, m)


@recurrence(STATE, w=weights(1, IN, 2 * HIDDEN), o=weights(4, HIDDEN, 4))
def gates_of_inputs(p, h, x):
    """minGRU."""
    a, b = jnp.split(x @ p["w"], 2)
    g = jax.nn.sigmoid(a)
    h = (1.0 - g) * h + g * jnp.tanh(b)
    return square(jnp.tanh(h) @ p["o"]), h


@recurrence(STATE, w=weights(1, IN, HIDDEN), rate=weights(2, HIDDEN), o=weights(4, HIDDEN, 4))
def averages(p, h, x):
    a = jax.nn.sigmoid(p["rate"])
    h = a * h + (1.0 - a) * (x @ p["w"])
    return square(jnp.tanh(h) @ p["o"]), h


@recurrence(STATE, w=weights(1, IN, HIDDEN), a=0.3 * weights(2, HIDDEN, HIDDEN), o=weights(4, HIDDEN, 4))
def linear_state(p, h, x):
    h = h @ p["a"] + x @ p["w"]
    return square(jnp.tanh(h) @ p["o"]), h


@recurrence(MEMORY, **KEYS)
def linear_attention(p, s, x):
    s = s + jnp.outer(jax.nn.softmax(x @ p["k"]), x @ p["v"])
    return square((x @ p["q"]) @ s @ p["o"]), s


@recurrence(MEMORY, **KEYS)
def retention(p, s, x):
    s = 0.95 * s + jnp.outer(x @ p["k"], x @ p["v"])
    return square(jnp.tanh((x @ p["q"]) @ s) @ p["o"]), s


@recurrence(MEMORY, **KEYS)
def gated_linear_attention(p, s, x):
    s = jax.nn.sigmoid(x @ p["g"])[:, None] * s + jnp.outer(x @ p["k"], x @ p["v"])
    return square((x @ p["q"]) @ s @ p["o"]), s


@recurrence(MEMORY, **KEYS)
def delta_rule(p, s, x):
    k = x @ p["k"]
    k = k / jnp.linalg.norm(k)
    s = s + jax.nn.sigmoid((x @ p["g"])[0]) * jnp.outer(k, x @ p["v"] - k @ s)
    return square((x @ p["q"]) @ s @ p["o"]), s


@recurrence((MEMORY, jnp.zeros(16), jnp.zeros(())), **KEYS)
def mlstm(p, state, x):
    c, n, m = state
    i, kept = (x @ p["g"])[0], jax.nn.log_sigmoid((x @ p["g"])[1]) + m
    m = jnp.maximum(kept, i)
    k, v, q = x @ p["k"] / 4.0, x @ p["v"], x @ p["q"]
    c = jnp.exp(kept - m) * c + jnp.exp(i - m) * jnp.outer(v, k)
    n = jnp.exp(kept - m) * n + jnp.exp(i - m) * k
    return square((c @ q / jnp.maximum(jnp.abs(n @ q), 1.0)) @ p["o"]), (c, n, m)


@recurrence(
    jnp.zeros((HIDDEN, 8)), w=weights(1, IN, HIDDEN), step=weights(2, IN, HIDDEN), bc=weights(3, IN, 16), a=weights(5, HIDDEN, 8),
    o=weights(4, HIDDEN, 4),
)  # fmt: skip
def selective_state_space(p, h, x):
    """Mamba's."""
    u, step, (b, c) = x @ p["w"], jax.nn.softplus(x @ p["step"]), jnp.split(x @ p["bc"], 2)
    h = jnp.exp(-step[:, None] * jnp.exp(p["a"])) * h + (step * u)[:, None] * b
    return square((h @ c) @ p["o"]), h


@recurrence(weights(9, 16, 16), **KEYS)
def written_memory(p, m, x):
    """A neural Turing machine's."""
    where = jax.nn.softmax(m @ (x @ p["k"]))
    m = m * (1.0 - jnp.outer(where, jax.nn.sigmoid(x @ p["g"]))) + jnp.outer(where, x @ p["v"])
    return square(jax.nn.softmax(m @ (x @ p["q"])) @ m @ p["o"]), m


@recurrence((jnp.zeros((16, IN)), jnp.int32(0)), **KEYS)
def ring_of_the_past(p, state, x):
    past, i = state
    past = past.at[i % 16].set(x)
    share = jax.nn.softmax(past @ p["k"] @ (x @ p["q"]))
    return square(share @ past @ p["v"] @ p["o"]), (past, i + 1)


@recurrence(jnp.zeros((8, IN)), w=weights(1, 8 * IN, HIDDEN), o=weights(4, HIDDEN, 4))
def last_eight(p, past, x):
    past = jnp.concatenate([past[1:], x[None]])
    return square(jnp.tanh(past.reshape(-1) @ p["w"]) @ p["o"]), past


@recurrence(
    (jnp.zeros(4), jnp.eye(4)), f=0.5 * weights(1, 4, 4), q=weights(2, 4), h=weights(3, 3, 4), w=weights(4, IN, 3)
)  # fmt: skip
def kalman(p, state, x):
    m, c = state
    m, c = p["f"] @ m, p["f"] @ c @ p["f"].T + jnp.diag(jnp.exp(p["q"]))
    s, e = p["h"] @ c @ p["h"].T + jnp.eye(3), x @ p["w"] - p["h"] @ m
    gain = jnp.linalg.solve(s, p["h"] @ c).T
    return e @ jnp.linalg.solve(s, e) + jnp.linalg.slogdet(s)[1], (m + gain @ e, c - gain @ p["h"] @ c)


@recurrence(np.full(8, 0.125, np.float32), a=weights(1, IN, 8), t=weights(2, 8, 8))
def hidden_markov_model(p, b, x):
    u = (b @ jax.nn.softmax(p["t"], -1)) * jax.nn.softmax(x @ p["a"])
    return -jnp.log(u.sum()), u / u.sum()


@recurrence(jnp.zeros((HIDDEN // 8, HIDDEN // 8)), w=weights(1, 2, 8), u=weights(2, 8, 8), o=weights(3, HIDDEN, 4))
def agents(p, h, x):
    h = jax.vmap(lambda h, e: jnp.tanh(e @ p["w"] + h @ p["u"]))(h, x.reshape(8, 2))
    return square(h.reshape(-1) @ p["o"]), h


@recurrence(STATE, **GATES)
def integrated(p, h, x):
    y = x @ p["w"][:, :HIDDEN]
    h = lax.fori_loop(0, 4, lambda i, h: h + 0.25 * (jnp.tanh(y + h @ p["u"][:, :HIDDEN]) - h), h)
    return square(h @ p["o"]), h


@recurrence((jnp.zeros(IN), jnp.zeros(IN), jnp.zeros(())), w=weights(1, IN, HIDDEN), o=weights(4, HIDDEN, 4))
def running_moments(p, state, x):
    mean, var, n = state
    n, off = n + 1.0, x - mean
    mean = mean + off / n
    var = var + off * (x - mean)
    return square(jnp.tanh((off * lax.rsqrt(var / n + 1e-4)) @ p["w"]) @ p["o"]), (mean, var, n)


@recurrence(jnp.zeros(4), w=weights(1, 4, HIDDEN), b=weights(2, HIDDEN, 2))
def policy_through_physics(p, s, x):
    a = jnp.tanh(jnp.tanh(s @ p["w"]) @ p["b"])
    push = jnp.stack([a[0] * jnp.cos(s[2]), a[1] * jnp.sin(s[2])])
    s = jnp.concatenate([s[:2] + 0.1 * s[2:], s[2:] + 0.1 * push + 0.01 * x[:2]])
    return square(s), s


@recurrence((STATE, jnp.int32(0)), e=weights(1, 10, HIDDEN), u=weights(2, HIDDEN, HIDDEN), o=weights(3, HIDDEN, 10))
def greedy_words(p, state, x):
    h, a = state
    h = jnp.tanh(p["e"][a] + h @ p["u"])
    logits = h @ p["o"] + x[:10]
    a = jnp.argmax(logits)
    return -jax.nn.log_softmax(logits)[a], (h, a)
