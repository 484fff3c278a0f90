"""One of two processes that train together: ``processes.py WHO ADDRESS DIRECTORY``; the second one can't write any file."""

import resource
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import distributed
import jax
import numpy as np
import pytest

from rlfx.errors import TrainingError
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


@contextmanager
def no_space():
    """Nothing can be written to files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuses(mesh, directory, first):
    """What the first process can't write, or the two don't read alike, is an error on both: neither waits for the other."""
    key = jax.random.key(6)
    why = r"OSError: \[Errno 27\]" if first else "OSError: another process says why"
    with no_space(), pytest.raises(TrainingError, match=f"Checkpoints in .*full can't be written: {why}"):
        run(drift, start(mesh), key, updates=9, callbacks=[Checkpoints(directory / "full", every=2)])
    why = "NotADirectoryError" if first else "OSError: another process says why"
    with pytest.raises(TrainingError, match=f"can't be written: {why}"):
        run(drift, start(mesh), key, updates=9, callbacks=[Checkpoints(directory / "metrics.csv" / "c")])
    with pytest.raises(TrainingError, match=r"The processes read different checkpoints of .*: 7, none"):
        latest(directory / ("c" if first else "none"), start(mesh), key)


def main(who, address, directory):
    distributed.connect(address, 2, int(who))
    mesh = distributed.everything()
    assert (jax.process_count(), mesh.size) == (2, 2)
    with no_space() if who == "1" else nullcontext():
        agent, score = tiny(mesh)
        drifted = goes_on(mesh, Path(directory))
        refuses(mesh, Path(directory), who == "0")
    params = whole(agent.params)
    if who == "0":
        np.savez(Path(directory, "result.npz"), *params, *drifted, score)


if __name__ == "__main__":
    main(*sys.argv[1:])
