"""PPO with one epoch and one minibatch, as in TimeRL's evaluation: acting and learning are one program.

Notice that this is not an acting program followed by a learning one: the surrogate loss stands beside the action it
judges, with advantages from `rlfx.gae`, normalised over the whole rollout by `rlfx.mean` and `rlfx.std`. `rlfx.compile`
makes it a loss function, and `jax.value_and_grad` of that is the iteration. (For several epochs see `ppo_cartpole.py`.)
"""

import argparse

import a2c
import jax
import jax.numpy as jnp
from networks import actor, critic

import rlfx.envs

env = rlfx.envs.make("CartPole-v1")
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5


def ppo(params, state, t):
    obs = env.observe(state)
    log_probs, value = actor(params, obs), critic(params, obs)
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = env.step(t.key_for("env"), state, action)

    next_value = rlfx.next_value(lambda obs: critic(params, obs), step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, next_value, gamma=GAMMA, lam=LAMBDA))
    target = advantage + jax.lax.stop_gradient(value)
    advantage = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)

    # With one epoch the old policy is the present one: the ratio is 1, its gradient that of the log-probability.
    ratio = jnp.exp(log_probs[action] - jax.lax.stop_gradient(log_probs[action]))
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
    loss = VALUE * (value - target) ** 2 - surrogate - ENTROPY * entropy
    falls = 1000 * rlfx.mean(step.terminated)
    return loss, state, falls


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=300)
    args = parser.parse_args(argv)
    falls = a2c.train(ppo, length=128, updates=args.updates, learning_rate=1e-2)
    print(f"falls per 1,000 steps {falls[:10].mean():.1f} -> {falls[-20:].mean():.1f}")


if __name__ == "__main__":
    main()
