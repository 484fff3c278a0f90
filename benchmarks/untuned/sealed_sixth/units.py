"""AlphaStar's learner (Vinyals et al. 2019) on stored games: a policy whose heads follow one another, the last of which points
at units, one after the other; V-trace, upgoing returns, and a teacher that is stayed near to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

UNIT, OBS, KINDS, DELAYS, PICKS, GAMMA, NEAR = 12, 16, 10, 6, 3, 0.99, 0.1
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 9)
    nets = {
        "units": (UNIT, hidden, hidden), "core": (OBS + hidden, hidden, hidden), "value": (hidden, hidden, 1),
        "kind": (hidden, hidden, KINDS), "delay": (hidden, hidden, DELAYS), "query": (hidden, hidden, hidden),
    }  # fmt: skip
    p = {name: c.mlp_params(key, sizes) for key, (name, sizes) in zip(k, nets.items(), strict=False)}
    tables = {"after kind": KINDS, "after delay": DELAYS}
    tables = {n: 0.3 * jax.random.normal(k, (size, hidden)) for k, (n, size) in zip(k[7:], tables.items(), strict=True)}
    return p | tables | {"picked": c.dense(k[6], hidden, hidden)}


def seen(p, x):
    """The units' embeddings, and what the policy begins with."""
    units = relu(c.mlp(p["units"], x["units"], relu))
    pooled = (units * x["there"][..., None]).sum(-2) / x["there"].sum(-1, keepdims=True)
    return units, relu(c.mlp(p["core"], jnp.concatenate([x["obs"], pooled], -1), relu))


def pointed(query, units, free):
    scores = (query[..., None, :] * units).sum(-1) / units.shape[-1] ** 0.5
    return jnp.where(free, scores, -1e9)


def one_after_another(p, units, core, x):
    """Logits of every head, given what was taken before; and the policy's own of all picks, ``[..., PICKS, units]``."""
    kind = c.mlp(p["kind"], core, relu)
    at = core + p["after kind"][x["kind"]]
    delay = c.mlp(p["delay"], at, relu)
    at = at + p["after delay"][x["delay"]]
    free, picks = x["there"] > 0, []
    for i in range(PICKS):
        picks.append(pointed(c.mlp(p["query"], at, relu), units, free))
        taken = x["picks"][..., i]
        free &= jnp.arange(free.shape[-1]) != taken[..., None]
        unit = jnp.take_along_axis(units, taken[..., None, None], -2)[..., 0, :]
        at = at + relu(c.linear(p["picked"], unit))
    return kind, delay, jnp.stack(picks, -2)


def policy(p, x, heads=one_after_another):
    units, core = seen(p, x)
    return core, [jax.nn.log_softmax(logits) for logits in heads(p, units, core, x)]


def likely(logs, x):
    """The log-probability of everything that was taken."""
    kind, delay, picks = logs
    return c.pick(kind, x["kind"]) + c.pick(delay, x["delay"]) + c.pick(picks, x["picks"]).sum(-1)


def spread(logs, of_teacher):
    """Entropies, and divergences from the teacher, of all heads."""
    summed = lambda x: x.sum((-2, -1)) if x.ndim > of_teacher[0].ndim else x.sum(-1)  # noqa: E731
    return sum(summed(jnp.exp(a) * (NEAR * (a - b) + 0.01 * a)) for a, b in zip(logs, of_teacher, strict=True))


def judged(p, core):
    return c.mlp(p["value"], core, relu)[..., 0]


def program(params, carry, t):
    (p, teacher), data = params
    x = rlfx.inputs(data)[t]
    core, logs = policy(p, x)
    v, log_prob = judged(p, core), likely(logs, x)
    value = rlfx.series(v, end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    log_rho = log_prob - x["log_mu"]
    target, advantage = rlfx.vtrace(step, value, value[t + 1], log_rho, gamma=GAMMA)
    upgoing = rlfx.upgo(step, v, value[t + 1], gamma=GAMMA) - v
    gained = stop_gradient(advantage + jnp.minimum(jnp.exp(log_rho), 1.0) * upgoing)
    near = spread(logs, stop_gradient(policy(teacher, x)[1]))
    return 0.5 * (v - stop_gradient(target)) ** 2 - log_prob * gained + near, carry


# -- by hand: heads


def at_once(p, units, core, x):
    """What was taken is known: all queries are rows of one product."""
    made = relu(c.linear(p["picked"], jnp.take_along_axis(units, x["picks"][..., :-1, None], -2)))
    kind = c.mlp(p["kind"], core, relu)
    at = core + p["after kind"][x["kind"]]
    delay = c.mlp(p["delay"], at, relu)
    at = at + p["after delay"][x["delay"]]
    ats = [at]
    for i in range(PICKS - 1):
        ats.append(ats[-1] + made[..., i, :])
    query = c.mlp(p["query"], jnp.stack(ats, -2), relu)
    return kind, delay, masked(jnp.einsum("...ph,...uh->...pu", query, units), x, units.shape[-1])


def masked(scores, x, width):
    places = jnp.arange(scores.shape[-1])
    gone = jnp.cumsum(x["picks"][..., None] == places, -2)  # of this pick and those before
    before = jnp.concatenate([jnp.zeros_like(gone[..., :1, :]), gone[..., :-1, :]], -2)
    return jnp.where((x["there"] > 0)[..., None, :] & (before == 0), scores / width**0.5, -1e9)


def hot(p, units, core, x):
    """The same, which picks units and rows of tables by products with ones and zeros; scores as sums of products."""
    chosen = jax.nn.one_hot(x["picks"][..., :-1], units.shape[-2])
    taken = (chosen[..., None] * units[..., None, :, :]).sum(-2)
    made = relu(c.linear(p["picked"], taken))
    kind = c.mlp(p["kind"], core, relu)
    at = core + jax.nn.one_hot(x["kind"], KINDS) @ p["after kind"]
    delay = c.mlp(p["delay"], at, relu)
    at = at + jax.nn.one_hot(x["delay"], DELAYS) @ p["after delay"]
    ats = jnp.stack([at, at + made[..., 0, :], at + made.sum(-2)], -2)
    scores = (c.mlp(p["query"], ats, relu)[..., :, None, :] * units[..., None, :, :]).sum(-1)
    return kind, delay, masked(scores, x, units.shape[-1])


def picked_before(p, units, core, x):
    """Every unit is multiplied, of which two are read: no rows are gathered before the product."""
    every = relu(c.linear(p["picked"], units))
    made = jnp.take_along_axis(every, x["picks"][..., :-1, None], -2)
    kind = c.mlp(p["kind"], core, relu)
    at = core + p["after kind"][x["kind"]]
    delay = c.mlp(p["delay"], at, relu)
    at = at + p["after delay"][x["delay"]]
    ats = jnp.stack([at, at + made[..., 0, :], at + made.sum(-2)], -2)
    return kind, delay, masked(jnp.einsum("...ph,...uh->...pu", c.mlp(p["query"], ats, relu), units), x, units.shape[-1])


# -- by hand: evaluations, ``(value, logs)`` of points


def as_written(p, x, heads=one_after_another):
    core, logs = policy(p, x, heads)
    return judged(p, core), logs


def two_axes(p, x):
    """Of rows ``[N, ...]``: every product is of two axes, units are rows, and the pooled units have weights of their own."""
    n, count = x["there"].shape
    flat = relu(c.mlp(p["units"], x["units"].reshape(n * count, -1), relu))
    units = flat.reshape(n, count, -1)
    share = x["there"] / x["there"].sum(-1, keepdims=True)
    pooled = (units * share[..., None]).sum(1)
    first, second = p["core"]
    core = relu(c.linear(second, relu(x["obs"] @ first["w"][:OBS] + pooled @ first["w"][OBS:] + first["b"])))
    # First layers of the value and the kinds are one product.
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), p["value"][0], p["kind"][0])
    to_value, to_kind = jnp.split(relu(c.linear(both, core)), 2, -1)
    value, kind = (to_value * p["value"][1]["w"][:, 0]).sum(-1) + p["value"][1]["b"], c.linear(p["kind"][1], to_kind)
    at = core + jax.nn.one_hot(x["kind"], KINDS) @ p["after kind"]
    delay = c.mlp(p["delay"], at, relu)
    at = at + jax.nn.one_hot(x["delay"], DELAYS) @ p["after delay"]
    places = (x["picks"][:, :-1] + count * jnp.arange(n)[:, None]).T.reshape(-1)
    made = relu(c.linear(p["picked"], flat[places])).reshape(PICKS - 1, n, -1)
    ats = jnp.concatenate([at, at + made[0], at + made[0] + made[1]])
    query = c.mlp(p["query"], ats, relu).reshape(PICKS, n, -1)
    scores = jnp.stack([(q[:, None] * units).sum(-1) for q in query], 1)
    return value, [jax.nn.log_softmax(logits) for logits in (kind, delay, masked(scores, x, units.shape[-1]))]


def features_first(p, x):
    """Of rows, which are innermost: ``[hidden, N]``, units ``[hidden, units, N]``."""
    n, count = x["there"].shape
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731
    net = lambda layers, x: act(layers[1], relu(act(layers[0], x)))  # noqa: E731
    flat = relu(net(p["units"], x["units"].transpose(2, 1, 0).reshape(UNIT, count * n)))
    units, there = flat.reshape(-1, count, n), x["there"].T
    pooled = (units * (there / there.sum(0))).sum(1)
    core = relu(net(p["core"], jnp.concatenate([x["obs"].T, pooled])))
    at = core + p["after kind"].T @ jax.nn.one_hot(x["kind"], KINDS, axis=0)
    later = at + p["after delay"].T @ jax.nn.one_hot(x["delay"], DELAYS, axis=0)
    chosen = jax.nn.one_hot(x["picks"].T, count, axis=1)  # [PICKS, units, N]
    made = [relu(act(p["picked"], (units * chosen[i]).sum(1))) for i in range(PICKS - 1)]
    ats = jnp.stack([later, later + made[0], later + made[0] + made[1]], 1).reshape(len(core), -1)
    query = net(p["query"], ats).reshape(-1, PICKS, n)
    gone = jnp.cumsum(chosen, 0) - chosen
    scores = jnp.stack([(query[:, i, None] * units).sum(0) for i in range(PICKS)])
    scores = jnp.where((there > 0) & (gone == 0), scores / len(core) ** 0.5, -1e9)
    logs = net(p["kind"], core).T, net(p["delay"], at).T, scores.transpose(2, 0, 1)
    return net(p["value"], core)[0], [jax.nn.log_softmax(x) for x in logs]


def targets(v, log_rho, data):
    """V-trace's, and the advantages of both kinds; all of ``[T, B]``."""
    going, clipped = GAMMA * (1.0 - data["done"].astype(jnp.float32)), jnp.minimum(jnp.exp(log_rho), 1.0)
    ends = jnp.zeros_like(v[0])
    following = c.shifted(v, ends)
    aim = data["reward"] + going * following
    target = v + c.discounted(clipped * (aim - v), going * clipped)
    better = c.shifted((aim >= v).astype(jnp.float32), jnp.ones_like(ends))
    upgoing = c.discounted(data["reward"] + going * (1.0 - better) * following, going * better)
    return target, clipped * (data["reward"] + going * c.shifted(target, ends) + upgoing - 2.0 * v)


def by_hand(length, batch, evaluate=as_written, flat=True, chunk=None, ways="kept", heads=None, beside=False):
    """``chunk``: timesteps of a block; ``ways``: what blocks computed is kept, or computed again by `jax.checkpoint`, or the
    network runs twice, for targets and for the loss; ``beside``: the teacher in one call of `jax.vmap` with the learner."""
    if heads:
        evaluate = lambda p, x: as_written(p, x, heads)  # noqa: E731

    def run(p, teacher, data):
        rows = c.rows_of if flat else lambda x: x
        shaped = lambda x: x.reshape(length, batch)  # noqa: E731

        def told(v, log_prob):
            v, log_prob = (shaped(stop_gradient(x)) for x in (v, log_prob))
            return rows(targets(v, log_prob - data["log_mu"], data))

        def pieces(p, x, near=None):
            if beside:
                v, logs = jax.vmap(evaluate, (0, None))(jax.tree.map(lambda *w: jnp.stack(w), p, stop_gradient(teacher)), x)
                (v, logs), near = jax.tree.map(lambda x: x[0], (v, logs)), [x[1] for x in logs]
            else:
                v, logs = evaluate(p, x)
                near = evaluate(teacher, x)[1]
            return v, likely(logs, x), spread(logs, stop_gradient(near))

        def found(v, log_prob, near, target, advantage):
            return (0.5 * (v - target) ** 2 - log_prob * advantage + near).sum() / (length * batch)

        if not chunk:

            def loss(p):
                v, log_prob, near = pieces(p, rows(data))
                return found(v, log_prob, near, *told(v, log_prob))

            return jax.value_and_grad(loss)(p)

        parts = c.in_chunks(rows(data), chunk * batch)
        whole = lambda x: jax.tree.map(lambda x: x.reshape(-1), x)  # noqa: E731
        if ways == "twice":

            def first(x):
                v, logs = evaluate(p, x)
                return v, likely(logs, x)

            aims = told(*jax.lax.map(first, parts))
            loss = lambda p, part: found(*pieces(p, part[0]), *part[1])  # noqa: E731
            return c.summed_gradient(loss, p, (parts, c.in_chunks(aims, chunk * batch)))

        def loss(p):
            one = lambda x: pieces(p, x)  # noqa: E731
            one = jax.checkpoint(one, prevent_cse=False) if ways == "again" else one
            v, log_prob, near = whole(jax.lax.map(one, parts))
            return found(v, log_prob, near, *told(v, log_prob))

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, units, hidden, chunk=4):
    make = lambda evaluate=as_written, **how: by_hand(length, batch, evaluate, **how)  # noqa: E731
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    some, first = {"chunk": chunk}, features_first
    forms = {
        "rlfx": lambda p, others, data: jax.value_and_grad(lambda p: loss_fn(((p, others), data), jnp.zeros(batch))[0])(p),
        "plain": make(flat=False), "rows": make(), "all queries at once": make(heads=at_once),
        "sums of products": make(heads=hot), "all units multiplied": make(heads=picked_before),
        "the teacher beside": make(heads=at_once, beside=True), "two axes": make(two_axes), "features first": make(first),
        f"blocks of {chunk}": make(**some), f"all queries at once, blocks of {chunk}": make(heads=at_once, **some),
        f"sums of products, blocks of {chunk}": make(heads=hot, **some), "two axes, blocks of 1": make(two_axes, chunk=1),
        f"two axes, blocks of {chunk}": make(two_axes, **some),
        f"two axes, blocks of {4 * chunk}": make(two_axes, chunk=4 * chunk),
        f"two axes, blocks of {chunk}, again": make(two_axes, **some, ways="again"),
        f"two axes, blocks of {chunk}, twice": make(two_axes, **some, ways="twice"),
        f"features first, blocks of {chunk}": make(first, **some), "features first, blocks of 1": make(first, chunk=1),
        f"features first, blocks of {chunk}, again": make(first, **some, ways="again"),
        f"features first, blocks of {chunk}, twice": make(first, **some, ways="twice"),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 11)
    size = length, batch
    order = jnp.argsort(jax.random.uniform(k[0], (*size, units)), -1)[..., :PICKS]
    there = (jax.random.uniform(k[1], (*size, units)) < 0.8) | (order[..., None] == jnp.arange(units)).any(-2)
    data = {
        "units": jax.random.normal(k[2], (*size, units, UNIT)), "there": there.astype(jnp.float32), "picks": order,
        "obs": jax.random.normal(k[3], (*size, OBS)), "kind": jax.random.randint(k[4], size, 0, KINDS),
        "delay": jax.random.randint(k[5], size, 0, DELAYS), "log_mu": -10.0 + 0.5 * jax.random.normal(k[6], size),
        "reward": jax.random.normal(k[7], size), "done": (jax.random.uniform(k[8], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    return Workload(forms, (params_of(k[9], hidden), params_of(k[10], hidden), data), tolerance=1e-5)
