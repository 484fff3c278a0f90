"""Learned policy gradients (LPG, Oh et al. 2020): an LSTM that goes backwards over a rollout tells what an agent should make
likelier and what it should predict; the agent takes one step towards that, and how well it then acts on others is what is learnt,
through the step. There are several agents, and one rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, CLASSES, EMBED, TOLD = 12, 4, 16, 16, 5
RATE, GAMMA, LAMBDA, PREDICT, PENALTY, CLASS_ENTROPY = 0.5, 0.99, 0.95, 0.5, 0.001, 0.001


def agent_of(key, hidden):
    """What is predicted are ``CLASSES`` logits, of which nothing says what they mean."""
    k = jax.random.split(key, 3)
    torso = c.mlp_params(k[0], (OBS, hidden, hidden))
    return {"torso": torso, "pi": c.dense(k[1], hidden, ACTIONS), "y": c.dense(k[2], hidden, CLASSES)}


def rule_of(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "embed": c.mlp_params(k[0], (CLASSES, EMBED, 1)), "x": c.dense(k[1], TOLD, 4 * hidden),
        "h": c.dense(k[2], hidden, 4 * hidden)["w"], "pi": c.dense(k[3], hidden, 1), "y": c.dense(k[4], hidden, CLASSES),
    }  # fmt: skip


def outputs(p, obs):
    """Logits of actions, and of classes."""
    h = jnp.tanh(c.mlp(p["torso"], obs))
    return c.linear(p["pi"], h), c.linear(p["y"], h)


def embedded(rule, y):
    return c.mlp(rule["embed"], jax.nn.softmax(y))[..., 0]


def gated(g, cell):
    """An LSTM's next state, of its gates before they are squashed."""
    i, f, o, u = jnp.split(g, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def update(params, carry, t):
    """What an agent's step descends; ``fixed`` is the same agent, of which targets are made."""
    p, fixed, rule, (steps, last) = params
    x, end = rlfx.inputs(steps)[t], rlfx.inputs(last, axes="b")[t]
    logits, y = outputs(fixed, x["obs"])
    predicted = rlfx.series(embedded(rule, y), end=embedded(rule, outputs(fixed, end["obs"])[1]))
    going = 1.0 - x["done"].astype(jnp.float32)
    told = jnp.stack([x["reward"], going, jax.nn.softmax(logits)[x["action"]], predicted[t], predicted[t + 1]])

    def backwards(after):
        h, cell = after[0] * going, after[1] * going
        return gated(c.linear(rule["x"], told) + h @ rule["h"], cell)

    nothing = jnp.zeros(rule["h"].shape[0])
    h, _ = rlfx.solve(lambda state: backwards(state[t + 1]), end=(nothing, nothing))
    likelier, y_target = c.linear(rule["pi"], h)[0], c.linear(rule["y"], h)

    logits, y = outputs(p, x["obs"])
    log_y = jax.nn.log_softmax(y)
    divergence = (jnp.exp(log_y) * (log_y - jax.nn.log_softmax(y_target))).sum()
    loss = PREDICT * divergence - jax.nn.log_softmax(logits)[x["action"]] * likelier
    return loss, carry, rlfx.mean(likelier**2 + (y_target**2).mean(), over=("t", "b"))


def acts_well(params, carry, t):
    p, (steps, last) = params
    x, end = rlfx.inputs(steps)[t], rlfx.inputs(last, axes="b")[t]
    value = rlfx.series(x["value"], end=end["value"])
    advantage = rlfx.gae(c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"])), value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    logits, y = outputs(p, x["obs"])
    log_p, log_y = jax.nn.log_softmax(logits), jax.nn.log_softmax(y)
    entropies = 0.01 * (jnp.exp(log_p) * log_p).sum() + CLASS_ENTROPY * (jnp.exp(log_y) * log_y).sum()
    return entropies - log_p[x["action"]] * advantage, carry


def by_rlfx(length, batch):
    compiled = lambda program: rlfx.compile(program, length=length, batch=batch)  # noqa: E731
    step, after = compiled(update), compiled(acts_well)

    def of_agent(rule, p, first, then):
        loss = lambda q: step((q, p, rule, first), jnp.zeros(batch))  # noqa: E731
        grads, (_, penalty) = jax.grad(loss, has_aux=True)(p)
        moved = jax.tree.map(lambda w, g: w - RATE * g, p, grads)
        return after((moved, then), jnp.zeros(batch))[0] + PENALTY * penalty

    def run(rule, agents, first, then):
        return jax.value_and_grad(lambda rule: jax.vmap(of_agent, (None, 0, 0, 0))(rule, agents, first, then).mean())(rule)

    return run


# -- by hand, as usual: of one agent, ``[T, B]``


def update_loss(out, targets, steps):
    (logits, y), (likelier, y_target) = out, targets
    log_y, chosen = jax.nn.log_softmax(y), c.pick(jax.nn.log_softmax(logits), steps["action"])
    divergence = (jnp.exp(log_y) * (log_y - jax.nn.log_softmax(y_target))).sum(-1)
    return (PREDICT * divergence - chosen * likelier).mean()


def penalty_of(targets):
    likelier, y_target = targets
    return PENALTY * (jnp.mean(likelier**2) + jnp.mean(y_target**2))


def after_loss(out, advantage, steps):
    logits, y = out
    log_p, log_y = jax.nn.log_softmax(logits), jax.nn.log_softmax(y)
    entropies = 0.01 * (jnp.exp(log_p) * log_p).sum(-1) + CLASS_ENTROPY * (jnp.exp(log_y) * log_y).sum(-1)
    return (entropies - c.pick(log_p, steps["action"]) * advantage).mean()


def advantages(then):
    steps, last = then
    return c.gae(steps["value"], last["value"], steps["reward"], steps["done"], GAMMA, LAMBDA)


def told_of(rule, out, last_y, steps):
    """What the LSTM is told of every timestep, and whether an episode goes on."""
    logits, y = out
    going = 1.0 - steps["done"].astype(jnp.float32)
    chance = c.pick(jax.nn.softmax(logits), steps["action"])
    predicted = embedded(rule, jnp.concatenate([y, last_y[None]]))
    return jnp.stack([steps["reward"], going, chance, predicted[:-1], predicted[1:]], -1), going


def plain(length, batch):
    def targets_of(rule, p, first):
        steps, last = first
        told, going = told_of(rule, outputs(p, steps["obs"]), outputs(p, last["obs"])[1], steps)

        def step(state, x):
            told, going = x
            h, cell = (going[:, None] * m for m in state)
            state = gated(c.linear(rule["x"], told) + h @ rule["h"], cell)
            return state, state[0]

        nothing = jnp.zeros((batch, rule["h"].shape[0]))
        h = jax.lax.scan(step, (nothing, nothing), (told, going), reverse=True)[1]
        return c.linear(rule["pi"], h)[..., 0], c.linear(rule["y"], h)

    def of_agent(rule, p, first, then):
        targets = targets_of(rule, p, first)
        grads = jax.grad(lambda q: update_loss(outputs(q, first[0]["obs"]), targets, first[0]))(p)
        moved = jax.tree.map(lambda w, g: w - RATE * g, p, grads)
        return after_loss(outputs(moved, then[0]["obs"]), advantages(then), then[0]) + penalty_of(targets)

    def run(rule, agents, first, then):
        return jax.value_and_grad(lambda rule: jax.vmap(of_agent, (None, 0, 0, 0))(rule, agents, first, then).mean())(rule)

    return run
