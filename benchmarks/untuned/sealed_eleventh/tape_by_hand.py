"""The actor-critic with an external memory by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eleventh import tape
from benchmarks.untuned.sealed_eleventh.tape import (
    ACTIONS,
    OBS,
    SLOTS,
    WIDTH,
    begins,
    learnt,
    outputs,
    params_of,
)  # fmt: skip

CUTS = [WIDTH, 2 * WIDTH, 3 * WIDTH, 4 * WIDTH]

# -- memory of a batch ``[B, SLOTS, WIDTH]``: weights by keys ``[B, WIDTH]``, and what they read


def softmax(x):
    """Cosines are small: without a maximum there is no overflow, but for sharpness of 80 and more."""
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def scaled_key(key, sharp):
    """The key, so long as it is sharp."""
    return key * (jax.nn.softplus(sharp) * jax.lax.rsqrt((key * key).sum(-1) + 1e-4))[:, None]


def like_by_einsum(memory, key, sharp):
    found = jnp.einsum("bmw,bw->bm", memory, scaled_key(key, sharp))
    return jax.nn.softmax(found * jax.lax.rsqrt(jnp.einsum("bmw,bmw->bm", memory, memory) + 1e-4))


def like_by_sums(memory, key, sharp):
    found = (memory * scaled_key(key, sharp)[:, None]).sum(-1)
    return softmax(found * jax.lax.rsqrt((memory * memory).sum(-1) + 1e-4))


def read_by_einsum(weight, memory):
    return jnp.einsum("bm,bmw->bw", weight, memory)


def read_by_sums(weight, memory):
    return (weight[..., None] * memory).sum(1)


def touched(memory, weight, erase, add):
    """Memory by what is erased and added: one product of both."""
    return memory + weight[..., None] * (add[:, None] - erase[:, None] * memory)


def used(memory, made, like, read_of):
    """What follows of the memory and the heads' product: what is read, and the memory."""
    reads, writes, erase, add, sharp = jnp.split(made, CUTS, -1)
    written = like(memory, writes, sharp[:, 0])
    memory = touched(memory, written, jax.nn.sigmoid(erase), jnp.tanh(add))
    return read_of(like(memory, reads, sharp[:, 1]), memory), memory


def used_in_columns(memory, made, *_):
    """Memory is ``[B, WIDTH, SLOTS]``: slots innermost."""
    reads, writes, erase, add, sharp = jnp.split(made, CUTS, -1)

    def weight(memory, key, sharp):
        found = (memory * scaled_key(key, sharp)[..., None]).sum(1)
        return softmax(found * jax.lax.rsqrt((memory * memory).sum(1) + 1e-4))

    written = weight(memory, writes, sharp[:, 0])[:, None]
    memory = memory + written * (jnp.tanh(add)[..., None] - jax.nn.sigmoid(erase)[..., None] * memory)
    return (weight(memory, reads, sharp[:, 1])[:, None] * memory).sum(-1), memory


def used_innermost(memory, made, *_):
    """Memory is ``[SLOTS, WIDTH, B]``: environments innermost, and no loop is shorter than they are many."""
    reads, writes, erase, add, sharp = jnp.split(made.T, CUTS)

    def weight(memory, key, sharp):
        key = key * (jax.nn.softplus(sharp) * jax.lax.rsqrt((key * key).sum(0) + 1e-4))
        e = jnp.exp((memory * key).sum(1) * jax.lax.rsqrt((memory * memory).sum(1) + 1e-4))
        return e / e.sum(0)

    written = weight(memory, writes, sharp[0])[:, None]
    memory = memory + written * (jnp.tanh(add) - jax.nn.sigmoid(erase) * memory)
    return (weight(memory, reads, sharp[1])[:, None] * memory).sum(0).T, memory


def rate_of(memory):
    return jax.lax.rsqrt((memory * memory).sum(-1, keepdims=True) + 1e-4)


def used_with_rates(memory, made, *_):
    """Beside memory are its slots' norms, of which each is for what is read, and for what is written next."""
    reads, writes, erase, add, sharp = jnp.split(made, CUTS, -1)
    memory, rate = memory

    def weight(memory, rate, key, sharp):
        e = jnp.exp(jnp.einsum("bmw,bw->bm", memory, scaled_key(key, sharp))[..., None] * rate)
        return e / e.sum(1, keepdims=True)

    written = weight(memory, rate, writes, sharp[:, 0])
    memory = memory + written * (jnp.tanh(add)[:, None] - jax.nn.sigmoid(erase)[:, None] * memory)
    rate = rate_of(memory)
    return read_by_einsum(weight(memory, rate, reads, sharp[:, 1])[..., 0], memory), (memory, rate)


by_einsum = functools.partial(used, like=like_by_einsum, read_of=read_by_einsum)
by_sums = functools.partial(used, like=like_by_sums, read_of=read_by_sums)
mixed = functools.partial(used, like=like_by_einsum, read_of=read_by_sums)
#: How memory of a batch is laid out for those that use it, from ``[B, SLOTS, WIDTH]``.
LAID_OUT = {used_in_columns: (0, 2, 1), used_innermost: (1, 2, 0)}


def laid_out(memory, use):
    memory = memory.transpose(LAID_OUT.get(use, (0, 1, 2)))
    return (memory, rate_of(memory)) if use is used_with_rates else memory


def start_of(p, carry, use):
    """The carry as ``use`` has it, and the memory that episodes begin with."""
    h, read, memory = carry
    return (h, read, laid_out(memory, use)), laid_out(p["slots"][None], use)


def kept_of(going, carry, blank, use):
    """``going[B]``: whether the episode goes on."""
    h, read, memory = carry
    some = going if use is used_innermost else going[:, None, None]
    memory = jax.tree.map(lambda blank, memory: blank + some * (memory - blank), blank, memory)
    return h * going[:, None], read * going[:, None], memory


# -- one timestep of a batch: ``pre`` is what the cell makes of the observation


def separate(p, h, read, pre, hidden):
    x = pre + read @ p["x"]["w"][OBS:]
    return gates(x, c.linear(p["h"], h), h)


def joined(p, h, read, pre, hidden):
    """One product of what is remembered and read; the third part has what is of either alone."""
    w, rows = p["h"]["w"], p["x"]["w"][OBS:]
    top = jnp.concatenate([w, jnp.zeros((hidden, hidden))], -1)
    low = jnp.concatenate([rows[:, : 2 * hidden], jnp.zeros((WIDTH, hidden)), rows[:, 2 * hidden :]], -1)
    made = jnp.concatenate([h, read], -1) @ jnp.concatenate([top, low])
    r, z, hn, xn = jnp.split(made, 4, -1)
    br, bz, bn = jnp.split(p["h"]["b"], 3)
    xr, xz, xm = jnp.split(pre, 3, -1)
    z = jax.nn.sigmoid(z + bz + xz)
    return z * h + (1.0 - z) * jnp.tanh(xm + xn + jax.nn.sigmoid(r + br + xr) * (hn + bn))


def stepper(p, blank, use, gate):
    def step(carry, x):
        pre, going = x
        h, read, memory = kept_of(going, carry, blank, use)
        h = gate(p, h, read, pre, h.shape[-1])
        read, memory = use(memory, c.linear(p["heads"], h))
        return (h, read, memory), (h, read)

    return step


def hoisted(p, data):
    pre = data["obs"] @ p["x"]["w"][:OBS] + p["x"]["b"]
    return pre, 1.0 - data["first"].astype(jnp.float32)


def heads_joined(p, h, read):
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"])
    made = c.linear(both, jnp.concatenate([h, read], -1))
    return made[..., :ACTIONS], made[..., ACTIONS]


def by_hand(length, batch, use=by_einsum, gate=separate, heads=outputs, unroll=1, again=False, chunk=None):
    """``again``: each timestep is computed again for its gradient; ``chunk``: so many of them."""

    def run(p, carry, data):
        def loss(p):
            first, blank = start_of(p, carry, use)
            step = stepper(p, blank, use, gate)
            step = jax.checkpoint(step, prevent_cse=False) if again else step
            scan = lambda carry, x: jax.lax.scan(step, carry, x, unroll=unroll)  # noqa: E731
            x = hoisted(p, data)
            if chunk is None:
                h, read = scan(first, x)[1]
            else:
                block = jax.checkpoint(scan, prevent_cse=False)
                found = jax.lax.scan(block, first, c.in_chunks(x, chunk))[1]
                h, read = (x.reshape(length, batch, -1) for x in found)
            return learnt(*heads(p, h, read), data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run


# -- the weights' gradients after the loop: it hands back slopes by what products made


def offset_step(p, blank, use):
    """A timestep, of which every product has an offset; what the products are of is told."""

    def step(carry, offsets, going):
        pre, by_h, by_heads = offsets
        h, read, memory = kept_of(going, carry, blank, use)
        before = h, read
        h = gates(pre + read @ p["x"]["w"][OBS:], c.linear(p["h"], h) + by_h, h)
        read, memory = use(memory, c.linear(p["heads"], h) + by_heads)
        return (h, read, memory), before

    return step


def weights_after(length, batch, use=by_einsum, heads=heads_joined, unroll=1, kept=False):
    """``kept``: the way forwards keeps what the way back needs; if not, each timestep is computed again."""

    def run(p, carry, data):
        first, _ = start_of(p, carry, use)
        blank, back_to_slots = jax.vjp(lambda slots: laid_out(slots[None], use), p["slots"])
        pre, going = hoisted(p, data)
        hidden = first[0].shape[-1]
        none = jnp.zeros((batch, 3 * hidden)), jnp.zeros((batch, 4 * WIDTH + 2))

        def differentiated(carry, pre, blank, going):
            one = lambda carry, offsets, blank: offset_step(p, blank, use)(carry, offsets, going)  # noqa: E731
            return jax.vjp(one, carry, (pre, *none), blank, has_aux=True)

        def forwards(carry, x):
            if kept:
                after, back, before = differentiated(carry, x[0], blank, x[1])
            else:
                after, before = offset_step(p, blank, use)(carry, (x[0], *none), x[1])
                back = carry
            return after, (after[:2], before, back)

        (h, read), before, backs = jax.lax.scan(forwards, first, (pre, going), unroll=unroll)[1]
        own = {"pi": p["pi"], "v": p["v"]}
        loss, (of_own, of_h, of_read) = jax.value_and_grad(
            lambda own, h, read: learnt(*heads(own, h, read), data) / (length * batch), (0, 1, 2)
        )(own, h, read)

        def backwards(by, x):
            (by_carry, by_blank), (back, pre, going, of_h, of_read) = by, x
            back = back if kept else differentiated(back, pre, blank, going)[1]
            by_carry, by_offsets, more = back((by_carry[0] + of_h, by_carry[1] + of_read, by_carry[2]))
            return (by_carry, jax.tree.map(jnp.add, by_blank, more)), by_offsets

        last = jax.tree.map(jnp.zeros_like, (first, blank))
        xs = backs, pre, going, of_h, of_read
        (_, by_blank), slopes = jax.lax.scan(backwards, last, xs, reverse=True, unroll=unroll)
        by_pre, by_hh, by_heads, obs, h_before, read_before, h = c.rows_of((*slopes, data["obs"], *before, h))
        grads = {
            "x": {"w": jnp.concatenate([obs, read_before], -1).T @ by_pre, "b": by_pre.sum(0)},
            "h": {"w": h_before.T @ by_hh, "b": by_hh.sum(0)}, "heads": {"w": h.T @ by_heads, "b": by_heads.sum(0)},
            "slots": back_to_slots(by_blank)[0],
        }  # fmt: skip
        return loss, grads | of_own

    return run


def workload(length, batch, hidden, chunk=8):
    make, after = functools.partial(by_hand, length, batch), functools.partial(weights_after, length, batch)
    one, column, inner = {"heads": heads_joined}, {"use": used_in_columns}, {"use": used_innermost}
    sums, both, some = {"use": by_sums}, {"gate": joined, "heads": heads_joined}, {"use": mixed}
    rates, two = {"use": used_with_rates}, {"unroll": 2}
    forms = {
        "rlfx": tape.by_rlfx(length, batch), "plain": tape.plain(length, batch), "hoisted": make(), "heads joined": make(**one),
        "sums": make(**sums, **one), "mixed": make(**some, **one), "joined": make(**both), "joined, sums": make(**sums, **both),
        "slots innermost": make(**column, **one), "environments innermost": make(**inner, **one),
        "environments innermost, joined": make(**inner, **both), "unrolled by 2": make(unroll=2, **one),
        "sums, unrolled by 2": make(unroll=2, **sums, **one), "sums, unrolled by 4": make(unroll=4, **sums, **one),
        "environments innermost, unrolled by 2": make(unroll=2, **inner, **one), "again": make(again=True, **one),
        "sums, again": make(again=True, **sums, **one), f"blocks of {chunk}": make(chunk=chunk, **one),
        f"sums, blocks of {chunk}": make(chunk=chunk, **sums, **one), "weights after": after(),
        "norms kept": make(**rates, **one), "norms kept, joined": make(**rates, **both), "weights after, mixed": after(**some),
        "weights after, norms kept": after(**rates), "weights after, kept, norms kept": after(kept=True, **rates),
        "weights after, norms kept, unrolled by 2": after(**rates, **two),
        "weights after, slots innermost, unrolled by 2": after(**column, **two),
        "weights after, sums": after(**sums), "weights after, slots innermost": after(**column),
        "weights after, environments innermost": after(**inner), "weights after, unrolled by 2": after(unroll=2),
        "weights after, kept": after(kept=True), "weights after, kept, sums": after(kept=True, **sums),
        "weights after, kept, mixed": after(kept=True, **some),
        "weights after, kept, slots innermost": after(kept=True, **column),
        "weights after, kept, environments innermost": after(kept=True, **inner),
        "weights after, kept, environments innermost, unrolled by 2": after(kept=True, unroll=2, **inner),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 6), (length, batch)
    done = jax.random.uniform(k[0], size) < 0.03
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "action": jax.random.randint(k[2], size, 0, ACTIONS),
        "reward": jax.random.normal(k[3], size), "done": done,
        "first": jnp.concatenate([jnp.zeros((1, batch), bool), done[:-1]]),
    }  # fmt: skip
    p = params_of(k[4], hidden)
    h, read, memory = begins(p, batch, hidden)
    carry = h, read, memory + 0.3 * jax.random.normal(k[5], (batch, SLOTS, WIDTH))
    return Workload(forms, (p, carry, data), tolerance=1e-4)
