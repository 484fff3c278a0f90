"""Actor and learner on two devices, in one XLA program: the run of `whole_run.py` with the actor one iteration behind.

With `policy[i - 1]` the rollout of iteration i + 1 and the epochs of iteration i do not need each other. `pipelined` runs
them at the same time, each on a device of its own, and exchanges what they made; what comes out is equal to the last bit.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # two devices of a CPU
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import whole_run
from jax.sharding import PartitionSpec
from ppo_cartpole import act

import rlfx


def exchanged(values, axis):
    """What the other of two devices has; all values of one dtype at once, since devices wait for each other at every exchange."""
    leaves, structure = jax.tree.flatten(values)
    theirs = [None] * len(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        same = [n for n, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[n].ravel() for n in same])
        parts = jnp.split(jax.lax.ppermute(flat, axis, [(0, 1), (1, 0)]), np.cumsum([leaves[n].size for n in same])[:-1])
        for n, part in zip(same, parts, strict=True):
            theirs[n] = part.reshape(leaves[n].shape)
    return jax.tree.unflatten(structure, theirs)


def pipelined(act, learn, mesh):
    """Two roles at once, on the two devices of a mesh of one axis.

    For n = 0, ..., N - 1: ``state[n + 1], data[n] = act(learner[max(n - 1, 0)], state[n], key[n])``
    and ``learner[n + 1] = learn(learner[n], data[n], key[n])``.

    Args:
      act: ``act(learner, state, key) -> (state, data)``.
      learn: ``learn(learner, data, key) -> learner``.

    Returns:
      ``run(learner, state, (act_keys[N], learn_keys[N])) -> (learner[N], state[N])``.
    """
    (axis,) = mesh.axis_names

    def run(learner, state, keys):
        acting = jax.lax.axis_index(axis) == 0
        act_keys, learn_keys = keys
        state, data = act(learner, state, act_keys[0])  # nothing to learn from yet: on both devices

        def step(carry, keys):
            learner, state, data = carry
            learner, state, following = jax.lax.cond(
                acting,
                lambda: (learner, *act(learner, state, keys[0])),
                lambda: (learn(learner, data, keys[1]), state, data),
            )
            theirs = exchanged((learner, following), axis)
            learner = jax.tree.map(lambda own, their: jnp.where(acting, their, own), learner, theirs[0])
            data = jax.tree.map(lambda own, their: jnp.where(acting, own, their), following, theirs[1])
            return (learner, state, data), None

        (learner, state, data), _ = jax.lax.scan(step, (learner, state, data), (act_keys[1:], learn_keys[:-1]))
        return learn(learner, data, learn_keys[-1]), jax.tree.map(lambda leaf: leaf[None], state)

    everywhere, split = PartitionSpec(), PartitionSpec(axis)
    both = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=(everywhere, split), check_vma=False)

    def call(learner, state, keys):
        learner, states = both(learner, state, keys)
        return learner, jax.tree.map(lambda leaf: leaf[0], states)  # the actor's

    return call


def make_train(mesh, *, iterations, length=128, batch=16):
    """``train(agent, key) -> agent``, as ``whole_run.make_train(lag=1)``."""
    rollout = rlfx.unroll(act, length=length, batch=batch)
    keys_of = rlfx.unroll(lambda _, c, i: (c, (i.key, i.key_for("shuffle"))), length=iterations, dim="i")

    def collect(learner, carry, key):
        carry, (samples, _) = rollout(learner[0], carry, key)
        return carry, samples

    run = pipelined(collect, whole_run.epochs, mesh)

    def train(agent, key):
        learner, carry = run((agent.params, agent.opt_state), agent.carry, keys_of(None, None, key)[1])
        return whole_run.Agent(*learner, carry)

    return train


def role_mesh():
    return jax.make_mesh((2,), ("role",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=50)
    args = parser.parse_args(argv)
    agent, key = whole_run.init(jax.random.key(0)), jax.random.key(1)
    one = jax.jit(lambda agent, key: whole_run.make_train(iterations=args.iterations, lag=1)(None, agent, key)[0])
    two = jax.jit(make_train(role_mesh(), iterations=args.iterations))
    ends = []
    for name, train in {"one device": one, "two devices": two}.items():
        train = train.lower(agent, key).compile()
        begin = time.perf_counter()
        ends.append(jax.block_until_ready(train(agent, key)).params)
        print(f"{name}: {args.iterations / (time.perf_counter() - begin):.1f} iterations a second")
    equal = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), *ends)))
    print("the parameters are equal to the last bit:", equal)


if __name__ == "__main__":
    main()
