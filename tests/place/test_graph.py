"""Exploded graphs: the paper's node counts, the function's values, fused scopes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import explode, workloads
from rlfx.place.graph import check

SMALL = {
    "chainmm": lambda: workloads.chainmm(16),
    "ffnn": lambda: workloads.ffnn(64, 8, 32),
    "llama-block": lambda: workloads.llama_block(16, 32, 8),
    "llama-layer": lambda: workloads.llama_layer(16, 32, 8, 48),
}
COUNTS = {"chainmm": 112, "ffnn": 192, "llama-block": 215, "llama-layer": 215}


@pytest.mark.parametrize("name", SMALL)
def test_node_counts_are_the_papers(name):
    assert len(SMALL[name]().graph().nodes) == COUNTS[name]
    assert len(workloads.WORKLOADS[name]().graph().nodes) == COUNTS[name]


@pytest.mark.parametrize("name", SMALL)
def test_graph_equals_the_unsharded_function(name):
    work = SMALL[name]()
    graph = work.graph()
    check(graph)
    args = work.arguments(jax.random.key(0))
    np.testing.assert_allclose(graph.evaluate(*args), work.fn(*args), atol=2e-6, rtol=2e-6)


def test_costs_of_full_chainmm():
    graph = workloads.chainmm().graph()
    matmuls = [n for n in graph.nodes if n.kind == "matmul"]
    assert sum(n.flops for n in matmuls) == 3 * 2 * 10_000**3
    assert {n.nbytes for n in matmuls} == {4 * 5000 * 5000, 4 * 2500 * 5000}
    assert len(graph.inputs) == 36


def mixed(x, w, table):
    """Primitives of every class: views, contractions, reductions, scans, gathers, casts, sorts."""
    h = jnp.tanh(x @ w).astype(jnp.float32)
    h = jnp.concatenate([h[:, 1:], h[:, :1]], axis=1) * jnp.arange(h.shape[1], dtype=jnp.float32)[None, :]
    h = h + jnp.cumsum(h, axis=0) + table[jnp.argmax(h, axis=1)]
    scanned, _ = jax.lax.scan(lambda c, r: (c * 0.5 + r, None), jnp.zeros(h.shape[1]), h)
    return {"rows": jnp.sort(h, axis=1).sum(axis=1), "scan": scanned, "max": jnp.max(h), "t": h.T.reshape(2, -1)}


@pytest.mark.parametrize("splits", [1, 2, 3, {"dot_general": (2, 2, 2)}, {"tanh": (3, 2), "cumsum": (2, 2)}])
def test_any_function_keeps_its_values(splits):
    keys = jax.random.split(jax.random.key(1), 3)
    args = tuple(jax.random.normal(k, s) for k, s in zip(keys, [(6, 4), (4, 8), (8, 8)], strict=True))
    graph = explode(mixed, *args, splits=splits)
    check(graph)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), graph.evaluate(*args), mixed(*args))


@pytest.mark.parametrize("splits", [1, 2])
def test_constants_of_the_function_are_read_beside_its_arguments(splits):
    shift, rows = np.linspace([0.0], [1.0], 3, axis=1, dtype=np.float32), np.array([2, 0], np.int32)

    def fn(w, scale):
        return jnp.tanh(w[rows] * scale + shift)

    args = jnp.arange(12.0).reshape(4, 3), jnp.float32(0.1)
    graph = explode(fn, *args, splits=splits)
    check(graph)
    want = np.tanh(np.asarray(args[0])[rows] * np.float32(0.1) + shift)
    np.testing.assert_allclose(np.asarray(graph.evaluate(*args)), want, atol=1e-6)


def test_automatic_splits_cut_large_elementwise_functions():
    graph = explode(lambda x: jnp.exp(x).sum(axis=1), jax.ShapeDtypeStruct((256, 128), jnp.float32), splits=4)
    assert sum(n.role == "shard" for n in graph.nodes) == 8


def test_partial_sums_are_reduce_nodes():
    graph = explode(lambda x: x.max(axis=1), jnp.ones((4, 8)), splits={"reduce_max": (2, 4)})
    kinds = [n.kind for n in graph.nodes]
    assert (kinds.count("reduction"), kinds.count("aggregate")) == (8, 2)


def test_effects_are_refused():
    def noisy(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(PlacementError, match=r"(?s)noisy has side effects \(.*\); its nodes may run in any.*Fix: Re"):
        explode(noisy, jnp.ones(3))


def test_unknown_split_is_refused_with_the_choices():
    with pytest.raises(PlacementError, match=r"(?s)'dense' names no scope.*Use one of: dot_general, .*x\."):
        explode(lambda x: x @ x, jnp.ones((2, 2)), splits={"dense": (2,)})


def test_bad_parts_are_refused():
    with pytest.raises(PlacementError, match=r"splits must be .*parts of each axis.*, got \{'x': \(0, 2\)\}"):
        explode(lambda x: x @ x, jnp.ones((2, 2)), splits={"x": (0, 2)})


def test_fusing_across_blocks_is_refused():
    def f(x):
        with jax.named_scope("both"):
            h = jnp.exp(x)
            return h.T @ h

    with pytest.raises(PlacementError, match=r"(?s)Scope 'both' of f cannot be fused.*different numbers of nodes"):
        explode(f, jnp.ones((4, 4)), splits={"both": (2, 1, 2), "both/exp": (2, 4)}, fuse=("both",))


def tabled(x, w):
    """Convolutions over images, filters and channels; sorts and the largest, of each row."""
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    rows = jnp.sum(y, (1, 2))
    return y, jax.lax.sort((rows, -rows), dimension=1, num_keys=1), jax.lax.top_k(rows, 3)


def test_convolutions_and_sorts_are_cut():
    kx, kw = jax.random.split(jax.random.key(1))
    args = jax.random.normal(kx, (4, 5, 5, 6)), jax.random.normal(kw, (3, 3, 6, 8))
    graph = explode(tabled, *args, splits={"conv_general_dilated": (2, 2, 3), "sort": (2, 1), "top_k": (4, 1)})
    check(graph)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), graph.evaluate(*args), tabled(*args))
    counts = {
        name: sum(n.name.startswith(name) and n.role == "shard" for n in graph.nodes)
        for name in ("conv", "sort", "top_k")
    }
    assert counts == {"conv": 12, "sort": 2, "top_k": 4}
    assert sum(n.flops for n in graph.nodes if n.kind == "matmul") == 2 * 4 * 5 * 5 * 8 * 3 * 3 * 6
