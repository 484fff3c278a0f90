"""One-epoch PPO with fused steps: the acting loop, policy and random numbers included, as one scalarised program.

Notice that the program is that of `ppo_one_epoch.py`, unchanged: `transform=fuse_steps` only changes how its acting loop
runs, and `explain` says what was fused, or why not. On a GPU that loop is one kernel; on a CPU it is one compiled function,
as long as the networks are small: matrix products of large ones are faster as they are, and the loop is then left alone.
Keys come from the fast generator, so that `jax.random` costs less, too.
"""

import argparse
import time

import jax
import optax
from a2c import make_update
from networks import init_actor_critic
from ppo_one_epoch import env, ppo

import rlfx
from rlfx.envs import fast_prng
from rlfx.transforms.fuse_steps import fuse_steps

LENGTH, LEARNING_RATE = 128, 1e-2


def train(transform=None, *, envs=64, updates=50, seed=0):
    """``(falls per 1,000 steps at each update, environment steps a second, the plan)``."""
    loss_fn = rlfx.compile(ppo, length=LENGTH, batch=envs, transform=transform)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LEARNING_RATE, eps=1e-5))
    params_key, env_key, train_key = jax.random.split(jax.random.key(seed, impl=fast_prng), 3)
    params = init_actor_critic(params_key, (4, 16, 2))
    state = jax.vmap(env.reset)(jax.random.split(env_key, envs))
    run = jax.jit(lambda agent, keys: jax.lax.scan(make_update(loss_fn, optimizer), agent, keys))
    arguments = (params, optimizer.init(params), state), jax.random.split(train_key, updates)
    compiled = run.lower(*arguments).compile()
    begin = time.perf_counter()
    _, falls = jax.block_until_ready(compiled(*arguments))
    rate = updates * LENGTH * envs / (time.perf_counter() - begin)
    return falls, rate, loss_fn.explain(params, state, train_key)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--envs", type=int, default=64)
    args = parser.parse_args(argv)
    for name, transform in (("as it is", None), ("fused", fuse_steps)):
        falls, rate, plan = train(transform, envs=args.envs, updates=args.updates)
        notes = [note for stage in plan.stages for note in stage.notes if "fused" in note]
        print(
            f"{name:9} {rate:10,.0f} env-steps/s   falls per 1,000 steps {falls[0]:.1f} -> {falls[-1]:.1f}   {' '.join(notes)}"
        )


if __name__ == "__main__":
    main()
