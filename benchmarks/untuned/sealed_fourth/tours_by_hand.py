"""`tours` by hand: its decoder, and how instances follow each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

from . import tours as e

# -- decoders: what is prepared of an instance's cities, and the logits ``[Q, N]`` of many tours


def each(p, made, tours):
    """One by one."""
    return jax.vmap(lambda tour: e.decided(p, made, tour))(tours)


def pointed(logits, visited, width):
    return jnp.where(visited, e.NEVER, e.CLIP * jnp.tanh(logits / np.float32(np.sqrt(width))))


def glimpsed(p, made, q, visited):
    """Of queries ``[Q, HEADS, D]``."""
    scores = jnp.einsum("qhd,nhd->qhn", q, made["k"]) / np.float32(np.sqrt(q.shape[-1]))
    shares = jax.nn.softmax(jnp.where(visited[:, None], e.NEVER, scores), -1)
    glimpse = c.linear(p["out"], jnp.einsum("qhn,nhd->qhd", shares, made["v"]).reshape(len(q), -1))
    return pointed(glimpse @ made["point"].T, visited, glimpse.shape[-1])


def batched(p, made, tours):
    """All tours of an instance by the same products."""
    h = made["nodes"]
    mean = jnp.broadcast_to(h.mean(0), (len(tours.first), h.shape[-1]))
    q = e.in_heads(c.linear(p["query"], jnp.concatenate([mean, h[tours.first], h[tours.current]], -1)))
    return glimpsed(p, made, q, tours.visited)


def with_queries(p, cities):
    """Products of the cities, from which those of tours are picked."""
    made = e.prepared(p, cities)
    h, w = made["nodes"], jnp.split(p["query"]["w"], 3)
    return made | {"base": h.mean(0) @ w[0] + p["query"]["b"], "first": h @ w[1], "current": h @ w[2]}


def late(p, made, tours):
    q = made["base"] + made["first"][tours.first] + made["current"][tours.current]
    return glimpsed(p, made, e.in_heads(q), tours.visited)


def with_tables(p, cities):
    """Scores of all cities for each that is first, or where one is; and what each head's share of a city adds to the logits."""
    made = with_queries(p, cities)
    width = made["nodes"].shape[-1]
    k, scale = made["k"], np.float32(np.sqrt(width // e.HEADS))
    scores = lambda q: jnp.einsum("...hd,nhd->...hn", e.in_heads(q), k).reshape(*q.shape[:-1], -1) / scale  # noqa: E731
    out = p["out"]["w"].reshape(e.HEADS, -1, width)
    adds = jnp.einsum("nhd,hdw->hnw", made["v"], out).reshape(-1, width) @ made["point"].T
    tables = {name: scores(made[name]) for name in ("base", "first", "current")}
    return tables | {"adds": adds, "bias": p["out"]["b"] @ made["point"].T}


def tables(one_hot):
    """``one_hot``: rows are picked by products, whose derivatives are products, too."""

    def decide(p, made, tours):
        count = tours.visited.shape[-1]
        pick = lambda name, i: jax.nn.one_hot(i, count) @ made[name] if one_hot else made[name][i]  # noqa: E731
        scores = made["base"] + pick("first", tours.first) + pick("current", tours.current)
        scores = jnp.where(tours.visited[:, None], e.NEVER, scores.reshape(-1, e.HEADS, count))
        shares = jnp.exp(scores - stop_gradient(scores.max(-1, keepdims=True)))
        shares = (shares / shares.sum(-1, keepdims=True)).reshape(len(scores), -1)
        return pointed(shares @ made["adds"] + made["bias"], tours.visited, len(p["out"]["b"]))

    return decide


def innermost(p, made, tours):
    """The same with tours innermost, ``[HEADS, N, Q]``, so that no sum is over neighbours in memory."""
    count, seen = tours.visited.shape[-1], tours.visited.T
    one_hot = lambda i: (np.arange(count)[:, None] == i).astype(np.float32)  # noqa: E731
    scores = made["first"].T @ one_hot(tours.first) + made["current"].T @ one_hot(tours.current) + made["base"][:, None]
    scores = jnp.where(seen, e.NEVER, scores.reshape(e.HEADS, count, -1))
    shares = jnp.exp(scores - stop_gradient(scores.max(1, keepdims=True)))
    shares = (shares / shares.sum(1, keepdims=True)).reshape(e.HEADS * count, -1)
    return pointed(made["adds"].T @ shares + made["bias"][:, None], seen, len(p["out"]["b"])).T


EACH, BATCHED, LATE = (e.prepared, each), (e.prepared, batched), (with_queries, late)
TABLES, PRODUCTS, INNERMOST = (with_tables, tables(False)), (with_tables, tables(True)), (with_tables, innermost)


# -- the learner


def advantages(way):
    """Of lengths ``[T, N]``."""
    return way.sum(0) - way.sum(0).mean()


def by_hand(cities, decoder=EACH, onepass=True, again=False, once=False, chunk=None, ahead=False):
    """``onepass``: the acting loop is differentiated, ``again``: and computes each timestep again; else all timesteps are
    decided anew, and with ``once`` the cities are encoded for both at once; ``chunk``: instances of a block; ``ahead``: random
    numbers are drawn before the loop."""
    prepare, decide = decoder
    steps, total = cities - 1, (cities - 1) * cities

    def acted(p, made, places, tours, key):
        (keys,) = c.streams(key, cities, "city")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (cities,)))(c.at(keys, t))  # noqa: E731
        times = jnp.arange(steps)

        def body(tours, given):
            t, drawn = given
            logits = decide(p, made, tours)
            chosen = jnp.argmax(stop_gradient(logits) + (draw(t) if drawn is None else drawn), -1).astype(jnp.int32)
            way = e.distance(places[tours.current], places[chosen])
            way += jnp.where(t == steps - 1, e.distance(places[chosen], places[tours.first]), 0.0)
            log_prob = c.pick(jax.nn.log_softmax(logits), chosen) if onepass else (tours, chosen)
            return jax.vmap(e.visit)(tours, chosen), (way, log_prob)

        body = jax.checkpoint(body, prevent_cse=False) if again else body
        return jax.lax.scan(body, tours, (times, jax.vmap(draw)(times) if ahead else None))

    def through(p, places, tours, key):
        after, (way, log_prob) = acted(p, prepare(p, places), places, tours, key)
        return (log_prob * stop_gradient(advantages(way))).sum() / total, after

    def learned(p, made, way, seen, chosen):
        log_prob = c.pick(jax.nn.log_softmax(decide(p, made, c.rows_of(seen))), c.rows_of(chosen))
        return (log_prob.reshape(way.shape) * advantages(way)).sum() / total

    def gradient(p, places, tours, keys):
        """The loss of some instances, added up, its gradient, and the tours after it."""
        if onepass:

            def some(p):
                found, after = jax.vmap(lambda *x: through(p, *x))(places, tours, keys)
                return found.sum(), after

            (found, after), grads = jax.value_and_grad(some, has_aux=True)(p)
            return found, grads, after

        prepare_all = lambda p: jax.vmap(lambda x: prepare(p, x))(places)  # noqa: E731
        made, pull = jax.vjp(prepare_all, p) if once else (prepare_all(p), None)
        after, (way, (seen, chosen)) = jax.vmap(lambda *x: acted(p, *x))(made, places, tours, keys)
        some = lambda p, made: jax.vmap(lambda *x: learned(p, *x))(made, way, seen, chosen).sum()  # noqa: E731
        if not once:
            return *jax.value_and_grad(lambda p: some(p, prepare_all(p)))(p), after
        found, (by_p, by_made) = jax.value_and_grad(some, (0, 1))(p, made)
        return found, jax.tree.map(jnp.add, by_p, pull(by_made)[0]), after

    def run(p, places, tours, keys):
        count = len(places)
        if chunk is None:
            found, grads, after = gradient(p, places, tours, keys)
        else:

            def add(total, part):
                found, grads, after = gradient(p, *part)
                return jax.tree.map(jnp.add, total, (found, grads)), after

            parts = (*c.in_chunks((places, tours), chunk), keys.reshape(-1, chunk))
            (found, grads), after = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)
            after = jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), after)
        return found / count, jax.tree.map(lambda x: x / count, grads), after

    return run


def workload(instances, cities, width, layers, chunk=4):
    make = lambda decoder=EACH, **how: by_hand(cities, decoder, **how)  # noqa: E731
    learner, blocks = {"onepass": False}, {"onepass": False, "once": True, "chunk": chunk}
    single, ahead = blocks | {"chunk": 1}, {"ahead": True}
    forms = {
        "rlfx": e.by_rlfx(cities), "plain": make(), "each timestep again": make(again=True), "decided anew": make(**learner),
        "batched": make(BATCHED), "batched, anew, encoded once": make(BATCHED, **learner, once=True),
        "picked late": make(LATE), "tables": make(TABLES), "tables by products": make(PRODUCTS),
        "tables, anew, encoded once": make(TABLES, **learner, once=True),
        "tables by products, anew, encoded once": make(PRODUCTS, **learner, once=True),
        f"batched, blocks of {chunk}": make(BATCHED, **blocks), f"picked late, blocks of {chunk}": make(LATE, **blocks),
        f"tables, blocks of {chunk}": make(TABLES, **blocks), f"tables by products, blocks of {chunk}": make(PRODUCTS, **blocks),
        "tables by products, blocks of 1": make(PRODUCTS, **single), "batched, one pass, blocks of 1": make(BATCHED, chunk=1),
        f"tables by products, blocks of {chunk}, drawn ahead": make(PRODUCTS, **blocks, **ahead),
        f"tables by products, blocks of {chunk}, threefry unrolled": make(PRODUCTS, **blocks),
        f"tables by products, blocks of {chunk}, drawn ahead, threefry unrolled": make(PRODUCTS, **blocks, **ahead),
        "tables by products, one pass, threefry unrolled": make(PRODUCTS),
        "tours innermost": make(INNERMOST), "tours innermost, drawn ahead, threefry unrolled": make(INNERMOST, **ahead),
        "tours innermost, anew, encoded once, drawn ahead, threefry unrolled": make(INNERMOST, **learner, **ahead, once=True),
        "tables, drawn ahead, threefry unrolled": make(TABLES, **ahead), "tables, threefry unrolled": make(TABLES),
        f"tables, blocks of {chunk}, drawn ahead, threefry unrolled": make(TABLES, **blocks, **ahead),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    places = jax.random.uniform(k[0], (instances, cities, 2), minval=-1.0)  # around 0, so that norms lose no digits
    tours = jax.tree.map(lambda x: jnp.broadcast_to(x, (instances, *x.shape)), e.begun(cities))
    keys = lambda impl=None: jax.random.split(jax.random.key(2, impl=impl), instances)  # noqa: E731
    given = e.params_of(k[1], width, layers), places, tours
    own = {name: (*given, keys(threefry)) for name in forms if name.endswith("threefry unrolled")}
    # The loss is a mean of what is weighed by advantages, whose mean is 0: what counts is how far it is from that. Logits are ten
    # times a tanh, so that a gradient's last digits are fewer than elsewhere.
    compared = lambda result: (1.0 + result[0], *result[1:])  # noqa: E731
    return Workload(forms, (*given, keys()), own, compared, tolerance=3e-5)
