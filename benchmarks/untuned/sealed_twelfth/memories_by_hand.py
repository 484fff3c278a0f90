"""RDPG by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twelfth import memories
from benchmarks.untuned.sealed_twelfth.memories import (
    ACTIONS,
    NETS,
    OBS,
    learnt,
    mu,
    params_of,
    seen_of,
    target_of,
)  # fmt: skip

# -- gates: ``made`` has four parts along ``axis``, last (rows of a batch) or first but for nets (features first)


def usual(made, cell, axis):
    i, f, g, o = jnp.split(made, 4, axis)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def halved(y):
    return 0.5 + 0.5 * y


def one_tanh(made, cell, axis):
    """Of what is scaled before (``scaled``): a sigmoid is a tanh of half."""
    i, f, g, o = jnp.split(jnp.tanh(made), 4, axis)
    cell = halved(f) * cell + halved(i) * g
    return halved(o) * jnp.tanh(cell), cell


def scaled(w, gate):
    """The product's last axis, as the gate wants it."""
    if gate is usual:
        return w
    i, f, g, o = jnp.split(w, 4, -1)
    return jnp.concatenate([0.5 * i, 0.5 * f, g, 0.5 * o], -1)


def forget_more(pre, gate):
    """What the usual gate adds to a part."""
    return pre if gate is usual else pre + 0.5 * (jnp.arange(4).repeat(pre.shape[-1] // 4) == 1)


def product(w, h, axis):
    return h @ w if axis == -1 else w.T @ h


# -- histories of h, of one net ``w[hidden, 4 hidden]``, ``pre[T, B, 4 hidden]``, or of several ``w[N, ...]``, ``pre[T, N, ...]``


def scanned(w, pre, going, memory, gate, axis, unroll=1, chunk=None):
    """``chunk``: so many timesteps are computed again for their gradient."""

    def step(memory, x):
        pre, going = x
        h, cell = (m * going for m in memory)
        memory = gate(pre + product(w, h, axis), cell, axis)
        return memory, memory[0]

    scan = lambda memory, x: jax.lax.scan(step, memory, x, unroll=unroll)  # noqa: E731
    if chunk is None:
        return scan(memory, (pre, going))[1]
    block = jax.checkpoint(scan, prevent_cse=False)
    return jax.lax.scan(block, memory, c.in_chunks((pre, going), chunk))[1].reshape(len(pre), *memory[0].shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def written(w, pre, going, memory, gate, axis, unroll=1):
    """The same with a way back of its own: slopes of what is made by the loop, and weights' by one product behind it."""
    return scanned(w, pre, going, memory, gate, axis, unroll)


def written_forwards(w, pre, going, memory, gate, axis, unroll):
    def step(memory, x):
        pre, going = x
        before, cell = (m * going for m in memory)
        i, f, g, o = jnp.split(pre + product(w, before, axis), 4, axis)
        if gate is usual:
            i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f + 1.0), jnp.tanh(g), jax.nn.sigmoid(o)
        else:
            i, f, g, o = halved(jnp.tanh(i)), halved(jnp.tanh(f)), jnp.tanh(g), halved(jnp.tanh(o))
        after = f * cell + i * g
        squashed = jnp.tanh(after)
        return (o * squashed, after), (before, (i, f, g, o, cell, squashed), o * squashed)

    before, kept, h = jax.lax.scan(step, memory, (pre, going), unroll=unroll)[1]
    return h, (w, going, before, kept)


def written_backwards(gate, axis, unroll, saved, by):
    w, going, before, kept = saved
    back = w.mT if axis == -1 else w.T
    scale = 1.0 if gate is usual else 2.0

    def step(carry, x):
        (by_h, by_cell), (by, going, (i, f, g, o, cell, squashed)) = carry, x
        by_h = by + by_h
        by_cell = by_cell + by_h * o * (1.0 - squashed * squashed)
        rest = scale * by_cell
        parts = rest * g * i * (1.0 - i), rest * cell * f * (1.0 - f), by_cell * i * (1.0 - g * g)
        on = jnp.concatenate([*parts, scale * by_h * squashed * o * (1.0 - o)], axis)
        return (going * product(back, on, axis), going * by_cell * f), on

    last = jnp.zeros_like(by[0]), jnp.zeros_like(by[0])
    memory, on = jax.lax.scan(step, last, (by, going, kept), reverse=True, unroll=unroll)
    if axis == 0:
        weights = jnp.einsum("thb,tkb->hk", before, on)
    else:
        weights = jnp.einsum("t...bh,t...bk->...hk", before, on)
    return weights, on, jnp.zeros_like(going), memory


written.defvjp(written_forwards, written_backwards)

# -- histories of all four nets


def made_before(nets, seen, gate, joined):
    """Of each net ``[T, B, 4 hidden]``; ``joined``: one product for all."""
    if joined:
        together = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(net["lstm"]["x"] for net in nets))
        made = jnp.split(c.linear(together, seen), len(nets), -1)
    else:
        made = [c.linear(net["lstm"]["x"], seen) for net in nets]
    return [forget_more(scaled(m + net["lstm"]["h"]["b"], gate), gate) for m, net in zip(made, nets, strict=True)]


def apart(nets, carry, seen, going, gate, loop, joined=False):
    pre = made_before(nets, seen, gate, joined)
    weights = [scaled(net["lstm"]["h"]["w"], gate) for net in nets]
    return [loop(w, x, going[..., None], m, gate, -1) for w, x, m in zip(weights, pre, carry, strict=True)]


def columns(nets, carry, seen, going, gate, loop, joined=False):
    """Features first."""
    pre = [x.mT for x in made_before(nets, seen, gate, joined)]
    weights = [scaled(net["lstm"]["h"]["w"], gate) for net in nets]
    memory = [jax.tree.map(jnp.transpose, m) for m in carry]
    return [loop(w, x, going[:, None], m, gate, 0).mT for w, x, m in zip(weights, pre, memory, strict=True)]


def stacked(nets, carry, seen, going, gate, loop, joined=False):
    """One loop, whose products are of a batch of nets."""
    pre = jnp.stack(made_before(nets, seen, gate, joined), 1)
    w = jnp.stack([scaled(net["lstm"]["h"]["w"], gate) for net in nets])
    memory = jax.tree.map(lambda *m: jnp.stack(m), *carry)
    return list(jnp.moveaxis(loop(w, pre, going[:, None, :, None], memory, gate, -1), 1, 0))


def whole_of(net, gate):
    """Weights and biases of what is seen and of h, as one."""
    x, h = net["lstm"]["x"], net["lstm"]["h"]
    w = scaled(jnp.concatenate([x["w"], h["w"]]), gate)
    return w, forget_more(scaled(x["b"] + h["b"], gate), gate)


def scanned_inside(w, b, seen, going, memory, gate, unroll=1):
    def step(memory, x):
        seen, going = x
        h, cell = (m * going for m in memory)
        memory = gate(jnp.concatenate([seen, h], -1) @ w + b, cell, -1)
        return memory, memory[0]

    return jax.lax.scan(step, memory, (seen, going), unroll=unroll)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def written_inside(w, b, seen, going, memory, gate, unroll=1):
    """Weights' gradients are added up in the loop, and of what is made only the gates and the cell are kept."""
    return scanned_inside(w, b, seen, going, memory, gate, unroll)


def inside_forwards(w, b, seen, going, memory, gate, unroll):
    def step(memory, x):
        seen, going = x
        h, cell = (m * going for m in memory)
        joined = jnp.concatenate([seen, h], -1)
        i, f, g, o = jnp.split(jnp.tanh(joined @ w + b), 4, -1)
        i, f, o = halved(i), halved(f), halved(o)
        after = f * cell + i * g
        h = o * jnp.tanh(after)
        return (h, after), (joined, cell, (i, f, g, o), h)

    *kept, h = jax.lax.scan(step, memory, (seen, going), unroll=unroll)[1]
    return h, (w, going, kept)


def inside_backwards(gate, unroll, saved, by):
    w, going, kept = saved
    size = by.shape[-1]
    back = w[-size:].T

    def step(carry, x):
        (by_h, by_cell, by_w, by_b), (by, going, (joined, cell, (i, f, g, o))) = carry, x
        by_h, squashed = by + by_h, jnp.tanh(f * cell + i * g)
        by_cell = by_cell + by_h * o * (1.0 - squashed * squashed)
        rest = 2.0 * by_cell
        parts = rest * g * i * (1.0 - i), rest * cell * f * (1.0 - f), by_cell * i * (1.0 - g * g)
        on = jnp.concatenate([*parts, 2.0 * by_h * squashed * o * (1.0 - o)], -1)
        return (going * (on @ back), going * by_cell * f, by_w + joined.T @ on, by_b + on.sum(0)), None

    zeros = jnp.zeros_like
    first = zeros(by[0]), zeros(by[0]), zeros(w), zeros(w[0])
    h, cell, by_w, by_b = jax.lax.scan(step, first, (by, going, kept), reverse=True, unroll=unroll)[0]
    seen = jnp.zeros((*by.shape[:2], len(w) - size))
    return by_w, by_b, seen, zeros(going), (h, cell)


written_inside.defvjp(inside_forwards, inside_backwards)


def inside(nets, carry, seen, going, gate, loop, joined=False):
    """Without anything made before the loop."""
    return [loop(*whole_of(net, gate), seen, going[..., None], m, gate) for net, m in zip(nets, carry, strict=True)]


def learnt_shared(p, actor_h, critic_h, target, data):
    """What the critic's first layer makes of its history is for both actions."""
    (first, *rest), hidden = p["critic"]["head"], critic_h.shape[-1]
    made = critic_h @ first["w"][:hidden] + first["b"]
    q = c.mlp(rest, jnp.tanh(made + data["action"] @ first["w"][hidden:]))[..., 0]
    acted = mu(p["actor"]["head"], actor_h) @ stop_gradient(first["w"][hidden:])
    gained = c.mlp(stop_gradient(rest), jnp.tanh(stop_gradient(made) + acted))[..., 0]
    return (0.5 * (q - target) ** 2 - gained).sum()


def by_hand(length, batch, of=apart, gate=usual, loop=scanned, end=learnt, groups=2, joined=True):
    """``groups`` of nets: two are what is learnt and the targets, of one all are in one loop."""

    def run(p, old, carry, data):
        seen, going = seen_of(data), 1.0 - data["first"].astype(jnp.float32)
        find = lambda nets, carry: of(nets, carry, seen, going, gate, loop, joined)  # noqa: E731
        fixed, then = [old[n] for n in NETS], [carry[1][n] for n in NETS]

        def loss(p):
            own, now = [p[n] for n in NETS], [carry[0][n] for n in NETS]
            h = find(own, now) + find(fixed, then) if groups == 2 else find(own + fixed, now + then)
            return end(p, *h[:2], target_of(old, *h[2:], data), data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run


def environments(length, batch, chunk, **how):
    """``chunk``: so many environments after the others."""
    one = by_hand(length, chunk, **how)

    def run(p, old, carry, data):
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        add = lambda total, x: (jax.tree.map(jnp.add, total, one(p, old, *x)), None)  # noqa: E731
        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        total = jax.lax.scan(add, none, (c.in_chunks(carry, chunk), parts))[0]
        return jax.tree.map(lambda x: x * (chunk / batch), total)

    return run


def workload(length, batch, hidden, chunk=8):
    make, cut = functools.partial(by_hand, length, batch), functools.partial
    parts = cut(environments, length, batch)
    one, shared, out = {"gate": one_tanh}, {"end": learnt_shared}, {"loop": written}
    both, best = {**one, **shared}, {**one, **shared, **out}
    two, four = {"loop": cut(scanned, unroll=2)}, {"loop": cut(written, unroll=2)}
    pairs, all_four, column = {"of": stacked}, {"of": stacked, "groups": 1}, {"of": columns}
    within, inner = {"of": inside, "loop": scanned_inside}, {"of": inside, "loop": written_inside}
    forms = {
        "rlfx": memories.by_rlfx(length, batch), "plain": memories.plain(length, batch), "hoisted": make(joined=False),
        "hoisted, joined": make(), "shared": make(**shared), "one tanh": make(**both),
        "pairs stacked": make(**pairs, **shared), "pairs stacked, one tanh": make(**pairs, **both),
        "four stacked": make(**all_four, **shared), "four stacked, one tanh": make(**all_four, **both),
        "features first": make(**column, **shared), "features first, one tanh": make(**column, **both),
        "unrolled by 2": make(**two, **both), f"blocks of {chunk}": make(loop=cut(scanned, chunk=chunk), **both),
        "written out": make(**shared, **out), "written out, one tanh": make(**best),
        "written out, one tanh, unrolled by 2": make(**four, **both),
        "written out, pairs stacked": make(**pairs, **shared, **out),
        "written out, pairs stacked, one tanh": make(**pairs, **best),
        "written out, four stacked, one tanh": make(**all_four, **best),
        "written out, features first, one tanh": make(**column, **best),
        "written out, features first, one tanh, unrolled by 2": make(**column, **four, **both),
        "inside": make(**within, **shared), "inside, one tanh": make(**within, **both),
        f"inside, {chunk} environments": parts(chunk, **within, **shared),
        f"inside, one tanh, {chunk} environments": parts(chunk, **within, **both),
        f"inside, one tanh, {2 * chunk} environments": parts(2 * chunk, **within, **both),
        "inside, written out": make(**inner, **both),
        "inside, written out, unrolled by 2": make(of=inside, loop=cut(written_inside, unroll=2), **both),
        f"inside, written out, {chunk // 2} environments": parts(chunk // 2, **inner, **both),
        f"inside, written out, {chunk} environments": parts(chunk, **inner, **both),
        f"inside, written out, {2 * chunk} environments": parts(2 * chunk, **inner, **both),
        f"written out, one tanh, {chunk} environments": parts(chunk, **best),
        f"written out, one tanh, {2 * chunk} environments": parts(2 * chunk, **best),
        f"written out, features first, one tanh, {2 * chunk} environments": parts(2 * chunk, **column, **best),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 12), (length, batch)
    done = jax.random.uniform(k[0], size) < 0.03
    acted = jnp.tanh(jax.random.normal(k[2], (length + 1, batch, ACTIONS)))
    gained = jax.random.normal(k[3], (length + 1, batch))
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "acted": acted[:-1], "gained": gained[:-1], "action": acted[1:],
        "reward": gained[1:], "done": done.astype(jnp.float32),
        "first": jnp.concatenate([jnp.zeros((1, batch), bool), done[:-1]]),
    }  # fmt: skip
    of = lambda key: tuple(0.5 * jax.random.normal(k, (batch, hidden)) for k in jax.random.split(key))  # noqa: E731
    carry = tuple({n: of(key) for n, key in zip(NETS, keys, strict=True)} for keys in (k[4:6], k[6:8]))
    return Workload(forms, (params_of(k[8], hidden), params_of(k[9], hidden), carry, data), tolerance=2e-5)
