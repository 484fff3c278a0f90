"""Statistical quality of the fast generator, over counters, keys, seeds, folds and splits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from rlfx.envs import fast_prng

N = 1 << 18


def seeds():
    return jax.vmap(lambda s: jax.random.key(s, impl=fast_prng))(jnp.arange(N))


def folds():
    """The keys of a program: one per (t, b)."""
    key = jax.random.key(0, impl=fast_prng)
    at = lambda t, b: jax.random.fold_in(jax.random.fold_in(key, t), b)  # noqa: E731
    return jax.vmap(jax.vmap(at, (None, 0)), (0, None))(jnp.arange(512), jnp.arange(N // 512)).reshape(-1)


def bits(key):
    return jax.random.bits(key, (), jnp.uint32)


def one_stream():
    return np.asarray(jax.random.bits(jax.random.key(1, impl=fast_prng), (N,), jnp.uint32))


STREAMS = {
    "counter": one_stream,
    "counter, strided": lambda: np.asarray(jax.random.bits(jax.random.key(2, impl=fast_prng), (4 * N,), jnp.uint32))[
        ::4
    ],
    "seed": lambda: np.asarray(jax.vmap(bits)(seeds())),
    "fold_in(t), fold_in(b)": lambda: np.asarray(jax.vmap(bits)(folds())),
    "split": lambda: np.asarray(jax.vmap(bits)(jax.random.split(jax.random.key(3, impl=fast_prng), N))),
    "key data": lambda: np.asarray(
        jax.random.key_data(jax.random.split(jax.random.key(4, impl=fast_prng), N // 2))
    ).reshape(-1),
    "fold key data": lambda: np.asarray(jax.random.key_data(folds()))[:, 1],
}
# Seven streams, seven statistics each: a fixed seed, so the tests are deterministic; 1e-4 leaves room for 49 draws.
LEVEL = 1e-4


@pytest.mark.parametrize("name", STREAMS)
def test_quality(name):
    words = STREAMS[name]()
    assert words.dtype == np.uint32
    p = {}
    for label, bits in {"high": words >> 24, "low": words & 255, "middle": (words >> 12) & 255}.items():
        p[f"chi-square {label} byte"] = stats.chisquare(np.bincount(bits, minlength=256)).pvalue
    pairs = (words[:-1] >> 28) * 16 + (words[1:] >> 28)
    p["serial pairs"] = stats.chisquare(np.bincount(pairs, minlength=256)).pvalue
    u = words / 2.0**32
    p["uniform"] = stats.kstest(u, "uniform").pvalue
    p["lag-1 correlation"] = stats.pearsonr(u[:-1], u[1:]).pvalue
    ones = ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).sum(axis=0)
    p["each bit"] = min(stats.binomtest(int(k), words.size, 0.5).pvalue for k in ones) * 32
    # Words collide as often as random ones: Poisson with mean n^2 / 2^33.
    collisions = words.size - np.unique(words).size
    mean = words.size**2 / 2**33
    p["collisions"] = 2 * min(stats.poisson.cdf(collisions, mean), stats.poisson.sf(collisions - 1, mean))
    assert min(p.values()) > LEVEL, p


def test_keys_never_collide():
    for keys in (seeds(), folds(), jax.random.split(jax.random.key(0, impl=fast_prng), N)):
        data = np.asarray(jax.random.key_data(keys)).astype(np.uint64)
        assert np.unique(data[:, 0] << np.uint64(32) | data[:, 1]).size == N


def test_avalanche():
    """Flipping any bit of key or folded data flips each output bit with probability one half."""
    data = jax.random.key_data(jax.random.split(jax.random.key(5, impl=fast_prng), 2048))

    def draw(words):
        key = jax.random.wrap_key_data(words[:2], impl=fast_prng)
        return jax.random.bits(jax.random.fold_in(key, words[2]), (2,))

    inputs = jnp.concatenate([data, data[:, :1]], axis=1)
    base = jax.vmap(draw)(inputs)
    for word in range(3):
        for bit in range(0, 32, 3):
            flipped = inputs.at[:, word].set(inputs[:, word] ^ jnp.uint32(1 << bit))
            changed = np.asarray(jax.vmap(draw)(flipped) ^ base)
            rates = ((changed[..., None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
            assert np.abs(rates - 0.5).max() < 0.06, (word, bit)  # 64 rates of 2,048 flips: 5.4 standard deviations


def test_birthday_spacings():
    """Marsaglia's test: repeated spacings between 512 birthdays in a year of 2^24 days are Poisson with mean 2."""
    words = np.asarray(jax.random.bits(jax.random.key(6, impl=fast_prng), (2000 * 512,), jnp.uint32))
    days = np.sort((words >> 8).reshape(2000, 512).astype(np.int64), axis=1)
    spacings = np.sort(np.diff(days, axis=1), axis=1)
    repeats = (np.diff(spacings, axis=1) == 0).sum(axis=1)
    observed = np.bincount(np.minimum(repeats, 7), minlength=8)
    expected = 2000 * np.append(stats.poisson.pmf(np.arange(7), 2), stats.poisson.sf(6, 2))
    assert stats.chisquare(observed, expected).pvalue > LEVEL


def test_uses_of_one_key_are_independent():
    """A key's bits, children and folds share no word, and do not correlate."""
    key = jax.random.key(7, impl=fast_prng)
    bits = np.asarray(jax.random.bits(key, (N,), jnp.uint32))
    children = np.asarray(jax.random.key_data(jax.random.split(key, N)))[:, 0]
    folded = np.asarray(jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(N))))[:, 0]
    for a, b in ((bits, children), (bits, folded), (children, folded)):
        assert stats.pearsonr(a / 2.0**32, b / 2.0**32).pvalue > LEVEL
        assert (a == b).sum() <= 2


def test_distributions():
    key = jax.random.key(8, impl=fast_prng)
    assert stats.kstest(np.asarray(jax.random.normal(key, (N,))), "norm").pvalue > LEVEL
    assert stats.kstest(np.asarray(jax.random.exponential(key, (N,))), "expon").pvalue > LEVEL
    counts = np.bincount(np.asarray(jax.random.randint(key, (N,), 0, 7)), minlength=7)
    assert stats.chisquare(counts).pvalue > LEVEL
    permutations = np.asarray(jax.vmap(lambda k: jax.random.permutation(k, 3))(jax.random.split(key, 6000)))
    orders = np.unique(permutations @ np.array([9, 3, 1]), return_counts=True)[1]
    assert len(orders) == 6
    assert stats.chisquare(orders).pvalue > LEVEL


def test_works_wherever_keys_do():
    key = jax.random.key(9, impl=fast_prng)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    keys = jax.random.split(key, (3, 2))
    assert keys.shape == (3, 2)
    batched = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (5,))))(keys)
    one = jax.jit(lambda k: jax.random.bits(k, (5,)))(keys[2, 1])
    np.testing.assert_array_equal(batched[2, 1], one)
    for dtype in ("uint8", "uint16", "uint32"):
        draw = jax.random.bits(key, (1000,), dtype=dtype)
        assert draw.dtype == dtype
        assert abs(float(draw.astype(jnp.float32).mean()) / np.iinfo(dtype).max - 0.5) < 0.05
    assert jax.random.bits(key, (0,)).shape == (0,)
    _, ys = jax.lax.scan(lambda k, _: (jax.random.split(k)[0], jax.random.normal(k)), key, length=4)
    assert np.unique(np.asarray(ys)).size == 4


def test_golden():
    """The stream is part of the contract: seeds reproduce across versions."""
    key = jax.random.key(42, impl=fast_prng)
    data = [int(x) for x in jax.random.key_data(key)]
    bits = [int(x) for x in jax.random.bits(key, (3,), jnp.uint32)]
    assert (data, bits) == GOLDEN


GOLDEN = ([178348614, 1598024518], [178857150, 4232853563, 1935705290])
