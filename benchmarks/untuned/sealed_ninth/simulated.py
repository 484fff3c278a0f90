"""Short-horizon actor-critic (SHAC, Xu et al. 2022): a policy learns through a simulation that can be differentiated, masses on
springs. Its gradient ends after a window of timesteps, with the value of a target critic; the critic learns TD(lambda)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

MASSES, ACTIONS, GAMMA, LAMBDA, DT, DAMPED = 8, 4, 0.99, 0.95, 0.1, 0.3
GOAL = np.sin(np.arange(MASSES, dtype=np.float32))


def params_of(key, hidden):
    k = jax.random.split(key)
    actor = c.mlp_params(k[0], (2 * MASSES, hidden, hidden, ACTIONS))
    return {"actor": actor, "log_std": jnp.full(ACTIONS, -1.0), "critic": c.mlp_params(k[1], (2 * MASSES, hidden, hidden, 1))}


def physics(state, action):
    """What follows, and its reward; ``state[..., 2 * MASSES]`` are places and speeds of a chain between two walls."""
    x, speed = jnp.split(state, 2, -1)
    wall = jnp.zeros_like(x[..., :1])
    stretched = jnp.diff(jnp.concatenate([wall, x, wall], -1))
    force = jnp.diff(stretched + 0.3 * stretched**3) - DAMPED * speed
    pushed = jnp.stack([action, jnp.zeros_like(action)], -1).reshape(x.shape)
    speed = speed + DT * (force + 2.0 * pushed)
    x = x + DT * speed
    return jnp.concatenate([x, speed], -1), -((x - GOAL) ** 2).mean(-1) - 0.01 * (action**2).mean(-1)


def acts(p, state, noise):
    return jnp.tanh(c.mlp(p["actor"], state) + jnp.exp(p["log_std"]) * noise)


def judged(critic, state):
    return c.mlp(critic, state)[..., 0]


def program(window):
    def shac(params, state, t):
        p, target = params
        age = t.now % window
        state = jnp.where(age == 0, stop_gradient(state), state)
        after, reward = physics(state, acts(p, state, jax.random.normal(t.key_for("action"), (ACTIONS,))))
        last = jnp.where(age == window - 1, GAMMA**window * judged(target, after), 0.0)
        gained = GAMMA ** age.astype(jnp.float32) * reward + last

        seen, never = stop_gradient(state), jnp.bool_(False)
        following = rlfx.series(judged(target, seen))
        aim = rlfx.lambda_return(c.Step(stop_gradient(reward), never, never), following[t + 1], gamma=GAMMA, lam=LAMBDA)
        return 0.5 * (judged(p["critic"], seen) - aim) ** 2 - gained, after

    return shac


# -- by hand: acting, and the critic


def drawn(key, batch):
    (keys,) = c.streams(key, batch, "action")
    return lambda t: jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(c.at(keys, t))


def layers(p, state, noise):
    """What the policy's layers make, and the action."""
    first = jnp.tanh(c.linear(p["actor"][0], state))
    second = jnp.tanh(c.linear(p["actor"][1], first))
    return first, second, jnp.tanh(c.linear(p["actor"][2], second) + jnp.exp(p["log_std"]) * noise)


def aims(reward, following, unroll=1):
    """TD(lambda), from ``following``, the target critic's values at ``t + 1``."""
    delta = (reward + GAMMA * (1.0 - LAMBDA) * following).at[-1].add(GAMMA * LAMBDA * following[-1])
    return c.discounted(delta, jnp.full_like(delta, GAMMA * LAMBDA), unroll)


def critic_loss(target, states, end, reward, unroll=8):
    """Of the critic, summed; ``states[T, B, ...]``."""
    following = judged(target, c.rows_of(jnp.concatenate([states[1:], end[None]]))).reshape(reward.shape)
    aim = aims(reward, following, unroll)
    return lambda critic: 0.5 * ((judged(critic, c.rows_of(states)) - aim.reshape(-1)) ** 2).sum()


def critic_blocks(critic, target, states, end, reward, chunk):
    """The critic's value and gradient, and its target's values, some timesteps at a time."""
    following = jax.lax.map(lambda x: judged(target, c.rows_of(x)), c.in_chunks(states, chunk)).reshape(reward.shape)
    following = c.shifted(following, judged(target, end))
    aim = aims(reward, following, 8)
    loss = lambda critic, x: 0.5 * ((judged(critic, c.rows_of(x[0])) - x[1].reshape(-1)) ** 2).sum()  # noqa: E731
    return c.summed_gradient(loss, critic, c.in_chunks((states, aim), chunk))


def through(length, batch, window, nested=True, again="nothing", unroll=1, flat=True, ahead=False):
    """All is differentiated through acting; ``nested``: a loop over windows of a loop over their timesteps, else one loop.
    ``again``: what is computed again, of "nothing", a "step" and a "window"."""

    def run(p, target, state, key):
        draw, times = drawn(key, batch), jnp.arange(length)
        noise = jax.vmap(draw)(times) if ahead else None

        def loss(p):
            def body(state, given):
                t, noise = given
                age = t % window
                state = state if nested else jnp.where(age == 0, stop_gradient(state), state)
                after, reward = physics(state, acts(p, state, draw(t) if noise is None else noise))
                if nested:
                    return after, (state, reward)
                last = jnp.where(age == window - 1, GAMMA**window * judged(target, after), 0.0)
                return after, (state, reward, GAMMA ** age.astype(jnp.float32) * reward + last)

            def of_window(state, given):
                after, (states, reward) = jax.lax.scan(some, stop_gradient(state), given, unroll=unroll)
                powers = GAMMA ** jnp.arange(window, dtype=jnp.float32)
                return after, (states, reward, powers @ reward + GAMMA**window * judged(target, after))

            some = jax.checkpoint(body, prevent_cse=False) if again == "step" else body
            whole = jax.checkpoint(of_window, prevent_cse=False) if again == "window" else of_window
            if nested:
                end, found = jax.lax.scan(whole, state, c.in_chunks((times, noise), window))
                states, reward = (x.reshape(length, batch, *x.shape[3:]) for x in found[:2])
            else:
                end, found = jax.lax.scan(some, state, (times, noise), unroll=unroll)
                states, reward = found[:2]
            states, end, reward = stop_gradient((states, end, reward))
            if flat:
                of_critic = critic_loss(target, states, end, reward)(p["critic"])
            else:
                value, following = judged(p["critic"], states), c.shifted(judged(target, states), judged(target, end))
                of_critic = 0.5 * ((value - aims(reward, following)) ** 2).sum()
            return (of_critic - found[2].sum()) / (length * batch), end

        (found, end), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, end

    return run


# -- by hand: windows side by side, ``[window, windows * B, ...]``, after acting


def beside(x, window):
    """``[T, B, ...]``; that windows are independent once their states are known."""
    x = jnp.moveaxis(x.reshape(-1, window, *x.shape[1:]), 0, 1)
    return x.reshape(window, -1, *x.shape[3:])


def differentiated(p, target, states, noise, kept, unroll, again=False):
    """The gain of all windows, and its gradient by automatic differentiation, timestep by timestep."""
    window = len(states)

    def loss(p):
        def body(state, noise):
            return physics(state, acts(p, state, noise))

        some = jax.checkpoint(body, prevent_cse=False) if again else body
        after, reward = jax.lax.scan(some, states[0], noise, unroll=unroll)
        powers = GAMMA ** np.arange(window, dtype=np.float32)
        return (powers @ reward).sum() + GAMMA**window * judged(target, after).sum()

    gained, grads = jax.value_and_grad(loss)({name: p[name] for name in ("actor", "log_std")})
    return gained, grads


def weights_after(p, target, states, noise, kept, unroll, ends=None, reward=None):
    """The way back goes over what was kept, and gradients of weights are contracted after it, of all timesteps at once."""
    first, second, action = kept
    window, (one, two, three) = len(states), (layer["w"] for layer in p["actor"])
    powers, turned = GAMMA ** jnp.arange(window, dtype=jnp.float32), (one.T, two.T, three.T)

    def body(by, given):
        state, first, second, action, power = given
        slopes = jax.vjp(physics, state, action)[1]((by, jnp.full(action.shape[:1], power)))
        by_made = slopes[1] * (1.0 - action * action)
        by_second = (by_made @ turned[2]) * (1.0 - second * second)
        by_first = (by_second @ turned[1]) * (1.0 - first * first)
        return slopes[0] + by_first @ turned[0], (by_first, by_second, by_made)

    last, back = jax.vjp(lambda state: judged(target, state), ends)
    by = back(jnp.full_like(last, GAMMA**window))[0]
    found = jax.lax.scan(body, by, (states, first, second, action, powers), reverse=True, unroll=unroll)[1]
    found = c.rows_of(found)
    pairs = zip(c.rows_of((states, first, second)), found, strict=True)
    actor = [{"w": x.T @ by, "b": by.sum(0)} for x, by in pairs]
    log_std = jnp.exp(p["log_std"]) * (found[2] * c.rows_of(noise)).sum(0)
    return (powers @ reward).sum() + GAMMA**window * last.sum(), {"actor": actor, "log_std": log_std}


def side_by_side(
    length, batch, window, learn=weights_after, keep=True, unroll=1, acting_unroll=1, chunk=None, ahead=True
):  # fmt: skip
    """``keep``: acting keeps the policy's layers, which are else made again of all timesteps at once; ``chunk``: timesteps of
    a block of the critic."""

    def run(p, target, state, key):
        draw, times = drawn(key, batch), jnp.arange(length)

        def body(state, given):
            t, noise = given
            noise = draw(t) if noise is None else noise
            made = layers(p, state, noise)
            after, reward = physics(state, made[-1])
            return after, (state, reward, noise, made if keep else made[-1])

        given = times, jax.vmap(draw)(times) if ahead else None
        end, (states, reward, noise, kept) = jax.lax.scan(body, state, given, unroll=acting_unroll)
        cut = lambda x: beside(x, window)  # noqa: E731
        how = {"ends": cut(jnp.concatenate([states[1:], end[None]]))[-1], "reward": cut(reward)}
        if learn is not weights_after:
            how = {}
        elif not keep:
            kept = layers(p, states, noise)
        gained, grads = learn(p, target, cut(states), cut(noise), jax.tree.map(cut, kept), unroll, **how)
        if chunk is None:
            loss, critic = jax.value_and_grad(critic_loss(target, states, end, reward))(p["critic"])
        else:
            loss, critic = critic_blocks(p["critic"], target, states, end, reward, chunk)
        grads = jax.tree.map(jnp.negative, grads) | {"critic": critic}
        return (loss - gained) / (length * batch), jax.tree.map(lambda x: x / (length * batch), grads), end

    return run


def workload(length, batch, window, hidden, chunk=64):
    make = functools.partial(through, length, batch, window)
    side = functools.partial(side_by_side, length, batch, window)
    auto, remade = functools.partial(side, learn=differentiated, keep=False), functools.partial(differentiated, again=True)
    some, ahead = {"chunk": chunk}, {"ahead": True}
    forms = {
        "rlfx": c.actor_by_rlfx(program(window), length, batch), "plain": make(flat=False), "one loop": make(nested=False),
        "rows": make(), "unrolled by 2": make(unroll=2), "unrolled by 4": make(unroll=4, **ahead),
        "steps again": make(again="step"), "windows again": make(again="window"), "drawn ahead": make(**ahead),
        "windows again, drawn ahead, unrolled by 2": make(again="window", unroll=2, **ahead),
        "side by side": auto(), "side by side, drawn within": auto(ahead=False), "side by side, unrolled by 4": auto(unroll=4),
        "side by side, again": side(learn=remade, keep=False), "weights after": side(),
        "weights after, made again": side(keep=False), f"weights after, critic in blocks of {chunk}": side(**some),
        "weights after, unrolled by 2": side(unroll=2), "weights after, all unrolled by 4": side(unroll=4, acting_unroll=4),
        f"weights after, made again, critic in blocks of {chunk}": side(keep=False, **some),
        "rows, threefry unrolled": make(), "side by side, threefry unrolled": auto(),
        "drawn ahead, threefry unrolled": make(**ahead), "weights after, threefry unrolled": side(),
        "weights after, drawn within, threefry unrolled": side(ahead=False),
        "weights after, made again, threefry unrolled": side(keep=False),
        f"weights after, critic in blocks of {chunk}, threefry unrolled": side(**some),
        "weights after, acting unrolled by 2, threefry unrolled": side(acting_unroll=2),
        "weights after, all unrolled by 4, threefry unrolled": side(unroll=4, acting_unroll=4),
        f"weights after, all unrolled by 4, critic in blocks of {chunk}, threefry unrolled": side(
            unroll=4, acting_unroll=4, **some
        ),
        f"weights after, acting unrolled by 8, critic in blocks of {chunk}, threefry unrolled": side(acting_unroll=8, **some),
        f"side by side, acting unrolled by 4, critic in blocks of {chunk}, threefry unrolled": auto(acting_unroll=4, **some),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    state = 0.5 * jax.random.normal(k[0], (batch, 2 * MASSES))
    given = params_of(k[1], hidden), params_of(k[2], hidden)["critic"], state
    return drawing(forms, given, tolerance=2e-5)
