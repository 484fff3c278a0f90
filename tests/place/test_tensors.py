"""Views read the same elements as the array operations that they stand for."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfx.place import tensors as tn


def blocked(array, cuts):
    """An array as blocks, and the environment that holds them."""
    regions = tn.regions(cuts)
    ids = {index: i for i, index in enumerate(regions)}
    env = {ids[i]: jnp.asarray(array[tuple(slice(a, b) for a, b in r)]) for i, r in regions.items()}
    return tn.Blocks(array.shape, cuts, ids), env


@st.composite
def grids(draw, max_rank=3):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_rank)))
    cuts = tuple(tn.even_cuts(n, draw(st.integers(1, n))) for n in shape)
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape), cuts


@st.composite
def region_of(draw, shape):
    out = []
    for n in shape:
        a = draw(st.integers(0, n - 1))
        out.append((a, draw(st.integers(a + 1, n))))
    return tuple(out)


def check(view, env, expected, data):
    region = data.draw(region_of(expected.shape))
    got = view.read(region).run(env)
    np.testing.assert_array_equal(got, expected[tuple(slice(a, b) for a, b in region)])
    for c, n in zip(view.cuts, view.shape, strict=True):
        assert (c[0], c[-1], list(c)) == (0, n, sorted(set(c)))


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_blocks(grid, data):
    array, cuts = grid
    blocks, env = blocked(array, cuts)
    check(blocks, env, array, data)


@settings(max_examples=80, deadline=None)
@given(grids(), st.data())
def test_reshape(grid, data):
    array, cuts = grid
    blocks, env = blocked(array, cuts)
    divisors = [d for d in range(1, array.size + 1) if array.size % d == 0]
    shapes = {s for k in (1, 2, 3) for s in itertools.product(divisors, repeat=k) if math.prod(s) == array.size}
    shape = data.draw(st.sampled_from(sorted(shapes)))
    check(tn.reshape(blocks, shape), env, array.reshape(shape), data)


@settings(max_examples=40, deadline=None)
@given(grids(), st.data())
def test_transpose_broadcast_slice_and_join(grid, data):
    array, cuts = grid
    blocks, env = blocked(array, cuts)
    perm = tuple(data.draw(st.permutations(range(array.ndim))))
    check(tn.transpose(blocks, perm), env, array.transpose(perm), data)
    target = (2, *(3 if n == 1 else n for n in array.shape))
    dims = tuple(range(1, array.ndim + 1))
    check(tn.broadcast(blocks, target, dims), env, np.asarray(jax.lax.broadcast_in_dim(array, target, dims)), data)
    inner = data.draw(region_of(array.shape))
    starts, stops = zip(*inner, strict=True)
    check(tn.shift(blocks, starts, stops), env, array[tuple(slice(a, b) for a, b in inner)], data)
    joined = tn.Joined((blocks, tn.literal(array + 100)), 0, (2 * array.shape[0], *array.shape[1:]))
    check(joined, env, np.concatenate([array, array + 100]), data)


def test_heads_are_read_without_the_rest_of_the_row():
    blocks, _ = blocked(np.zeros((4, 8), np.float32), ((0, 4), (0, 2, 4, 6, 8)))
    heads = tn.reshape(blocks, (4, 4, 2))
    assert heads.cuts[1] == (0, 1, 2, 3, 4)
    assert heads.read(((0, 4), (2, 3), (0, 2))).blocks == {2}


@pytest.mark.parametrize(("size", "parts"), [(7, 3), (4, 4), (3, 1)])
def test_even_cuts_cover(size, parts):
    cuts = tn.even_cuts(size, parts)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, size, parts + 1)
