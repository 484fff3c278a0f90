"""Model-based policy optimisation (MBPO, Janner et al. 2019): from every stored state an ensemble of probabilistic models
imagines five steps of the policy, by a random member each; soft actor-critic learns on what was imagined until it ended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, MEMBERS, HORIZON, GAMMA = 11, 3, 4, 5, 0.99
LEAST, MOST, FALLEN = -6.0, -1.0, 2.5
relu, silu = jax.nn.relu, jax.nn.silu


def params_of(key, hidden):
    k = jax.random.split(key)
    critic = lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1))  # noqa: E731
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS))
    return {"actor": actor, "critics": jax.vmap(critic)(jax.random.split(k[1])), "log_alpha": jnp.float32(-1.0)}


def models_of(key, hidden):
    """Mean and log-deviation of how observations change, and of a reward."""
    model = lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 2 * (OBS + 1)))  # noqa: E731
    return jax.vmap(model)(jax.random.split(key, MEMBERS))


def changed(obs, made, noise):
    """What the model makes next: observation, reward, and whether it ended."""
    mean, log_std = jnp.split(made, 2, -1)
    drawn = mean + jnp.exp(jnp.clip(log_std, LEAST, MOST)) * noise
    obs = obs + drawn[..., 1:]
    return obs, drawn[..., 0], jnp.abs(obs[..., 0]) > FALLEN


def imagine(p, models, obs, key):
    """The steps from an observation, ``[HORIZON, ...]``."""

    def body(carry, key):
        obs, alive = carry
        act_key, member_key, model_key = jax.random.split(key, 3)
        action, _ = c.squashed(p["actor"], obs, jax.random.normal(act_key, (ACTIONS,)))
        x = jnp.concatenate([obs, action])
        made = jax.vmap(lambda model: c.mlp(model, x, silu))(models)[jax.random.randint(member_key, (), 0, MEMBERS)]
        next_obs, reward, done = changed(obs, made, jax.random.normal(model_key, (OBS + 1,)))
        seen = {"obs": obs, "action": action, "reward": reward, "done": done, "next": next_obs, "alive": alive}
        return (next_obs, alive & ~done), seen

    return jax.lax.scan(body, (obs, jnp.bool_(True)), jax.random.split(key, HORIZON))[1]


def losses(p, old, x, noise):
    """Soft actor-critic's of transitions ``[...]``; ``noise[2, ..., ACTIONS]``."""
    alpha = stop_gradient(jnp.exp(p["log_alpha"]))
    action, log_prob = c.squashed(p["actor"], x["next"], noise[0])
    soft = c.mapped(old, x["next"], action).min(0) - alpha * log_prob
    target = stop_gradient(x["reward"] + GAMMA * jnp.where(x["done"], 0.0, soft))
    critic_loss = ((c.mapped(p["critics"], x["obs"], x["action"]) - target) ** 2).sum(0)
    action, log_prob = c.squashed(p["actor"], x["obs"], noise[1])
    actor_loss = alpha * log_prob - c.mapped(stop_gradient(p["critics"]), x["obs"], action).min(0)
    temperature = -p["log_alpha"] * stop_gradient(log_prob - ACTIONS)
    return jnp.where(x["alive"], critic_loss + actor_loss + temperature, 0.0)


def program(params, carry, t):
    (p, (models, old)), data = params
    x = stop_gradient(imagine(p, models, rlfx.inputs(data)[t]["obs"], t.key_for("model")))
    noise = jax.random.normal(t.key_for("noise"), (2, HORIZON, ACTIONS))
    return losses(p, old, x, noise).mean(), carry


# -- by hand, as usual


def plain(length, batch):
    def run(p, others, data, key):
        (models, old), times = others, jnp.arange(length)
        model_keys, noise_keys = (jax.vmap(lambda t, k=k: c.at(k, t))(times) for k in c.streams(key, batch, "model", "noise"))
        every = jax.vmap(jax.vmap(imagine, (None, None, 0, 0)), (None, None, 0, 0))
        x = every(p, models, data["obs"], model_keys)  # [T, B, HORIZON, ...]
        draw = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2, HORIZON, ACTIONS))))
        noise = jnp.moveaxis(draw(noise_keys), 2, 0)
        return jax.value_and_grad(lambda p: losses(p, old, x, noise).mean())(p)

    return run
