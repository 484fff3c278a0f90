"""GRPO: a causal transformer writes a prompt's digits in order, token by token, and learns from groups of its own answers.

Notice that writing and learning are one program of one token. `keys[:t + 1]` is the cache: its length, and what attention
costs, grow with t when writing; when learning, all tokens attend at once. The batch is the group of answers to one prompt:
`over="b"` makes their rewards advantages, and `jax.vmap` goes over prompts. The reference learned before, in the same
program, which digits an answer has, and not their order; a divergence keeps the policy near to it.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient
from networks import init_mlp, mlp
from recipes import Recipe, main

import rlfx

DIGITS, PROMPT, PROMPTS, GROUP, UPDATES = 10, 6, 16, 16, 460
WIDTH, HEADS, LAYERS, BETA, LEARNING_RATE, PRETRAIN = 32, 2, 2, 0.005, 1e-3, 300
BAR = 0.95  # of the best: the share of digits in their place, greedy, of 100 prompts

LENGTH = 2 * PROMPT  # the prompt, then "=", at which the first digit of the answer is written, and the others
EQUALS = DIGITS


# -- the model: a causal transformer, of one token


def init_params(key, width=WIDTH):
    embed, *keys = jax.random.split(key, 1 + 3 * LAYERS)

    def layer(qkv, out, hidden):
        return {
            "qkv": init_mlp(qkv, (width, 3 * width)),
            "out": init_mlp(out, (width, width), 0.5),
            "mlp": init_mlp(hidden, (width, 4 * width, width), 0.5),
        }

    tokens, positions, head = jax.random.split(embed, 3)
    return {
        "token": 0.5 * jax.random.normal(tokens, (DIGITS + 1, width)),
        "position": 0.5 * jax.random.normal(positions, (LENGTH, width)),
        "layers": [layer(*keys[3 * i : 3 * i + 3]) for i in range(LAYERS)],
        "head": init_mlp(head, (width, DIGITS), 0.1),
    }


def normed(x):
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5)


def attend(layer, x, t):
    """What the heads find among the tokens so far."""
    query, key, value = mlp(layer["qkv"], x).reshape(3, HEADS, -1)
    keys, values = rlfx.series(key)[: t + 1], rlfx.series(value)[: t + 1]
    scores = jnp.einsum("thw,hw->th", keys, query) / query.shape[-1] ** 0.5
    return mlp(layer["out"], jnp.einsum("th,thw->hw", jax.nn.softmax(scores, axis=0), values).ravel())


def model(params, token, t):
    """Log-probabilities of the digit that follows, ``[DIGITS]``."""
    x = params["token"][token] + params["position"][t.now]
    for layer in params["layers"]:
        x = x + attend(layer, normed(x), t)
        x = x + mlp(layer["mlp"], normed(x))
    return jax.nn.log_softmax(mlp(params["head"], normed(x)))


# -- the programs: one token of one answer


def following(prompt, answer, t):
    """The token after this one: of the prompt, the "=", or of the answer."""
    in_prompt = jnp.where(t.now + 1 == PROMPT, EQUALS, prompt[jnp.minimum(t.now + 1, PROMPT - 1)])
    return jnp.where(writes(t), answer, in_prompt)


def writes(t):
    return t.now >= PROMPT


def wanted(prompt, t):
    """The digit that belongs here."""
    return jnp.sort(prompt)[jnp.maximum(t.now - PROMPT, 0)]


def imitate(params, token, t):
    """Learn to write the digits of the prompt in any order: each answer is a shuffle of them."""
    params, prompt, shuffled = params
    answer = shuffled[jnp.maximum(t.now - PROMPT, 0)]
    loss = -model(params, token, t)[answer]
    return jnp.where(writes(t), loss, 0.0), following(prompt, answer, t)


def grpo(params, token, t):
    """Shao et al. 2024, eq. 3 and 4, on policy: one step of learning for each group, whose ratios are 1."""
    params, reference, prompt = params
    log_probs, of_reference = model(params, token, t), stop_gradient(model(reference, token, t))
    answer = jax.random.categorical(t.key_for("token"), log_probs)

    right = jnp.where(writes(t) & (answer == wanted(prompt, t)), 1.0 / PROMPT, 0.0)
    reward = rlfx.sum(right, over="t")
    advantage = (reward - rlfx.mean(reward, over="b")) / (rlfx.std(reward, over="b") + 1e-4)

    apart = of_reference[answer] - log_probs[answer]
    divergence = jnp.exp(apart) - apart - 1.0
    loss = -log_probs[answer] * stop_gradient(advantage) + BETA * divergence
    metrics = {"reward": reward, "divergence": jnp.where(writes(t), divergence, 0.0)}
    return jnp.where(writes(t), loss, 0.0), following(prompt, answer, t), metrics


def write(params, token, t):
    """The most likely answer; whether its digits are right."""
    params, prompt = params
    answer = jnp.argmax(model(params, token, t))
    return following(prompt, answer, t), writes(t) & (answer == wanted(prompt, t))


# -- the learner


class Agent(NamedTuple):
    params: Any
    opt_state: Any
    reference: Any


def draw(key, prompts):
    return jax.random.randint(key, (prompts, PROMPT), 0, DIGITS)


def make(*, updates=UPDATES, prompts=PROMPTS, group=GROUP, width=WIDTH, pretrain=PRETRAIN, mesh=None):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    imitation = rlfx.compile(imitate, length=LENGTH)
    group_loss = rlfx.compile(grpo, length=LENGTH, batch=group, mesh=mesh)  # answers are split, not prompts
    greedy = rlfx.unroll(write, length=LENGTH)

    def step(loss, params, opt_state):
        (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, metrics

    def init(key):
        params_key, learn_key = jax.random.split(key)
        params = init_params(params_key, width)

        def imitated(learner, key):
            prompt_key, shuffle_key = jax.random.split(key)
            asked = draw(prompt_key, prompts * group)
            shuffled = jax.random.permutation(shuffle_key, asked, axis=1, independent=True)

            def loss(params):
                one = lambda asked, shuffled: imitation((params, asked, shuffled), asked[0])[0]  # noqa: E731
                return jax.vmap(one)(asked, shuffled).mean(), None

            return step(loss, *learner)[:2], None

        (params, _), _ = jax.lax.scan(imitated, (params, optimizer.init(params)), jax.random.split(learn_key, pretrain))
        return Agent(params, optimizer.init(params), params)

    def update(agent, key):
        prompt_key, write_key = jax.random.split(key)
        asked, keys = draw(prompt_key, prompts), jax.random.split(write_key, prompts)

        def loss(params):
            def of_group(prompt, key):
                first = prompt[0].repeat(group)
                value, (_, metrics) = group_loss((params, agent.reference, prompt), first, key)
                return value, metrics

            losses, metrics = jax.vmap(of_group)(asked, keys)
            return losses.mean(), jax.tree.map(jnp.mean, metrics)

        params, opt_state, metrics = step(loss, agent.params, agent.opt_state)
        return Agent(params, opt_state, agent.reference), metrics

    def score(agent, key, episodes):
        """The share of digits that are in their place, in greedy answers to new prompts."""
        one = lambda prompt: greedy((agent.params, prompt), prompt[0])[1].sum() / PROMPT  # noqa: E731
        return jax.vmap(one)(draw(key, episodes)).mean()

    return Recipe("grpo", "sorting", init, update, None, updates, 20, 20, prompts * group * PROMPT, BAR, score=score)


if __name__ == "__main__":
    sys.exit(main(make))
