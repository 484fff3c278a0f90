"""COMA (Foerster et al. 2018): agents that share an actor, and a critic of the whole state, which for every agent values all of
its actions beside what the others did. An agent's advantage is over its own other actions; the critic learns TD(lambda) of a
target network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed import agents as a

ACTIONS, GAMMA, LAMBDA, ENTROPY = a.ACTIONS, 0.99, 0.8, 0.01


def params_of(key, agents, hidden):
    k = jax.random.split(key)
    seen = a.size_of(agents) + agents * ACTIONS + agents
    return {
        "actor": c.mlp_params(k[0], (a.SEEN + agents, hidden, hidden, ACTIONS)),
        "critic": c.mlp_params(k[1], (seen, hidden, hidden, ACTIONS)),
    }


def judged(p, agents, x, action):
    """Of every agent's own actions, ``[..., agents, ACTIONS]``: it sees the state, what the others did, and which one it is."""
    others = jax.nn.one_hot(action, ACTIONS)[..., None, :, :] * (1.0 - jnp.eye(agents))[..., None]
    every = lambda y: jnp.broadcast_to(y, (*x.shape[:-1], agents, y.shape[-1]))  # noqa: E731
    seen = every(x[..., None, :]), others.reshape(*x.shape[:-1], agents, -1), every(jnp.eye(agents))
    return c.mlp(p["critic"], jnp.concatenate(seen, -1))


def point_loss(logits, q, action, aim):
    """Summed over agents; ``logits, q[..., agents, ACTIONS]``."""
    log_p = jax.nn.log_softmax(logits)
    share, taken = jnp.exp(log_p), c.pick(q, action)
    advantage = stop_gradient(taken - (share * q).sum(-1))
    entropy = -(share * log_p).sum(-1)
    return (0.5 * (taken - aim) ** 2 - c.pick(log_p, action) * advantage - ENTROPY * entropy).sum(-1)


def program(agents):
    drift = a.drift_of(agents)

    def coma(params, state, t):
        p, target = params
        x = state["x"]
        logits = a.actors(p, agents, x)
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        following = rlfx.series(stop_gradient(c.pick(judged(target, agents, x, action), action)))
        state, step = drift(t.key_for("env"), state, action)
        aim = rlfx.lambda_return(step, following[t + 1], gamma=GAMMA, lam=LAMBDA)
        return point_loss(logits, judged(p, agents, x, action), action, aim), state

    return coma


# -- by hand: the critic of ``x[N, n], action[N, agents]``


def outermost(critic):
    """Agents are outermost in what ``critic`` gives: they become the last but one axis."""
    return lambda p, agents, x, action: jnp.swapaxes(critic(p, agents, x, action), 0, 1)


def all_rows(p, agents, x, action):
    """Agents are rows of one matrix, and outermost: ``[agents, N, ACTIONS]``."""
    own = jnp.eye(agents)[:, None, :, None]
    others = jax.nn.one_hot(action, ACTIONS) * (1.0 - own)  # [agents, N, agents, ACTIONS]
    seen = jnp.broadcast_to(x, (agents, *x.shape)), others.reshape(agents, len(x), -1)
    seen = jnp.concatenate([*seen, jnp.broadcast_to(own[..., 0], (agents, len(x), agents))], -1)
    return c.mlp(p["critic"], seen.reshape(agents * len(x), -1)).reshape(agents, len(x), ACTIONS)


def parts_of(p, agents, x):
    first, *rest = p["critic"]
    ends = x.shape[-1], x.shape[-1] + agents * ACTIONS
    return *jnp.split(first["w"], ends), first["b"], rest


def without_own(p, agents, x, action):
    """The state and all actions are multiplied once for all agents, of which each takes off what is its own."""
    of_state, of_actions, of_agent, b, rest = parts_of(p, agents, x)
    hot = jax.nn.one_hot(action, ACTIONS)
    both = jnp.concatenate([x, hot.reshape(len(x), -1)], -1) @ jnp.concatenate([of_state, of_actions]) + b
    own = jnp.einsum("nia,iah->nih", hot, of_actions.reshape(agents, ACTIONS, -1))
    h = jnp.tanh(both[:, None] - own + of_agent)
    return c.mlp(rest, h.reshape(-1, h.shape[-1])).reshape(len(x), agents, ACTIONS)


def first_as_one(p, agents, x, action):
    """All agents' first layers are columns of one product, with zeros for an agent's own action."""
    of_state, of_actions, of_agent, b, rest = parts_of(p, agents, x)
    others = of_actions.reshape(agents, ACTIONS, 1, -1) * (1.0 - jnp.eye(agents))[:, None, :, None]
    w = jnp.concatenate([jnp.tile(of_state, (1, agents)), others.reshape(agents * ACTIONS, -1)])
    seen = jnp.concatenate([x, jax.nn.one_hot(action, ACTIONS).reshape(len(x), -1)], -1)
    h = jnp.tanh(seen @ w + (of_agent + b).reshape(-1))
    return c.mlp(rest, h.reshape(-1, b.shape[0])).reshape(len(x), agents, ACTIONS)


def one_by_one(p, agents, x, action):
    """An agent after the other takes off its own; they are outermost: ``[agents, N, ACTIONS]``."""
    of_state, of_actions, of_agent, b, rest = parts_of(p, agents, x)
    hot = jax.nn.one_hot(action, ACTIONS)
    both = jnp.concatenate([x, hot.reshape(len(x), -1)], -1) @ jnp.concatenate([of_state, of_actions]) + b
    own = [hot[:, i] @ of_actions[i * ACTIONS : (i + 1) * ACTIONS] for i in range(agents)]
    h = jnp.concatenate([jnp.tanh(both - own[i] + of_agent[i]) for i in range(agents)])
    return c.mlp(rest, h).reshape(agents, len(x), ACTIONS)


in_rows, agents_first = outermost(all_rows), outermost(one_by_one)


def actors_outermost(p, agents, x):
    """``[agents, N, ACTIONS]``."""
    first, *rest = p["actor"]
    parts = jnp.concatenate([jnp.roll(x, -a.SHIFT * i, -1)[..., : a.SEEN] for i in range(agents)])
    h = (parts @ first["w"][: a.SEEN]).reshape(agents, len(x), -1) + (first["w"][a.SEEN :] + first["b"])[:, None]
    return c.mlp(rest, jnp.tanh(h).reshape(parts.shape[0], -1)).reshape(agents, len(x), ACTIONS)


def critic_columns(p, agents, x, action):
    """Rows innermost."""
    of_state, of_actions, of_agent, b, rest = parts_of(p, agents, x)
    hot = jax.nn.one_hot(action.T, ACTIONS, axis=1)  # [agents, ACTIONS, N]
    seen = jnp.concatenate([x.T, hot.reshape(agents * ACTIONS, -1)])
    both = jnp.concatenate([of_state, of_actions]).T @ seen + b[:, None]
    own = jnp.stack([of_actions[i * ACTIONS : (i + 1) * ACTIONS].T @ hot[i] for i in range(agents)], 1)
    h = jnp.tanh(both[:, None] - own + of_agent.T[..., None])  # [hidden, agents, N]
    return c.columns(rest, h.reshape(len(h), -1)).reshape(ACTIONS, agents, -1).transpose(2, 1, 0)


def actor_columns(p, agents, x):
    first, *rest = p["actor"]
    parts = jnp.stack([jnp.roll(x, -a.SHIFT * i, -1)[..., : a.SEEN] for i in range(agents)])
    bias = (first["w"][a.SEEN :] + first["b"]).T[..., None]
    h = first["w"][: a.SEEN].T @ parts.reshape(-1, a.SEEN).T
    h = jnp.tanh(h.reshape(len(h), agents, -1) + bias)
    return c.columns(rest, h.reshape(len(h), -1)).reshape(ACTIONS, agents, -1).transpose(2, 1, 0)


# -- by hand: losses with what is picked by ones and zeros


def by_ones(logits, q, action, aim):
    log_p, hot = jax.nn.log_softmax(logits), jax.nn.one_hot(action, ACTIONS)
    share, taken = jnp.exp(log_p), (q * hot).sum(-1)
    fixed, shares = stop_gradient((q, share))
    advantage = (fixed * (hot - shares)).sum(-1, keepdims=True)
    return 0.5 * ((taken - aim) ** 2).sum(-1) - (log_p * (hot * advantage - ENTROPY * share)).sum((-2, -1))


def slopes_known(logits, q, action, aim):
    """What the loss sends back is made with it."""

    def both(logits, q):
        log_p, hot = jax.nn.log_softmax(logits), jax.nn.one_hot(action, ACTIONS)
        share, error = jnp.exp(log_p), (q * hot).sum(-1) - aim
        advantage = (q * (hot - share)).sum(-1, keepdims=True)
        mean = (share * log_p).sum(-1, keepdims=True)
        of_policy = (log_p * hot).sum(-1) * advantage[..., 0] - ENTROPY * mean[..., 0]
        slope = ENTROPY * share * (log_p - mean) - advantage * (hot - share)
        return (0.5 * error**2 - of_policy).sum(-1), (slope, hot * error[..., None])

    @jax.custom_vjp
    def loss(logits, q):
        return both(logits, q)[0]

    loss.defvjp(both, lambda slopes, by: tuple(by[..., None, None] * s for s in slopes))
    return loss(logits, q)


def by_hand(
    length, batch, agents, critic=in_rows, acting=a.actors, learning=a.actors_in_rows, loss_of=point_loss, flat=True, chunk=None,
    ahead=False, outer=False,
):  # fmt: skip
    """``chunk``: timesteps of a block, the target's too; ``ahead``: random numbers of actions are drawn before the loop;
    ``outer``: agents are outermost in what learns."""
    drift = a.drift_of(agents)

    def run(p, target, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        draw = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (agents, ACTIONS)))(c.at(action_keys, t))  # noqa: E731
        times = jnp.arange(length + 1)  # one action more, for the value after the end
        noise = jax.vmap(draw)(times) if ahead else None
        act = lambda x, t, noise: jnp.argmax(acting(p, agents, x) + (draw(t) if noise is None else noise), -1)  # noqa: E731

        def body(state, given):
            t, noise = given
            action = act(state["x"], t, noise)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (state["x"], action, step.reward, step.terminated)

        xs = jax.tree.map(lambda x: x[:length], (times, noise))
        after, (x, action, reward, done) = jax.lax.scan(body, state, xs)
        end = act(after["x"], times[-1], None if noise is None else noise[-1])
        size = length * batch if chunk is None else chunk * batch
        turned = (lambda x: jnp.swapaxes(x, 0, 1)) if outer else lambda x: x
        taken = lambda x, action: turned(c.pick(critic(target, agents, x, action), turned(action)))  # noqa: E731
        if not flat:
            of_target = taken(x, action)
        elif chunk is None:
            of_target = taken(*c.rows_of((x, action)))
        else:
            of_target = jax.lax.map(lambda given: taken(*given), c.in_chunks(c.rows_of((x, action)), size))
        following = c.shifted(of_target.reshape(length, batch, agents), taken(after["x"], end))
        decay = GAMMA * (1.0 - done.astype(jnp.float32))[..., None]
        # G = r + decay ((1 - lam) v' + lam G'), which begins with the last value.
        one_step = reward[..., None] + decay * (1.0 - LAMBDA) * following
        one_step = one_step.at[-1].add(LAMBDA * decay[-1] * following[-1])
        aim = c.discounted(one_step, jnp.broadcast_to(LAMBDA * decay, one_step.shape))

        def loss(p, data):
            x, action, aim = data
            found = loss_of(learning(p, agents, x), critic(p, agents, x, action), turned(action), turned(aim))
            return found.sum() / (length * batch)

        data = x, action, aim
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), size)), after

    return run


def workload(length, batch, agents, hidden, chunk=4):
    make = lambda critic=in_rows, **how: by_hand(length, batch, agents, critic, **how)  # noqa: E731
    own, one, turned, first = without_own, first_as_one, critic_columns, agents_first
    hot, known, some, ahead = {"loss_of": by_ones}, {"loss_of": slopes_known}, {"chunk": chunk}, {"ahead": True}
    actor, rows, cols = {"acting": a.actors_as_one}, {"acting": a.actors_in_rows}, {"learning": actor_columns}
    same = {"acting": a.actors_as_one, "learning": a.actors_as_one}
    outer = {"acting": a.actors_as_one, "learning": actors_outermost, "outer": True}
    forms = {
        "rlfx": c.actor_by_rlfx(program(agents), length, batch),
        "plain": make(judged, learning=a.actors, flat=False), "rows": make(**rows),
        "without own": make(own), "first layers as one": make(one, **same), "one by one": make(first),
        "features first": make(turned, **cols), "without own, slopes known": make(own, **known, **actor),
        "agents outermost": make(all_rows, **outer), "agents outermost, one by one": make(one_by_one, **outer),
        "agents outermost, picked by ones": make(all_rows, **hot, **outer), "drawn ahead": make(**ahead, **rows),
        f"blocks of {chunk}": make(**some, **rows),
        f"one by one, slopes known, blocks of {chunk}": make(first, **known, **some, **actor),
        f"agents outermost, one by one, slopes known, blocks of {chunk}": make(one_by_one, **known, **some, **outer),
        "features first, slopes known, threefry unrolled": make(turned, **known, **cols, **actor),
        "one by one, slopes known, drawn ahead, threefry unrolled": make(first, **known, **ahead, **actor),
        f"first layers as one, slopes known, blocks of {chunk}, threefry unrolled": make(one, **known, **some, **same),
        "agents outermost, slopes known, threefry unrolled": make(all_rows, **known, **outer),
        f"agents outermost, slopes known, blocks of {chunk}, threefry unrolled": make(all_rows, **known, **some, **outer),
        f"agents outermost, one by one, slopes known, blocks of {chunk}, threefry unrolled": make(
            one_by_one, **known, **some, **outer
        ),
        f"agents outermost, one by one, slopes known, blocks of {chunk}, drawn ahead, threefry unrolled": make(
            one_by_one, **known, **some, **outer, **ahead
        ),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = c.batch_of(c.drift_reset(a.size_of(agents)), batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, 60)
    given = params_of(k[1], agents, hidden), params_of(k[2], agents, hidden), state
    return drawing(forms, given, tolerance=1e-5)
