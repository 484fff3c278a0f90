"""V-MPO (Song et al. 2020): it acts by the target network's policy, and learns the actions whose advantages are in the upper half
of the whole batch, weighted by a temperature that is learnt, as is the multiplier of the divergence from what acted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, LAMBDA, EPISODE, EPSILON, NEAR = 16, 5, 0.99, 0.95, 40, 0.1, 0.01
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)


def params_of(key, hidden):
    k = jax.random.split(key)
    sizes = OBS, hidden, hidden
    nets = {"pi": c.mlp_params(k[0], (*sizes, ACTIONS)), "v": c.mlp_params(k[1], (*sizes, 1))}
    return nets | {"temperature": jnp.float32(0.3), "multiplier": jnp.float32(1.0)}


def value_of(p, obs):
    return c.mlp(p["v"], obs)[..., 0]


def duals(p):
    """The temperature and the multiplier, which are positive."""
    return jax.nn.softplus(p["temperature"]), jax.nn.softplus(p["multiplier"])


def held_near(log_p, old, multiplier):
    """The divergence from what acted, and what its multiplier learns."""
    apart = (jnp.exp(old) * (old - log_p)).sum(-1)
    return stop_gradient(multiplier) * apart + multiplier * (NEAR - stop_gradient(apart))


def program(params, state, t):
    p, target = params
    obs = state["x"]
    old = jax.nn.log_softmax(c.mlp(target["pi"], obs))
    action = jax.random.categorical(t.key_for("action"), old)
    state, step = step_of(t.key_for("env"), state, action)
    v = value_of(p, obs)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    upper = advantage >= rlfx.shared(jnp.median, rlfx.series(advantage)[:])
    temperature, multiplier = duals(p)
    scale = rlfx.max(advantage)
    weight = jnp.where(upper, jnp.exp((advantage - scale) / temperature), 0.0)
    total, count = rlfx.mean(weight), rlfx.mean(upper.astype(jnp.float32))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], obs))
    learnt = -stop_gradient(weight / total) * log_p[action]
    dual = temperature * (EPSILON + jnp.log(total / count)) + scale
    return learnt + dual + held_near(log_p, old, multiplier) + 0.5 * (v - advantage - stop_gradient(v)) ** 2, state


# -- by hand: networks


def logits_of(p, obs):
    return c.mlp(p["pi"], obs)


def features_first_net(layers, obs):
    return c.columns(layers, obs.reshape(-1, OBS).T).T.reshape(*obs.shape[:-1], -1)


def separate(p, obs):
    return logits_of(p, obs), value_of(p, obs)


def stacked(p, obs):
    """The first layers are one product, and the second layers are one product of stacks."""
    first, second = (jax.tree.map(lambda a, b: jnp.stack([a, b]), p["pi"][i], p["v"][i]) for i in range(2))
    rows = obs.reshape(-1, OBS)
    h = jnp.tanh(rows @ first["w"] + first["b"][:, None])
    actor, critic = jnp.tanh(h @ second["w"] + second["b"][:, None])
    logits, v = c.linear(p["pi"][2], actor), c.linear(p["v"][2], critic)[:, 0]
    return logits.reshape(*obs.shape[:-1], ACTIONS), v.reshape(obs.shape[:-1])


def features_first(p, obs):
    return features_first_net(p["pi"], obs), features_first_net(p["v"], obs)[..., 0]


# -- by hand: the least advantage of the upper half


def sorted_all(advantage):
    return jnp.median(advantage)


def top(advantage):
    """Half of them, of which the last is the least."""
    return jax.lax.top_k(advantage.reshape(-1), (advantage.size + 1) // 2)[0][-1]


def bisected(advantage):
    """By the bits of floats in order, half of what is left at each step."""
    bits = jax.lax.bitcast_convert_type(advantage.reshape(-1), jnp.int32)
    keys = jnp.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    half = (advantage.size + 1) // 2

    def body(_, ends):
        low, high = ends  # at least half are >= low, and fewer >= high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = (keys >= middle).sum() >= half
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, 32, body, (keys.min(), keys.max() + 1))
    back = jnp.where(low < 0, -low | jnp.int32(-(2**31)), low)
    return jax.lax.bitcast_convert_type(back, jnp.float32)


def by_hand(
    length, batch, networks=separate, least=sorted_all, flat=True, ways="at once", ahead=False, chunk=None, beside=False
):
    """``ways``: the critic runs "at once" after the loop, or in the loop ("acting"), again for its loss either way, or is
    "kept" from its evaluation after the loop; ``beside``: it runs with the policy, before the targets are known, and what the
    loss sends back is; ``chunk``: timesteps of a block; ``ahead``: random numbers of actions are drawn before the loop."""
    net = features_first_net if networks is features_first else c.mlp

    def run(p, target, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(action_keys, t))  # noqa: E731

        def body(state, given):
            t, gumbel = given
            obs = state["x"]
            logits = net(target["pi"], obs)
            action = jnp.argmax(logits + (draw(t) if gumbel is None else gumbel), -1)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            v = value_of(p, obs) if ways == "acting" else None
            return after, (obs, action, jax.nn.log_softmax(logits), v, step.reward, step.terminated)

        times = jnp.arange(length)
        xs = times, jax.vmap(draw)(times) if ahead else None
        after, (obs, action, old, v, reward, done) = jax.lax.scan(body, state, xs)
        flatten = c.rows_of if flat else lambda x: x
        shaped = lambda x: x.reshape(length, batch)  # noqa: E731
        judge = lambda p: net(p["v"], flatten(obs))[..., 0]  # noqa: E731
        last = value_of(p, after["x"])

        def weighed(advantage):
            upper = advantage >= least(advantage)
            scale, (temperature, _) = advantage.max(), duals(p)
            weight = jnp.where(upper, jnp.exp((advantage - scale) / temperature), 0.0)

            def dual(raw):
                by = jax.nn.softplus(raw)
                total = jnp.where(upper, jnp.exp((advantage - scale) / by), 0.0).sum()
                return by * (EPSILON + jnp.log(total / upper.sum())) + scale

            return weight / weight.sum(), *jax.value_and_grad(dual)(p["temperature"])

        def of_policy(logits, multiplier, x):
            """Summed over points; ``x``: actions, what acted, and weights."""
            action, old, weight = x
            log_p = jax.nn.log_softmax(logits)
            near = held_near(log_p, old, jax.nn.softplus(multiplier))
            return (near / (length * batch) - weight * c.pick(log_p, action)).sum()

        if beside:
            (logits, v), back = jax.vjp(lambda p: networks(p, flatten(obs)), p)
            advantage = c.gae(shaped(v), last, reward, done, GAMMA, LAMBDA)
            weight, dual, slope = weighed(advantage)
            x = flatten((action, old, weight))
            found, (dlogits, by) = jax.value_and_grad(of_policy, (0, 1))(logits, p["multiplier"], x)
            grads = back((dlogits, -flatten(advantage) / (length * batch)))[0]
            grads |= {"multiplier": by, "temperature": slope}
            return found + dual + 0.5 * (advantage**2).mean(), grads, after
        if ways == "kept":
            v, back = jax.vjp(judge, p)
        elif ways == "at once":
            v = judge(p)
        v = shaped(v)
        advantage = c.gae(v, last, reward, done, GAMMA, LAMBDA)
        weight, dual, slope = weighed(advantage)

        def loss(p, x):
            obs, value, *x = x
            if ways == "kept":
                return of_policy(net(p["pi"], obs), p["multiplier"], x)
            logits, v = networks(p, obs)
            return of_policy(logits, p["multiplier"], x) + 0.5 * ((v - value) ** 2).sum() / (length * batch)

        data = flatten((obs, v + advantage, action, old, weight))
        if chunk is None:
            found, grads = jax.value_and_grad(loss)(p, data)
        else:
            found, grads = c.summed_gradient(loss, p, c.in_chunks(data, chunk * batch))
        if ways == "kept":
            found += 0.5 * (advantage**2).mean()
            grads = jax.tree.map(jnp.add, grads, back(-flatten(advantage) / (length * batch))[0])
        return found + dual, grads | {"temperature": slope}, after

    return run


def workload(length, batch, hidden, chunk=4):
    make = lambda networks=separate, least=top, **how: by_hand(length, batch, networks, least, **how)  # noqa: E731
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def by_rlfx(p, target, state, key):
        of = lambda p: loss_fn((p, target), state, key)  # noqa: E731
        (loss, (state, _)), grads = jax.value_and_grad(of, has_aux=True)(p)
        return loss, grads, state

    kept, some, first = {"ways": "kept"}, {"chunk": chunk}, features_first
    beside = {"beside": True, "ahead": True}
    forms = {
        "rlfx": by_rlfx, "plain": make(least=sorted_all, flat=False, ways="acting"), "values late": make(least=sorted_all),
        "top half": make(), "bisected": make(least=bisected), "joined": make(c.first_joined), "stacked": make(stacked),
        "features first": make(first), "critic once": make(**kept), "bisected, critic once": make(least=bisected, **kept),
        "all once": make(**beside), "joined, all once": make(c.first_joined, bisected, **beside),
        "features first, all once": make(first, bisected, **beside), f"blocks of {chunk}": make(**some),
        f"joined, blocks of {chunk}": make(c.first_joined, **some), f"features first, blocks of {chunk}": make(first, **some),
        f"critic once, blocks of {chunk}": make(**kept, **some), "drawn ahead": make(ahead=True),
        "all once, threefry unrolled": make(least=bisected, **beside),
        "features first, all once, threefry unrolled": make(first, bisected, **beside),
        f"critic once, blocks of {chunk}, threefry unrolled": make(least=bisected, **kept, **some),
        f"critic once, blocks of {chunk}, drawn ahead, threefry unrolled": make(least=bisected, **kept, **some, ahead=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    given = params_of(k[1], hidden), params_of(k[2], hidden), state
    return drawing(forms, given, tolerance=1e-5)
