"""The algorithms of ``written_loops.py`` as per-timestep programs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import jax
import jax.numpy as jnp

import rlfx

S, sg = rlfx.series, jax.lax.stop_gradient
Step = namedtuple("Step", "reward terminated truncated final_obs")
PROGRAMS: dict[str, Callable] = {}


def program(fn: Callable) -> Callable:
    PROGRAMS[fn.__name__] = fn
    return fn


def data(p, name):
    """Data from outside, as a series."""
    return rlfx.inputs(p[name + "_tb"])


@program
def gru(p, c, t):
    h = jnp.where(c["done"], 0.0, c["h"])
    xh = jnp.concatenate([c["x"], h])
    z, r = jax.nn.sigmoid(xh @ p["Wz"]), jax.nn.sigmoid(xh @ p["Wr"])
    h = (1 - z) * h + z * jnp.tanh(jnp.concatenate([c["x"], r * h]) @ p["Wh"])
    v = h @ p["o"]
    x = sg(0.9 * c["x"] + 0.3 * jnp.tanh(v) + 0.4 * data(p, "e")[t])
    done = jnp.abs(x[0]) > 0.5
    delta = jnp.sum(x**2) + 0.9 * jnp.where(done, 0.0, sg(S(v)[t + 1])) - v
    advantage = rlfx.solve(lambda a: sg(delta) + 0.8 * jnp.where(done, 0.0, a[t + 1]), end=0.0)
    return delta**2 - v * advantage, {"h": h, "x": jnp.where(done, 0.1, x), "done": done}, advantage


@program
def lstm(p, c, t):
    x = data(p, "x")
    i, g, f, o = jnp.split(jnp.concatenate([x[t], c["h"]]) @ p["W"], 4)
    cell = jax.nn.sigmoid(f + 1) * c["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(cell)
    h = (h - h.mean()) / jnp.sqrt(h.var() + 1e-2) * p["g"]
    following = x[rlfx.minimum(t + 1, t.length - 1)]
    return jnp.sum((h - following) ** 2) + S(h)[: t + 1].mean(0) @ following, {"h": h, "c": cell}, h[0]


def _step(p, t):
    step = Step(*(data(p, k)[t] for k in ("r", "term", "trunc", "f")))
    return step, data(p, "v")[t], rlfx.next_value(lambda obs: obs, step, S(data(p, "v")[t], end=0.3))


@program
def gae(p, c, t):
    step, value, follow = _step(p, t)
    x = rlfx.gae(step, value, follow, gamma=0.9, lam=0.8)
    return x**2, c, jnp.abs(x)


@program
def lambda_return(p, c, t):
    step, _, follow = _step(p, t)
    x = jnp.sin(rlfx.lambda_return(step, follow, gamma=0.9, lam=0.7))
    return x, c, x


@program
def n_step_return(p, c, t):
    step, _, follow = _step(p, t)
    x = jnp.sin(rlfx.n_step_return(step, follow, gamma=0.9, n=3))
    return x, c, x


@program
def vtrace(p, c, t):
    step, value, follow = _step(p, t)
    target, advantage = rlfx.vtrace(step, value, follow, data(p, "rho")[t], gamma=0.9, lam=0.95)
    x = jnp.sin(target) + 0.5 * advantage
    return x, c, x


@program
def retrace(p, c, t):
    x, a = data(p, "x")[t] + 0.3 * c["s"], data(p, "a")[t]
    q, pi = x @ p["W"], jax.nn.softmax(x @ p["P"])
    trace = S(0.9 * jnp.minimum(1.0, pi[a] / jnp.exp(data(p, "m")[t])), end=0.0)
    delta = data(p, "r")[t] + 0.95 * S(pi @ q, end=0.0)[t + 1] - q[a]
    correction = rlfx.solve(lambda y: delta + 0.95 * trace[t + 1] * y[t + 1], end=0.0)
    loss = (q[a] - sg(q[a] + correction)) ** 2 + 0.1 * correction
    return loss, {"s": jnp.tanh(x)}, loss


@program
def upgo(p, c, t):
    x = data(p, "x")[t] + c["s"]
    v, q = S(jnp.tanh(x @ p["w"]), end=0.3), S(jnp.sin(x @ p["q"]), end=0.1)
    g = rlfx.solve(lambda g: data(p, "r")[t] + 0.9 * jnp.where(q[t + 1] >= v[t + 1], g[t + 1], v[t + 1]), end=0.2)
    return (g - v[t]) * q[t] + 0.1 * S(g)[:].max(), {"s": 0.5 * x}, g


@program
def vmpo(p, c, t):
    x = data(p, "x")[t] + c["s"]
    v = S(x @ p["w"], end=0.0)
    advantage = data(p, "r")[t] + 0.9 * v[t + 1] - v[t]
    least = rlfx.shared(lambda a: jax.lax.top_k(a, (a.shape[0] + 1) // 2)[0][-1], advantage)
    chosen = jnp.where(advantage >= least, jnp.exp(advantage * jnp.exp(p["eta"])), 0.0)
    psi = chosen / rlfx.sum(chosen, "b")
    loss = -sg(psi) * v[t] + 0.1 * rlfx.max(psi, "b")
    return loss, {"s": jnp.tanh(x)}, loss


@program
def ppo(p, c, t):
    x = data(p, "x")[t] + c["s"]
    v = x @ p["v"]
    delta = jnp.sin(x.sum()) + 0.9 * S(v, end=v)[t + 1] - v
    a = rlfx.solve(lambda a: delta + 0.7 * a[t + 1], end=0.0)
    normal = sg((a - rlfx.mean(a)) / (rlfx.std(a) + 1e-2))
    ratio = jnp.exp(jax.nn.log_sigmoid(x @ p["w"]) - data(p, "old")[t])
    clipped = jnp.minimum(ratio * normal, jnp.clip(ratio, 0.8, 1.2) * normal)
    return -clipped + (v - sg(a + v) / rlfx.max(jnp.abs(a))) ** 2, {"s": 0.5 * x}, normal


@program
def her(p, c, t):
    x = data(p, "x")[t] + c["s"]
    xs = S(jnp.tanh(x))
    future = xs[t:]
    goal = future[jnp.floor(data(p, "u")[t] * future.shape[0]).astype(jnp.int32)]
    return -jnp.sum((xs[t] - goal) ** 2) + goal @ p["w"], {"s": 0.5 * x}, goal


@program
def cpc(p, c, t):
    x = data(p, "x")[t]
    z = S(jnp.tanh(x @ p["Wz"]), end=0.0)
    s = jnp.tanh(0.5 * c["s"] + x)
    q = s @ p["Wc"]
    contrast = rlfx.shared(lambda q, z: -jnp.mean(jnp.diagonal(jax.nn.log_softmax(q @ z.T, 1))), q, z[t + 2])
    own = jax.nn.log_softmax(z[:] @ q)
    return contrast + own[0], {"s": s}, own.max()


@program
def rssm(p, c, t):
    def normal(y):
        m, s = jnp.split(y, 2)
        return m, jax.nn.softplus(s) + 0.1

    def kl(m, s, k, r):
        return jnp.sum(jnp.log(r / s) + (s**2 + (m - k) ** 2) / (2 * r**2) - 0.5)

    o = data(p, "o")[t]
    d = jnp.tanh(jnp.concatenate([c["d"], c["s"]]) @ p["G"])
    prior, post = normal(d @ p["R"]), normal(jnp.concatenate([d, o]) @ p["Q"])
    s = post[0] + post[1] * data(p, "e")[t]
    rebuilt = jnp.concatenate([d, s]) @ p["D"]
    divergence = 0.8 * kl(*map(sg, post), *prior) + 0.2 * kl(*post, *map(sg, prior))
    return jnp.sum((rebuilt - o) ** 2) + divergence, {"d": d, "s": s}, divergence


@program
def hmm(p, c, t):
    emit = jnp.tanh(data(p, "x")[t] @ p["E"]) + 0.1 * c["s"]
    nothing, emits = jnp.zeros_like(emit), S(emit, end=0.0)
    forward = rlfx.solve(lambda a: emit + jax.nn.logsumexp(a[t - 1][:, None] + p["A"], axis=0), start=nothing)
    backward = rlfx.solve(lambda b: jax.nn.logsumexp(p["A"] + (emits[t + 1] + b[t + 1])[None], axis=1), end=nothing)
    posterior = jax.nn.softmax(forward + backward)
    return posterior @ emit + jax.nn.logsumexp(rlfx.last(forward)), {"s": 0.9 * c["s"]}, posterior


@program
def viterbi(p, c, t):
    x = data(p, "x")[t] * (1 + c["s"])
    best = rlfx.solve(lambda d: x + jnp.max(d[t - 1][:, None] + p["A"], 0), start=jnp.zeros_like(x))
    scores = S(best, start=0.0)[t - 1][:, None] + p["A"]
    back = S(jnp.argmax(scores, 0).astype(jnp.int32), end=jnp.arange(3, dtype=jnp.int32))
    final = jnp.argmax(best).astype(jnp.int32)
    path = rlfx.solve(lambda s: jnp.where(S(t.now).window(1, 2, fill=-1)[0] < 0, final, back[t + 1][s[t + 1]]), end=0)
    return x[path], {"s": 0.5 * c["s"]}, path


@program
def kalman(p, c, t):
    f, q, r = jnp.tanh(p["f"]), jnp.exp(p["q"]), jnp.exp(p["r"])
    y = data(p, "y")[t] + c["s"]

    def forward(s):
        m, v = s[t - 1]
        predicted, spread = f * m, f * v * f + q
        gain = spread / (spread + r)
        return predicted + gain * (y - predicted), (1 - gain) * spread

    m, v = rlfx.solve(forward, start=(jnp.zeros_like(y), jnp.ones_like(y)))
    back = v * f / (f * v * f + q)
    smooth = rlfx.solve(lambda z: m + back * (z[t + 1] - f * m), end=S(f * m)[t])
    return (smooth - y) ** 2, {"s": jnp.tanh(c["s"])}, smooth


@program
def attention(p, c, t):
    x = data(p, "x")[t] + c["s"]
    keys, values = S(x @ p["k"]), S(x @ p["v"])
    whole = jax.nn.softmax(keys[: t + 1] @ (x @ p["q"])) @ values[: t + 1]
    valid = S(jnp.ones_like(x[0])).window(-2, 1, fill=0.0) > 0
    scores = jnp.where(valid, keys.window(-2, 1) @ x + p["pos"], -jnp.inf)
    recent = jax.nn.softmax(scores) @ values.window(-2, 1)
    return jnp.sum(whole**2) + jnp.sum(recent), {"s": jnp.tanh(whole + recent)}, recent


@program
def dqn(p, c, t):
    def error(w, now, later):
        aim = jnp.take_along_axis(later @ c["target"], jnp.argmax(later @ w, -1)[:, None], -1)[:, 0]
        return jnp.mean(((now @ w)[:, 0] - sg(1 + 0.9 * aim)) ** 2)

    now = c["x"] + data(p, "x")[t]
    later = jnp.tanh(now + 0.1)
    w = rlfx.shared(lambda now, later: c["w"] - 0.1 * jax.grad(error)(c["w"], now, later), now, later)
    target = rlfx.every(3, lambda: w, otherwise=c["target"])
    q = S(jnp.max(now @ w), end=0.0)
    loss = (q[t] - 0.9 * sg(q[t + 1])) ** 2 * jnp.exp(p["lr"])
    return loss, {"x": 0.5 * later, "w": w, "target": target}, w


@program
def maml(p, c, t):
    x = data(p, "x")[t] + c["s"]
    xs, ys = S(x), data(p, "y")
    inner = jax.grad(lambda w: jnp.mean((xs[: t + 1] @ w - ys[: t + 1]) ** 2))(p["w"])
    adapted = p["w"] - 0.3 * jnp.exp(p["rate"]) * inner
    return jnp.mean((xs[t:] @ adapted - ys[t:]) ** 2), {"s": 0.5 * jnp.tanh(x)}, adapted


@program
def agents(p, c, t):
    pos = S(c["pos"])

    def agent(i, x, v):
        centre = pos[rlfx.maximum(t - 1, 0)].mean(0)
        message = jnp.sum(pos[: t + 1], axis=(0, 1)) @ p["w"]
        return jnp.tanh(0.9 * v + 0.1 * (centre - x) + 0.05 * message + i * 0.01 * p["m"])

    vel = jax.vmap(agent)(jnp.arange(3).astype(c["vel"].dtype), c["pos"], c["vel"])
    loss = jnp.sum(vel**2) + pos[t:].mean((0, 1)) @ p["m"]
    return loss, {"pos": c["pos"] + 0.1 * vel, "vel": vel}, vel.sum(0)


@program
def td_lambda(p, c, t):
    x = data(p, "x")[t] + c["s"]
    lam, v = S(jax.nn.sigmoid(x @ p["l"]), end=0.0), S(x @ p["w"], end=0.0)
    e = rlfx.solve(lambda e: 0.9 * lam[rlfx.maximum(t - 1, 0)] * e[t - 1] + x, start=jnp.zeros_like(x))
    g = rlfx.solve(lambda g: jnp.sum(x) + 0.9 * ((1 - lam[t + 1]) * v[t + 1] + lam[t + 1] * g[t + 1]), end=0.0)
    return jnp.sum(g * e) + (g - v[t]) ** 2, {"s": 0.3 * jnp.tanh(x) + 0.1 * e}, e


@program
def reinforce(p, c, t):
    x, a = data(p, "x")[t] + sg(c["s"]), data(p, "a")[t]
    g = rlfx.discounted_sum(S(sg(jnp.sin(x.sum() + a.astype(x.dtype))))[t:], 0.9)
    v = x @ p["b"]
    return -jax.nn.log_softmax(x @ p["W"])[a] * (g - sg(v)) + (g - v) ** 2, {"s": sg(jnp.tanh(x))}, g


@program
def replay(p, c, t):
    x = jnp.tanh(data(p, "x")[t] + c["s"])
    xs = S(x, history=rlfx.History(3, data=c["kept"]))
    drawn = xs[t.now - data(p, "back")[t], data(p, "env")[t]]
    loss = p["w"] * drawn * x + 0.5 * xs[t.now - 2]
    return loss, {"s": jnp.sin(x), "kept": xs.history.data}, drawn
