"""Algorithms as NumPy loops over one environment, or over a batch: what ``written.py`` writes as per-timestep programs.

Nothing of rlfx here. Each takes ``(p, c, n, stop)``: the parameters, the carry (``x_tb`` and other names in ``_tb`` are
data with axes [T, B]; the loops of one environment get that environment's), the number of timesteps, and
``stop_gradient``. It returns the losses, the final carry, and what each timestep reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Algorithm:
    """``shapes`` of parameters and carry: floats; "int:k" and "bool" tell other data. ``batched``: over all environments."""

    loops: Callable
    params: dict
    carry: dict
    batched: bool = False


ALGORITHMS: dict[str, Algorithm] = {}
T0 = 4  # the absolute time of the first timestep


def algorithm(params: dict, carry: dict, batched: bool = False) -> Callable:
    def register(fn: Callable) -> Callable:
        ALGORITHMS[fn.__name__] = Algorithm(fn, params, carry, batched)
        return fn

    return register


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def logsumexp(x, axis=-1):
    m = x.max(axis, keepdims=True)
    return np.squeeze(m, axis) + np.log(np.exp(x - m).sum(axis))


def log_softmax(x):
    return x - logsumexp(x)


STEP = {"r_tb": (), "v_tb": (), "term_tb": "bool", "trunc_tb": "bool", "f_tb": ()}


@algorithm({"Wz": (5, 3), "Wr": (5, 3), "Wh": (5, 3), "o": (3,), "e_tb": (2,)}, {"h": (3,), "x": (2,), "done": "bool"})
def gru(p, c, n, stop):
    def value(c):
        h = np.where(c["done"], 0.0, c["h"])
        xh = np.concatenate([c["x"], h])
        z, r = sigmoid(xh @ p["Wz"]), sigmoid(xh @ p["Wr"])
        h = (1 - z) * h + z * np.tanh(np.concatenate([c["x"], r * h]) @ p["Wh"])
        return h, h @ p["o"]

    values, rewards, dones = [], [], []
    for t in range(n):
        h, v = value(c)
        x = stop(0.9 * c["x"] + 0.3 * np.tanh(v) + 0.4 * p["e_tb"][t])
        done = abs(x[0]) > 0.5
        c = {"h": h, "x": np.where(done, 0.1, x), "done": done}
        values.append(v)
        rewards.append(np.sum(x**2))
        dones.append(done)
    values.append(value(c)[1])
    losses, aux, advantage = [0.0] * n, [None] * n, 0.0
    for t in reversed(range(n)):
        delta = rewards[t] + 0.9 * np.where(dones[t], 0, stop(values[t + 1])) - values[t]
        advantage = stop(delta) + 0.8 * np.where(dones[t], 0, advantage)
        losses[t], aux[t] = delta**2 - values[t] * advantage, advantage
    return losses, c, aux


def _following(p, n):
    """The value that follows each timestep: that of the final observation where an episode is cut, 0.3 at the end."""
    v = [*p["v_tb"][1:], 0.3]
    return [p["f_tb"][t] if p["trunc_tb"][t] and not p["term_tb"][t] else v[t] for t in range(n)]


@algorithm(STEP, {"s": ()})
def gae(p, c, n, stop):
    follow, advantage, losses = _following(p, n), 0.0, [0.0] * n
    for t in reversed(range(n)):
        alive, going = 1 - p["term_tb"][t], 1 - (p["term_tb"][t] | p["trunc_tb"][t])
        advantage = p["r_tb"][t] + 0.9 * alive * follow[t] - p["v_tb"][t] + 0.9 * 0.8 * going * advantage
        losses[t] = advantage**2
    return losses, c, [np.sqrt(x) for x in losses]


@algorithm(STEP, {"s": ()})
def lambda_return(p, c, n, stop):
    follow, losses = _following(p, n), [0.0] * n
    g = follow[-1]
    for t in reversed(range(n)):
        if p["term_tb"][t]:
            g = p["r_tb"][t]
        elif p["trunc_tb"][t]:
            g = p["r_tb"][t] + 0.9 * follow[t]
        else:
            g = p["r_tb"][t] + 0.9 * (0.3 * follow[t] + 0.7 * g)
        losses[t] = np.sin(g)
    return losses, c, losses


@algorithm(STEP, {"s": ()})
def n_step_return(p, c, n, stop):
    follow, losses = _following(p, n), []
    for t in range(n):
        total, discount = 0.0, 1.0
        for s in range(t, min(t + 3, n)):
            total += discount * p["r_tb"][s]
            discount *= 0.9 * (1 - p["term_tb"][s])
            if p["term_tb"][s] or p["trunc_tb"][s] or s == min(t + 3, n) - 1:
                total += discount * follow[s]
                break
        losses.append(np.sin(total))
    return losses, c, losses


@algorithm({**STEP, "rho_tb": ()}, {"s": ()})
def vtrace(p, c, n, stop):
    follow, losses = _following(p, n), [0.0] * n
    correction, target = 0.0, follow[-1]
    for t in reversed(range(n)):
        alive, going = 1 - p["term_tb"][t], 1 - (p["term_tb"][t] | p["trunc_tb"][t])
        rho = np.exp(p["rho_tb"][t])
        next_target = going * target + (alive - going) * follow[t]
        delta = min(rho, 1.0) * (p["r_tb"][t] + 0.9 * alive * follow[t] - p["v_tb"][t])
        correction = delta + 0.9 * going * 0.95 * min(rho, 1.0) * correction
        target = p["v_tb"][t] + correction
        losses[t] = np.sin(target) + 0.5 * min(rho, 1.0) * (p["r_tb"][t] + 0.9 * next_target - p["v_tb"][t])
    return losses, c, losses


@algorithm({"W": (2, 3), "P": (2, 3), "x_tb": (2,), "r_tb": (), "a_tb": "int:3", "m_tb": ()}, {"s": (2,)})
def retrace(p, c, n, stop):
    q, pi, s = [], [], c["s"]
    for t in range(n):
        x = p["x_tb"][t] + 0.3 * s
        q.append(x @ p["W"])
        pi.append(softmax(x @ p["P"]))
        s = np.tanh(x)
    correction, losses = 0.0, [0.0] * n
    for t in reversed(range(n)):
        expected = pi[t + 1] @ q[t + 1] if t + 1 < n else 0.0
        trace = 0.9 * min(1.0, pi[t + 1][p["a_tb"][t + 1]] / np.exp(p["m_tb"][t + 1])) if t + 1 < n else 0.0
        correction = p["r_tb"][t] + 0.95 * expected - q[t][p["a_tb"][t]] + 0.95 * trace * correction
        losses[t] = (q[t][p["a_tb"][t]] - stop(q[t][p["a_tb"][t]] + correction)) ** 2 + 0.1 * correction
    return losses, {"s": s}, losses


@algorithm({"w": (2,), "q": (2,), "x_tb": (2,), "r_tb": ()}, {"s": (2,)})
def upgo(p, c, n, stop):
    v, q, s = [], [], c["s"]
    for t in range(n):
        x = p["x_tb"][t] + s
        v.append(np.tanh(x @ p["w"]))
        q.append(np.sin(x @ p["q"]))
        s = 0.5 * x
    v, q, g = [*v, 0.3], [*q, 0.1], [0.0] * n + [0.2]
    for t in reversed(range(n)):
        g[t] = p["r_tb"][t] + 0.9 * (g[t + 1] if q[t + 1] >= v[t + 1] else v[t + 1])
    return [(g[t] - v[t]) * q[t] + 0.1 * max(g[:n]) for t in range(n)], {"s": s}, g[:n]


@algorithm({"w": (2,), "x_tb": (2,), "r_tb": (), "eta": ()}, {"s": (2,)}, batched=True)
def vmpo(p, c, n, stop):
    v, s, batch = [], c["s"], len(c["s"])
    for t in range(n):
        x = p["x_tb"][t] + s
        v.append(x @ p["w"])
        s = np.tanh(x)
    v.append(np.zeros(batch))
    losses = []
    for t in range(n):
        advantage = p["r_tb"][t] + 0.9 * v[t + 1] - v[t]
        best = np.sort(advantage)[-((batch + 1) // 2) :]
        chosen = np.where(advantage >= best[0], np.exp(advantage * np.exp(p["eta"])), 0.0)
        psi = chosen / chosen.sum()
        losses.append(-stop(psi) * v[t] + 0.1 * psi.max())
    return losses, {"s": s}, losses


@algorithm({"w": (2,), "v": (2,), "x_tb": (2,), "old_tb": ()}, {"s": (2,)}, batched=True)
def ppo(p, c, n, stop):
    xs, s = [], c["s"]
    for t in range(n):
        xs.append(p["x_tb"][t] + s)
        s = 0.5 * xs[-1]
    v = [x @ p["v"] for x in xs]
    a, advantages = 0.0, [0.0] * n
    for t in reversed(range(n)):
        a = np.sin(xs[t].sum(-1)) + 0.9 * v[min(t + 1, n - 1)] - v[t] + 0.7 * a
        advantages[t] = a
    a = np.array(advantages)
    normal, losses = stop((a - a.mean()) / (a.std() + 1e-2)), []
    for t in range(n):
        ratio = np.exp(-np.log1p(np.exp(-xs[t] @ p["w"])) - p["old_tb"][t])
        clipped = np.minimum(ratio * normal[t], np.clip(ratio, 0.8, 1.2) * normal[t])
        losses.append(-clipped + (v[t] - stop(a[t] + v[t]) / np.abs(a).max()) ** 2)
    return losses, {"s": s}, list(normal)


@algorithm({"w": (2,), "x_tb": (2,), "u_tb": "unit"}, {"s": (2,)})
def her(p, c, n, stop):
    xs, s, losses, goals = [], c["s"], [], []
    for t in range(n):
        x = p["x_tb"][t] + s
        xs.append(np.tanh(x))
        s = 0.5 * x
    for t in range(n):
        goals.append(xs[t + int(p["u_tb"][t] * (n - t))])
        losses.append(-np.sum((xs[t] - goals[t]) ** 2) + goals[t] @ p["w"])
    return losses, {"s": s}, goals


@algorithm({"lr": (), "x_tb": (2,)}, {"x": (2,), "w": "shared:2,2", "target": "shared:2,2"}, batched=True)
def dqn(p, c, n, stop):
    x, w, target, q, weights = c["x"], c["w"], c["target"], [], []
    rows = np.arange(len(x))
    for t in range(n):
        now = x + p["x_tb"][t]
        later = np.tanh(now + 0.1)
        aim = stop(1 + 0.9 * (later @ target)[rows, np.argmax(later @ w, -1)])
        slope = np.zeros((2, 2))
        slope[:, 0] = 2 * (((now @ w)[:, 0] - aim)[:, None] * now).mean(0)
        w = w - 0.1 * slope
        target = w if (T0 + t) % 3 == 0 else target
        q.append((now @ w).max(-1))
        weights.append(w)
        x = 0.5 * later
    q.append(np.zeros(len(x)))
    losses = [(q[t] - 0.9 * stop(q[t + 1])) ** 2 * np.exp(p["lr"]) for t in range(n)]
    return losses, {"x": x, "w": w, "target": target}, [np.broadcast_to(w, (len(x), 2, 2)) for w in weights]


@algorithm({"w": (2,), "l": (2,), "x_tb": (2,)}, {"s": (2,)})
def td_lambda(p, c, n, stop):
    xs, lam, v, traces, s, e = [], [], [], [], c["s"], np.zeros(2)
    for t in range(n):
        x = p["x_tb"][t] + s
        xs.append(x)
        lam.append(sigmoid(x @ p["l"]))
        v.append(x @ p["w"])
        e = 0.9 * lam[max(t - 1, 0)] * e + x
        traces.append(e)
        s = 0.3 * np.tanh(x) + 0.1 * e
    g, losses = 0.0, [0.0] * n
    for t in reversed(range(n)):
        follow = (lam[t + 1], v[t + 1]) if t + 1 < n else (0.0, 0.0)
        g = xs[t].sum() + 0.9 * ((1 - follow[0]) * follow[1] + follow[0] * g)
        losses[t] = np.sum(g * traces[t]) + (g - v[t]) ** 2
    return losses, {"s": s}, traces


@algorithm({"W": (2, 3), "b": (2,), "x_tb": (2,), "a_tb": "int:3"}, {"s": (2,)})
def reinforce(p, c, n, stop):
    xs, s, rewards = [], stop(c["s"]), []
    for t in range(n):
        xs.append(p["x_tb"][t] + s)
        rewards.append(stop(np.sin(xs[t].sum() + p["a_tb"][t])))
        s = stop(np.tanh(xs[t]))
    losses, aux, g = [0.0] * n, [0.0] * n, 0.0
    for t in reversed(range(n)):
        g = rewards[t] + 0.9 * g
        v = xs[t] @ p["b"]
        losses[t] = -log_softmax(xs[t] @ p["W"])[p["a_tb"][t]] * (g - stop(v)) + (g - v) ** 2
        aux[t] = g
    return losses, {"s": s}, aux


@algorithm({"w": (), "x_tb": (), "back_tb": "int:2", "env_tb": "int:2"}, {"s": (), "kept": (3,)}, batched=True)
def replay(p, c, n, stop):
    """A ring buffer in the carry, from which an older value of another environment is drawn."""
    kept, s, losses, aux = np.array(c["kept"]), c["s"], [], []
    for t in range(n):
        x = np.tanh(p["x_tb"][t] + s)
        kept = kept.copy()
        kept[:, (T0 + t) % 3] = x
        drawn = kept[p["env_tb"][t], (T0 + t - p["back_tb"][t]) % 3]
        losses.append(p["w"] * drawn * x + 0.5 * kept[:, (T0 + t - 2) % 3])
        aux.append(drawn)
        s = np.sin(x)
    return losses, {"s": s, "kept": kept}, aux
