"""MAPPO's first epoch: agents that share an actor, each with its own view, and one critic of the whole state, which gives the
advantages and learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

SEEN, SHIFT, ACTIONS, GAMMA, LAMBDA, CLIP, ENTROPY = 8, 4, 4, 0.99, 0.95, 0.2, 0.01


def size_of(agents):
    return SHIFT * agents


def drift_of(agents):
    return c.drift_step(size_of(agents), 60)


def params_of(agents, hidden):
    k = jax.random.split(jax.random.key(0))
    actor = c.mlp_params(k[0], (SEEN + agents, hidden, hidden, ACTIONS))
    return {"actor": actor, "critic": c.mlp_params(k[1], (size_of(agents), hidden, hidden, 1))}


def seen_by(agents, x):
    """What each agent sees of a state ``x[..., n]``: a part of it, and which agent it is."""
    parts = jnp.stack([jnp.roll(x, -SHIFT * i, -1)[..., :SEEN] for i in range(agents)], -2)
    names = jnp.broadcast_to(jnp.eye(agents), (*x.shape[:-1], agents, agents))
    return jnp.concatenate([parts, names], -1)


def actors(p, agents, x):
    """Logits ``[..., agents, ACTIONS]``."""
    return c.mlp(p["actor"], seen_by(agents, x))


def actors_as_one(p, agents, x):
    """The first layers of all agents as one product with the state: each reads some of its rows, and has its own bias."""
    first, *rest = p["actor"]
    padded = jnp.zeros((x.shape[-1], first["w"].shape[1])).at[:SEEN].set(first["w"][:SEEN])
    from_state = [jnp.roll(padded, SHIFT * i, 0) for i in range(agents)]
    bias = (first["b"] + first["w"][SEEN:]).reshape(-1)
    h = jnp.tanh(x @ jnp.concatenate(from_state, -1) + bias)
    return c.mlp(rest, h.reshape(*x.shape[:-1], agents, -1))


def actors_in_rows(p, agents, x):
    """Agents are rows of one matrix, and which it is chooses a row of the weights."""
    first, *rest = p["actor"]
    parts = jnp.stack([jnp.roll(x, -SHIFT * i, -1)[..., :SEEN] for i in range(agents)], -2)
    h = (parts.reshape(-1, SEEN) @ first["w"][:SEEN]).reshape(*x.shape[:-1], agents, -1)
    h = h + first["w"][SEEN:] + first["b"]
    h = c.mlp(rest, jnp.tanh(h).reshape(-1, h.shape[-1]))
    return h.reshape(*x.shape[:-1], agents, ACTIONS)


def critic(p, x):
    return c.mlp(p["critic"], x)[..., 0]


def actor_loss(logits, action, old, advantage):
    """Summed over agents; ``action[..., agents]``, ``advantage[...]``."""
    log_p = jax.nn.log_softmax(logits)
    ratio, advantage = jnp.exp(c.pick(log_p, action) - old), advantage[..., None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return -(gain - ENTROPY * (jnp.exp(log_p) * log_p).sum(-1)).sum(-1)


def program(agents):
    drift = drift_of(agents)

    def mappo(p, state, t):
        x = state["x"]
        logits, v = actors(p, agents, x), critic(p, x)
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = drift(t.key_for("env"), state, action)
        value = rlfx.series(v)
        gained = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
        advantage = (gained - rlfx.mean(gained)) / (rlfx.std(gained) + 1e-8)
        old = stop_gradient(c.pick(jax.nn.log_softmax(logits), action))
        aim = gained + stop_gradient(v)
        return actor_loss(logits, action, old, advantage) + 0.5 * (v - aim) ** 2, state

    return mappo


def by_hand(
    length, batch, agents, acting=actors, learning=actors, late=False, once=False, flat=True, chunk=None, ahead=False
):
    """``late``: values of all timesteps after the loop; ``once``: those are the critic's only evaluation, and what its loss
    sends back is known; ``ahead``: random numbers of actions drawn before the loop."""
    drift = drift_of(agents)

    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (agents, ACTIONS)))(c.at(action_keys, t))  # noqa: E731

        def body(state, x):
            t, gumbel = x
            x = state["x"]
            logits = acting(p, agents, x)
            action = jnp.argmax(logits + (draw(t) if gumbel is None else gumbel), -1)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            old = None if once else c.pick(jax.nn.log_softmax(logits), action)
            return after, (x, action, old, None if late or once else critic(p, x), step.reward, step.terminated)

        times = jnp.arange(length)
        xs = times, jax.vmap(draw)(times) if ahead else None
        after, (x, action, old, v, reward, done) = jax.lax.scan(body, state, xs)
        last = critic(p, after["x"])
        flatten = c.rows_of if flat else lambda x: x
        judge = lambda p: critic(p, flatten(x)).reshape(length, batch)  # noqa: E731
        if once:
            v, back = jax.vjp(judge, p)
        elif late:
            v = judge(p)
        gained = c.gae(v, last, reward, done, GAMMA, LAMBDA)
        advantage = (gained - gained.mean()) / (gained.std() + 1e-8)

        def loss(p, data):
            x, action, old, advantage, aim = data
            logits = learning(p, agents, x)
            # In the first epoch the old probabilities are the new ones.
            old = stop_gradient(c.pick(jax.nn.log_softmax(logits), action)) if once else old
            found = actor_loss(logits, action, old, advantage)
            return (found if once else found + 0.5 * (critic(p, x) - aim) ** 2).sum() / (length * batch)

        data = flatten((x, action, old, advantage, gained + v))
        if chunk is None:
            found, grads = jax.value_and_grad(loss)(p, data)
        else:
            found, grads = c.summed_gradient(loss, p, c.in_chunks(data, chunk * batch))
        if once:
            found += 0.5 * (gained**2).mean()
            grads = jax.tree.map(jnp.add, grads, back(-gained / (length * batch))[0])
        return found, grads, after

    return run


def workload(length, batch, agents, hidden, chunk=4):
    make = lambda **how: by_hand(length, batch, agents, **how)  # noqa: E731
    one, rows = ({"acting": f, "learning": f} for f in (actors_as_one, actors_in_rows))
    forms = {
        "rlfx": c.by_rlfx(program(agents), length, batch), "plain": make(), "not flattened": make(flat=False),
        "values late": make(late=True), "critic once": make(once=True), "first layers as one": make(**one, late=True),
        "rows": make(**rows, late=True), f"blocks of {chunk}": make(late=True, chunk=chunk),
        f"rows, blocks of {chunk}": make(**rows, late=True, chunk=chunk),
        f"rows, critic once, blocks of {chunk}": make(**rows, once=True, chunk=chunk),
        f"rows, critic once, blocks of {chunk}, drawn ahead": make(**rows, once=True, chunk=chunk, ahead=True),
        f"first layers as one, critic once, blocks of {chunk}": make(**one, once=True, chunk=chunk),
    }  # fmt: skip
    state = c.batch_of(c.drift_reset(size_of(agents)), batch)
    return Workload(forms, (params_of(agents, hidden), state, jax.random.key(2)), tolerance=5e-6)
