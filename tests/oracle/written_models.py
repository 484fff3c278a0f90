"""Models of sequences, as NumPy loops; see ``written_loops.py``."""

from __future__ import annotations

import numpy as np

from tests.oracle.written_loops import algorithm, log_softmax, logsumexp, sigmoid, softmax


@algorithm({"W": (6, 12), "g": (3,), "x_tb": (3,)}, {"h": (3,), "c": (3,)})
def lstm(p, c, n, stop):
    past, losses, aux = [], [], []
    for t in range(n):
        i, g, f, o = np.split(np.concatenate([p["x_tb"][t], c["h"]]) @ p["W"], 4)
        cell = sigmoid(f + 1) * c["c"] + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(cell)
        h = (h - h.mean()) / np.sqrt(h.var() + 1e-2) * p["g"]
        past.append(h)
        following = p["x_tb"][min(t + 1, n - 1)]
        losses.append(np.sum((h - following) ** 2) + np.mean(past, 0) @ following)
        aux.append(h[0])
        c = {"h": h, "c": cell}
    return losses, c, aux


@algorithm({"Wz": (2, 3), "Wc": (2, 3), "x_tb": (2,)}, {"s": (2,)}, batched=True)
def cpc(p, c, n, stop):
    z, s, losses, aux = np.tanh(p["x_tb"] @ p["Wz"]), c["s"], [], []
    for t in range(n):
        s = np.tanh(0.5 * s + p["x_tb"][t])
        q = s @ p["Wc"]
        far = z[t + 2] if t + 2 < n else np.zeros_like(z[0])
        logits = q @ far.T
        contrast = -np.mean(np.diagonal(logits) - logsumexp(logits, 1))
        own = np.array([log_softmax(z[:, b] @ q[b]) for b in range(len(q))])
        losses.append(contrast + own[:, 0])
        aux.append(own.max(1))
    return losses, {"s": s}, aux


@algorithm({"G": (4, 2), "Q": (4, 4), "R": (2, 4), "D": (4, 2), "o_tb": (2,), "e_tb": (2,)}, {"d": (2,), "s": (2,)})
def rssm(p, c, n, stop):
    def normal(y):
        return y[:2], np.log1p(np.exp(y[2:])) + 0.1

    def kl(m, s, k, r):
        return np.sum(np.log(r / s) + (s**2 + (m - k) ** 2) / (2 * r**2) - 0.5)

    losses, aux = [], []
    for t in range(n):
        d = np.tanh(np.concatenate([c["d"], c["s"]]) @ p["G"])
        prior, post = normal(d @ p["R"]), normal(np.concatenate([d, p["o_tb"][t]]) @ p["Q"])
        s = post[0] + post[1] * p["e_tb"][t]
        rebuilt = np.concatenate([d, s]) @ p["D"]
        divergence = 0.8 * kl(*map(stop, post), *prior) + 0.2 * kl(*post, *map(stop, prior))
        losses.append(np.sum((rebuilt - p["o_tb"][t]) ** 2) + divergence)
        aux.append(divergence)
        c = {"d": d, "s": s}
    return losses, c, aux


@algorithm({"A": (3, 3), "E": (2, 3), "x_tb": (2,)}, {"s": (3,)})
def hmm(p, c, n, stop):
    emit, s = [], c["s"]
    for t in range(n):
        emit.append(np.tanh(p["x_tb"][t] @ p["E"]) + 0.1 * s)
        s = 0.9 * s
    forward, a = [], np.zeros(3)
    for t in range(n):
        a = emit[t] + logsumexp(a[:, None] + p["A"], 0)
        forward.append(a)
    backward, b = [0.0] * n, np.zeros(3)
    for t in reversed(range(n)):
        b = logsumexp(p["A"] + ((emit[t + 1] if t + 1 < n else 0) + b)[None], 1)
        backward[t] = b
    posterior = [softmax(forward[t] + backward[t]) for t in range(n)]
    return [posterior[t] @ emit[t] + logsumexp(forward[-1]) for t in range(n)], {"s": s}, posterior


@algorithm({"A": (3, 3), "x_tb": (3,)}, {"s": ()})
def viterbi(p, c, n, stop):
    best, back, xs, s = np.zeros(3), [], [], c["s"]
    for t in range(n):
        xs.append(p["x_tb"][t] * (1 + s))
        scores = best[:, None] + p["A"]
        back.append(scores.argmax(0))
        best = xs[t] + scores.max(0)
        s = 0.5 * s
    path = [int(best.argmax())]
    for t in reversed(range(1, n)):
        path.insert(0, int(back[t][path[0]]))
    return [xs[t][path[t]] for t in range(n)], {"s": s}, path


@algorithm({"f": (), "q": (), "r": (), "y_tb": ()}, {"s": ()})
def kalman(p, c, n, stop):
    f, q, r, s = np.tanh(p["f"]), np.exp(p["q"]), np.exp(p["r"]), c["s"]
    m, v, ms, vs, ys = 0.0, 1.0, [], [], []
    for t in range(n):
        y, s = p["y_tb"][t] + s, np.tanh(s)
        predicted, spread = f * m, f * v * f + q
        gain = spread / (spread + r)
        m, v = predicted + gain * (y - predicted), (1 - gain) * spread
        ms.append(m)
        vs.append(v)
        ys.append(y)
    smooth = [0.0] * n
    for t in reversed(range(n)):
        back = vs[t] * f / (f * vs[t] * f + q)
        smooth[t] = ms[t] if t == n - 1 else ms[t] + back * (smooth[t + 1] - f * ms[t])
    return [(smooth[t] - ys[t]) ** 2 for t in range(n)], {"s": s}, smooth


@algorithm({"q": (3, 3), "k": (3, 3), "v": (3, 3), "pos": (3,), "x_tb": (3,)}, {"s": (3,)})
def attention(p, c, n, stop):
    keys, values, s, losses, aux = [], [], c["s"], [], []
    for t in range(n):
        x = p["x_tb"][t] + s
        keys.append(x @ p["k"])
        values.append(x @ p["v"])
        whole = softmax(np.array(keys) @ (x @ p["q"])) @ np.array(values)
        near = min(3, t + 1)
        recent = softmax(np.array(keys[-near:]) @ x + p["pos"][3 - near :]) @ np.array(values[-near:])
        s = np.tanh(whole + recent)
        losses.append(np.sum(whole**2) + np.sum(recent))
        aux.append(recent)
    return losses, {"s": s}, aux


@algorithm({"w": (2,), "rate": (), "x_tb": (2,), "y_tb": ()}, {"s": (2,)})
def maml(p, c, n, stop):
    xs, s, losses, aux = [], c["s"], [], []
    for t in range(n):
        xs.append(p["x_tb"][t] + s)
        s = 0.5 * np.tanh(xs[-1])
    xs = np.array(xs)
    for t in range(n):
        error = xs[: t + 1] @ p["w"] - p["y_tb"][: t + 1]
        adapted = p["w"] - 0.3 * np.exp(p["rate"]) * 2 * (error[:, None] * xs[: t + 1]).mean(0)
        losses.append(np.mean((xs[t:] @ adapted - p["y_tb"][t:]) ** 2))
        aux.append(adapted)
    return losses, {"s": s}, aux


@algorithm({"w": (2, 2), "m": (2,)}, {"pos": (3, 2), "vel": (3, 2)})
def agents(p, c, n, stop):
    pos, vel, all_pos, all_vel = c["pos"], c["vel"], [], []
    for t in range(n):
        all_pos.append(pos)
        centre = all_pos[max(t - 1, 0)].mean(0)
        message = np.sum(all_pos, axis=(0, 1)) @ p["w"]
        rank = np.arange(3)[:, None] * 0.01 * p["m"]
        vel = np.tanh(0.9 * vel + 0.1 * (centre - pos) + 0.05 * message + rank)
        all_vel.append(vel)
        pos = pos + 0.1 * vel
    losses = [np.sum(all_vel[t] ** 2) + np.mean(all_pos[t:], axis=(0, 1)) @ p["m"] for t in range(n)]
    return losses, {"pos": pos, "vel": vel}, [v.sum(0) for v in all_vel]
