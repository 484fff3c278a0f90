"""Updates of several models, written as for one device, for benchmarks/place_stages.py. Each is (fn, state, arguments)."""

import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import rlfx

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import placed_ensemble
import ppo_cartpole
import whole_run

optimizer = optax.adam(3e-4)
KEY = jax.random.key(0)


def stepped(loss, params, opt, *args):
    value, slope = jax.value_and_grad(loss)(params, *args)
    step, opt = optimizer.update(slope, opt, params)
    return optax.apply_updates(params, step), opt, value


def ensemble(critics=6, hidden=512, batch=256):
    """REDQ: critics towards the least of two targets, and an actor."""
    state = placed_ensemble.init(KEY, critics, hidden)
    return placed_ensemble.update, state, (placed_ensemble.transitions(KEY, batch), KEY)


class WorldModel(nn.Module):
    width: int

    @nn.compact
    def __call__(self, hidden, action, obs):
        hidden, _ = nn.GRUCell(self.width)(hidden, jnp.concatenate([action, nn.Dense(self.width)(obs)], -1))
        return hidden, nn.Dense(obs.shape[-1])(nn.relu(nn.Dense(self.width)(hidden)))


class Head(nn.Module):
    width: int
    out: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.out)(nn.relu(nn.Dense(self.width)(nn.relu(nn.Dense(self.width)(x)))))


def world_model(width=512, batch=64, length=8, obs=64, actions=8, horizon=6):
    """A recurrent world model, and beside it a policy and a value that learn in what the model of before imagines."""
    model, actor, critic = WorldModel(width), Head(width, actions), Head(width, 1)
    start = jnp.zeros((batch, width))
    keys = jax.random.split(KEY, 5)
    params = [
        model.init(keys[0], start, jnp.zeros((batch, actions)), jnp.zeros((batch, obs))),
        actor.init(keys[1], start),
        critic.init(keys[2], start),
    ]

    def prediction(w, data):
        hidden, error = start, 0.0
        for action, now, following in zip(data["action"], data["obs"], data["next"], strict=True):
            hidden, seen = model.apply(w, hidden, action, now)
            error += jnp.mean((seen - following) ** 2)
        return error / length

    def imagined(w_actor, w_model, w_critic, obs):
        hidden, gain = start, 0.0
        for i in range(horizon):
            hidden, obs = model.apply(w_model, hidden, jnp.tanh(actor.apply(w_actor, hidden)), obs)
            gain += 0.99**i * critic.apply(w_critic, hidden).mean()
        return -gain

    def valued(w_critic, data):
        return jnp.mean((critic.apply(w_critic, data["latent"])[:, 0] - data["return"]) ** 2)

    def update(state, data):
        (w_model, w_actor, w_critic), opts = state
        new_model, model_opt, error = stepped(prediction, w_model, opts[0], data)
        new_actor, actor_opt, loss = stepped(imagined, w_actor, opts[1], w_model, w_critic, data["obs"][0])
        new_critic, critic_opt, _ = stepped(valued, w_critic, opts[2], data)
        return ([new_model, new_actor, new_critic], [model_opt, actor_opt, critic_opt]), (error, loss)

    seen = jax.random.normal(keys[3], (length + 1, batch, obs))
    data = {
        "obs": seen[:-1], "next": seen[1:], "action": jnp.tanh(jax.random.normal(keys[4], (length, batch, actions))),
        "latent": jnp.tanh(jax.random.normal(keys[4], (batch, width))), "return": jnp.ones(batch),
    }  # fmt: skip
    return update, (params, [optimizer.init(w) for w in params]), (data,)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=a)
        self.up, self.down = eqx.nn.Linear(width, 4 * width, key=b), eqx.nn.Linear(4 * width, width, key=c)

    def __call__(self, x, mask):
        x = x + self.attention(x, x, x, mask)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Language(eqx.Module):
    embed: jax.Array
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, vocabulary, width, depth, out, key):
        a, b, *keys = jax.random.split(key, depth + 2)
        self.embed = 0.1 * jax.random.normal(a, (vocabulary, width))
        self.blocks = [Block(width, 4, k) for k in keys]
        self.head = eqx.nn.Linear(width, out, key=b)

    def __call__(self, tokens):
        x, mask = self.embed[tokens], jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(x)


def rlhf(vocabulary=512, width=256, depth=2, batch=4, length=128):
    """PPO on tokens: actor and critic learn; the reference's log-probabilities and the reward model's score are computed."""
    made = [Language(vocabulary, width, depth, out, k)
            for out, k in zip((vocabulary, 1, vocabulary, 1), jax.random.split(KEY, 4), strict=True)]  # fmt: skip
    split = [eqx.partition(m, eqx.is_array) for m in made]
    params, static = [s[0] for s in split], [s[1] for s in split]

    def apply(i, w, tokens):
        return jax.vmap(eqx.combine(w, static[i]))(tokens)

    def log_probs(i, w, tokens):
        logits = jax.nn.log_softmax(apply(i, w, tokens)[:, :-1])
        return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]

    def update(state, frozen, data):
        (actor, critic), (actor_opt, critic_opt) = state
        tokens = data["tokens"]
        kl = data["log_prob"] - log_probs(2, frozen[0], tokens)
        score = apply(3, frozen[1], tokens)[:, -1, 0]
        reward = (-0.1 * kl).at[:, -1].add(score)
        returns = jnp.cumsum(reward[:, ::-1], axis=1)[:, ::-1]

        def critic_loss(w):
            return jnp.mean((apply(1, w, tokens)[:, :-1, 0] - returns) ** 2)

        def actor_loss(w):
            ratio = jnp.exp(log_probs(0, w, tokens) - data["log_prob"])
            gain = returns - data["value"]
            return -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain))

        critic, critic_opt, value_loss = stepped(critic_loss, critic, critic_opt)
        actor, actor_opt, loss = stepped(actor_loss, actor, actor_opt)
        return ([actor, critic], [actor_opt, critic_opt]), (loss, value_loss)

    data = {
        "tokens": jax.random.randint(KEY, (batch, length), 0, vocabulary), "value": jnp.zeros((batch, length - 1)),
        "log_prob": jnp.full((batch, length - 1), -6.0),
    }  # fmt: skip
    return update, (params[:2], [optimizer.init(w) for w in params[:2]]), (params[2:], data)


def pipeline(width=768, depth=4, micro=6, rows=64):
    """A network of two halves, and small batches that go through one after the other: the second half of one beside the first
    half of the next."""
    keys = jax.random.split(KEY, 2 * depth)
    halves = [[jax.random.normal(k, (width, width)) / width**0.5 for k in keys[i::2]] for i in range(2)]

    def half(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def loss(halves, x):
        first, second = halves
        with jax.named_scope("first"):
            x = half(first, x)
        with jax.named_scope("second"):
            return jnp.mean(half(second, x) ** 2)

    def update(halves, xs):
        slopes = [jax.grad(loss)(halves, x) for x in xs]
        return jax.tree.map(lambda w, *g: w - 1e-2 * sum(g), halves, *slopes), ()

    return update, halves, (list(jax.random.normal(KEY, (micro, rows, width))),)


def roles(envs=64, length=128):
    """Two compiled programs of rlfx: CartPole's rollout, and PPO's epochs on the rollout before it."""
    rollout = rlfx.unroll(ppo_cartpole.act, length=length, batch=envs)

    def iteration(state, key):
        agent, samples = state
        carry, (new, _) = rollout(agent.params, agent.carry, key)
        params, opt_state = whole_run.epochs((agent.params, agent.opt_state), samples, key)
        return (whole_run.Agent(params, opt_state, carry), new), ()

    agent = whole_run.init(KEY, envs)
    _, (samples, _) = jax.jit(rollout)(agent.params, agent.carry, KEY)
    return iteration, (agent, samples), (KEY,)


UPDATES = {
    "ensemble of critics": ensemble,
    "world model and policy": world_model,
    "RLHF's four models": rlhf,
    "pipeline": pipeline,
    "actor and learner": roles,
}
CONSTANT = {"RLHF's four models": (1,)}  # what stays the same from call to call
