"""Planning by the cross-entropy method through a learnt model (PETS, Chua et al. 2018): at every timestep sampled sequences of
actions are refined towards the best of them, beginning with the plan of the timestep before. A policy and a value learn what was
planned (as POPLIN does, Wang and Ba 2020), the model learns what followed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, EPISODE, ROUNDS, WIDE, LEAST = 8, 2, 0.97, 30, 3, 0.6, 0.05
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    model = c.mlp_params(k[0], (OBS + ACTIONS, hidden, OBS + 1))
    return {"model": model, "pi": c.mlp_params(k[1], (OBS, hidden, ACTIONS)), "v": c.mlp_params(k[2], (OBS, hidden, 1))}


def predicted(model, obs, action):
    """The observation that follows, and the reward."""
    made = c.mlp(model, jnp.concatenate([obs, action], -1), relu)
    return jnp.tanh(obs + made[..., :-1]), made[..., -1]


def judged(p, obs):
    return c.mlp(p["v"], obs, relu)[..., 0]


def returns(p, obs, plans):
    """Of ``plans[samples, horizon, ACTIONS]`` from one observation."""
    obs, total = jnp.broadcast_to(obs, (len(plans), OBS)), 0.0
    for i in range(plans.shape[1]):
        obs, reward = predicted(p["model"], obs, plans[:, i])
        total = total + GAMMA**i * reward
    return total + GAMMA ** plans.shape[1] * judged(p, obs)


def refined(p, obs, mean, noise, elites):
    """The plan, ``[horizon, ACTIONS]``, and what the best ones of it are worth; ``noise[ROUNDS, samples, horizon, ACTIONS]``."""
    std = WIDE * jnp.ones_like(mean)
    for z in noise:
        plans = jnp.clip(mean + std * z, -1.0, 1.0)
        worth, best = jax.lax.top_k(returns(p, obs, plans), elites)
        mean, std = plans[best].mean(0), plans[best].std(0) + LEAST
    return mean, worth.mean()


def goes_on(mean):
    """What the next timestep begins with."""
    return jnp.concatenate([mean[..., 1:, :], jnp.zeros_like(mean[..., :1, :])], -2)


def learnt(p, obs, action, worth, after, reward, done):
    """The loss of points: the model's, where the episode goes on, the policy's and the value's."""
    made, of_reward = predicted(p["model"], obs, action)
    model = jnp.where(done, 0.0, ((made - after) ** 2).sum(-1)) + (of_reward - reward) ** 2
    imitated = ((jnp.tanh(c.mlp(p["pi"], obs, relu)) - action) ** 2).sum(-1)
    return model + imitated + 0.5 * (judged(p, obs) - worth) ** 2


def program(samples, horizon, elites):
    def pets(p, carry, t):
        state, mean = carry
        obs = state["x"]
        noise = jax.random.normal(t.key_for("plan"), (ROUNDS, samples, horizon, ACTIONS))
        mean, worth = refined(stop_gradient(p), obs, mean, noise, elites)
        state, step = step_of(t.key_for("env"), state, mean[0])
        loss = learnt(p, obs, mean[0], worth, rlfx.series(obs)[t + 1], step.reward, step.terminated)
        return loss, (state, jnp.where(step.terminated, 0.0, goes_on(mean)))

    return pets


# -- by hand: elites of ``plans[B, samples, horizon, ACTIONS]``: means, deviations, and their worth


def gathered(plans, worth, elites):
    values, best = jax.lax.top_k(worth, elites)
    taken = jnp.take_along_axis(plans, best[..., None, None], 1)
    return taken.mean(1), taken.std(1), values.mean(-1)


def by_weights(plans, worth, weight, elites):
    """Of weights 1 for the elites and 0 for others: no plan is copied."""
    mean = (plans * weight[..., None, None]).sum(1) / elites
    std = jnp.sqrt(((plans - mean[:, None]) ** 2 * weight[..., None, None]).sum(1) / elites)
    return mean, std, (worth * weight).sum(-1) / elites


def above(plans, worth, elites):
    """All that are no worse than the last elite."""
    least = jax.lax.top_k(worth, elites)[0][..., -1:]
    return by_weights(plans, worth, (worth >= least).astype(jnp.float32), elites)


def ordered(plans, worth, elites):
    """The same, by sorting values alone."""
    least = jnp.sort(worth)[..., -elites][..., None]
    return by_weights(plans, worth, (worth >= least).astype(jnp.float32), elites)


def counted(plans, worth, elites):
    """Each is compared with all: an elite has fewer above it than there are elites."""
    better = (worth[..., None, :] > worth[..., :, None]).sum(-1)
    return by_weights(plans, worth, (better < elites).astype(jnp.float32), elites)


# -- by hand: the worth of ``plans``, from ``obs[B, OBS]``


def stacked(p, obs, plans):
    return jax.vmap(returns, (None, 0, 0))(p, obs, plans)


def in_rows(p, obs, plans):
    """Samples of all environments are rows. The first observation is multiplied once for all samples, later ones apart from their
    actions."""
    batch, samples, horizon, _ = plans.shape
    first, last = p["model"]
    actions = (plans.reshape(-1, ACTIONS) @ first["w"][OBS:]).reshape(batch, samples, horizon, -1)
    h = relu((obs @ first["w"][:OBS] + first["b"])[:, None] + actions[:, :, 0])
    x, total = jnp.broadcast_to(obs[:, None], (batch, samples, OBS)), 0.0
    for i in range(horizon):
        if i:
            h = relu((x.reshape(-1, OBS) @ first["w"][:OBS] + first["b"]).reshape(h.shape) + actions[:, :, i])
        made = (h.reshape(-1, h.shape[-1]) @ last["w"] + last["b"]).reshape(batch, samples, -1)
        x, total = jnp.tanh(x + made[..., :-1]), total + GAMMA**i * made[..., -1]
    return total + GAMMA**horizon * judged(p, x.reshape(-1, OBS)).reshape(batch, samples)


def whole_rows(p, obs, plans):
    """The same, without parts: one product of each layer."""
    batch, samples, horizon, _ = plans.shape
    x, total = jnp.repeat(obs, samples, 0), 0.0
    for i in range(horizon):
        x, reward = predicted(p["model"], x, plans[:, :, i].reshape(-1, ACTIONS))
        total = total + GAMMA**i * reward
    return (total + GAMMA**horizon * judged(p, x)).reshape(batch, samples)


def in_a_loop(p, obs, plans):
    """Timesteps of plans in a loop."""
    batch, samples, horizon, _ = plans.shape

    def body(x, action):
        return predicted(p["model"], x, action)

    actions = jnp.moveaxis(plans, 2, 0).reshape(horizon, -1, ACTIONS)
    x, rewards = jax.lax.scan(body, jnp.repeat(obs, samples, 0), actions)
    total = (GAMMA ** jnp.arange(horizon, dtype=jnp.float32)) @ rewards + GAMMA**horizon * judged(p, x)
    return total.reshape(batch, samples)


def features_first(p, obs, plans):
    """Samples of all environments are innermost."""
    batch, samples, horizon, _ = plans.shape
    act = lambda layer, x: layer["w"].T @ x + layer["b"][:, None]  # noqa: E731
    net = lambda layers, x: act(layers[1], relu(act(layers[0], x)))  # noqa: E731
    actions = plans.transpose(2, 3, 0, 1).reshape(horizon, ACTIONS, -1)
    x, total = jnp.repeat(obs.T, samples, 1), 0.0
    for i in range(horizon):
        made = net(p["model"], jnp.concatenate([x, actions[i]]))
        x, total = jnp.tanh(x + made[:-1]), total + GAMMA**i * made[-1]
    return (total + GAMMA**horizon * net(p["v"], x)[0]).reshape(batch, samples)


# -- by hand: networks that learn


def joined(p, obs, action, worth, after, reward, done):
    """Products of rows, the first layers of all networks as one: the policy and the value have zeros for actions."""
    padded = lambda layer: layer | {"w": jnp.pad(layer["w"], ((0, ACTIONS), (0, 0)))}  # noqa: E731
    firsts = p["model"][0], padded(p["pi"][0]), padded(p["v"][0])
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *firsts)
    of_model, of_pi, of_v = jnp.split(relu(c.linear(first, jnp.concatenate([obs, action], -1))), 3, -1)
    made = c.linear(p["model"][1], of_model)
    x, of_reward = jnp.tanh(obs + made[..., :-1]), made[..., -1]
    model = jnp.where(done, 0.0, ((x - after) ** 2).sum(-1)) + (of_reward - reward) ** 2
    imitated = ((jnp.tanh(c.linear(p["pi"][1], of_pi)) - action) ** 2).sum(-1)
    return model + imitated + 0.5 * (c.linear(p["v"][1], of_v)[..., 0] - worth) ** 2


def by_hand(length, batch, samples, horizon, elites, judge=stacked, select=gathered, learn=learnt, **how):
    """``flat``: what is learnt is of rows; ``ahead``: noise of all timesteps is drawn before the loop; ``envs``: environments of
    a block, which acts by itself; ``mapped``: every environment plans by itself, under `jax.vmap`; ``chunk``: timesteps of a
    block that learns; ``rolled``: rounds of refinement in a loop."""
    flat, ahead, envs, mapped, chunk, rolled = (
        how.get(n) for n in ("flat", "ahead", "envs", "mapped", "chunk", "rolled")
    )

    def planned(p, obs, mean, noise):
        if mapped:
            return jax.vmap(lambda obs, mean, noise: refined(p, obs, mean, noise, elites))(obs, mean, noise)

        def improve(found, z):
            mean, std, _ = found
            plans = jnp.clip(mean[:, None] + std[:, None] * z, -1.0, 1.0)
            mean, std, worth = select(plans, judge(p, obs, plans), elites)
            return (mean, std + LEAST, worth), None

        found = mean, WIDE * jnp.ones_like(mean), jnp.zeros(len(obs))
        if rolled:
            found = jax.lax.scan(improve, found, jnp.moveaxis(noise, 1, 0))[0]
        else:
            for i in range(ROUNDS):
                found, _ = improve(found, noise[:, i])
        return found[0], found[2]

    def run(p, carry, key):
        draw_one = lambda k: jax.random.normal(k, (ROUNDS, samples, horizon, ACTIONS))  # noqa: E731
        times = jnp.arange(length)

        def acted(given):
            carry, plan_keys, env_keys = given
            draw = lambda t: jax.vmap(draw_one)(c.at(plan_keys, t))  # noqa: E731

            def body(carry, given):
                t, noise = given
                state, mean = carry
                obs = state["x"]
                mean, worth = planned(p, obs, mean, draw(t) if noise is None else noise)
                state, step = jax.vmap(step_of)(c.at(env_keys, t), state, mean[:, 0])
                kept = jnp.where(step.terminated[:, None, None], 0.0, goes_on(mean))
                return (state, kept), (obs, mean[:, 0], worth, state["x"], step.reward, step.terminated)

            return jax.lax.scan(body, carry, (times, jax.vmap(draw)(times) if ahead else None))

        keys = c.streams(key, batch, "plan", "env")
        carry, data = c.acted_by_environments(acted, (carry, *keys), length, envs)
        data = c.rows_of(data) if flat or chunk else data
        loss = lambda p, data: learn(p, *data).sum() / (length * batch)  # noqa: E731
        if chunk:
            return *c.summed_gradient(loss, p, c.in_chunks(data, chunk * batch)), carry
        return *jax.value_and_grad(loss)(p, data), carry

    return run


def workload(length, batch, samples, horizon, elites, hidden, chunk=4, envs=4):
    make = lambda judge=stacked, select=gathered, **how: by_hand(  # noqa: E731
        length, batch, samples, horizon, elites, judge, select, **how
    )
    rows, first, best = {"flat": True}, features_first, {"flat": True, "learn": joined}
    forms = {
        "rlfx": c.by_rlfx(program(samples, horizon, elites), length, batch), "plain": make(mapped=True),
        "rows": make(whole_rows, **rows), "products with observations and actions apart": make(in_rows, **rows),
        "features first": make(first, **rows), "rows, elites by weights": make(whole_rows, above, **rows),
        "rows, sorted": make(whole_rows, ordered, **rows), "rows, compared": make(whole_rows, counted, **rows),
        "apart, compared, joined": make(in_rows, counted, **best), "plans in a loop": make(in_a_loop, above, **rows),
        "features first, compared, joined": make(first, counted, **best),
        "features first, rounds in a loop": make(first, counted, rolled=True, **best),
        f"rows, compared, {envs} environments": make(whole_rows, counted, envs=envs, **best),
        f"features first, compared, {envs} environments": make(first, counted, envs=envs, **best),
        f"rows, compared, blocks of {chunk}": make(whole_rows, counted, chunk=chunk),
        "rows, compared, threefry unrolled": make(whole_rows, counted, **best),
        "features first, compared, threefry unrolled": make(first, counted, **best),
        "features first, joined, threefry unrolled": make(first, **best),
        "features first, joined, drawn ahead, threefry unrolled": make(first, ahead=True, **best),
        f"features first, joined, {envs} environments, threefry unrolled": make(first, envs=envs, **best),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    given = params_of(k[1], hidden), (state, 0.3 * jax.random.normal(k[2], (batch, horizon, ACTIONS)))
    return drawing(forms, given, tolerance=2e-5)
