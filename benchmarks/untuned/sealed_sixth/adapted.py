"""MAML (Finn et al. 2017): for each of many tasks one policy-gradient step on its first episodes, whose step sizes are learnt
(Li et al. 2017), and the loss of what it led to on others: the gradient goes through the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA = 20, 4, 0.99, 0.95


def params_of(key, hidden):
    k = jax.random.split(key)
    nets = {"pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1))}
    return {"nets": nets, "sizes": jax.tree.map(lambda w: jnp.full_like(w, 0.1), nets)}


def actor_critic(params, carry, t):
    nets, data = params
    x = rlfx.inputs(data)[t]
    logits, v = c.mlp(nets["pi"], x["obs"]), c.mlp(nets["v"], x["obs"])[0]
    value = rlfx.series(v, end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), carry


def stepped(p, grads):
    return jax.tree.map(lambda w, size, g: w - size * g, p["nets"], p["sizes"], grads)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(actor_critic, length=length, batch=batch)
    loss = lambda nets, data: loss_fn((nets, data), jnp.zeros(batch))[0]  # noqa: E731

    def of_task(p, first, then):
        return loss(stepped(p, jax.grad(loss)(p["nets"], first)), then)

    def run(p, first, then):
        return jax.value_and_grad(lambda p: jax.vmap(of_task, (None, 0, 0))(p, first, then).mean())(p)

    return run


# -- by hand: losses of ``[T, B]``


def separate(nets, obs):
    return c.mlp(nets["pi"], obs), c.mlp(nets["v"], obs)[..., 0]


def features_first(nets, obs):
    x = obs.reshape(-1, OBS).T
    return c.columns(nets["pi"], x).T.reshape(*obs.shape[:-1], ACTIONS), c.columns(nets["v"], x)[0].reshape(obs.shape[:-1])


def loss_of(evaluate=separate, flat=True):
    def loss(nets, data):
        size = data["reward"].shape
        logits, v = evaluate(nets, c.rows_of(data["obs"]) if flat else data["obs"])
        timed = stop_gradient(v).reshape(size)
        advantage = c.gae(timed, jnp.zeros(size[1]), data["reward"], data["done"], GAMMA, LAMBDA)
        advantage, action = (x.reshape(v.shape) for x in (advantage, data["action"]))
        log_prob = c.pick(jax.nn.log_softmax(logits), action)
        return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)).mean()

    return loss


def written_out(nets, data, tangents=None):
    """Loss and gradient, with every derivative by hand; or, given ``tangents`` of the weights, the derivative of the gradient
    in their direction, that is, their product with the Hessian. Rows are ``[T * B]``."""
    size = data["reward"].shape
    obs, action = data["obs"].reshape(-1, OBS), data["action"].reshape(-1)
    n = len(obs)

    def forwards(layers):
        x = [obs]
        for layer in layers[:-1]:
            x.append(jnp.tanh(c.linear(layer, x[-1])))
        return x, c.linear(layers[-1], x[-1])

    def backwards(layers, xs, d):
        found, ds = [], []
        for layer, x in zip(layers[::-1], xs[::-1], strict=True):
            found.append({"w": x.T @ d, "b": d.sum(0)})
            ds.append(d)
            if x is not obs:
                d = (d @ layer["w"].T) * (1.0 - x * x)
        return found[::-1], ds

    def moved(layers, by, xs):
        """Tangents of what layers hold, and of the output."""
        dxs = [None]
        for layer, dlayer, x, y in zip(layers, by, xs, [*xs[1:], None], strict=True):
            d = x @ dlayer["w"] + dlayer["b"]
            d = d if dxs[-1] is None else d + dxs[-1] @ layer["w"]
            dxs.append(d if y is None else d * (1.0 - y * y))
        return dxs[:-1], dxs[-1]

    def backwards_moved(layers, by, xs, dxs, ds, d):
        found = []
        of_layers = zip(layers[::-1], by[::-1], xs[::-1], dxs[::-1], ds, strict=True)
        for layer, dlayer, x, dx, back in of_layers:
            found.append({"w": x.T @ d if dx is None else x.T @ d + dx.T @ back, "b": d.sum(0)})
            if dx is not None:
                arrived = back @ layer["w"].T
                d = (d @ layer["w"].T + back @ dlayer["w"].T) * (1.0 - x * x) - 2.0 * arrived * x * dx
        return found[::-1]

    (xs, logits), (ys, v) = forwards(nets["pi"]), forwards(nets["v"])
    timed = v.reshape(size)
    advantage = c.gae(timed, jnp.zeros(size[1]), data["reward"], data["done"], GAMMA, LAMBDA).reshape(-1, 1)
    log_p = jax.nn.log_softmax(logits)
    p = jnp.exp(log_p)
    hot = jax.nn.one_hot(action, ACTIONS)
    spread = (p * log_p).sum(-1, keepdims=True)
    dlogits = (-(hot - p) * advantage + 0.01 * p * (log_p - spread)) / n
    dv = -advantage / n  # the target is the value and the advantage
    by_pi, back_pi = backwards(nets["pi"], xs, dlogits)
    by_v, back_v = backwards(nets["v"], ys, dv)
    if tangents is None:
        loss = (0.5 * advantage**2 - (hot * log_p).sum(-1, keepdims=True) * advantage + 0.01 * spread).mean()
        return loss, {"pi": by_pi, "v": by_v}

    dxs, moved_logits = moved(nets["pi"], tangents["pi"], xs)
    dys, moved_v = moved(nets["v"], tangents["v"], ys)
    dlog_p = moved_logits - (p * moved_logits).sum(-1, keepdims=True)
    dp = p * dlog_p
    dspread = (dp * (log_p + 1.0)).sum(-1, keepdims=True)
    dd = (dp * advantage + 0.01 * (dp * (log_p - spread) + p * (dlog_p - dspread))) / n
    pi = backwards_moved(nets["pi"], tangents["pi"], xs, dxs, back_pi, dd)
    return {"pi": pi, "v": backwards_moved(nets["v"], tangents["v"], ys, dys, back_v, moved_v / n)}


# -- by hand: value and gradient of a task, with respect to networks and step sizes


def twice_backwards(loss, again=False):
    inner = jax.checkpoint(loss, prevent_cse=False) if again else loss

    def of_task(p, first, then):
        return jax.value_and_grad(lambda p: loss(stepped(p, jax.grad(inner)(p["nets"], first)), then))(p)

    return of_task


def linearized(loss):
    """``g - H (size g)``: the gradient after the step, and the derivative of that before it in one direction, forwards over
    backwards."""

    def of_task(p, first, then):
        slope, product = jax.linearize(lambda nets: jax.grad(loss)(nets, first), p["nets"])
        found, g = jax.value_and_grad(loss)(stepped(p, slope), then)
        return found, adapted(p, slope, g, product)

    return of_task


def adapted(p, slope, g, product):
    back = product(jax.tree.map(jnp.multiply, p["sizes"], g))
    return {"nets": jax.tree.map(jnp.subtract, g, back), "sizes": jax.tree.map(lambda a, b: -a * b, slope, g)}


def forwards_over_backwards(loss):
    """The same, whose gradient before the step is computed again with its derivative."""

    def of_task(p, first, then):
        before = lambda nets: jax.grad(loss)(nets, first)  # noqa: E731
        slope = before(p["nets"])
        found, g = jax.value_and_grad(loss)(stepped(p, slope), then)
        return found, adapted(p, slope, g, lambda v: jax.jvp(before, (p["nets"],), (v,))[1])

    return of_task


def by_layers(loss=None):
    """With layers and their derivatives written out: no activation is computed twice."""

    def of_task(p, first, then):
        _, slope = written_out(p["nets"], first)
        found, g = (jax.value_and_grad(loss) if loss else written_out)(stepped(p, slope), then)
        return found, adapted(p, slope, g, lambda v: written_out(p["nets"], first, v))

    return of_task


def by_hand(of_task, chunk=None):
    """``chunk``: tasks of a block."""

    def run(p, first, then):
        tasks = len(first["reward"])
        both = jax.vmap(of_task, (None, 0, 0))

        def summed(first, then):
            return jax.tree.map(lambda x: x.sum(0) / tasks, both(p, first, then))

        if chunk is None:
            return summed(first, then)

        def add(total, part):
            found = jax.tree.map(lambda x: x / tasks, of_task(p, *part)) if chunk == 1 else summed(*part)
            return jax.tree.map(jnp.add, total, found), None

        parts = (first, then) if chunk == 1 else c.in_chunks((first, then), chunk)
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]

    return run


def plain(loss):
    def run(p, first, then):
        def of_task(p, first, then):
            return loss(stepped(p, jax.grad(loss)(p["nets"], first)), then)

        return jax.value_and_grad(lambda p: jax.vmap(of_task, (None, 0, 0))(p, first, then).mean())(p)

    return run


def workload(tasks, length, batch, hidden, chunk=4):
    one, some = {"chunk": 1}, {"chunk": chunk}
    rows, both, first = loss_of(), loss_of(c.first_joined), loss_of(features_first)
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": plain(loss_of(flat=False)), "rows": plain(rows), "joined": plain(both),
        "gradients task by task": by_hand(twice_backwards(rows)), "in turn": by_hand(twice_backwards(rows), **one),
        "in turn, checkpointed": by_hand(twice_backwards(rows, again=True), **one),
        "linearized": by_hand(linearized(rows)), "linearized, in turn": by_hand(linearized(rows), **one),
        f"linearized, blocks of {chunk}": by_hand(linearized(rows), **some),
        "linearized, joined, in turn": by_hand(linearized(both), **one),
        "linearized, features first, in turn": by_hand(linearized(first), **one),
        "forwards over backwards": by_hand(forwards_over_backwards(rows)),
        "forwards over backwards, in turn": by_hand(forwards_over_backwards(rows), **one),
        "forwards over backwards, features first, in turn": by_hand(forwards_over_backwards(first), **one),
        "layers written out": by_hand(by_layers()), "layers written out, in turn": by_hand(by_layers(), **one),
        f"layers written out, blocks of {chunk}": by_hand(by_layers(), **some),
        "layers written out, the first ones joined, in turn": by_hand(by_layers(both), **one),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)

    def episodes(key):
        k = jax.random.split(key, 4)
        size = tasks, length, batch
        return {
            "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
            "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.05).at[:, -1].set(True),
        }  # fmt: skip

    return Workload(forms, (params_of(k[0], hidden), episodes(k[1]), episodes(k[2])), tolerance=2e-5)
