"""GAIL: a discriminator of the policy's points from an expert's gives the rewards and learns, with a penalty on slopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from rlfx.threefry import threefry

OBS, ACTIONS, GAMMA, LAMBDA, STEEP = 12, 3, 0.99, 0.95, 0.5
drift = c.drift_step(OBS, 40)


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    actor = {"mean": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "log_std": jnp.full(ACTIONS, -0.5)}
    judge = c.mlp_params(k[2], (OBS + ACTIONS, hidden, hidden, 1))
    judge[-1]["b"] += 0.5  # else the halves of its gradient cancel, and comparing it compares rounding
    return {"actor": actor, "critic": c.mlp_params(k[1], (OBS, hidden, hidden, 1)), "judge": judge}


def value_of(p, x):
    return c.mlp(p["critic"], x)[..., 0]


def judged(layers, point):
    """The logit that a point is the expert's."""
    return c.mlp(layers, point)[..., 0]


def too_steep(slope):
    return (jnp.sqrt((slope**2).sum(-1) + 1e-12) - 1.0) ** 2


def judge_loss(own, theirs, slope):
    return jax.nn.softplus(own) + jax.nn.softplus(-theirs) + STEEP * too_steep(slope)


def agent_loss(p, x, v, action, advantage, aim):
    spread = p["actor"]["log_std"]
    log_prob = -(0.5 * ((action - c.mlp(p["actor"]["mean"], x)) / jnp.exp(spread)) ** 2 + spread).sum(-1)
    return 0.5 * (v - aim) ** 2 - log_prob * advantage - 0.01 * spread.sum()


def program(params, state, t):
    p, expert = params
    x, shown = state["x"], rlfx.inputs(expert)[t]
    v = value_of(p, x)
    noise = jax.random.normal(t.key_for("action"), (ACTIONS,))
    action = stop_gradient(c.mlp(p["actor"]["mean"], x) + jnp.exp(p["actor"]["log_std"]) * noise)
    state, step = drift(t.key_for("env"), state, action)

    judge = lambda point: judged(p["judge"], point)  # noqa: E731
    mine, example = jnp.concatenate([x, action]), jnp.concatenate([shown["obs"], shown["action"]])
    mix = jax.random.uniform(t.key_for("mix"))
    own = judge(mine)
    told = judge_loss(own, judge(example), jax.grad(judge)(mix * mine + (1.0 - mix) * example))

    step = step._replace(reward=stop_gradient(jax.nn.softplus(own)))
    value = rlfx.series(v)
    gained = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    advantage = (gained - rlfx.mean(gained)) / (rlfx.std(gained) + 1e-8)
    return told + agent_loss(p, x, v, action, advantage, gained + stop_gradient(v)), state


# -- by hand: how rows of points are judged; the loss summed over them, and the logits of the policy's


def apart(layers, mine, example, mix):
    mixed = mix[..., None] * mine + (1.0 - mix[..., None]) * example
    slope = jax.grad(lambda x: judged(layers, x).sum())(mixed)
    own = judged(layers, mine)
    return judge_loss(own, judged(layers, example), slope).sum(), own


def one_by_one(layers, mine, example, mix):
    """As a user writes it, under `jax.vmap`."""

    def of_point(mine, example, mix):
        slope = jax.grad(lambda x: judged(layers, x))(mix * mine + (1.0 - mix) * example)
        own = judged(layers, mine)
        return judge_loss(own, judged(layers, example), slope), own

    told, own = jax.vmap(of_point)(mine, example, mix)
    return told.sum(), own


def written_out(layers, mine, example, mix):
    """The slope as products of its own, so that one derivative is left to take."""
    mixed = mix[..., None] * mine + (1.0 - mix[..., None]) * example
    own = judged(layers, mine)
    return judge_loss(own, judged(layers, example), slope_of(layers, mixed)).sum(), own


def slope_of(layers, x):
    first, second, last = layers
    h = jnp.tanh(c.linear(first, x))
    g = jnp.tanh(c.linear(second, h))
    g = (last["w"][:, 0] * (1.0 - g**2)) @ second["w"].T
    return (g * (1.0 - h**2)) @ first["w"].T


def as_one(layers, mine, example, mix):
    """All three kinds of points are rows of one product."""
    first, second, last = layers
    mixed = mix[:, None] * mine + (1.0 - mix[:, None]) * example
    h = jnp.tanh(c.linear(first, jnp.concatenate([mine, example, mixed])))
    g = jnp.tanh(c.linear(second, h))
    n = len(mix)
    own, theirs = jnp.split(c.linear(last, g[: 2 * n])[:, 0], 2)
    back = (last["w"][:, 0] * (1.0 - g[2 * n :] ** 2)) @ second["w"].T
    return judge_loss(own, theirs, (back * (1.0 - h[2 * n :] ** 2)) @ first["w"].T).sum(), own


def features_first(layers, mine, example, mix):
    """The same with rows innermost."""
    first, second, last = layers
    mine, example = mine.T, example.T
    mixed = mix * mine + (1.0 - mix) * example
    n = len(mix)
    h = jnp.tanh(first["w"].T @ jnp.concatenate([mine, example, mixed], 1) + first["b"][:, None])
    g = jnp.tanh(second["w"].T @ h + second["b"][:, None])
    own, theirs = jnp.split((last["w"].T @ g[:, : 2 * n] + last["b"][:, None])[0], 2)
    back = second["w"] @ (last["w"] * (1.0 - g[:, 2 * n :] ** 2))
    slope = first["w"] @ (back * (1.0 - h[:, 2 * n :] ** 2))
    return judge_loss(own, theirs, slope.T).sum(), own


def by_hand(length, batch, judging=apart, late=False, once=False, flat=True, chunk=None, ahead=False):
    """``late``: values of all timesteps after the loop; ``once``: the policy's points are judged once, in the discriminator's
    loss; ``chunk``: timesteps of a block of the learner; ``ahead``: random numbers of actions drawn before the loop."""

    def run(p, expert, state, key):
        action_keys, env_keys, mix_keys = c.streams(key, batch, "action", "env", "mix")
        draw = lambda t: jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(c.at(action_keys, t))  # noqa: E731
        times = jnp.arange(length)

        def body(state, given):
            t, noise = given
            x = state["x"]
            noise = draw(t) if noise is None else noise
            action = c.mlp(p["actor"]["mean"], x) + jnp.exp(p["actor"]["log_std"]) * noise
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (x, action, None if late else value_of(p, x), step.terminated)

        after, (x, action, v, done) = jax.lax.scan(body, state, (times, jax.vmap(draw)(times) if ahead else None))
        mix = jax.vmap(lambda t: jax.vmap(jax.random.uniform)(c.at(mix_keys, t)))(times)
        flatten = c.rows_of if flat else lambda x: x
        mean = 1.0 / (length * batch)
        points = flatten(
            (jnp.concatenate([x, action], -1), jnp.concatenate([expert["obs"], expert["action"]], -1), mix)
        )
        v = value_of(p, flatten(x)).reshape(length, batch) if late else v

        def judge_of(layers, points):
            told, own = judging(layers, *points)
            return mean * told, own

        def agent_of(p, data):
            x, *given = data
            return mean * agent_loss(p, x, value_of(p, x), *given).sum()

        def advantages(own):
            reward = jax.nn.softplus(own).reshape(length, batch)
            gained = c.gae(v, value_of(p, after["x"]), reward, done, GAMMA, LAMBDA)
            return flatten(((gained - gained.mean()) / (gained.std() + 1e-8), gained + v))

        if not once:
            data = *flatten((x, action)), *advantages(judged(p["judge"], points[0]))
            both = lambda p, parts: judge_of(p["judge"], parts[0])[0] + agent_of(p, parts[1])  # noqa: E731
            if chunk is None:
                return *jax.value_and_grad(both)(p, (points, data)), after
            return *c.summed_gradient(both, p, c.in_chunks((points, data), chunk * batch)), after

        judge = jax.value_and_grad(judge_of, has_aux=True)
        agent = {name: p[name] for name in ("actor", "critic")}
        if chunk is None:
            (told, own), of_judge = judge(p["judge"], points)
            found, of_agent = jax.value_and_grad(agent_of)(agent, (*flatten((x, action)), *advantages(own)))
        else:

            def add(total, points):
                (told, own), grads = judge(p["judge"], points)
                return jax.tree.map(jnp.add, total, (told, grads)), own

            start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p["judge"])
            (told, of_judge), own = jax.lax.scan(add, start, c.in_chunks(points, chunk * batch))
            data = *flatten((x, action)), *advantages(own)
            found, of_agent = c.summed_gradient(agent_of, agent, c.in_chunks(data, chunk * batch))
        return told + found, of_agent | {"judge": of_judge}, after

    return run


def workload(length, batch, hidden, chunk=4):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    one = {"judging": as_one, "once": True, "late": True}
    first, out = one | {"judging": features_first}, one | {"judging": written_out}
    forms = {
        "rlfx": c.actor_by_rlfx(program, length, batch),
        "plain": make(judging=one_by_one), "rows": make(), "not flattened": make(flat=False),
        "values late": make(late=True), "judged once": make(late=True, once=True), "slope written out, judged once": make(**out),
        "points as one": make(**one), f"blocks of {chunk}": make(late=True, chunk=chunk),
        f"written out, once, blocks of {chunk}": make(**out, chunk=chunk),
        f"points as one, blocks of {chunk}": make(**one, chunk=chunk),
        f"points as one, blocks of {chunk}, drawn ahead": make(**one, chunk=chunk, ahead=True),
        f"features first, blocks of {chunk}": make(**first, chunk=chunk),
        f"features first, blocks of {chunk}, threefry unrolled": make(**first, chunk=chunk),
        f"points as one, blocks of {chunk}, threefry unrolled": make(**one, chunk=chunk),
        f"written out, once, blocks of {chunk}, threefry unrolled": make(**out, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    size = length, batch
    expert = {
        "obs": jnp.tanh(jax.random.normal(k[1], (*size, OBS))),
        "action": jax.random.normal(k[2], (*size, ACTIONS)),
    }
    given = params_of(k[0], hidden), expert, c.batch_of(c.drift_reset(OBS), batch)
    unrolled = *given, jax.random.key(2, impl=threefry)
    own = {name: unrolled for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, tolerance=5e-6)
