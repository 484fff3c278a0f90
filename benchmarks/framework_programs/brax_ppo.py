"""brax's own PPO on its inverted pendulum, called with the settings of its training notebook."""

import functools

from brax import envs
from brax.training.agents.ppo import train as ppo

train = functools.partial(
    ppo.train, num_timesteps=2_000_000, num_evals=20, reward_scaling=10, episode_length=1000, normalize_observations=True,
    action_repeat=1, unroll_length=5, num_minibatches=32, num_updates_per_batch=4, discounting=0.97, learning_rate=3e-4,
    entropy_cost=1e-2, num_envs=2048, batch_size=1024, seed=1,
)  # fmt: skip
train(environment=envs.get_environment("inverted_pendulum"))
