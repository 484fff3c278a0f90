"""Programs that act in `rlfx.envs`, or that act inside of a timestep: A2C, the same with a GRU that sees no velocities,
planning by MPPI, evolution strategies."""

from __future__ import annotations

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.ordinary.parts import gru, gru_params, nets, value_of

GAMMA = 0.99


def begun(env, batch):
    return jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), batch))


# -- A2C on CartPole: acts, and learns from what it did; truncations have a value


def a2c_program(env):
    def a2c(p, state, t):
        obs = env.observe(state)
        logits, value = c.mlp(p["pi"], obs), value_of(p, obs)
        action = jax.random.categorical(t.key_for("action"), logits)
        state, step = env.step(t.key_for("env"), state, action)
        following = rlfx.next_value(lambda obs: value_of(p, obs), step, value)
        advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=0.95))
        target = advantage + stop_gradient(value)
        log_p = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_p) * log_p).sum()
        return 0.5 * (value - target) ** 2 - log_p[action] * advantage - 0.01 * entropy, state

    return a2c


def a2c_plain(env, length, batch):
    def run(p, state, key):
        env_keys, action_keys = c.streams(key, batch, "env", "action")

        def act(state, t):
            obs = jax.vmap(env.observe)(state)
            action = c.categorical(c.at(action_keys, t), c.mlp(p["pi"], obs))
            state, step = jax.vmap(env.step)(c.at(env_keys, t), state, action)
            return state, (obs, action, step)

        state, (obs, action, step) = jax.lax.scan(act, state, jnp.arange(length))
        last = jax.vmap(env.observe)(state)

        def loss(p):
            logits, value = c.mlp(p["pi"], obs), value_of(p, obs)
            following = c.shifted(value, value_of(p, last))
            following = jnp.where(step.truncated & ~step.terminated, value_of(p, step.final_obs), following)
            done = step.terminated | step.truncated
            delta = step.reward + GAMMA * (1.0 - step.terminated) * following - value
            advantage = stop_gradient(c.discounted(delta, GAMMA * 0.95 * (1.0 - done)))
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, value, log_prob, advantage, stop_gradient(advantage + value)).mean()

        return *jax.value_and_grad(loss)(p), state

    return run


def compared(result):
    """The value, the gradient, and where the environments are."""
    loss, grads, state = result
    return (
        loss,
        grads,
        jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state),
    )


def a2c(length, batch, hidden):
    env = rlfx.envs.make("CartPole-v1")
    p = nets(jax.random.key(0), 4, hidden, 2)
    forms = {"rlfx": c.by_rlfx(a2c_program(env), length, batch), "plain": a2c_plain(env, length, batch)}
    return drawing(forms, (p, begun(env, batch)), compared=compared)


# -- A2C with a GRU that sees no velocities: the loss is differentiated through the memory


def memory_params(key, hidden):
    k = jax.random.split(key, 3)
    return {"gru": gru_params(k[0], 2, hidden), "pi": c.dense(k[1], hidden, 2), "v": c.dense(k[2], hidden, 1)}


def memory_program(env):
    def program(p, carry, t):
        state, h = carry
        h = gru(p["gru"], h, env.observe(state)[jnp.array([0, 2])])
        logits, value = c.linear(p["pi"], h), c.linear(p["v"], h)[0]
        action = jax.random.categorical(t.key_for("action"), logits)
        state, step = env.step(t.key_for("env"), state, action)
        reward, discount = rlfx.series(step.reward), rlfx.series(jnp.where(step.done, 0.0, GAMMA))
        returns = rlfx.discounted_sum(reward[t:], discount[t:])
        log_p = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_p) * log_p).sum()
        loss = 0.5 * (value - returns) ** 2 - log_p[action] * stop_gradient(returns - value) - 0.01 * entropy
        return loss, (state, jnp.where(step.done, 0.0, h))

    return program


def memory_plain(env, length, batch):
    def run(p, carry, key):
        env_keys, action_keys = c.streams(key, batch, "env", "action")

        def loss(p):
            def act(carry, t):
                state, h = carry
                h = gru(p["gru"], h, jax.vmap(env.observe)(state)[:, jnp.array([0, 2])])
                logits = c.linear(p["pi"], h)
                action = c.categorical(c.at(action_keys, t), logits)
                state, step = jax.vmap(env.step)(c.at(env_keys, t), state, action)
                done = step.terminated | step.truncated
                return (state, jnp.where(done[:, None], 0.0, h)), (h, logits, action, step.reward, done)

            after, (h, logits, action, reward, done) = jax.lax.scan(act, carry, jnp.arange(length))
            value = c.linear(p["v"], h)[..., 0]
            returns = c.discounted(reward, jnp.where(done, 0.0, GAMMA))
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            advantage = stop_gradient(returns - value)
            return c.actor_critic_loss(logits, value, log_prob, advantage, returns).mean(), after

        (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, after

    return run


def memory(length, batch, hidden):
    env = rlfx.envs.make("CartPole-v1")
    p = memory_params(jax.random.key(0), hidden)
    forms = {"rlfx": c.by_rlfx(memory_program(env), length, batch), "plain": memory_plain(env, length, batch)}
    return drawing(forms, (p, (begun(env, batch), jnp.zeros((batch, hidden)))), compared=compared)


# -- MPPI: at every timestep, rollouts of a learned model by noisy plans; the plan is their mean by a softmax of returns

OBS, DIMS = 3, 1


def planned(p, obs, plan, noise):
    """Of one environment: the new plan ``[horizon, DIMS]``; ``noise[samples, horizon, DIMS]``."""
    actions = jnp.clip(plan + 0.5 * noise, -1.0, 1.0)

    def body(state, action):
        """Of all samples."""
        change = c.mlp(p, jnp.concatenate([state, action], -1))
        state = state + change[:, :OBS]
        return state, change[:, OBS]

    start = jnp.broadcast_to(obs, (len(noise), OBS))
    _, reward = jax.lax.scan(body, start, jnp.moveaxis(actions, 1, 0))
    weight = jax.nn.softmax(reward.sum(0) / 0.5)
    return jnp.einsum("s,shd->hd", weight, actions)


def moved_on(plan):
    return jnp.concatenate([plan[1:], jnp.zeros_like(plan[:1])])


def mppi_program(env, samples, horizon):
    def program(p, carry, t):
        state, plan = carry
        plan = planned(p, env.observe(state), plan, jax.random.normal(t.key_for("plan"), (samples, horizon, DIMS)))
        state, step = env.step(t.key_for("env"), state, plan[0])
        return (state, moved_on(plan)), (step.reward, plan[0])

    return program


def mppi_plain(env, length, batch, samples, horizon):
    def run(p, carry, key):
        env_keys, plan_keys = c.streams(key, batch, "env", "plan")

        def act(carry, t):
            state, plan = carry
            noise = jax.vmap(lambda k: jax.random.normal(k, (samples, horizon, DIMS)))(c.at(plan_keys, t))
            plan = jax.vmap(planned, (None, 0, 0, 0))(p, jax.vmap(env.observe)(state), plan, noise)
            state, step = jax.vmap(env.step)(c.at(env_keys, t), state, plan[:, 0])
            return (state, jax.vmap(moved_on)(plan)), (step.reward, plan[:, 0])

        return jax.lax.scan(act, carry, jnp.arange(length))

    return run


def mppi(length, batch, hidden, samples, horizon):
    env = rlfx.envs.rescale_action(rlfx.envs.make("Pendulum-v1"))
    p = c.mlp_params(jax.random.key(0), (OBS + DIMS, hidden, hidden, OBS + 1))
    by_rlfx = rlfx.unroll(mppi_program(env, samples, horizon), length=length, batch=batch)
    forms = {"rlfx": by_rlfx, "plain": mppi_plain(env, length, batch, samples, horizon)}
    given = p, (begun(env, batch), jnp.zeros((batch, horizon, DIMS)))
    return drawing(forms, given, compared=lambda result: result[1])


# -- evolution strategies: the slope of the mean return, by mirrored members of a population, each in environments of its own


def returns_program(env):
    def act(p, state, t):
        action = jnp.tanh(c.mlp(p, env.observe(state)))
        state, step = env.step(t.key_for("env"), state, action)
        return state, step.reward

    return act


def strategies(env, mean_return, members):
    def run(p, state, key):
        flat, unflat = jax.flatten_util.ravel_pytree(p)
        noise = jax.random.normal(jax.random.key(7), (members // 2, flat.size))
        both = jnp.concatenate([noise, -noise])
        found = jax.vmap(lambda x: mean_return(unflat(flat + 0.1 * x), state, key))(both)
        scores = (found - found.mean()) / (found.std() + 1e-6)
        return found, unflat(scores @ both / (0.1 * members))

    return run


def evolution(length, batch, hidden, members):
    env = rlfx.envs.rescale_action(rlfx.envs.make("Pendulum-v1"))
    rollout = rlfx.unroll(returns_program(env), length=length, batch=batch)

    def plain(p, state, key):
        (env_keys,) = c.streams(key, batch, "env")

        def act(state, t):
            action = jnp.tanh(c.mlp(p, jax.vmap(env.observe)(state)))
            state, step = jax.vmap(env.step)(c.at(env_keys, t), state, action)
            return state, step.reward

        return jax.lax.scan(act, state, jnp.arange(length))[1].sum(0).mean()

    by_rlfx = lambda p, state, key: rollout(p, state, key)[1].sum(0).mean()  # noqa: E731
    forms = {name: strategies(env, fn, members) for name, fn in {"rlfx": by_rlfx, "plain": plain}.items()}
    return drawing(forms, (c.mlp_params(jax.random.key(0), (OBS, hidden, hidden, DIMS)), begun(env, batch)))
