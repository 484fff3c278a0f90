"""PPO of a policy that writes (RLHF, Ouyang et al. 2022): a GRU over tokens, written by the policy before; a judge reads the
whole text at its end, and every token pays for its divergence from a reference. Advantages are over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing

LAMBDA, CLIP, BETA, ENTROPY = 0.95, 0.2, 0.1, 0.01


def params_of(key, words, hidden):
    k = jax.random.split(key, 5)
    sizes = {"x": (hidden, 3 * hidden), "h": (hidden, 3 * hidden), "pi": (hidden, words), "v": (hidden, 1)}
    layers = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=False)}
    return layers | {"token": jax.random.normal(k[4], (words, hidden))}


def cell(p, h, word):
    return gates(c.linear(p["x"], p["token"][word]), c.linear(p["h"], h), h)


def speaks(p, h):
    """Log-probabilities of words."""
    return jax.nn.log_softmax(c.linear(p["pi"], h))


def judged(judge, texts):
    """Of the mean of a text's embeddings."""
    return c.mlp(judge["net"], texts)[..., 0]


def point_loss(logits, v, x):
    """Of each point; ``x``: the word, its old log-probability, the normalised advantage, and the value's target."""
    word, old, normalised, aim = x
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(c.pick(log_probs, word) - old)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return 0.5 * (v - aim) ** 2 - gain - ENTROPY * entropy


def program(params, carry, t):
    p, old, reference, judge = params
    word, h, h_old, h_ref = carry
    h, h_old, h_ref = cell(p, h, word), cell(old, h_old, word), cell(reference, h_ref, word)
    by_old = speaks(old, h_old)
    word = jax.random.categorical(t.key_for("word"), by_old)
    apart = by_old[word] - speaks(reference, h_ref)[word]
    ends = t + 1 == t.length
    worth = judged(judge, rlfx.mean(judge["token"][word], over="t"))
    step = c.Step(jnp.where(ends, worth, 0.0) - BETA * apart, ends, jnp.zeros_like(ends))

    v = c.linear(p["v"], h)[0]
    value = rlfx.series(stop_gradient(v), end=0.0)
    advantage = rlfx.gae(step, value, value[t + 1], gamma=1.0, lam=LAMBDA)
    normalised = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    told = jax.tree.map(stop_gradient, (word, by_old[word], normalised, advantage + value[t]))
    return point_loss(c.linear(p["pi"], h), v, told), (word, h, h_old, h_ref)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, others, carry, key):
        of = lambda p: loss_fn((p, *others), carry, key)  # noqa: E731
        (loss, ((word, *_), _)), grads = jax.value_and_grad(of, has_aux=True)(p)
        return loss, grads, word

    return run


# -- by hand: recurrences, ``h[T, B, H]`` after the words ``[T, B]``


def stepwise(p, h, words, **_):
    def body(h, word):
        h = cell(p, h, word)
        return h, h

    return jax.lax.scan(body, h, words)[1]


def embedded(p, words):
    """Rows are gathered and multiplied."""
    made = c.linear(p["x"], p["token"][words.reshape(-1)])
    return made.reshape(*words.shape, -1)


def from_table(p, words):
    """Every word is multiplied once, and then gathered."""
    return c.linear(p["x"], p["token"])[words]


def from_ones(p, words):
    """The same by a product with ones and zeros, whose gradient is one."""
    table = c.linear(p["x"], p["token"])
    return (jax.nn.one_hot(words.reshape(-1), len(table)) @ table).reshape(*words.shape, -1)


def hoisted(p, h, words, given=embedded, unroll=1, again=False):
    def body(h, x):
        h = gates(x, c.linear(p["h"], h), h)
        return h, h

    body = jax.checkpoint(body, prevent_cse=False) if again else body
    return jax.lax.scan(body, h, given(p, words), unroll=unroll)[1]


def weights_after(p, h, words, given=embedded, unroll=1, halved=False):
    """The way back is written out, and the weights' gradient is of all timesteps at once; ``halved``: logistic functions are
    hyperbolic tangents, for which weights are halved before the loop."""
    size = h.shape[-1]

    def logistic(made):
        return 0.5 * jnp.tanh(made) + 0.5 if halved else jax.nn.sigmoid(made)

    def forwards(w, b, x):
        def body(h, x):
            made = h @ w
            r, z = jnp.split(logistic(x[:, : 2 * size] + made[:, : 2 * size]), 2, -1)
            side = made[:, 2 * size :] + b
            n = jnp.tanh(x[:, 2 * size :] + r * side)
            after = n + z * (h - n)
            return after, (after, (h, r, z, n, side))

        hs, kept = jax.lax.scan(body, h, x, unroll=unroll)[1]
        return hs, (w, kept)

    @jax.custom_vjp
    def run(w, b, x):
        return forwards(w, b, x)[0]

    def backwards(residuals, by):
        w, kept = residuals
        turned, factor = w.T, 2.0 if halved else 1.0  # of halved weights' own slopes

        def body(by_h, given):
            by, (h, r, z, n, side) = given
            by_h = by_h + by
            by_n = by_h * (1.0 - z) * (1.0 - n**2)
            by_r = factor * by_n * side * r * (1.0 - r)
            by_z = factor * by_h * (h - n) * z * (1.0 - z)
            made = jnp.concatenate([by_r, by_z, by_n * r], -1)
            return by_h * z + made @ turned, (made, by_n)

        made, by_n = jax.lax.scan(body, jnp.zeros_like(h), (by, kept), reverse=True, unroll=unroll)[1]
        rows = c.rows_of(made)
        by_x = jnp.concatenate([made[..., : 2 * size], by_n], -1)
        return c.rows_of(kept[0]).T @ rows, rows[:, 2 * size :].sum(0), by_x

    run.defvjp(forwards, backwards)
    scale = jnp.repeat(jnp.array([0.5, 0.5, 1.0]), size) if halved else 1.0
    first = p["x"] | {"b": p["x"]["b"] + p["h"]["b"].at[2 * size :].set(0.0)}
    first = jax.tree.map(lambda w: w * scale, first)
    return run(p["h"]["w"] * scale, p["h"]["b"][2 * size :], given(p | {"x": first}, words))


# -- by hand: heads of ``h[N, H]``, and losses of points


def apart(p, h):
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def heads_joined(p, h):
    made = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"]), h)
    return made[..., :-1], made[..., -1]


def slopes_known(logits, v, x):
    """What the loss sends back is made with it, by one exponential of each logit."""
    word, old, normalised, aim = x

    def both(logits, v):
        shifted = logits - logits.max(-1, keepdims=True)
        grown = jnp.exp(shifted)
        total = grown.sum(-1, keepdims=True)
        log_probs, share = shifted - jnp.log(total), grown / total
        hot = jax.nn.one_hot(word, logits.shape[-1])
        ratio = jnp.exp((hot * log_probs).sum(-1) - old)
        free, bound = ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised
        mean = (share * log_probs).sum(-1)
        by_word = jnp.where(free <= bound, free, 0.0)[..., None]
        slope = by_word * (share - hot) + ENTROPY * share * (log_probs - mean[..., None])
        return 0.5 * (v - aim) ** 2 - jnp.minimum(free, bound) + ENTROPY * mean, (slope, v - aim)

    @jax.custom_vjp
    def loss(logits, v):
        return both(logits, v)[0]

    loss.defvjp(both, lambda slopes, by: (by[..., None] * slopes[0], by * slopes[1]))
    return loss(logits, v)


def by_hand(
    length, batch, recurrence=stepwise, heads=apart, loss_of=point_loss, given=embedded, reference="with", flat=True, ahead=False,
    table=False, unroll=1, late=False, **how,
):  # fmt: skip
    """``reference``: it reads "with" what is written, or "after"; ``table``: what the old policy makes of every word is known
    before it writes; ``late``: its log-probabilities are made after the loop; ``ahead``: random numbers are drawn before it;
    ``unroll``: of both loops of what learns nothing."""

    def run(p, others, carry, key):
        old, other, judge = others
        word, h, h_old, h_ref = carry
        (keys,) = c.streams(key, batch, "word")
        words = len(old["token"])
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (words,)))(c.at(keys, t))  # noqa: E731
        times, beside = jnp.arange(length), reference == "with"
        of_words = c.linear(old["x"], old["token"]) if table else None

        def body(carry, given):
            t, noise = given
            word, h, h_ref = carry
            h_ref = cell(other, h_ref, word) if beside else h_ref
            h = gates(of_words[word], c.linear(old["h"], h), h) if table else cell(old, h, word)
            logits = c.linear(old["pi"], h)
            said = logits if late else jax.nn.log_softmax(logits)
            following = jnp.argmax(said + (draw(t) if noise is None else noise), -1)
            by_ref = c.pick(speaks(other, h_ref), following) if beside else None
            return (following, h, h_ref), (word, following, said if late else c.pick(said, following), by_ref)

        xs = times, jax.vmap(draw)(times) if ahead else None
        (end, _, _), (read, said, by_old, by_ref) = jax.lax.scan(body, (word, h_old, h_ref), xs, unroll=unroll)
        flatten = c.rows_of if flat else lambda x: x
        shaped = lambda x: x.reshape(length, batch)  # noqa: E731
        if late:
            rows = c.rows_of(by_old)
            by_old = shaped(c.pick(rows, said.reshape(-1)) - jax.nn.logsumexp(rows, -1))
        if not beside:
            rows = c.linear(
                other["pi"], c.rows_of(hoisted(other, h_ref, read, from_table if table else embedded, unroll))
            )
            by_ref = shaped(c.pick(rows, said.reshape(-1)) - jax.nn.logsumexp(rows, -1))
        worth = judged(judge, judge["token"][said].mean(0))
        reward = (-BETA * (by_old - by_ref)).at[-1].add(worth)

        def loss(p):
            logits, v = heads(p, flatten(recurrence(p, h, read, given=given, **how)))
            value = stop_gradient(shaped(v))
            delta = reward + c.shifted(value, jnp.zeros(batch)) - value
            advantage = c.discounted(delta, jnp.full_like(delta, LAMBDA), unroll)
            normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            return loss_of(logits, v, flatten((said, by_old, normalised, advantage + value))).mean()

        return *jax.value_and_grad(loss)(p), end

    return run


def workload(length, batch, words, hidden):
    make = lambda recurrence=stepwise, heads=apart, loss_of=point_loss, **how: by_hand(  # noqa: E731
        length, batch, recurrence, heads, loss_of, **how
    )
    after, joined, known = weights_after, heads_joined, slopes_known
    late, ahead, halved = {"reference": "after"}, {"ahead": True}, {"halved": True}
    table = {"table": True, "given": from_table, **late}
    ones = {**table, "given": from_ones}
    best = {**ones, "late": True}
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(flat=False), "rows": make(), "reference after": make(**late),
        "hoisted": make(hoisted, **late), "a table": make(hoisted, **table), "a table by ones": make(hoisted, **ones),
        "hoisted, again": make(hoisted, again=True, **ones), "a table, drawn ahead": make(hoisted, **table, **ahead),
        "weights after": make(after, **late), "weights after, a table": make(after, **table),
        "weights after, a table by ones, heads joined": make(after, joined, **ones),
        "weights after, a table by ones, slopes known": make(after, apart, known, **ones),
        "weights after, all late": make(after, joined, known, **best),
        "halved, all late": make(after, joined, known, **best, **halved),
        "halved, a table, slopes known, drawn ahead": make(after, apart, known, **table, **halved, **ahead),
        "weights after, a table by ones, threefry unrolled": make(after, **ones),
        "weights after, all late, threefry unrolled": make(after, joined, known, **best),
        "halved, all late, threefry unrolled": make(after, joined, known, **best, **halved),
        "halved, all late, drawn ahead, threefry unrolled": make(after, joined, known, **best, **halved, **ahead),
        "halved, a table, slopes known, drawn ahead, threefry unrolled": make(after, apart, known, **table, **halved, **ahead),
        "halved, a table by ones, slopes known, drawn ahead, threefry unrolled": make(
            after, apart, known, **ones, **halved, **ahead
        ),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    p = params_of(k[0], words, hidden)
    beside = jax.tree.map(lambda w, n: w + 0.1 * n, p, params_of(k[1], words, hidden))  # one update ago
    judge = {"token": jax.random.normal(k[3], (words, 16)), "net": c.mlp_params(k[4], (16, 32, 1))}
    others = beside, params_of(k[2], words, hidden), judge
    states = [0.3 * jax.random.normal(k, (batch, hidden)) for k in k[5:7]]  # after a prompt
    carry = jax.random.randint(k[7], (batch,), 0, words), states[0], states[0], states[1]
    return drawing(forms, (p, others, carry), tolerance=2e-5)
