"""Stable-Baselines3's shape: environments one after another in Python, with wrappers, a buffer in NumPy, a policy in jax."""

import gymnasium
import jax
import numpy as np
from gain_programs.cartpole import apply, network

ENVS, STEPS = 4, 2000
params = network(jax.random.key(0))
policy = jax.jit(lambda params, observed: apply(params, observed)[0].argmax(-1))


class Normalised:
    """Observations by the running mean and variance of what was seen."""

    def __init__(self):
        self.mean, self.variance, self.count = np.zeros(4), np.ones(4), 1e-4

    def __call__(self, batch):
        mean, variance, count = batch.mean(0), batch.var(0), len(batch)
        delta, total = mean - self.mean, self.count + count
        squares = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        self.mean, self.variance, self.count = self.mean + delta * count / total, squares / total, total
        return np.clip((batch - self.mean) / np.sqrt(self.variance + 1e-8), -10, 10).astype(np.float32)


class Monitor(gymnasium.Wrapper):
    def reset(self, **options):
        self.rewards = []
        return self.env.reset(**options)

    def step(self, action):
        observed, reward, end, cut, info = self.env.step(action)
        self.rewards.append(float(reward))
        if end or cut:
            info["episode"] = {"r": sum(self.rewards), "l": len(self.rewards)}
        return observed, reward, end, cut, info


envs = [Monitor(gymnasium.make("CartPole-v1")) for _ in range(ENVS)]


def step_all(actions):
    out = []
    for env, action in zip(envs, actions, strict=True):
        observed, reward, end, cut, info = env.step(int(action))
        if end or cut:
            observed, _ = env.reset()
        out.append((observed, reward, end or cut, info))
    return out


def once():
    normalised = Normalised()
    observed = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    buffer = np.zeros((STEPS, ENVS, 4), np.float32)
    for t in range(STEPS):
        inputs = normalised(observed)
        actions = np.asarray(policy(params, inputs))
        results = step_all(actions)
        observed = np.stack([r[0] for r in results])
        buffer[t] = inputs
