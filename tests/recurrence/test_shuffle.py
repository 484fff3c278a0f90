"""The keyed permutation: a bijection for every length and key, and as even as one can see."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rlfx.errors import DomainError
from rlfx.recurrence.language.shuffle import _rectangle, shuffle

# Fixed keys make these tests deterministic: a p-value below this would happen once in ten thousand tests by chance.
ALPHA = 1e-4


def orders(n, count, seed=0):
    return np.asarray(jax.jit(jax.vmap(lambda key: shuffle(key, n)))(jax.random.split(jax.random.key(seed), count)))


@pytest.mark.parametrize("n", [*range(1, 14), 16, 25, 31, 63, 65, 97, 600, 1000, 1023, 1025, 3 * 1009, 8192, 10007])
def test_bijection(n):
    for order in orders(n, 3):
        np.testing.assert_array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 1 << 10, 999_983, 1 << 20])
def test_every_rectangle_holds_n_with_little_to_spare(n):
    a, b = _rectangle(n)
    assert n <= a * b <= n + math.isqrt(n) + 1
    assert max(a, b) <= 5 * min(a, b) or n < 4


@pytest.mark.parametrize("n", [10, 64, 1000, 1009])
def test_positions_are_elements_of_the_whole(n):
    key = jax.random.key(3)
    whole = shuffle(key, n)
    at = jnp.array([[n - 1, 0, n // 2], [1, 1, 2]])
    np.testing.assert_array_equal(shuffle(key, n, at), np.asarray(whole)[np.asarray(at)])
    np.testing.assert_array_equal(jax.vmap(lambda i: shuffle(key, n, i))(jnp.arange(n)), whole)
    assert shuffle(key, n).dtype == jnp.int32


def test_eager_jitted_and_batched_agree():
    keys = jax.random.split(jax.random.key(5), 4)
    many = jax.jit(jax.vmap(lambda key: shuffle(key, 50)))(keys)
    for key, order in zip(keys, many, strict=True):
        np.testing.assert_array_equal(shuffle(key, 50), order)
    assert len({tuple(np.asarray(o)) for o in many}) == 4


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_permutation_of_few_is_equally_frequent(n):
    drawn = orders(n, 30_000)
    codes = (drawn * n ** np.arange(n)).sum(1)
    _, seen = np.unique(codes, return_counts=True)
    assert len(seen) == math.factorial(n)
    assert stats.chisquare(seen).pvalue > ALPHA


@pytest.mark.parametrize("n", [7, 9, 15, 16, 31, 60, 64])
def test_positions_and_pairs_are_uniform(n):
    count = 20_000
    drawn = orders(n, count)
    table = np.stack([np.bincount(drawn[:, i], minlength=n) for i in range(n)])
    chi = ((table - count / n) ** 2 / (count / n)).sum()
    assert stats.chi2.sf(chi, (n - 1) ** 2) > ALPHA  # rows and columns are fixed: (n - 1)^2 degrees of freedom
    for i, j in [(0, 1), (0, n - 1), (n // 2, n // 2 + 1)]:
        pairs = np.bincount(drawn[:, i] * n + drawn[:, j], minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
        assert stats.chisquare(pairs).pvalue > ALPHA


@pytest.mark.parametrize("n", [64, 1000, 1024, 8192])
def test_neighbours_meet_in_a_minibatch_as_often_as_by_chance(n):
    """Of the first quarter of the data, the first of four minibatches gets a hypergeometric number."""
    count = 1000 if n > 1024 else 4000
    drawn = orders(n, count)
    share = (drawn[:, : n // 4] < n // 4).sum(1)
    law = stats.hypergeom(n, n // 4, n // 4)
    edges = np.unique(law.ppf(np.linspace(0, 1, 11)[1:-1]))
    seen = np.histogram(share, np.concatenate([[-0.5], edges + 0.5, [n]]))[0]
    assert stats.chisquare(seen, np.diff(np.concatenate([[0], law.cdf(edges), [1]])) * count).pvalue > ALPHA
    minibatch = np.argsort(drawn, axis=1) // (n // 4)
    for distance in (1, 2, 64 if n > 64 else 32):
        meet = (minibatch[:, 0] == minibatch[:, distance]).sum()
        assert stats.binomtest(int(meet), count, (n / 4 - 1) / (n - 1)).pvalue > ALPHA


@pytest.mark.parametrize("n", [16, 100, 1024])
def test_fixed_points_and_parity(n):
    drawn = orders(n, 4000)
    fixed = np.bincount(np.minimum((drawn == np.arange(n)).sum(1), 4), minlength=5)
    law = stats.poisson.pmf(np.arange(4), 1)
    assert stats.chisquare(fixed, 4000 * np.append(law, 1 - law.sum())).pvalue > ALPHA
    if n == 16:
        odd = np.triu(drawn[:, :, None] > drawn[:, None, :]).sum((1, 2)) % 2
        assert stats.binomtest(int(odd.sum()), 4000).pvalue > ALPHA


def test_neighbouring_keys_are_unrelated():
    """Seeds 0, 1, 2, ... give permutations that agree at as many positions as unrelated ones: one, on average."""
    keys = jax.vmap(jax.random.key)(jnp.arange(2001))
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: shuffle(key, 256)))(keys))
    agree = (drawn[1:] == drawn[:-1]).sum()
    assert abs(agree - 2000) < 4 * math.sqrt(2000)


@pytest.mark.parametrize("n", [0, -3, 2.5, (1 << 30) + 1])
def test_bad_lengths(n):
    with pytest.raises(DomainError, match=r"shuffle: n must be an integer from 1 to 1073741824, got"):
        shuffle(jax.random.key(0), n)


def test_no_sort_in_the_program():
    text = jax.jit(lambda key: shuffle(key, 1000)).lower(jax.random.key(0)).as_text()
    assert "stablehlo.sort" not in text
    assert "stablehlo.sort" in jax.jit(lambda key: jax.random.permutation(key, 1000)).lower(jax.random.key(0)).as_text()
