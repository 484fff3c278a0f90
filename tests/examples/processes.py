"""One of two processes that train together: ``processes.py WHO ADDRESS DIRECTORY``; the second one can't write any file."""

import resource
import signal
import sys
from pathlib import Path

import distributed
import jax
import numpy as np

from rlfx.training import CSV, Checkpoints, Metrics, latest, run

SIZES = {"length": 4, "envs": 4, "updates": 2, "hidden": (4,), "episodes": 3}


def tiny(mesh):
    return distributed.train(mesh, **SIZES)


def drift(agent, key):
    """An update of what is split, and of what is not."""
    x = agent["x"] + jax.random.normal(key, agent["x"].shape)
    return {"x": x, "mean": 0.9 * agent["mean"] + x.mean(), "key": jax.random.split(agent["key"])[0]}, x.mean()


def start(mesh):
    def init(key):
        return {"x": jax.numpy.zeros((4, 3)), "mean": jax.numpy.float32(0.0), "key": key}

    split = lambda *axes: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))  # noqa: E731
    return jax.jit(init, out_shardings={"x": split("b"), "mean": split(), "key": split()})(jax.random.key(5))


def whole(tree):
    """Every leaf, on every process."""
    data = jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == jax.random.key(0).dtype else x, tree)
    return [np.asarray(jax.experimental.multihost_utils.process_allgather(x, tiled=True)) for x in jax.tree.leaves(data)]


def goes_on(mesh, directory):
    """Saved after four updates, on to the seventh: the same bits as without a stop; the agents."""
    key = jax.random.key(6)
    callbacks = [Checkpoints(directory / "c", every=2), Metrics(CSV(directory / "metrics.csv"))]
    straight = run(drift, start(mesh), key, updates=7).agent
    run(drift, start(mesh), key, updates=4, callbacks=callbacks)
    found, done = latest(directory / "c", start(mesh), key)
    assert done == 4
    assert found["x"].sharding.is_equivalent_to(start(mesh)["x"].sharding, 2)
    resumed = run(drift, start(mesh), key, updates=7, callbacks=callbacks).agent
    for a, b in zip(whole(straight), whole(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    return whole(resumed)


def main(who, address, directory):
    distributed.connect(address, 2, int(who))
    mesh = distributed.everything()
    assert (jax.process_count(), mesh.size) == (2, 2)
    if who == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    agent, score = tiny(mesh)
    drifted = goes_on(mesh, Path(directory))
    params = whole(agent.params)
    if who == "0":
        np.savez(Path(directory, "result.npz"), *params, *drifted, score)


if __name__ == "__main__":
    main(*sys.argv[1:])
