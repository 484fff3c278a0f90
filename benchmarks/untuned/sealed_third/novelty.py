"""Never Give Up (Badia et al. 2020): a reward for being far from the nearest neighbours among the last timesteps of the episode,
in codes that learn to tell the action between two of them; actor-critic, one gradient of a rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

OBS, ACTIONS, NEAREST, GAMMA, LAMBDA, NOVEL, SOFT = 12, 5, 5, 0.99, 0.95, 0.3, 0.01
drift = c.drift_step(OBS, 50)


def params_of(hidden, code):
    k = jax.random.split(jax.random.key(0), 5)
    return {
        "body": c.mlp_params(k[0], (OBS, hidden, hidden)), "pi": c.dense(k[1], hidden, ACTIONS), "v": c.dense(k[2], hidden, 1),
        "code": c.mlp_params(k[3], (OBS, hidden, code)), "tell": c.mlp_params(k[4], (2 * code, hidden, ACTIONS)),
    }  # fmt: skip


def net(p, obs):
    h = jnp.tanh(c.mlp(p["body"], obs))
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def code(p, obs):
    return c.mlp(p["code"], obs, jax.nn.relu)


def told(p, before, after):
    """The logits of the action between two codes."""
    return c.mlp(p["tell"], jnp.concatenate([before, after], -1), jax.nn.relu)


def bonus_of(nearest, typical):
    """Of squared distances ``[..., NEAREST]``, infinite where there is no neighbour."""
    return 1.0 / (jnp.sqrt((SOFT / (nearest / typical + SOFT)).sum(-1) + 1e-3) + 0.1)


def known(nearest):
    """Those that there are, summed, and their number."""
    there = nearest < jnp.inf
    return jnp.where(there, nearest, 0.0).sum(-1), there.sum(-1).astype(jnp.float32)


def unlike(logits, action, done):
    return jnp.where(done, 0.0, -c.pick(jax.nn.log_softmax(logits), action))


def program(memory):
    def never_give_up(p, carry, t):
        state, age = carry
        x = state["x"]
        logits, v = net(p, x)
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = drift(t.key_for("env"), state, action)

        z = code(p, x)
        guess = told(p, z, rlfx.series(z)[t + 1])
        remembered = rlfx.series(stop_gradient(z)).window(-memory, 0)
        distance = ((remembered - stop_gradient(z)) ** 2).sum(-1)
        distance = jnp.where(jnp.arange(memory, 0, -1) <= age, distance, jnp.inf)
        nearest = -jax.lax.top_k(-distance, NEAREST)[0]
        total, count = known(nearest)
        bonus = bonus_of(nearest, rlfx.sum(total) / rlfx.sum(count))

        value, paid = rlfx.series(v), step._replace(reward=step.reward + NOVEL * bonus)
        gained = stop_gradient(rlfx.gae(paid, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
        log_prob = jax.nn.log_softmax(logits)[action]
        loss = c.actor_critic_loss(logits, v, log_prob, gained, gained + stop_gradient(v))
        return loss + unlike(guess, action, step.terminated), (state, jnp.where(step.terminated, 0, age + 1))

    return never_give_up


# -- by hand: squared distances to the nearest before, ``[T, B, NEAREST]``, of codes ``z[T, B, D]``


def smallest(distance):
    return -jax.lax.top_k(-distance, NEAREST)[0]


def stacked(z, age, memory):
    """Windows of codes as an array ``[T, memory, B, D]``."""
    padded = jnp.concatenate([jnp.zeros((memory, *z.shape[1:])), z])
    windows = padded[jnp.arange(len(z))[:, None] + jnp.arange(memory)]
    distance = jnp.moveaxis(((windows - z[:, None]) ** 2).sum(-1), 1, -1)
    return smallest(jnp.where(jnp.arange(memory, 0, -1) <= age[..., None], distance, jnp.inf))


def one_window_at_a_time(z, age, memory):
    padded = jnp.concatenate([jnp.zeros((memory, *z.shape[1:])), z])

    def of(x):
        t, z, age = x
        window = jax.lax.dynamic_slice_in_dim(padded, t, memory)
        distance = ((window - z) ** 2).sum(-1).T
        return smallest(jnp.where(jnp.arange(memory, 0, -1) <= age[:, None], distance, jnp.inf))

    return jax.lax.map(of, (jnp.arange(len(z)), z, age))


def among_pairs(z, age, memory):
    """Distances of all pairs of timesteps, by products."""
    z = jnp.swapaxes(z, 0, 1)
    long = (z**2).sum(-1)
    distance = jnp.maximum(long[:, :, None] + long[:, None] - 2.0 * z @ jnp.swapaxes(z, 1, 2), 0.0)
    t = jnp.arange(z.shape[1])
    back = t[:, None] - t
    there = (back > 0) & (back <= jnp.minimum(age.T, memory)[..., None])
    return jnp.swapaxes(smallest(jnp.where(there, distance, jnp.inf)), 0, 1)


def environment_by_environment(z, age, memory):
    """The same, so that no more than the pairs of one environment are there."""
    of = lambda x: among_pairs(x[0][:, None], x[1][:, None], memory)[:, 0]  # noqa: E731
    return jnp.swapaxes(jax.lax.map(of, (jnp.swapaxes(z, 0, 1), age.T)), 0, 1)


def in_bands(rows):
    """Products of some timesteps with those and the ones before that are remembered."""

    def near(z, age, memory):
        rows_of = lambda x: jnp.swapaxes(x, 0, 1)  # noqa: E731
        padded = rows_of(jnp.concatenate([jnp.zeros((memory, *z.shape[1:])), z]))
        back = memory + jnp.arange(rows)[:, None] - jnp.arange(memory + rows)

        def of(x):
            t, z, age = x
            z, keys = rows_of(z), jax.lax.dynamic_slice_in_dim(padded, t, memory + rows, 1)
            distance = (z**2).sum(-1)[:, :, None] + (keys**2).sum(-1)[:, None] - 2.0 * z @ jnp.swapaxes(keys, 1, 2)
            there = (back > 0) & (back <= jnp.minimum(age.T, memory)[..., None])
            return rows_of(smallest(jnp.where(there, jnp.maximum(distance, 0.0), jnp.inf)))

        return c.rows_of(jax.lax.map(of, (jnp.arange(0, len(z), rows), *c.in_chunks((z, age), rows))))

    return near


def put_in(distance, nearest):
    """A sorted list of the smallest, after one more."""
    kept = []
    for old in nearest:
        kept.append(jnp.minimum(old, distance))
        distance = jnp.maximum(old, distance)
    return kept


def put_in_by_offsets(z, age, memory):
    """All timesteps at once, one offset after the other: no distance is kept, none sorted."""
    length, batch, _ = z.shape
    padded = jnp.concatenate([jnp.zeros((memory, *z.shape[1:])), z])

    def body(nearest, back):
        before = jax.lax.dynamic_slice_in_dim(padded, memory - back, length)
        distance = ((before - z) ** 2).sum(-1)
        return put_in(jnp.where(back <= age, distance, jnp.inf), nearest), None

    start = [jnp.full((length, batch), jnp.inf)] * NEAREST
    offsets = jnp.arange(1, min(memory, length - 1) + 1)
    return jnp.stack(jax.lax.scan(body, start, offsets)[0], -1)


def by_hand(length, batch, memory, near=stacked, once=False, split=False, chunk=None, ahead=False, early=False):
    """``once``: values and codes of all timesteps are evaluated in the loss alone; ``split``: codes are multiplied before they
    are paired; ``chunk``: timesteps of a block; ``ahead``: random numbers of actions drawn before the loop; ``early``: what is
    told of actions needs no advantage, and so is differentiated where codes are evaluated for the distances."""

    def guessed(p, z):
        """Of codes ``[T + 1, B, D]`` the actions between them."""
        if not split:
            return told(p, *c.rows_of((z[:-1], z[1:])))
        first, second = p["tell"]
        wide = jnp.concatenate(jnp.split(first["w"], 2), 1)
        before, after = jnp.split((z.reshape(-1, z.shape[-1]) @ wide).reshape(*z.shape[:2], -1), 2, -1)
        return c.linear(second, c.rows_of(jax.nn.relu(before[:-1] + after[1:] + first["b"])))

    def coded(p, obs):
        return code(p, c.rows_of(obs)).reshape(*obs.shape[:2], -1)

    def advantages(z, v, age, reward, done):
        """``v[T + 1, B]``."""
        nearest = near(z, age, memory)
        total, count = known(nearest)
        bonus = bonus_of(nearest, total.sum() / count.sum())
        return c.gae(v[:-1], v[-1], reward + NOVEL * bonus, done, GAMMA, LAMBDA)

    def run(p, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(action_keys, t))  # noqa: E731
        times, mean = jnp.arange(length), 1.0 / (length * batch)

        def body(carry, given):
            (state, age), (t, gumbel) = carry, given
            logits, v = net(p, state["x"])
            action = jnp.argmax(logits + (draw(t) if gumbel is None else gumbel), -1)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            out = state["x"], action, v, step.reward, step.terminated, age
            return (after, jnp.where(step.terminated, 0, age + 1)), out

        xs = times, jax.vmap(draw)(times) if ahead else None
        after, (obs, action, v, reward, done, age) = jax.lax.scan(body, carry, xs)
        obs = jnp.concatenate([obs, after[0]["x"][None]])

        def policy_loss(logits, v, action, gained, aim):
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return mean * c.actor_critic_loss(logits, v, log_prob, gained, aim).sum()

        def told_loss(p, z, action, done):
            return mean * unlike(guessed(p, z), *c.rows_of((action, done))).sum()

        if once:

            def whole(p):
                (logits, v), z = net(p, c.rows_of(obs)), coded(p, obs)
                v = v.reshape(length + 1, batch)
                gained = advantages(stop_gradient(z[:-1]), stop_gradient(v), age, reward, done)
                logits = logits.reshape(length + 1, batch, -1)[:-1]
                found = policy_loss(*c.rows_of((logits, v[:-1], action, gained, gained + stop_gradient(v[:-1]))))
                return found + told_loss(p, z, action, done)

            return *jax.value_and_grad(whole)(p), after

        values = jnp.concatenate([v, net(p, obs[-1])[1][None]])
        agent, teller = ({k: p[k] for k in names} for names in (("body", "pi", "v"), ("code", "tell")))

        def of_codes(teller, part):
            obs, following, action, done = part
            z = coded(teller, jnp.concatenate([obs, following[None]]))
            return told_loss(teller, z, action, done), z[:-1]

        def of_policy(agent, part):
            obs, *given = c.rows_of(part)
            return policy_loss(*net(agent, obs), *given)

        points = obs[:-1], action, done
        if chunk is None:
            gained = advantages(coded(p, obs[:-1]), values, age, reward, done)

            def loss(p):
                told, _ = of_codes(p, (obs[:-1], obs[-1], action, done))
                return told + of_policy(p, (obs[:-1], action, gained, gained + v))

            return *jax.value_and_grad(loss)(p), after

        seen, *rest = c.in_chunks(points, chunk)
        parts = seen, obs[chunk::chunk], *rest
        if early:

            def add(total, part):
                (told, z), grads = jax.value_and_grad(of_codes, has_aux=True)(teller, part)
                return jax.tree.map(jnp.add, total, (told, grads)), z

            start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, teller)
            (told, by_told), z = jax.lax.scan(add, start, parts)
            gained = advantages(c.rows_of(z), values, age, reward, done)
            parts = c.in_chunks((obs[:-1], action, gained, gained + v), chunk)
            found, grads = c.summed_gradient(of_policy, agent, parts)
            return found + told, grads | by_told, after

        gained = advantages(coded(p, obs[:-1]), values, age, reward, done)
        both = lambda p, x: of_codes(p, x[:4])[0] + of_policy(p, (x[0], x[2], *x[4:]))  # noqa: E731
        return *c.summed_gradient(both, p, (*parts, *c.in_chunks((gained, gained + v), chunk))), after

    return run


def workload(length, batch, hidden, size, memory, chunk=16):
    make = lambda **how: by_hand(length, batch, memory, **how)  # noqa: E731
    pairs = {"near": among_pairs, "split": True}
    alone, offsets = pairs | {"near": environment_by_environment}, pairs | {"near": put_in_by_offsets}
    bands = pairs | {"near": in_bands(2 * chunk)}
    forms = {
        "rlfx": c.by_rlfx(program(memory), length, batch), "plain": make(),
        "one window at a time": make(near=one_window_at_a_time),
        "among pairs": make(near=among_pairs), "among pairs, split": make(**pairs),
        "among pairs, split, once": make(**pairs, once=True), "put in, split, once": make(**offsets, once=True),
        f"among pairs, split, blocks of {chunk}": make(**pairs, chunk=chunk),
        f"among pairs, split, blocks of {chunk}, drawn ahead": make(**pairs, chunk=chunk, ahead=True),
        f"among pairs, split, blocks of {chunk}, threefry unrolled": make(**pairs, chunk=chunk),
        f"pairs of one environment, split, blocks of {chunk}, threefry unrolled": make(**alone, chunk=chunk),
        f"pairs in bands, split, blocks of {chunk}, threefry unrolled": make(**bands, chunk=chunk),
        f"put in, split, blocks of {chunk}, threefry unrolled": make(**offsets, chunk=chunk),
        "pairs in bands, split, once, threefry unrolled": make(**bands, once=True),
        f"pairs in bands, split, early, blocks of {chunk}, threefry unrolled": make(**bands, chunk=chunk, early=True),
        f"pairs in bands, split, early, blocks of {2 * chunk}, threefry unrolled": make(**bands, chunk=2 * chunk, early=True),
        f"pairs in bands, split, early, blocks of {chunk // 2}, threefry unrolled": make(**bands, chunk=chunk // 2, early=True),
        f"pairs in bands, early, blocks of {chunk}, threefry unrolled": make(**bands | {"split": False}, chunk=chunk, early=True),
        f"pairs of one environment, split, early, blocks of {chunk}, threefry unrolled": make(**alone, chunk=chunk, early=True),
    }  # fmt: skip
    given = params_of(hidden, size), (c.batch_of(c.drift_reset(OBS), batch), jnp.zeros(batch, jnp.int32))
    unrolled = *given, jax.random.key(2, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, tolerance=1e-5)
