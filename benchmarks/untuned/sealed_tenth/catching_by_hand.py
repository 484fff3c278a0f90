"""PQN at the game of catch by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_tenth import catching
from benchmarks.untuned.sealed_tenth.catching import (
    ACTIONS,
    CELLS,
    COLUMNS,
    EPSILON,
    ROWS,
    normed,
    params_of,
    relu,
    reset,
    targets,
)

# -- the network, of states


def cells_of(state):
    return state["row"] * COLUMNS + state["ball"], (ROWS - 1) * COLUMNS + state["paddle"]


def ones_of(state):
    """The board ``[..., CELLS]`` of states ``[...]``."""
    hot = lambda i: jax.nn.one_hot(i, CELLS)  # noqa: E731
    ball, paddle = map(hot, cells_of(state))
    return jnp.maximum(ball, paddle)


def by_moments(x):
    """Mean and mean square in one pass."""
    mean = x.mean(-1, keepdims=True)
    variance = (x * x).mean(-1, keepdims=True) - mean * mean
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


@jax.custom_vjp
def by_rule(x):
    return rule_forwards(x)[0]


def rule_forwards(x):
    mean = x.mean(-1, keepdims=True)
    rate = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-5)
    y = (x - mean) * rate
    return y, (y, rate)


def rule_backwards(kept, by):
    y, rate = kept
    return (rate * (by - by.mean(-1, keepdims=True) - y * (by * y).mean(-1, keepdims=True)),)


by_rule.defvjp(rule_forwards, rule_backwards)


def looked_up(p, state):
    """The first layer is the sum of two rows of its weights."""
    ball, paddle = cells_of(state)
    both = p[0]["w"][ball] + p[0]["w"][paddle]
    return jnp.where((ball == paddle)[..., None], 0.5 * both, both) + p[0]["b"]


def centred_weights(p):
    """Weights whose columns' mean is taken out before: what they make has no mean."""
    centre = lambda layer: jax.tree.map(lambda w: w - w.mean(-1, keepdims=True), layer)  # noqa: E731
    return [*map(centre, p[:-1]), p[-1]]


def scaled(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def with_first(first, norm):
    """A network of states ``[N]``."""

    def of(p, state):
        p = centred_weights(p) if norm is scaled else p
        x = relu(norm(first(p, state)))
        return c.linear(p[2], relu(norm(c.linear(p[1], x))))

    return of


def by_ones(p, state):
    return c.linear(p[0], ones_of(state))


def in_columns(p, state):
    """Features first, rows innermost."""

    def norm(x):
        return x * jax.lax.rsqrt((x * x).mean(0) + 1e-5)

    p = centred_weights(p)
    cells = jnp.arange(CELLS)[:, None]
    ball, paddle = cells_of(state)
    x = ((cells == ball) | (cells == paddle)).astype(jnp.float32)
    for layer in p[:-1]:
        x = relu(norm(layer["w"].T @ x + layer["b"][:, None]))
    return (p[2]["w"].T @ x + p[2]["b"][:, None]).T


usual = with_first(by_ones, normed)


# -- acting


def choices(key, batch):
    streams = c.streams(key, batch, "explores", "random", "env")

    def of(t):
        """Whether it explores and how, and where a new episode begins."""
        explores, random, env = (c.at(k, t) for k in streams)
        explores = jax.vmap(jax.random.uniform)(explores) < EPSILON
        return explores, jax.vmap(lambda k: jax.random.randint(k, (), 0, ACTIONS))(random), jax.vmap(reset)(env)

    return of


def moved(state, action, fresh):
    row, paddle = state["row"] + 1, jnp.clip(state["paddle"] + action - 1, 0, COLUMNS - 1)
    done = row == ROWS - 1
    reward = jnp.where(done, jnp.where(state["ball"] == paddle, 1.0, -1.0), 0.0)
    state = {"row": row, "ball": state["ball"], "paddle": paddle}
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, state), reward, done


def acted(p, state, key, length, net, ahead, unroll):
    """The last state, and of all timesteps: states, actions, values, rewards and ends."""
    draw, times = choices(key, len(state["row"])), jnp.arange(length)

    def body(state, x):
        explores, random, fresh = x if ahead else draw(x)
        q = net(p, state)
        action = jnp.where(explores, random, jnp.argmax(q, -1))
        after, reward, done = moved(state, action, fresh)
        return after, (state, action, q, reward, done)

    return jax.lax.scan(body, state, jax.vmap(draw)(times) if ahead else times, unroll=unroll)


# -- learning


def by_hand(length, batch, net=usual, actor=None, ahead=False, unroll=1, again=False, chunk=None, flat=True):
    """Acts, and evaluates the network of all states again; ``chunk``: of so many timesteps at once."""
    actor, learner = actor or net, jax.checkpoint(net) if again else net

    def run(p, state, key):
        end, (states, action, q, reward, done) = acted(p, state, key, length, actor, ahead, unroll)
        data = states, action, targets(p, net, end, q, reward, done)

        def loss(p, part):
            states, action, target = part
            picked = (learner(p, states) * jax.nn.one_hot(action, ACTIONS)).sum(-1)
            return (0.5 * (picked - target) ** 2).sum() / (length * batch)

        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data) if flat else data), end
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), end

    return run


def through_acting(length, batch, net=usual, ahead=False, unroll=1):
    """The loop that acts is differentiated itself."""

    def run(p, state, key):
        def loss(p):
            end, (_, action, q, reward, done) = acted(p, state, key, length, net, ahead, unroll)
            target = targets(stop_gradient(p), net, end, stop_gradient(q), reward, done)
            return (0.5 * (c.pick(q, action) - target) ** 2).mean(), end

        (found, end), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, end

    return run


def layers(first, p, state):
    """What the layers make, and the rates of their norms."""
    y, rate = rule_forwards(first(p, state))[1]
    y2, rate2 = rule_forwards(c.linear(p[1], relu(y)))[1]
    return y, rate, y2, rate2, c.linear(p[2], relu(y2))


def back(p, state, kept, by, scattered):
    """Gradients of rows, of what acting has kept."""
    y, rate, y2, rate2 = kept
    first, second = relu(y), relu(y2)
    on = rule_backwards((y2, rate2), jnp.where(y2 > 0, by @ p[2]["w"].T, 0.0))[0]
    before = rule_backwards((y, rate), jnp.where(y > 0, on @ p[1]["w"].T, 0.0))[0]
    if scattered:
        ball, paddle = cells_of(state)
        once = jnp.where((ball == paddle)[:, None], 0.0, before)
        weights = jnp.zeros_like(p[0]["w"]).at[ball].add(before).at[paddle].add(once)
    else:
        weights = ones_of(state).T @ before
    return [
        {"w": weights, "b": before.sum(0)}, {"w": first.T @ on, "b": on.sum(0)}, {"w": second.T @ by, "b": by.sum(0)},
    ]  # fmt: skip


def kept(length, batch, first=by_ones, ahead=False, unroll=1, chunk=None, scattered=False):
    """Acting keeps what its layers made: nothing is evaluated twice."""

    def run(p, state, key):
        draw, times = choices(key, batch), jnp.arange(length)

        def body(state, x):
            explores, random, fresh = x if ahead else draw(x)
            *some, q = layers(first, p, state)
            action = jnp.where(explores, random, jnp.argmax(q, -1))
            after, reward, done = moved(state, action, fresh)
            return after, (state, tuple(some), action, q, reward, done)

        end, told = jax.lax.scan(body, state, jax.vmap(draw)(times) if ahead else times, unroll=unroll)
        states, some, action, q, reward, done = told
        hot = jax.nn.one_hot(action, ACTIONS)
        apart = (q * hot).sum(-1) - targets(p, with_first(first, normed), end, q, reward, done)
        scale = 1.0 / (length * batch)
        part = c.rows_of((states, some, scale * apart[..., None] * hot))
        loss = 0.5 * scale * (apart**2).sum()
        if chunk is None:
            return loss, back(p, *part, scattered), end
        add = lambda total, part: (jax.tree.map(jnp.add, total, back(p, *part, scattered)), None)  # noqa: E731
        grads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), c.in_chunks(part, chunk * batch))[0]
        return loss, grads, end

    return run


def workload(length, batch, hidden, chunk=8):
    make, keeps = functools.partial(by_hand, length, batch), functools.partial(kept, length, batch)
    through = functools.partial(through_acting, length, batch)
    moments, ruled, looked = (
        with_first(*how) for how in ((by_ones, by_moments), (by_ones, by_rule), (looked_up, by_rule))
    )
    centred, ahead, some, found = with_first(by_ones, scaled), {"ahead": True}, {"chunk": chunk}, {"first": looked_up}
    mixed = {"actor": looked}
    forms = {
        "rlfx": c.by_rlfx(catching.program, length, batch), "plain": catching.plain(length, batch), "rows": make(),
        "not flattened": make(flat=False), "by moments": make(moments), "ruled": make(ruled), "looked up": make(looked),
        "centred weights": make(centred), "features first": make(in_columns), "again": make(ruled, again=True),
        "acts by looking up": make(ruled, **mixed), "through acting": through(), "through acting, ruled": through(ruled, **ahead),
        f"ruled, blocks of {chunk}": make(ruled, **some), "kept": keeps(), "kept, looked up": keeps(**found),
        f"kept, blocks of {chunk}": keeps(**some), "kept, looked up, scattered": keeps(**found, scattered=True),
        "rows, threefry unrolled": make(), "ruled, drawn ahead, threefry unrolled": make(ruled, **ahead),
        "centred weights, drawn ahead, threefry unrolled": make(centred, **ahead),
        "features first, drawn ahead, threefry unrolled": make(in_columns, **ahead),
        f"acts by looking up, blocks of {chunk}, drawn ahead, threefry unrolled": make(ruled, **mixed, **ahead, **some),
        "kept, threefry unrolled": keeps(), "kept, drawn ahead, threefry unrolled": keeps(**ahead),
        "kept, looked up, threefry unrolled": keeps(**found),
        f"kept, looked up, scattered, blocks of {chunk}, drawn ahead, threefry unrolled": keeps(
            **found, **ahead, **some, scattered=True
        ),
        f"kept, looked up, scattered, blocks of {chunk // 2}, drawn ahead, threefry unrolled": keeps(
            **found, **ahead, chunk=chunk // 2, scattered=True
        ),
        "kept, looked up, drawn ahead, threefry unrolled": keeps(**found, **ahead),
        f"kept, looked up, blocks of {chunk}, drawn ahead, threefry unrolled": keeps(**found, **ahead, **some),
        "through acting, looked up, drawn ahead, threefry unrolled": through(looked, **ahead),
        f"kept, looked up, blocks of {chunk // 2}, drawn ahead, threefry unrolled": keeps(**found, **ahead, chunk=chunk // 2),
        "kept, looked up, drawn ahead, unrolled by 2, threefry unrolled": keeps(**found, **ahead, unroll=2),
    }  # fmt: skip
    state = c.batch_of(reset, batch)
    state["row"] = jnp.arange(batch, dtype=jnp.int32) % (ROWS - 1)
    return drawing(forms, (params_of(jax.random.key(0), hidden), state), tolerance=2e-5)
