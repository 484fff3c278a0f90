"""Two agents that have to meet on two places, by PPO: critics of their own (IPPO), or one that sees everything (MAPPO).

Notice that agents are an axis of a value, and no index: an observation is ``[agents, n]``, an action has one number for each,
and advantages are ``[agents]``. What the two algorithms differ in is one function: what the critic is told. The agents share
the weights of the actor; each has its own observation, and sees the other only where it stands.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from loops import Agent, Sample, clipped_surrogate, falling_adam, over_rollouts
from networks import init_mlp, mlp
from recipes import Recipe, main
from tasks import Meeting, made

import rlfx.envs
from rlfx.training import Categorical

LENGTH, ENVS, EPOCHS, MINIBATCHES, UPDATES = 64, 32, 4, 4, 200
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE, SCALE = 0.95, 0.95, 0.2, 0.02, 2.5e-3, 0.2
BAR = 15.0  # of at most 20, and about 18 for the best; greedy, the mean of 100 episodes

env = made(Meeting())
AGENTS, OBS = env.observation_space.shape
ACTIONS = env.action_space[0].n


def alone(obs):
    """What each critic is told: the observation of its agent. ``[agents, n]``."""
    return obs


def together(obs):
    """Every critic is told the observations of all. ``[agents, agents n]``."""
    return jnp.stack([jnp.roll(obs, -i, axis=0).ravel() for i in range(AGENTS)])


def actors(params, obs):
    return Categorical(jax.vmap(partial(mlp, params["actor"]))(obs))


def critics(params, told):
    return jax.vmap(partial(mlp, params["critic"]))(told)[:, 0]


# -- the program: one timestep of one environment, of both agents


def make_act(tell):
    def act(params, state, t):
        obs = env.observe(state)
        policy, value = actors(params, obs), critics(params, tell(obs))
        action = policy.sample(t.key_for("action"))
        state, step = env.step(t.key_for("env"), state, tuple(action))

        each = step.replace(reward=jnp.full(AGENTS, SCALE * step.reward))
        next_value = rlfx.next_value(lambda obs: critics(params, tell(obs)), each, value)
        advantage = rlfx.gae(each, value, next_value, gamma=GAMMA, lam=LAMBDA)
        return state, (Sample(obs, action, policy.log_prob(action), advantage, advantage + value), step.reward)

    return act


# -- the learner


def ppo_loss(tell, params, batch):
    def of_one(sample):
        policy = actors(params, sample.obs)
        return policy.log_prob(sample.action), policy.entropy(), critics(params, tell(sample.obs))

    log_prob, entropy, value = jax.vmap(of_one)(batch)
    surrogate = clipped_surrogate(log_prob - batch.log_prob, batch.advantage, CLIP)
    return 0.25 * ((value - batch.target) ** 2).mean() - surrogate - ENTROPY * entropy.mean()


def greedy(agent, obs, key):
    return tuple(actors(agent.params, obs).mode())


def make(tell, name, *, length=LENGTH, envs=ENVS, updates=UPDATES, hidden=(64, 64), mesh=None):
    optimizer = falling_adam(LEARNING_RATE, updates * EPOCHS * MINIBATCHES)
    update = over_rollouts(
        make_act(tell), partial(ppo_loss, tell), optimizer, length=length, envs=envs, epochs=EPOCHS,
        minibatches=MINIBATCHES, mesh=mesh,
    )  # fmt: skip
    told = tell(jnp.zeros((AGENTS, OBS))).shape[-1]

    def init(key):
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        params = {
            "actor": init_mlp(actor_key, (OBS, *hidden, ACTIONS), 0.01),
            "critic": init_mlp(critic_key, (told, *hidden, 1)),
        }
        return Agent(params, optimizer.init(params), jax.vmap(env.reset)(jax.random.split(env_key, envs)))

    return Recipe(name, env, init, update, greedy, updates, 10, 20, length * envs, BAR)


FAMILY = {"independent": partial(make, alone, "ippo"), "central": partial(make, together, "mappo")}

if __name__ == "__main__":
    sys.exit(main(FAMILY))
