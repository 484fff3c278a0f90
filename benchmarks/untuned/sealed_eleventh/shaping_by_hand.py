"""LOLA by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_eleventh import shaping
from benchmarks.untuned.sealed_eleventh.shaping import (
    ACTIONS,
    AGENTS,
    GAMMA,
    PLACES,
    RATE,
    learnt_by,
    log_prob_of,
    magic_box,
    observed,
    params_of,
    reset,
    went,
)  # fmt: skip

WENT = np.array(jax.vmap(jax.vmap(went, (None, 0)), (0, None))(np.arange(PLACES), np.arange(ACTIONS)))

# -- logits ``[..., ACTIONS]`` of states ``[...]``: first what is done once for a network, and then at states


def by_ones(net):
    """Of one batch, or of rows of all timesteps."""

    def of(state):
        flat = jax.tree.map(lambda x: x.reshape(-1), state)
        return c.mlp(net, jax.vmap(observed)(flat)).reshape(*state["red"].shape, ACTIONS)

    return of


def by_rows(net):
    """Rows of the first layer's weights: what is observed is three places."""
    first, *rest = net

    def of(state):
        w, coin = first["w"], 2 * PLACES + PLACES * state["owner"] + state["coin"]
        return c.mlp(rest, jnp.tanh(w[state["red"]] + w[PLACES + state["blue"]] + w[coin] + first["b"]))

    return of


# -- games


def draws(key, batch):
    streams = c.streams(key, batch, *AGENTS, "coin")

    def of(t):
        red, blue, coin = (c.at(k, t) for k in streams)
        gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))
        return gumbel(red), gumbel(blue), jax.vmap(lambda k: jax.random.randint(k, (), 0, PLACES))(coin)

    return of


def moved(state, red_action, blue_action, coin):
    """By a table of moves."""
    red, blue, owner = jnp.asarray(WENT)[state["red"], red_action], jnp.asarray(WENT)[state["blue"], blue_action], state["owner"]
    red_takes, blue_takes = red == state["coin"], blue == state["coin"]
    taken = red_takes | blue_takes
    rewards = red_takes - 2.0 * (blue_takes & (owner == 0)), blue_takes - 2.0 * (red_takes & (owner == 1))
    after = {"red": red, "blue": blue, "coin": jnp.where(taken, coin, state["coin"])}
    return after | {"owner": jnp.where(taken, 1 - owner, owner)}, rewards


def games(red_of, blue_of, state, key, length, ahead=False, unroll=1):
    """States, actions and rewards of both ``[T, B]``; ``ahead``: all draws before the loop."""
    draw, times = draws(key, len(state["red"])), jnp.arange(length)

    def body(state, x):
        red_gumbel, blue_gumbel, coin = x if ahead else draw(x)
        actions = jnp.argmax(red_of(state) + red_gumbel, -1), jnp.argmax(blue_of(state) + blue_gumbel, -1)
        after, rewards = moved(state, *actions, coin)
        return after, (state, actions, rewards)

    xs = jax.vmap(draw)(times) if ahead else times
    return stop_gradient(jax.lax.scan(body, state, xs, unroll=unroll)[1])


def discounts(length):
    return (GAMMA ** np.arange(length, dtype=np.float32))[:, None]


def to_come(x):
    """Sums of all that follows."""
    return jnp.cumsum(x[::-1], 0)[::-1]


def to_come_by_product(x):
    return jnp.triu(jnp.ones((len(x), len(x)))) @ x


# -- differentiated twice


def through(length, batch, policy=by_rows, boxes=True, **how):
    """``boxes``: of both agents, and all by derivatives; if not, the opponent's gradient is by returns with the other one in."""
    discount, scale = discounts(length), -1.0 / (length * batch)

    def run(p, state, key):
        before, after = jax.random.split(key)

        def loss(red):
            red_of = policy(red)
            states, actions, rewards = games(red_of, policy(p["blue"]), state, before, length, **how)
            gained = discount * rewards[1]
            red_log_prob = log_prob_of(red_of(states), actions[0])
            returns = to_come(gained * magic_box(jnp.cumsum(red_log_prob, 0)))

            def opponent(blue):
                log_prob = log_prob_of(policy(blue)(states), actions[1])
                if boxes:
                    return scale * (gained * magic_box(jnp.cumsum(red_log_prob + log_prob, 0))).sum()
                return scale * (log_prob * returns).sum()

            blue = learnt_by(p["blue"], jax.grad(opponent)(p["blue"]))
            blue_of = policy(blue)
            states, actions, rewards = games(red_of, blue_of, state, after, length, **how)
            gained = discount * rewards[0]
            log_prob = log_prob_of(red_of(states), actions[0]) + log_prob_of(blue_of(states), actions[1])
            surrogate = scale * (log_prob * to_come(gained)).sum()
            return scale * gained.sum() + surrogate - stop_gradient(surrogate)

        return jax.value_and_grad(loss)(p["red"])

    return run


# -- once: what the opponent learns changes along the slope of what it plays then


def along(length, batch, policy=by_rows, joined=False, follow=to_come, **how):
    """``joined``: one gradient of the agent, of both games' points."""
    discount, scale = discounts(length), -1.0 / (length * batch)

    def run(p, state, key):
        red, blue = p["red"], p["blue"]
        before, after = jax.random.split(key)
        states, actions, rewards = games(policy(red), policy(blue), state, before, length, **how)
        gained = discount * rewards[1]

        def log_probs(blue):
            return log_prob_of(policy(blue)(states), actions[1])

        grads = jax.grad(lambda blue: scale * (log_probs(blue) * follow(gained)).sum())(blue)
        later = learnt_by(blue, grads)
        next_states, next_actions, next_rewards = games(policy(red), policy(later), state, after, length, **how)
        next_gained = discount * next_rewards[0]
        returns = follow(next_gained)

        def of_blue(blue):
            return scale * (log_prob_of(policy(blue)(next_states), next_actions[1]) * returns).sum()

        slope = jax.grad(of_blue)(later)
        turned = jax.jvp(log_probs, (blue,), (slope,))[1]
        shaping_returns = -RATE * follow(gained * jnp.cumsum(turned, 0))

        def of_red(red):
            if joined:
                both = lambda a, b: jnp.concatenate([a, b])  # noqa: E731
                log_prob = log_prob_of(policy(red)(jax.tree.map(both, states, next_states)), both(actions[0], next_actions[0]))
                return scale * (log_prob * both(shaping_returns, returns)).sum()
            first = log_prob_of(policy(red)(states), actions[0]) * shaping_returns
            return scale * (first + log_prob_of(policy(red)(next_states), next_actions[0]) * returns).sum()

        return scale * next_gained.sum(), jax.grad(of_red)(red)

    return run


# -- what acting makes of states is kept, and every derivative is written out


def evaluated(net, state):
    """Logits, and both hidden layers: of states of one timestep."""
    first, second, third = net
    w, coin = first["w"], 2 * PLACES + PLACES * state["owner"] + state["coin"]
    h = jnp.tanh(w[state["red"]] + w[PLACES + state["blue"]] + w[coin] + first["b"])
    g = jnp.tanh(c.linear(second, h))
    return c.linear(third, g), (h, g)


def games_kept(nets, state, key, length, ahead, unroll, likely_later):
    """States, actions and rewards; and of both networks hidden layers and probabilities; all of rows ``[T * B]``."""
    draw, times = draws(key, len(state["red"])), jnp.arange(length)

    def body(state, x):
        *gumbels, coin = x if ahead else draw(x)
        found = [evaluated(net, state) for net in nets]
        actions = [jnp.argmax(logits + gumbel, -1) for (logits, _), gumbel in zip(found, gumbels, strict=True)]
        after, rewards = moved(state, *actions, coin)
        outputs = [(logits if likely_later else jax.nn.softmax(logits), kept) for logits, kept in found]
        return after, (state, actions, rewards, outputs)

    xs = jax.vmap(draw)(times) if ahead else times
    states, actions, rewards, outputs = jax.lax.scan(body, state, xs, unroll=unroll)[1]
    if likely_later:
        outputs = [(jax.nn.softmax(logits), kept) for logits, kept in outputs]
    return c.rows_of(states), [x.reshape(-1) for x in actions], rewards, c.rows_of(outputs)


def slopes(by, action, likely):
    """Of logits, by those of log-probabilities ``by[N]``."""
    return by.reshape(-1, 1) * (jax.nn.one_hot(action, ACTIONS) - likely)


def back(net, states, kept, by, ones):
    """The network's gradient by slopes of its logits; ``ones``: that of its first layer by a product, not by adding up rows."""
    (h, g), (_, second, third) = kept, net
    by_g = (by @ third["w"].T) * (1.0 - g * g)
    by_h = (by_g @ second["w"].T) * (1.0 - h * h)
    if ones:
        of_first = jax.vmap(observed)(states).T @ by_h
    else:
        coin = 2 * PLACES + PLACES * states["owner"] + states["coin"]
        at = jnp.concatenate([states["red"], PLACES + states["blue"], coin])
        of_first = jnp.zeros_like(net[0]["w"]).at[at].add(jnp.concatenate([by_h] * 3))
    return [
        {"w": of_first, "b": by_h.sum(0)}, {"w": h.T @ by_g, "b": by_g.sum(0)}, {"w": g.T @ by, "b": by.sum(0)},
    ]  # fmt: skip


def forth(net, slope, states, kept, action, likely):
    """How log-probabilities ``[N]`` change along ``slope``."""
    (h, g), (_, second, third) = kept, net
    w, coin = slope[0]["w"], 2 * PLACES + PLACES * states["owner"] + states["coin"]
    by_h = (w[states["red"]] + w[PLACES + states["blue"]] + w[coin] + slope[0]["b"]) * (1.0 - h * h)
    by_g = (by_h @ second["w"] + c.linear(slope[1], h)) * (1.0 - g * g)
    by = by_g @ third["w"] + c.linear(slope[2], g)
    return c.pick(by, action) - (likely * by).sum(-1)


def kept_by_acting(length, batch, follow=to_come, ones=False, ahead=False, unroll=1, likely_later=False):
    discount, scale = discounts(length), -1.0 / (length * batch)
    play = functools.partial(games_kept, length=length, ahead=ahead, unroll=unroll, likely_later=likely_later)

    def run(p, state, key):
        red, blue = p["red"], p["blue"]
        before, after = jax.random.split(key)
        states, actions, rewards, ((red_likely, red_kept), (likely, kept)) = play((red, blue), state, before)
        gained = scale * discount * rewards[1]
        later = learnt_by(blue, back(blue, states, kept, slopes(follow(gained), actions[1], likely), ones))
        next_states, next_actions, next_rewards, (own, others) = play((red, later), state, after)
        next_gained = scale * discount * next_rewards[0]
        returns = follow(next_gained)
        slope = back(later, next_states, others[1], slopes(returns, next_actions[1], others[0]), ones)
        turned = forth(blue, slope, states, kept, actions[1], likely).reshape(length, batch)
        by = slopes(-RATE * follow(gained * jnp.cumsum(turned, 0)), actions[0], red_likely)
        next_by = slopes(returns, next_actions[0], own[0])
        first = back(red, states, red_kept, by, ones)
        second = back(red, next_states, own[1], next_by, ones)
        return next_gained.sum(), jax.tree.map(jnp.add, first, second)

    return run


def workload(length, batch, hidden):
    twice, once = functools.partial(through, length, batch), functools.partial(along, length, batch)
    kept, ahead, follow = functools.partial(kept_by_acting, length, batch), {"ahead": True}, {"follow": to_come_by_product}
    one, ones, two, late = {"policy": by_ones}, {"ones": True}, {"unroll": 2}, {"likely_later": True}
    forms = {
        "rlfx": shaping.by_rlfx(length, batch), "plain": shaping.plain(length, batch), "through, ones": twice(**one),
        "through": twice(), "through, returns": twice(boxes=False), "along, ones": once(**one), "along": once(),
        "along, joined": once(joined=True), "along, drawn ahead": once(**ahead), "kept": kept(), "kept, ones": kept(**ones),
        "kept, drawn ahead": kept(**ahead), "plain, threefry unrolled": shaping.plain(length, batch),
        "through, returns, threefry unrolled": twice(boxes=False), "along, threefry unrolled": once(),
        "along, ones, threefry unrolled": once(**one),
        "along, ones, drawn ahead, threefry unrolled": once(**one, **ahead),
        "along, joined, drawn ahead, threefry unrolled": once(joined=True, **ahead), "kept, threefry unrolled": kept(),
        "kept, ones, threefry unrolled": kept(**ones), "kept, drawn ahead, threefry unrolled": kept(**ahead),
        "kept, ones, drawn ahead, threefry unrolled": kept(**ones, **ahead),
        "kept, ones, likely later, threefry unrolled": kept(**ones, **late),
        "kept, ones, likely later, drawn ahead, threefry unrolled": kept(**ones, **ahead, **late),
        "kept, likely later, drawn ahead, threefry unrolled": kept(**ahead, **late),
        "kept, ones, products, drawn ahead, threefry unrolled": kept(**ones, **follow, **ahead),
        "kept, ones, drawn ahead, unrolled by 2, threefry unrolled": kept(**ones, **two, **ahead),
        "kept, ones, likely later, drawn ahead, unrolled by 4, threefry unrolled": kept(unroll=4, **ones, **late, **ahead),
    }  # fmt: skip
    p = params_of(jax.random.key(0), hidden)
    return drawing(forms, (p, c.batch_of(reset, batch)), tolerance=1e-4)
