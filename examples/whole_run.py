"""A whole PPO run as one call: iterations of rollouts and epochs, with the outputs of the last iteration and of every n-th.

Notice `iteration`, a program over i that calls `rollout`, a program over t and b. Its parameters are a part of the carry, and
only those that it ends with are an output: the memory of the run does not grow with its length. With `lag=1` the actor runs
one iteration behind, `policy[i - 1]`; `two_roles.py` runs that on two devices.
"""

import argparse
from typing import NamedTuple

import jax
import optax
from ppo_cartpole import LEARNING_RATE, act, init_agent, ppo_loss

import rlfx

EPOCHS, MINIBATCHES, LOG_EVERY = 4, 4, 10
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LEARNING_RATE, eps=1e-5))


class Agent(NamedTuple):
    params: object
    opt_state: object
    carry: object  # of the environments, which go on from iteration to iteration


def learn(learner, sample):
    params, opt_state = learner
    updates, opt_state = optimizer.update(jax.grad(ppo_loss)(params, sample), opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None


def epochs(learner, samples, key):
    return rlfx.minibatch_epochs(learn, learner, samples, epochs=EPOCHS, minibatches=MINIBATCHES, key=key)[0]


def make_train(*, iterations, length=128, batch=16, lag=0):
    """``train(None, agent, key) -> (agent, logs)``: a program over i."""
    rollout = rlfx.unroll(act, length=length, batch=batch)

    def iteration(_, agent, i):
        policy = rlfx.series(agent.params, start=agent.params)
        carry, (samples, (_, done)) = rollout(policy[i - lag], agent.carry, i.key)
        params, opt_state = epochs((agent.params, agent.opt_state), samples, i.key_for("shuffle"))
        falls = rlfx.series(1000 * done.mean())
        logs = {
            "falls": rlfx.Every(LOG_EVERY, falls[i - 7 : i + 1].mean()),  # of the last 8 iterations
            "policy": rlfx.Last(policy[i - lag]),
        }
        return Agent(params, opt_state, carry), logs

    return rlfx.unroll(iteration, length=iterations, dim="i")


def init(key, batch=16):
    return Agent(*init_agent(key, optimizer, batch))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--lag", type=int, default=0)
    args = parser.parse_args(argv)
    train = jax.jit(make_train(iterations=args.iterations, lag=args.lag))
    _, logs = train(None, init(jax.random.key(0)), jax.random.key(1))
    print("ends of episodes per 1,000 steps:", *(f"{x:.1f}" for x in logs["falls"]))


if __name__ == "__main__":
    main()
