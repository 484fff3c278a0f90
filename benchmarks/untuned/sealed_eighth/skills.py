"""DIAYN (Eysenbach et al. 2019): skills that a discriminator tells apart by where they lead, which is all the reward there is; a
soft actor-critic with a squashed normal policy and twin critics learns them from what it has just acted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

OBS, ACTIONS, GAMMA, ALPHA, EPISODE = 12, 2, 0.97, 0.1, 40
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)
relu = jax.nn.relu


def critics_of(key, skills, hidden):
    sizes = OBS + skills + ACTIONS, hidden, hidden, 1
    return jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(key))


def params_of(key, skills, hidden):
    k = jax.random.split(key, 3)
    return {
        "actor": c.mlp_params(k[0], (OBS + skills, hidden, hidden, 2 * ACTIONS)),
        "critics": critics_of(k[1], skills, hidden),
        "discriminator": c.mlp_params(k[2], (OBS, hidden, hidden, skills)),
    }


def told_apart(p, obs):
    """Log-probabilities of skills."""
    return jax.nn.log_softmax(c.mlp(p["discriminator"], obs, relu))


def program(skills):
    def diayn(params, carry, t):
        p, target = params
        state, skill = carry
        obs = state["x"]
        seen = jnp.concatenate([obs, jax.nn.one_hot(skill, skills)])
        action, log_prob = c.squashed(p["actor"], seen, jax.random.normal(t.key_for("action"), (ACTIONS,)))
        state, step = step_of(t.key_for("env"), state, stop_gradient(action))
        known = told_apart(p, obs)[skill]
        soft = rlfx.series(stop_gradient(c.mapped(target, seen, action).min(0) - ALPHA * log_prob))
        following = jnp.where(step.terminated, 0.0, soft[t + 1])
        aim = stop_gradient(known) + np.log(skills) + GAMMA * following
        of_critics = ((c.mapped(p["critics"], seen, stop_gradient(action)) - aim) ** 2).sum()
        of_actor = ALPHA * log_prob - c.mapped(stop_gradient(p["critics"]), seen, action).min(0)
        skill = jnp.where(step.terminated, jax.random.randint(t.key_for("skill"), (), 0, skills), skill)
        return of_critics + of_actor - known, (state, skill)

    return diayn


# -- by hand: critics, ``[2, ...]``


def in_columns(critics, seen, action):
    """Features first, rows ``[N, ...]`` innermost."""
    x = jnp.concatenate([seen, action], -1).T
    return jnp.stack([c.columns(jax.tree.map(lambda w: w[i], critics), x, relu)[0] for i in range(2)])


# -- by hand: value and gradient of points ``[N, ...]``, summed; ``following``: what is added to the reward


def two_losses(critics):
    """The critics are evaluated for their own loss, and for the actor's."""

    def of(p, part, scale):
        def loss(p):
            obs, hot, noise, following = part
            seen = jnp.concatenate([obs, hot], -1)
            action, log_prob = c.squashed(p["actor"], seen, noise)
            known = (told_apart(p, obs) * hot).sum(-1)
            aim = stop_gradient(known) + np.log(hot.shape[-1]) + following
            of_critics = ((critics(p["critics"], seen, stop_gradient(action)) - aim) ** 2).sum(0)
            of_actor = ALPHA * log_prob - critics(stop_gradient(p["critics"]), seen, action).min(0)
            return scale * (of_critics + of_actor - known).sum()

        return jax.value_and_grad(loss)(p)

    return of


def begun(p, part):
    """The parts that both of the following have: ``(action, log_prob), seen, known`` and what goes back."""
    obs, hot, noise, _ = part
    seen = jnp.concatenate([obs, hot], -1)
    acted, to_actor = jax.vjp(lambda actor: c.squashed(actor, seen, noise), p["actor"])
    judge = lambda net: (told_apart({"discriminator": net}, obs) * hot).sum(-1)  # noqa: E731
    known, to_judge = jax.vjp(judge, p["discriminator"])
    return acted, seen, known, to_actor, to_judge


def finished(q, log_prob, known, following, skills, scale):
    """The loss, the slopes of the critics' own loss, and of the actor's."""
    error = q - (known + np.log(skills) + following)
    loss = scale * ((error**2).sum() + (ALPHA * log_prob - q.min(0) - known).sum())
    least = jnp.stack([q[0] <= q[1], q[0] > q[1]]).astype(q.dtype)
    return loss, 2.0 * scale * error, -scale * least


def critics_once(critics):
    """One evaluation, and two ways back."""

    def of(p, part, scale):
        (action, log_prob), seen, known, to_actor, to_judge = begun(p, part)
        q, back = jax.vjp(lambda w, action: critics(w, seen, action), p["critics"], action)
        loss, of_weights, of_action = finished(q, log_prob, known, part[-1], part[1].shape[-1], scale)
        (weights, _), (_, by_action) = back(of_weights), back(of_action)
        (actor,), (judge,) = (
            to_actor((by_action, jnp.full_like(log_prob, scale * ALPHA))),
            to_judge(jnp.full_like(known, -scale)),
        )
        return loss, {"actor": actor, "critics": weights, "discriminator": judge}

    return of


def one_way_back(p, part, scale):
    """A critic has one output, so that what goes back is one direction for every point, as long as either slope says."""
    (action, log_prob), seen, known, to_actor, to_judge = begun(p, part)
    x = jnp.concatenate([seen, action], -1)
    first, second, third = p["critics"]
    made = x @ jnp.concatenate([first["w"][0], first["w"][1]], -1) + first["b"].reshape(-1)
    firsts = jnp.split(relu(made), 2, -1)
    seconds = [relu(h @ second["w"][i] + second["b"][i]) for i, h in enumerate(firsts)]
    q = jnp.stack([h @ third["w"][i, :, 0] + third["b"][i] for i, h in enumerate(seconds)])
    loss, of_weights, of_action = finished(q, log_prob, known, part[-1], part[1].shape[-1], scale)
    layers, by_action = [[], [], []], 0.0
    for i, (h, g) in enumerate(zip(firsts, seconds, strict=True)):
        slope = of_weights[i]
        from_third = jnp.where(g > 0, third["w"][i, :, 0], 0.0)
        from_second = jnp.where(h > 0, from_third @ second["w"][i].T, 0.0)
        by_action += of_action[i][:, None] * (from_second @ first["w"][i, -ACTIONS:].T)
        layers[2].append({"w": (slope @ g)[:, None], "b": slope.sum()[None]})
        for layer, before, back in ((layers[1], h, from_third), (layers[0], x, from_second)):
            scaled = slope[:, None] * back
            layer.append({"w": before.T @ scaled, "b": scaled.sum(0)})
    weights = [jax.tree.map(lambda *w: jnp.stack(w), *pair) for pair in layers]
    (actor,), (judge,) = (
        to_actor((by_action, jnp.full_like(log_prob, scale * ALPHA))),
        to_judge(jnp.full_like(known, -scale)),
    )
    return loss, {"actor": actor, "critics": weights, "discriminator": judge}


def by_hand(length, batch, skills, critics=c.mapped, learn=None, flat=True, chunk=None, ahead=False):
    """``learn``: value and gradient of points; ``chunk``: timesteps of a block, the target's too; ``ahead``: random numbers are
    drawn before the loop."""
    learn = two_losses(critics) if learn is None else learn
    scale = 1.0 / (length * batch)

    def run(p, target, carry, key):
        action_keys, env_keys, skill_keys = c.streams(key, batch, "action", "env", "skill")
        draw_one = jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))
        redraw = jax.vmap(lambda k: jax.random.randint(k, (), 0, skills))
        draw = lambda t: (draw_one(c.at(action_keys, t)), redraw(c.at(skill_keys, t)))  # noqa: E731
        times = jnp.arange(length + 1)  # one action more, for the value after the end

        def act(carry, noise):
            seen = jnp.concatenate([carry[0]["x"], jax.nn.one_hot(carry[1], skills)], -1)
            return c.squashed(p["actor"], seen, noise)

        def body(carry, given):
            t, drawn = given
            noise, fresh = draw(t) if drawn is None else drawn
            state, skill = carry
            action, log_prob = act(carry, noise)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            found = state["x"], jax.nn.one_hot(skill, skills), noise, action, log_prob, step.terminated
            return (after, jnp.where(step.terminated, fresh, skill)), found

        drawn = jax.vmap(draw)(times) if ahead else None
        xs = jax.tree.map(lambda x: x[:length], (times, drawn))
        after, (obs, hot, noise, action, log_prob, done) = jax.lax.scan(body, carry, xs)

        def soft_of(obs, hot, action, log_prob):
            return critics(target, jnp.concatenate([obs, hot], -1), action).min(0) - ALPHA * log_prob

        size = None if chunk is None else chunk * batch
        rows = obs, hot, action, log_prob
        if not flat:
            soft = soft_of(*rows)
        elif chunk is None:
            soft = soft_of(*c.rows_of(rows))
        else:
            soft = jax.lax.map(lambda x: soft_of(*x), c.in_chunks(c.rows_of(rows), size))
        end = draw_one(c.at(action_keys, times[-1])) if drawn is None else drawn[0][-1]
        last = soft_of(after[0]["x"], jax.nn.one_hot(after[1], skills), *act(after, end))
        following = GAMMA * jnp.where(done, 0.0, c.shifted(soft.reshape(length, batch), last))
        part = obs, hot, noise, following
        if not flat:
            return *learn(p, part, scale), after
        part = c.rows_of(part)
        if chunk is None:
            return *learn(p, part, scale), after
        add = lambda total, part: (jax.tree.map(jnp.add, total, learn(p, part, scale)), None)  # noqa: E731
        start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
        return *jax.lax.scan(add, start, c.in_chunks(part, size))[0], after

    return run


def workload(length, batch, skills, hidden, chunk=4):
    make = lambda critics=c.mapped, learn=None, **how: by_hand(length, batch, skills, critics, learn, **how)  # noqa: E731
    one, joined, some, ahead = c.one_by_one, c.twins_joined, {"chunk": chunk}, {"ahead": True}
    twice = [critics_once(critics) for critics in (c.mapped, one, joined)]
    forms = {
        "rlfx": c.actor_by_rlfx(program(skills), length, batch),
        "plain": make(flat=False), "rows": make(), "one by one": make(one),
        "firsts joined": make(joined), "features first": make(in_columns), "critics once": make(learn=twice[0]),
        "one by one, critics once": make(one, twice[1]), "firsts joined, critics once": make(joined, twice[2]),
        "one way back": make(one, one_way_back), "drawn ahead": make(**ahead), f"blocks of {chunk}": make(**some),
        f"one by one, blocks of {chunk}": make(one, **some), f"one way back, blocks of {chunk}": make(one, one_way_back, **some),
        "one by one, critics once, threefry unrolled": make(one, twice[1]),
        "one way back, threefry unrolled": make(one, one_way_back),
        "firsts joined, one way back, threefry unrolled": make(joined, one_way_back),
        "one way back, drawn ahead, threefry unrolled": make(one, one_way_back, **ahead),
        f"one by one, critics once, blocks of {chunk}, threefry unrolled": make(one, twice[1], **some),
        f"one way back, blocks of {chunk}, threefry unrolled": make(one, one_way_back, **some),
        f"one way back, blocks of {chunk}, drawn ahead, threefry unrolled": make(one, one_way_back, **some, **ahead),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    carry = state, jax.random.randint(k[3], (batch,), 0, skills)
    given = params_of(k[1], skills, hidden), critics_of(k[2], skills, hidden), carry
    return drawing(forms, given, tolerance=1e-5)
