"""The neural linear bandit by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing as drawing_workload
from benchmarks.untuned.sealed_thirteenth import bandits
from benchmarks.untuned.sealed_thirteenth.bandits import (
    ARMS,
    VARIANCE,
    begins,
    drawing,
    features_of,
    params_of,
    rewards_of,
    tasks_of,
    unlikely,
)  # fmt: skip

# -- one timestep of all environments, features ``f[B, ARMS, D]``: what is believed then, the arm, its features, error, variance


def by_einsum(carry, f, noise, rewards):
    mean, cov = carry
    values, away = jnp.einsum("bad,bd->ba", f, mean), jnp.einsum("bad,bde->bae", f, cov)
    arm = jnp.argmax(values + jnp.sqrt(VARIANCE * (away * f).sum(-1)) * noise, -1)
    of_arm = lambda x: jnp.take_along_axis(x, arm[:, None, None], 1)[:, 0]  # noqa: E731
    return moved(mean, cov, of_arm(f), of_arm(away), rewards, arm)


def moved(mean, cov, f, gain, rewards, arm):
    spread, error = 1.0 + (f * gain).sum(-1), c.pick(rewards, arm) - (f * mean).sum(-1)
    mean = mean + gain * (error / spread)[:, None]
    cov = cov - gain[:, :, None] * (gain / spread[:, None])[:, None]
    return (mean, cov), (arm, f, gain, error, spread)


def by_sums(carry, f, noise, rewards):
    mean, cov = carry
    values, away = (f * mean[:, None]).sum(-1), (f[..., None] * cov[:, None]).sum(2)
    arm = jnp.argmax(values + jnp.sqrt(VARIANCE * (away * f).sum(-1)) * noise, -1)
    of_arm = lambda x: jnp.take_along_axis(x, arm[:, None, None], 1)[:, 0]  # noqa: E731
    return moved(mean, cov, of_arm(f), of_arm(away), rewards, arm)


def by_ones(carry, f, noise, rewards):
    """What is of the arm is a sum over arms, of which it is one."""
    mean, cov = carry
    values, away = (f * mean[:, None]).sum(-1), f @ cov
    arm = jnp.argmax(values + jnp.sqrt(VARIANCE * (away * f).sum(-1)) * noise, -1)
    one = jax.nn.one_hot(arm, ARMS)
    of_arm = lambda x: (one[:, :, None] * x).sum(1)  # noqa: E731
    return moved(mean, cov, of_arm(f), of_arm(away), rewards, arm)


def innermost(carry, f, noise, rewards):
    """Environments innermost: ``mean[D, B]``, ``cov[D, D, B]``, ``f[ARMS, D, B]``."""
    mean, cov = carry
    values, away = (f * mean).sum(1), (f[:, :, None] * cov).sum(1)
    arm = jnp.argmax(values + jnp.sqrt(VARIANCE * (away * f).sum(1)) * noise, 0)
    one = jnp.arange(ARMS)[:, None] == arm
    of_arm = lambda x: jnp.where(one[:, None], x, 0.0).sum(0)  # noqa: E731
    f, gain = of_arm(f), of_arm(away)
    spread = 1.0 + (f * gain).sum(0)
    error = jnp.where(one, rewards, 0.0).sum(0) - (f * mean).sum(0)
    mean, cov = mean + gain * (error / spread), cov - gain[:, None] * (gain / spread)
    return (mean, cov), (arm, f, gain, error, spread)


def innermost_by_parts(carry, f, noise, rewards):
    """The same with sums over features written out, an arm after the other."""
    mean, cov = carry
    away = [sum(x[i] * cov[i] for i in range(len(cov))) for x in f]
    values = jnp.stack([(x * mean).sum(0) for x in f])
    spreads = jnp.stack([(x * y).sum(0) for x, y in zip(f, away, strict=True)])
    arm = jnp.argmax(values + jnp.sqrt(VARIANCE * spreads) * noise, 0)
    of_arm = lambda parts: sum(jnp.where(arm == i, x, 0.0) for i, x in enumerate(parts))  # noqa: E731
    f, gain, spread = of_arm(f), of_arm(away), 1.0 + of_arm(spreads)
    error = of_arm(rewards) - of_arm(values)
    mean, cov = mean + gain * (error / spread), cov - gain[:, None] * (gain / spread)
    return (mean, cov), (arm, f, gain, error, spread)


# -- acting: the last belief, and of all timesteps arms ``[T, B]``, and features, gains, errors, variances of those


def drawn(tasks, key, length, batch):
    """Contexts, noise of arms' values, and what each of them would give."""
    context, noise, more = jax.vmap(drawing(key, batch))(jnp.arange(length))
    rewards = jnp.einsum("tbw,bwa->tba", jnp.sin(jnp.einsum("tbc,bcw->tbw", context, tasks["waves"])), tasks["weights"])
    return context, noise, rewards + VARIANCE**0.5 * more[..., None]


def acted(p, f, noise, rewards, step, unroll=1, again=False):
    """``again``: of a timestep nothing is kept for the gradient but what was believed."""
    begin = begins(p, noise.shape[1])
    one = lambda carry, x: step(carry, *x)  # noqa: E731
    one = jax.checkpoint(one, prevent_cse=False) if again else one
    if step in (innermost, innermost_by_parts):
        last = lambda x: jnp.moveaxis(x, 0, -1)  # noqa: E731
        xs = jnp.moveaxis(f, 1, -1), noise.mT, rewards.mT
        (mean, cov), (arm, *rest) = jax.lax.scan(one, jax.tree.map(last, begin), xs, unroll=unroll)
        f, gain, error, spread = rest
        return (mean.T, jnp.moveaxis(cov, -1, 0)), (arm, f.mT, gain.mT, error, spread)
    return jax.lax.scan(one, begin, (f, noise, rewards), unroll=unroll)


# -- the gradient


def through(length, batch, step=by_einsum, unroll=1, again=False, ahead=True):
    """The loop that acts is differentiated; ``ahead``: features are made before it."""

    def within(p, tasks, key):
        draw = drawing(key, batch)

        def body(carry, t):
            context, noise, more = draw(t)
            rewards = jax.vmap(rewards_of)(tasks, context) + VARIANCE**0.5 * more[:, None]
            return step(carry, features_of(p["net"], context), noise, rewards)

        return jax.lax.scan(body, begins(p, batch), jnp.arange(length), unroll=unroll)

    def run(p, tasks, key):
        def loss(p):
            if ahead:
                context, noise, rewards = drawn(tasks, key, length, batch)
                made = acted(p, features_of(p["net"], context), noise, rewards, step, unroll, again)
            else:
                made = within(p, tasks, key)
            (mean, _), (*_, error, spread) = made
            return unlikely(error, spread).mean(), mean

        (found, mean), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, mean

    return run


def replayed(f, rewards, begin, unroll=1, again=False):
    """Errors and variances of the features ``[T, B, D]`` of arms that are known, and the last mean."""

    def step(carry, x):
        (mean, cov), (f, reward) = carry, x
        gain = (f[:, None] * cov).sum(2)
        spread, error = 1.0 + (f * gain).sum(-1), reward - (f * mean).sum(-1)
        mean = mean + gain * (error / spread)[:, None]
        return (mean, cov - gain[:, :, None] * (gain / spread[:, None])[:, None]), (error, spread)

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    return jax.lax.scan(step, begin, (f, rewards), unroll=unroll)[1]


def evidence(f, rewards, begin_mean, log_prior):
    """Of all rewards at once: what the product of how likely each was before it was seen comes to."""
    precision = jnp.exp(-log_prior)
    whole = jnp.einsum("tbd,tbe->bde", f, f) + jnp.diag(precision)
    right = jnp.einsum("tbd,tb->bd", f, rewards) + precision * begin_mean
    root = jnp.linalg.cholesky(whole)
    half = jax.scipy.linalg.solve_triangular(root, right[..., None], lower=True)[..., 0]
    squares = (rewards**2).sum(0) + (precision * begin_mean**2).sum() - (half**2).sum(-1)
    logs = 2.0 * jnp.log(jnp.diagonal(root, axis1=1, axis2=2)).sum(-1) + log_prior.sum()
    return 0.5 * (squares / VARIANCE + logs)


def of_arms(f, arm):
    return jnp.take_along_axis(f, arm[..., None, None], 2)[:, :, 0]


def relearnt(length, batch, step=by_einsum, by=replayed, unroll=1, **how):
    """Acts, and goes through the features of the arms that were chosen again."""

    def run(p, tasks, key):
        context, noise, rewards = drawn(tasks, key, length, batch)
        f, back = jax.vjp(lambda net: features_of(net, context), p["net"])
        (mean, _), (arm, *_) = acted(p, f, noise, rewards, step, unroll)
        given = c.pick(rewards, arm)

        def loss(f, rest):
            if by is evidence:
                return evidence(of_arms(f, arm), given, rest["mean"], rest["log_prior"]).sum() / (length * batch)
            return unlikely(*by(of_arms(f, arm), given, begins(rest, batch), unroll, **how)).mean()

        rest = {"mean": p["mean"], "log_prior": p["log_prior"]}
        found, (by_f, of_rest) = jax.value_and_grad(loss, (0, 1))(f, rest)
        return found, {"net": back(by_f)[0], **of_rest}, mean

    return run


def way_back(p, kept, cov_last, unroll=1):
    """Slopes of features, mean and prior by a loop backwards, in which beliefs are what later ones were made of."""
    f, gain, error, spread = kept
    size = spread.size

    def step(carry, x):
        (by_mean, by_cov), (f, gain, error, spread, before) = carry, x
        by_gain = by_mean * (error / spread)[:, None] - ((by_cov + by_cov.mT) @ gain[..., None])[..., 0] / spread[:, None]
        scaled = (by_mean * gain).sum(-1) / spread
        by_error = scaled + error / (VARIANCE * spread) / size
        outer = (gain * (by_cov @ gain[..., None])[..., 0]).sum(-1) / spread**2
        by_spread = outer - scaled * error / spread + (1.0 / spread - error**2 / (VARIANCE * spread**2)) * 0.5 / size
        mean, cov = before
        by_gain = by_gain + by_spread[:, None] * f
        by_f = by_spread[:, None] * gain - by_error[:, None] * mean + (cov @ by_gain[..., None])[..., 0]
        by_cov = by_cov + by_gain[:, :, None] * f[:, None]
        return (by_mean - by_error[:, None] * f, by_cov), by_f

    mean, cov = before_of(p, gain, error, spread)
    none = jnp.zeros_like(f[0]), jnp.zeros_like(cov_last)
    (by_mean, by_cov), by_f = jax.lax.scan(step, none, (*kept, (mean, cov)), reverse=True, unroll=unroll)
    prior = jnp.exp(p["log_prior"])
    return by_f, {"mean": by_mean.sum(0), "log_prior": prior * jnp.diagonal(by_cov.sum(0))}


def before_of(p, gain, error, spread):
    """What was believed before each timestep, by sums of what followed."""
    mean, cov = begins(p, gain.shape[1])
    sums = lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), jnp.cumsum(x, 0)[:-1]])  # noqa: E731
    scaled = gain / spread[..., None]
    return mean + sums(error[..., None] * scaled), cov - sums(gain[..., :, None] * scaled[..., None, :])


def posterior(p, kept, cov_last, mean_last, rewards):
    """Slopes of the evidence, by what is believed in the end: no loop, and nothing but products."""
    f = kept[0]
    size = f.shape[0] * f.shape[1]
    error = rewards - (f * mean_last).sum(-1)
    by_f = (f[..., None, :] * cov_last).sum(-1) - error[..., None] / VARIANCE * mean_last
    precision, moved = jnp.exp(-p["log_prior"]), p["mean"] - mean_last
    diagonal = jnp.diagonal(cov_last, axis1=1, axis2=2)
    of_prior = 0.5 * (1.0 - precision * (diagonal + moved**2 / VARIANCE))
    of_rest = {"mean": (precision * moved / VARIANCE).sum(0), "log_prior": of_prior.sum(0)}
    return by_f / size, jax.tree.map(lambda x: x / size, of_rest)


def kept_by_acting(length, batch, step=by_einsum, by="posterior", unroll=1, scattered=True, chunk=None):
    """Acting's errors are the loss; ``scattered``: slopes of the arms that weren't chosen are zeros, the last layer's products
    have all of them; else that layer is of one arm a row."""

    def some(p, tasks, context, noise, rewards):
        size = noise.shape[1]
        if scattered:
            f, back = jax.vjp(lambda net: features_of(net, context), p["net"])
        else:
            *body, last = p["net"]
            x, back = jax.vjp(lambda body: jnp.tanh(c.mlp(body, context)), body)
            f = jnp.tanh(c.linear(last, x)).reshape(length, size, ARMS, -1)
        (mean, cov), (arm, *kept) = acted(p, f, noise, rewards, step, unroll)
        *_, error, spread = kept
        if by == "posterior":
            by_f, of_rest = posterior(p, kept, cov, mean, c.pick(rewards, arm))
        else:
            by_f, of_rest = way_back(p, kept, cov, unroll)
        one = jax.nn.one_hot(arm, ARMS)
        if scattered:
            of_net = back(one[..., None] * by_f[:, :, None])[0]
        else:
            by_made = by_f * (1.0 - kept[0] ** 2)
            by_all = (one[..., None] * by_made[:, :, None]).reshape(length * size, -1)
            by_x = by_all @ last["w"].T
            of_last = {"w": x.reshape(len(by_all), -1).T @ by_all, "b": by_all.sum(0)}
            of_net = [*back(by_x.reshape(x.shape))[0], of_last]
        return unlikely(error, spread).mean(), {"net": of_net, **of_rest}, mean

    def run(p, tasks, key):
        given = drawn(tasks, key, length, batch)
        if chunk is None:
            return some(p, tasks, *given)
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), given)

        def add(total, part):
            *found, mean = some(p, tasks, *part)
            return jax.tree.map(jnp.add, total, tuple(found)), mean

        none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        (loss, grads), mean = jax.lax.scan(add, none, parts)
        return *jax.tree.map(lambda x: x * (chunk / batch), (loss, grads)), mean.reshape(batch, -1)

    return run


def workload(length, batch, hidden, features, chunk=8):
    one, two, keeps = (functools.partial(f, length, batch) for f in (through, relearnt, kept_by_acting))
    inner, parts, seen = {"step": innermost}, {"step": innermost_by_parts}, {"by": evidence}
    loop, rows = {"by": "loop"}, {"scattered": False}
    forms = {
        "rlfx": bandits.by_rlfx(length, batch), "plain": bandits.plain(length, batch), "batched": one(ahead=False),
        "features ahead": one(), "features ahead, sums": one(by_sums), "features ahead, ones": one(by_ones),
        "features ahead, innermost": one(**inner), "features ahead, again": one(again=True),
        "features ahead, sums, again": one(by_sums, again=True), "features ahead, unrolled by 2": one(unroll=2),
        "chosen again": two(), "chosen again, innermost": two(**inner), "chosen again, sums": two(by_sums),
        "chosen again, again": two(again=True), "chosen again, unrolled by 2": two(unroll=2),
        "evidence": two(**seen), "evidence, innermost": two(**inner, **seen), "evidence, sums": two(by_sums, **seen),
        "kept, loop": keeps(**loop), "kept, loop, innermost": keeps(**inner, **loop),
        "kept, loop, innermost by parts": keeps(**parts, **loop), "kept, loop, unrolled by 2": keeps(unroll=2, **loop),
        "kept, posterior": keeps(), "kept, posterior, sums": keeps(by_sums), "kept, posterior, ones": keeps(by_ones),
        "kept, posterior, innermost": keeps(**inner), "kept, posterior, innermost by parts": keeps(**parts),
        "kept, posterior, innermost, rows": keeps(**inner, **rows),
        "kept, posterior, innermost, unrolled by 2": keeps(unroll=2, **inner),
        f"kept, posterior, {chunk} environments": keeps(chunk=chunk),
        f"kept, posterior, innermost, {2 * chunk} environments": keeps(chunk=2 * chunk, **inner),
        "features ahead, threefry unrolled": one(), "evidence, threefry unrolled": two(**seen),
        "kept, loop, innermost, threefry unrolled": keeps(**inner, **loop),
        "kept, posterior, threefry unrolled": keeps(), "kept, posterior, innermost, threefry unrolled": keeps(**inner),
        "kept, posterior, innermost, rows, threefry unrolled": keeps(**inner, **rows),
        "kept, posterior, innermost by parts, threefry unrolled": keeps(**parts),
        "kept, posterior, innermost by parts, rows, threefry unrolled": keeps(**parts, **rows),
        f"kept, posterior, innermost, {2 * chunk} environments, threefry unrolled": keeps(chunk=2 * chunk, **inner),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    return drawing_workload(forms, (params_of(k[0], hidden, features), tasks_of(k[1], batch)), tolerance=1e-4)

