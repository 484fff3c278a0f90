"""The unrolled threefry draws what jax's does, bit for bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.prng import fast_prng
from rlfx.threefry import threefry, unrolled
from rlfx.transforms.fuse_steps import fuse_steps

PAIRS = [(jax.random.key(s), jax.random.key(s, impl=threefry)) for s in (0, 1, 2**31, 2**32 - 1)]


def same(a, b):
    a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


DRAWS = {
    "key": lambda key: key,
    "split": jax.random.split,
    "split 7": lambda key: jax.random.split(key, 7),
    "split shape": lambda key: jax.random.split(key, (2, 3)),
    "fold_in": lambda key: jax.random.fold_in(key, 12345),
    "fold_in large": lambda key: jax.random.fold_in(key, np.uint32(2**32 - 1)),
    "bits scalar": jax.random.bits,
    "bits 32": lambda key: jax.random.bits(key, (3, 5)),
    "bits 16": lambda key: jax.random.bits(key, (5,), "uint16"),
    "bits 8": lambda key: jax.random.bits(key, (5,), "uint8"),
    "bits none": lambda key: jax.random.bits(key, (0,)),
    "uniform": lambda key: jax.random.uniform(key, (1001,)),
    "normal": lambda key: jax.random.normal(key, (4, 4)),
    "categorical": lambda key: jax.random.categorical(key, jnp.zeros((6, 4))),
    "permutation": lambda key: jax.random.permutation(key, 100),
    "randint": lambda key: jax.random.randint(key, (9,), 0, 10),
    "chain": lambda key: jax.random.gumbel(jax.random.split(jax.random.fold_in(key, 3))[1], (2,)),
    "vmapped": lambda key: jax.vmap(lambda k: jax.random.uniform(k, (3,)))(jax.random.split(key, 4)),
    "vmapped fold_in": lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(5)),
    "jitted": jax.jit(lambda key: jax.random.uniform(key, (3, 2))),
}


@pytest.mark.parametrize("name", DRAWS)
def test_bits_are_jaxs(name):
    for ours, theirs in PAIRS:
        same(DRAWS[name](ours), DRAWS[name](theirs))


def test_sixty_four_bits():
    with jax.enable_x64(True):
        for theirs, ours in PAIRS:
            same(jax.random.bits(ours, (5,), "uint64"), jax.random.bits(theirs, (5,), "uint64"))


def test_no_loop_where_jax_has_one():
    draw = jax.jit(lambda key: jax.random.bits(key, (8,)))
    theirs, ours = PAIRS[0]
    assert "stablehlo.while" in draw.lower(theirs).as_text()
    assert "stablehlo.while" not in draw.lower(ours).as_text()


def test_unrolled_keeps_other_keys():
    other = jax.random.key(0, impl=fast_prng)
    assert unrolled(other) is other
    assert unrolled(jax.random.key(0)).dtype == PAIRS[0][1].dtype
    assert jax.jit(unrolled)(jax.random.key(0)).dtype == PAIRS[0][1].dtype


def test_compiled_programs_draw_jax_s_numbers_without_its_loop():
    def f(params, x, t):
        first, second = jax.random.split(t.key)
        bits = jax.random.bits(first, (3,)) ^ jax.random.bits(jax.random.fold_in(second, 7), (3,))
        return x, (bits, jax.random.fold_in(t.key_for("kept"), 1))

    arguments = ((), jnp.zeros((2, 3)), jax.random.key(4))
    compiled = rlfx.unroll(f, length=3, batch=2)
    got = jax.jit(compiled)(*arguments)[1]
    jax.tree.map(same, got, rlfx.reference(f, length=3, batch=2, loss=False)(*arguments)[1])
    jax.tree.map(same, got, compiled(*arguments)[1])  # without jit
    assert "while" in jax.jit(jax.random.bits).lower(arguments[2]).as_text()
    assert "while" not in jax.jit(compiled).lower(*arguments).as_text()


@pytest.mark.parametrize("impl", [threefry, fast_prng], ids=str)
@pytest.mark.optimised
def test_a_draw_is_computed_once_for_all_that_use_it(impl):
    """Each of the uses is a loop of its own, and none of them draws again: there are no more words than for one use."""

    def words(*uses):
        program = jax.jit(lambda key: [use(jax.random.normal(key, (64, 64))) for use in uses])
        text = program.lower(jax.random.key(0, impl=impl)).compile().as_text()
        return len(re.findall(r" = u32\S* (?:shift-left|multiply)\(", text))

    assert words(jnp.sum) > 5
    assert words(lambda x: x.T @ x, jnp.sum, lambda x: x.max(1), lambda x: x[::-1] + 1.0) == words(jnp.sum)


def test_one_equation_however_many_axes():
    """Rounds are not traced once more under every axis: a draw of many keys is lowered to one function."""
    keys = jax.random.wrap_key_data(jax.random.key_data(jax.random.split(jax.random.key(0), (2, 3, 4))), impl=threefry)
    draw = jax.vmap(jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (5,)))))
    text = jax.jit(draw).lower(keys).as_text()
    assert text.count("func.func private @threefry2x32_unrolled") == 1
    same(draw(keys), draw(jax.random.split(jax.random.key(0), (2, 3, 4))))


def test_keys_at_other_axes():
    keys = jax.random.split(jax.random.key(1), (3, 2))
    counters = jnp.arange(6, dtype=jnp.uint32).reshape(2, 3)
    fold = jax.vmap(jax.vmap(jax.random.fold_in), in_axes=(1, 0), out_axes=1)
    own = jax.random.wrap_key_data(jax.random.key_data(keys), impl=threefry)
    same(fold(own, counters), fold(keys, counters))


def test_differentiated_and_sharded():
    key = jax.random.key(2, impl=threefry)
    noisy = lambda x, key: (x * jax.random.normal(key, x.shape)).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(noisy)(jnp.ones(3), key), jax.random.normal(jax.random.key(2), (3,)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    keys = jax.random.split(key, 2 * jax.device_count())
    each = lambda keys: jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys)  # noqa: E731
    spread = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec))
    same(spread(keys), each(keys))


def test_kernels_draw_from_keys_that_are_given():
    """What scalarises steps knows jax's rounds, and gets these in their place."""

    def moved(p, x, t):
        noise = jax.random.normal(t.key_for("noise"), (3,))
        later = jax.random.fold_in(jax.random.split(t.key_for("later"))[1], 3)
        return jnp.sum(p * x), 0.9 * x + noise + jax.random.uniform(later, (3,)), x

    x, how = jnp.ones((20, 3)), {"length": 4, "batch": 20}
    theirs, ours = PAIRS[0]
    fused = rlfx.compile(moved, transform=fuse_steps, **how)
    assert "its steps are one scalarised program" in str(fused.explain(1.0, x, ours, verbose=True))
    found, expected = fused(1.0, x, ours), rlfx.compile(moved, **how)(1.0, x, theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
