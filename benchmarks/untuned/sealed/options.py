"""Option-critic: a few options, each a policy with a condition of its own end; tiny networks and thousands of environments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, EXPLORE, MARGIN = 6, 3, 0.99, 0.9, 0.1, 0.02
HEADS = "q", "beta", "pi"
drift = c.drift_step(OBS, 40)


def params_of(options, hidden):
    k = jax.random.split(jax.random.key(0), 4)
    sizes = {"q": options, "beta": options, "pi": options * ACTIONS}
    heads = {name: c.dense(key, hidden, n) for key, (name, n) in zip(k[1:], sizes.items(), strict=True)}
    return heads | {"body": c.mlp_params(k[0], (OBS, hidden, hidden))}


def net(p, obs):
    """Of each option its value, the probability that it ends here, and its policy's logits."""
    h = jnp.tanh(c.mlp(p["body"], obs))
    logits = c.linear(p["pi"], h)
    return c.linear(p["q"], h), jax.nn.sigmoid(c.linear(p["beta"], h)), logits.reshape(*logits.shape[:-1], -1, ACTIONS)


def joined(p, obs):
    """The three heads as one product."""
    h = jnp.tanh(c.mlp(p["body"], obs))
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name] for name in HEADS))
    options = p["q"]["b"].shape[0]
    q, beta, logits = jnp.split(c.linear(both, h), (options, 2 * options), -1)
    return q, jax.nn.sigmoid(beta), logits.reshape(*logits.shape[:-1], options, ACTIONS)


def features_first(p, obs):
    """For ``obs[N, OBS]``: the rows of a batch are innermost, and the heads are one product."""
    x = obs.T
    for layer in p["body"]:
        x = jnp.tanh(layer["w"].T @ x + layer["b"][:, None])
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name] for name in HEADS))
    options = p["q"]["b"].shape[0]
    q, beta, logits = jnp.split(both["w"].T @ x + both["b"][:, None], (options, 2 * options))
    return q.T, jax.nn.sigmoid(beta).T, jnp.moveaxis(logits.reshape(options, ACTIONS, -1), -1, 0)


def point_loss(q, beta, logits, given):
    """Of one point, or of rows: the option and the one before it, the action, the return, whether none was in force."""
    option, old, action, aim, begins = given
    value = c.pick(q, option)
    log_p = jax.nn.log_softmax(jnp.take_along_axis(logits, option[..., None, None], -2)[..., 0, :])
    gain = c.pick(log_p, action) * stop_gradient(aim - value) - 0.01 * (jnp.exp(log_p) * log_p).sum(-1)
    worse = stop_gradient(c.pick(q, old) - q.max(-1) + MARGIN)
    return 0.5 * (value - aim) ** 2 - gain + jnp.where(begins, 0.0, c.pick(beta, old) * worse)


def program(p, carry, t):
    state, old, begins = carry
    q, beta, logits = net(p, state["x"])
    left = begins | (jax.random.uniform(t.key_for("leave")) < beta[old])
    best = jnp.argmax(q)
    chosen = jnp.where(
        jax.random.uniform(t.key_for("explore")) < EXPLORE,
        jax.random.randint(t.key_for("which"), (), 0, q.shape[0]),
        best,
    )
    option = jnp.where(left, chosen, old)
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits[option]))
    state, step = drift(t.key_for("env"), state, action)

    arrival = rlfx.series(stop_gradient((1.0 - beta[old]) * q[old] + beta[old] * q.max()))
    aim = stop_gradient(rlfx.lambda_return(step, arrival[t + 1], gamma=GAMMA, lam=LAMBDA))

    value, log_p = q[option], jax.nn.log_softmax(logits[option])
    gain = log_p[action] * stop_gradient(aim - value) - 0.01 * (jnp.exp(log_p) * log_p).sum()
    ending = jnp.where(begins, 0.0, beta[old] * stop_gradient(q[old] - q.max() + MARGIN))
    return 0.5 * (value - aim) ** 2 - gain + ending, (state, option, step.terminated)


def arrival_of(q, beta, old):
    beta = c.pick(beta, old)
    return (1.0 - beta) * c.pick(q, old) + beta * q.max(-1)


def by_hand(length, batch, acting=net, learning=net, flat=True, chunk=None, ahead=False, onepass=False, back=False):
    """``ahead``: random numbers are drawn before the loop; ``onepass``: the acting loop itself is differentiated; ``back``:
    returns, loss and gradient in one loop backwards."""

    def run(p, carry, key):
        streams = c.streams(key, batch, "leave", "explore", "which", "action", "env")
        options = p["q"]["b"].shape[0]

        def draws(t):
            leave, explore, which, action, _ = (c.at(k, t) for k in streams)
            uniform = jax.vmap(jax.random.uniform)
            which = jax.vmap(lambda k: jax.random.randint(k, (), 0, options))(which)
            return uniform(leave), uniform(explore), which, jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(action)

        def act(carry, outputs, t, drawn):
            """What follows from the network's outputs."""
            state, old, begins = carry
            q, beta, logits = jax.tree.map(stop_gradient, outputs)
            leave, explore, which, gumbel = drawn
            left = begins | (leave < c.pick(beta, old))
            option = jnp.where(left, jnp.where(explore < EXPLORE, which, jnp.argmax(q, -1)), old)
            own = jnp.take_along_axis(logits, option[:, None, None], 1)[:, 0]
            action = jnp.argmax(own + gumbel, -1)
            after, step = jax.vmap(drift)(c.at(streams[-1], t), state, action)
            return (after, option, step.terminated), (step, (option, old, action, begins), arrival_of(q, beta, old))

        times = jnp.arange(length)
        xs = times, jax.vmap(draws)(times) if ahead else None

        def acted(p):
            def body(carry, x):
                t, drawn = x
                outputs = acting(p, carry[0]["x"])
                after, (step, made, arrival) = act(carry, outputs, t, draws(t) if drawn is None else drawn)
                kept = outputs if onepass else carry[0]["x"]
                return after, (kept, made, step.reward, step.terminated, arrival)

            return jax.lax.scan(body, carry, xs)

        def last_of(p, after):
            q, beta, _ = acting(stop_gradient(p), after[0]["x"])
            return arrival_of(q, beta, after[1])

        def aims(reward, done, arrival, last):
            # G = r + going ((1 - lam) v' + lam G'), and v' in place of G' at the end
            going, following = GAMMA * (1.0 - done.astype(jnp.float32)), c.shifted(arrival, last)
            delta = (reward + going * (1.0 - LAMBDA) * following).at[-1].add(going[-1] * LAMBDA * last)
            return c.discounted(delta, going * LAMBDA)

        if onepass:

            def whole(p):
                after, (outputs, (option, old, action, begins), reward, done, arrival) = acted(p)
                aim = aims(reward, done, arrival, last_of(p, after))
                return point_loss(*outputs, (option, old, action, aim, begins)).mean(), after

            (found, after), grads = jax.value_and_grad(whole, has_aux=True)(p)
            return found, grads, after

        after, (obs, (option, old, action, begins), reward, done, arrival) = acted(p)

        def loss(p, data):
            obs, *given = data
            return point_loss(*learning(p, obs), given).sum() / (length * batch)

        if back:
            return *backwards(
                p, loss, (obs, option, old, action, begins), reward, done, arrival, last_of(p, after)
            ), after
        data = obs, option, old, action, aims(reward, done, arrival, last_of(p, after)), begins
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def backwards(p, loss, made, reward, done, arrival, last):
    """The return of a timestep and, at once, the gradient of its loss."""

    def body(state, x):
        aim, following, total = state
        (obs, option, old, action, begins), reward, done, arrival = x
        going = GAMMA * (1.0 - done.astype(jnp.float32))
        aim = reward + going * ((1.0 - LAMBDA) * following + LAMBDA * aim)
        found = jax.value_and_grad(loss)(p, (obs, option, old, action, aim, begins))
        return (aim, arrival, jax.tree.map(jnp.add, total, found)), None

    total = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
    return jax.lax.scan(body, (last, last, total), (made, reward, done, arrival), reverse=True)[0][2]


def workload(length, batch, options, hidden, chunk=4):
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    heads, first = ({"acting": f, "learning": f} for f in (joined, features_first))
    forms = {
        "rlfx": c.by_rlfx(program, length, batch), "plain": make(), "not flattened": make(flat=False),
        "heads joined": make(**heads),
        f"heads joined, blocks of {chunk}": make(**heads, chunk=chunk),
        "heads joined, blocks of 1": make(**heads, chunk=1), "one pass, heads joined": make(**heads, onepass=True),
        "features first": make(**first), "features first, blocks of 1": make(**first, chunk=1),
        "features first, blocks of 1, drawn ahead": make(**first, chunk=1, ahead=True),
        "features first, one pass": make(**first, onepass=True), "features first, back": make(**first, back=True),
        "features first learns, blocks of 1": make(acting=joined, learning=features_first, chunk=1),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(2))
    state = c.batch_of(c.drift_reset(OBS), batch)
    start = state, jax.random.randint(k[0], (batch,), 0, options), jnp.asarray(np.arange(batch) % 2 == 0)
    return Workload(forms, (params_of(options, hidden), start, k[1]), tolerance=5e-6)
