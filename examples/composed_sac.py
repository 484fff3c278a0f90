"""SAC on Pendulum-v1, its actors, replay and learner at work together on two devices (PEARL).

The networks, the loss and all the numbers are those of `sac.py`: one update of 256 transitions for every four timesteps. Notice
what differs. Replay is uniform, as there: with `alpha=0` every priority is one, whatever the errors. And actors act with weights
of the last iteration, which are four updates old.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import sac
from composed import train, use_two_devices
from networks import init_mlp, one_each
from sac import PENDULUM, Learner, Params
from transitions import Transition

from rlfx.place import pearl

ACTORS, ENVS, LENGTH = 2, 2, 4  # 16 transitions an iteration
ITERATIONS = 1000  # 16,000 timesteps

env = PENDULUM.make()


def init(key, hidden=(64, 64)):
    (actions,), (observed,) = env.action_space.shape, env.observation_space.shape
    actor_key, critic_key = jax.random.split(key)
    critics = one_each(lambda k: init_mlp(k, (observed + actions, *hidden, 1)), jax.random.split(critic_key))
    params = Params(init_mlp(actor_key, (observed, *hidden, 2 * actions), 0.01), critics, jnp.float32(0.0))
    return Learner(params, critics, sac.optimizer.init(params))


def policy(params, obs, key, t):
    chosen = sac.actor(params, obs)
    anything = env.action_space.sample(key)
    return jnp.where(t < PENDULUM.explore, anything, chosen.squash(chosen.sample(key)))


def greedy(params, obs, key):
    chosen = sac.actor(params, obs)
    return chosen.squash(chosen.mode())


def gradient(learner, transitions, weight, key):
    """Of the mean over a sub-batch; as replay is uniform, every transition has the same error."""
    x = transitions
    x = Transition(x.obs, x.action, PENDULUM.scale * x.reward, x.terminated, x.next_obs)

    def loss(params):
        keys = jax.random.split(key, weight.shape)
        losses = jax.vmap(sac.sac_loss, in_axes=(None, None, 0, 0))(params, learner.target, x, keys)
        return (weight * losses).mean()

    value, grads = jax.value_and_grad(loss)(learner.params)
    return grads, jnp.ones_like(weight), {"loss": value, "alpha": jnp.exp(learner.params.log_alpha)}


def apply(learner, grads):
    updates, opt_state = sac.optimizer.update(grads, learner.opt_state, learner.params)
    params = optax.apply_updates(learner.params, updates)
    return Learner(params, optax.incremental_update(params.critics, learner.target, sac.POLYAK), opt_state)


def make(actors=ACTORS, envs=ENVS, length=LENGTH, **sizes):
    """The system: an update for every four timesteps, from the first ones on."""
    collected = actors * envs * length
    uniform = {"batch": sac.ENVS * sac.SAMPLES, "capacity": sac.ENVS * PENDULUM.capacity, "alpha": 0.0, "beta": 0.0}
    sizes = {"updates": collected // sac.ENVS, "warmup": collected, **uniform, **sizes}
    return pearl.System(
        env, init, lambda learner: learner.params.actor, policy, gradient, apply, actors, envs, length, **sizes
    )


def main(argv=None):
    return train("SAC on two devices", make(), greedy, iterations=ITERATIONS, shown="alpha", every=250, argv=argv)


if __name__ == "__main__":
    use_two_devices()
    main()
    sys.exit(0)
