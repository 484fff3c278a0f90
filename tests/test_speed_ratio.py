"""A regression guard: rlfx against hand-written JAX in one process. It fails on a ratio of CPU times, never on a time."""

import importlib.util
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlfx

pytestmark = pytest.mark.optimised

ROUNDS = 7


@pytest.fixture(autouse=True)
def lenient():
    """optax and the benchmarks count on implicit promotion, as jax allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def benchmark(name, monkeypatch):
    """The benchmark's module, which finds its siblings while the test lasts."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def ratio(ours, theirs, *args):
    """The least CPU time of `ours` over that of `theirs`, in interleaved rounds: what other processes do adds to both."""
    runs = [jax.jit(fn).lower(*args).compile() for fn in (ours, theirs)]
    results = [jax.block_until_ready(run(*args)) for run in runs]
    least = [np.inf, np.inf]
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            begin = time.process_time()
            jax.block_until_ready(run(*args))
            least[i] = min(least[i], time.process_time() - begin)
    return least[0] / least[1], results


def test_one_epoch_ppo_is_no_slower_than_by_hand(monkeypatch):
    timerl = benchmark("ppo_timerl", monkeypatch)
    monkeypatch.setattr(timerl, "LENGTH", 100)
    params = timerl.init(jax.random.key(0), 64)
    state = jax.vmap(timerl.env_reset)(jax.random.split(jax.random.key(1), 64))
    found, (ours, theirs) = ratio(
        timerl.compiled_by_rlfx(64), timerl.hand_written(64), params, state, jax.random.key(2)
    )
    np.testing.assert_allclose(ours[0][0], theirs[0][0], rtol=1e-4)
    assert found < 1.5, f"rlfx takes {found:.2f}x the CPU time of the hand-written program; it was 0.97x."


def test_minibatch_epochs_are_faster_than_by_hand():
    """Against what is usually written: a sorting permutation, all data gathered, a scan over minibatches."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (8, 64, 64, 1)
    init = [jax.random.normal(k, s) / 8 for k, s in zip(keys, zip(sizes[:-1], sizes[1:], strict=True), strict=False)]
    x = jax.random.normal(keys[3], (128, 64, 8))
    data, optimizer = {"x": x, "y": x.sum(-1)}, optax.adam(1e-3)

    def loss(params, batch):
        h = batch["x"]
        for w in params[:-1]:
            h = jnp.tanh(h @ w)
        return jnp.mean(((h @ params[-1])[:, 0] - batch["y"]) ** 2)

    def update(carry, batch):
        params, state = carry
        grads, state = optimizer.update(jax.grad(loss)(params, batch), state)
        return (optax.apply_updates(params, grads), state), None

    def ours(params, key):
        return rlfx.minibatch_epochs(update, (params, optimizer.init(params)), data, epochs=4, minibatches=4, key=key)[
            0
        ]

    def theirs(params, key):
        rows = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), data)

        def epoch(carry, key):
            order = jax.random.permutation(key, 128 * 64)
            shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0).reshape((4, -1, *x.shape[1:])), rows)
            return jax.lax.scan(update, carry, shuffled)

        return jax.lax.scan(epoch, (params, optimizer.init(params)), jax.random.split(key, 4))[0]

    found, (a, b) = ratio(ours, theirs, init, jax.random.key(1))
    assert float(loss(a[0], jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), data))) == pytest.approx(
        float(loss(b[0], jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), data))), rel=0.2
    )
    assert found < 1.0, f"minibatch_epochs takes {found:.2f}x the CPU time of the usual program; it was about 0.6x."
