"""Self-predictive representations (SPR, Schwarzer et al. 2021) with distances as of bisimulation (MICo, Castro et al. 2021): what
the model foresees some steps ahead points where the target network's codes then do, and codes of the batch's environments at one
timestep are as far apart as their rewards and what follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, BETA, SMALL = 16, 4, 0.99, 0.1, 1e-6
relu = jax.nn.relu


def params_of(key, code, hidden):
    sizes = {
        "encoder": (OBS, hidden, code), "model": (code + ACTIONS, hidden, code), "projection": (code, code),
        "prediction": (code, code),
    }  # fmt: skip
    k = jax.random.split(key, len(sizes))
    return {name: c.mlp_params(key, size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def encoded(p, obs):
    return jnp.tanh(c.mlp(p["encoder"], obs, relu))


def moved(p, z, action):
    return jnp.tanh(c.mlp(p["model"], jnp.concatenate([z, action], -1), relu))


def unit(x):
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + SMALL)


def foreseen(p, z):
    """Where the projection of a code is predicted to point."""
    return unit(c.mlp(p["prediction"], c.mlp(p["projection"], z)))


def distances(x, y):
    """MICo's, of all pairs of codes ``x[N, code], y[M, code]``: half of their squares, and the angle between them."""
    cosine = (unit(x)[:, None] * unit(y)[None]).sum(-1)
    return apart((x**2).mean(-1)[:, None], (y**2).mean(-1)[None], cosine)


def apart(x, y, cosine):
    """Of means of squares, and the cosine."""
    angle = jnp.arctan2(jnp.sqrt(jnp.maximum(1.0 - cosine**2, 0.0) + SMALL), cosine)
    return 0.5 * (x + y) + BETA * angle


def huber(error):
    return jnp.where(jnp.abs(error) < 1.0, 0.5 * error**2, jnp.abs(error) - 0.5)


def compared(z, beside, following, reward):
    """The loss of all pairs of a timestep: codes, the target network's, and its next ones."""
    aim = jnp.abs(reward[:, None] - reward[None]) + GAMMA * distances(following, following)
    return huber(distances(z, beside) - stop_gradient(aim)).mean()


def program(steps):
    def spr(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        z, beside = encoded(p, x["obs"]), stop_gradient(encoded(target, x["obs"]))
        codes = rlfx.series(beside, end=jnp.zeros_like(beside))
        pairs = rlfx.shared(compared, z, beside, codes[t + 1], x["reward"])

        pointed = stop_gradient(unit(c.mlp(target["projection"], beside)))
        stored = x["action"], 1.0 - x["done"].astype(jnp.float32), pointed
        action, going, aims = rlfx.series(stored).window(0, steps + 1)
        ahead, found, goes_on = z, 0.0, 1.0
        for i in range(steps):
            ahead = moved(p, ahead, action[i])
            goes_on = goes_on * going[i]
            found += goes_on * (1.0 - foreseen(p, ahead) @ aims[i + 1])
        return pairs + jnp.where(t + steps < t.length, found / steps, 0.0), carry

    return spr


# -- by hand: distances of ``x[..., N, code]``


def by_products(x, y):
    """All cosines of a timestep as one product of matrices."""
    return apart((x**2).mean(-1)[..., :, None], (y**2).mean(-1)[..., None, :], unit(x) @ jnp.swapaxes(unit(y), -1, -2))


def scaled(x, y):
    """The product is of the codes, whose lengths divide it."""
    squares = [(v**2).sum(-1) for v in (x, y)]
    a, b = (jax.lax.rsqrt(s + SMALL) for s in squares)
    cosine = (x @ jnp.swapaxes(y, -1, -2)) * a[..., :, None] * b[..., None, :]
    size = x.shape[-1]
    return apart(squares[0][..., :, None] / size, squares[1][..., None, :] / size, cosine)


def of_pairs(measure):
    """Losses of every timestep, of ``[..., B, code]``."""

    def loss(z, beside, following, reward):
        aim = jnp.abs(reward[..., :, None] - reward[..., None, :]) + GAMMA * measure(following, following)
        return huber(measure(z, beside) - stop_gradient(aim)).mean((-2, -1))

    return loss


def rolled(z, beside, following, reward):
    """Each with the one so many places further, one place after another: no array of all pairs."""
    batch = z.shape[-2]
    own = unit(z), (z**2).mean(-1)
    others = unit(beside), (beside**2).mean(-1)
    after = unit(following), (following**2).mean(-1)

    def of(a, b, shift):
        (u, x), (v, y) = a, (jnp.roll(b[0], -shift, -2), jnp.roll(b[1], -shift, -1))
        return apart(x, y, (u * v).sum(-1))

    def add(total, shift):
        aim = jnp.abs(reward - jnp.roll(reward, -shift, -1)) + GAMMA * of(after, after, shift)
        return total + huber(of(own, others, shift) - stop_gradient(aim)).sum(-1), None

    return jax.lax.scan(add, jnp.zeros(z.shape[:-2]), jnp.arange(batch))[0] / batch**2


def mapped(z, beside, following, reward):
    return jax.vmap(compared)(z, beside, following, reward)


def in_turn(z, beside, following, reward):
    """Timestep after timestep."""
    of = jax.checkpoint(of_pairs(by_products), prevent_cse=False)
    return jax.lax.map(lambda x: of(*x), (z, beside, following, reward))


# -- by hand: steps of the model


def apart_from_actions(p, z, product):
    first, last = p["model"]
    return jnp.tanh(c.linear(last, relu(z @ first["w"][: z.shape[-1]] + product)))


def folded(p, z):
    """The projection and the prediction, which have nothing between them, are one matrix."""
    (a,), (b,) = p["projection"], p["prediction"]
    return unit(z @ (a["w"] @ b["w"]) + (a["b"] @ b["w"] + b["b"]))


def by_hand(length, batch, steps, pairs=mapped, flat=True, chunk=None, **how):
    """``chunk``: timesteps of a block; ``again``: steps of the model are computed again; ``fold``: the projection and the
    prediction are one; ``apart``: the model's products with actions are made once for all timesteps; ``late``: what is foreseen
    is predicted of all steps at once."""
    count = length - steps  # timesteps with enough ahead of them
    again, apart, late = (how.get(n) for n in ("again", "apart", "late"))
    foresee = folded if how.get("fold") else foreseen

    def run(p, target, data):
        shaped = lambda x: x.reshape(length, batch, *x.shape[1:])  # noqa: E731
        beside = shaped(encoded(target, c.rows_of(data["obs"])))
        aims = unit(c.mlp(target["projection"], beside))
        following = c.shifted(beside, jnp.zeros_like(beside[0]))
        going = 1.0 - data["done"].astype(jnp.float32)

        def ahead_of(p, z, begin, size):
            """The loss of what is foreseen from each of ``size`` timesteps, whose codes are ``z``."""
            rows = c.rows_of if flat else lambda x: x
            some = lambda x, i: rows(jax.lax.dynamic_slice_in_dim(x, begin + i, size))  # noqa: E731
            first = p["model"][0]
            given = data["action"]
            if apart:
                extent = (size + steps, batch, -1)
                given = jax.lax.dynamic_slice_in_dim(given, begin, size + steps)
                given = (c.rows_of(given) @ first["w"][-ACTIONS:] + first["b"]).reshape(extent)
                take = lambda i: rows(given[i : i + size])  # noqa: E731
                step = apart_from_actions
            else:
                take, step = lambda i: some(given, i), moved
            if again:
                step = jax.checkpoint(step, prevent_cse=False)
            ahead, goes_on, found, codes, weights = rows(z), 1.0, 0.0, [], []
            for i in range(steps):
                ahead = step(p, ahead, take(i))
                goes_on = goes_on * some(going, i)
                if late:
                    codes.append(ahead)
                    weights.append(goes_on)
                else:
                    found += (goes_on * (1.0 - (foresee(p, ahead) * some(aims, i + 1)).sum(-1))).sum()
            if late:
                then = jnp.stack([some(aims, i + 1) for i in range(steps)])
                found = (jnp.stack(weights) * (1.0 - (foresee(p, jnp.stack(codes)) * then).sum(-1))).sum()
            return found / (steps * batch)

        def loss(p, part):
            obs, *others = part
            z = encoded(p, c.rows_of(obs) if flat else obs).reshape(*obs.shape[:2], -1)
            return (pairs(z, *others).sum() + ahead_of(p, z[:count], 0, count)) / length

        whole = data["obs"], beside, following, data["reward"]
        if chunk is None:
            return jax.value_and_grad(loss)(p, whole)

        def of_block(p, part):
            begin, (obs, *others) = part
            z = encoded(p, c.rows_of(obs)).reshape(*obs.shape[:2], -1)
            return (pairs(z, *others).sum() + ahead_of(p, z, begin, chunk)) / length

        # Blocks with enough ahead of them, and the timesteps of the others.
        blocks = count // chunk
        end = blocks * chunk
        cut = lambda x: jax.tree.map(lambda x: x[:end], x)  # noqa: E731
        starts = jnp.arange(blocks) * chunk
        total = c.summed_gradient(of_block, p, (starts, c.in_chunks(cut(whole), chunk)))

        def rest(p):
            obs, *others = jax.tree.map(lambda x: x[end:], whole)
            z = encoded(p, c.rows_of(obs)).reshape(*obs.shape[:2], -1)
            found = pairs(z, *others).sum()
            return (found + ahead_of(p, z[: count - end], end, count - end) if count > end else found) / length

        return jax.tree.map(jnp.add, total, jax.value_and_grad(rest)(p))

    return run


def workload(length, batch, steps, code, hidden, chunk=4):
    make = lambda pairs=mapped, **how: by_hand(length, batch, steps, pairs, **how)  # noqa: E731
    products, shorter = of_pairs(by_products), of_pairs(scaled)
    best, some = {"fold": True, "apart": True}, {"chunk": chunk}
    forms = {
        "rlfx": c.learner_by_rlfx(program(steps), length, batch), "plain": make(flat=False), "rows": make(),
        "products": make(products), "products, lengths after": make(shorter), "rolled": make(rolled),
        "pairs timestep by timestep": make(in_turn), "products, folded": make(products, fold=True),
        "products, actions apart": make(products, apart=True), "products, folded, actions apart": make(products, **best),
        "lengths after, folded, actions apart": make(shorter, **best), "products, late": make(products, late=True),
        "products, checkpointed": make(products, again=True), f"blocks of {chunk}": make(**some),
        f"products, blocks of {chunk}": make(products, **some),
        f"products, folded, actions apart, blocks of {chunk}": make(products, **best, **some),
        f"lengths after, folded, actions apart, late, blocks of {chunk}": make(shorter, **best, late=True, **some),
        f"rolled, folded, actions apart, blocks of {chunk}": make(rolled, **best, **some),
        "products, blocks of 1": make(products, chunk=1),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "reward": jax.random.normal(k[1], size),
        "action": jax.nn.one_hot(jax.random.randint(k[2], size, 0, ACTIONS), ACTIONS),
        "done": jax.random.uniform(k[3], size) < 0.05,
    }  # fmt: skip
    given = params_of(k[4], code, hidden), params_of(k[5], code, hidden)
    return Workload(forms, (*given, data), tolerance=2e-5)
