"""Where the largest of many numbers is: as jax says, in programs and in what they call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.arguments import ARGMAX, ARGMIN
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.ir.interpret import rewritten

KEY = jax.random.key(0)


def operations(fn, *args):
    return [e.primitive for e in J.equations_in({"jaxpr": jax.make_jaxpr(fn)(*args)})]


@pytest.mark.parametrize("find", [jnp.argmax, jnp.argmin])
@pytest.mark.parametrize(("shape", "axis"), [((5, 32), -1), ((40, 3), 0), ((2, 24, 3), 1), ((300,), 0), ((2, 2, 64), -1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_places_are_those_of_jax(find, shape, axis, dtype):
    """Of random numbers, of many that are equal, of infinities, and of what is not a number."""
    x = jax.random.normal(KEY, shape).astype(dtype)
    equal, k = jnp.round(x), jax.random.split(KEY, 3)
    infinite = jnp.where(jax.random.bernoulli(k[0], 0.2, shape), jnp.inf, jnp.where(x > 1, -jnp.inf, x)).astype(dtype)
    nothing = jnp.where(jax.random.bernoulli(k[1], 0.1, shape), jnp.nan, infinite).astype(dtype)
    fast = rewritten(lambda x: find(x, axis), ELEMENTS)
    assert not {ARGMAX, ARGMIN} & set(operations(fast, x))
    for given in (x, equal, infinite, nothing, jnp.full_like(x, -jnp.inf), jnp.full_like(x, jnp.nan)):
        found, expected = jax.jit(fast)(given), find(given, axis)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("x", [jnp.ones((4, 8)), jnp.ones((4, 64), jnp.int32), jnp.ones((64, 8)) > 0])
def test_few_numbers_and_integers_stay(x):
    fast = rewritten(lambda x: jnp.argmax(x, -1), ELEMENTS)
    assert ARGMAX in operations(fast, x)


def test_under_vmap_and_in_loops():
    x = jax.random.normal(KEY, (3, 4, 50))
    fast = rewritten(lambda x: jax.vmap(lambda x: jnp.argmax(x, -1))(x), ELEMENTS)
    np.testing.assert_array_equal(fast(x), jnp.argmax(x, -1))

    def loop(x):
        return jax.lax.scan(lambda n, x: (n + jnp.argmax(x, -1), jnp.argmin(x, -1)), jnp.zeros(4, int), x)

    fast = rewritten(loop, ELEMENTS)
    assert not {ARGMAX, ARGMIN} & set(operations(fast, x))
    jax.tree.map(np.testing.assert_array_equal, fast(x), loop(x))


def test_a_policy_over_many_words_acts_as_by_jax():
    """The same draws, the same words: in loops over time, and against numbers found one by one."""
    words, batch, length = 40, 3, 6
    w = jax.random.normal(KEY, (words, words))

    def writes(w, word, t):
        drawn = jax.random.gumbel(t.key_for("word"), (words,)) + w[word]
        after = jnp.argmax(drawn).astype(jnp.int32)
        return w[word, after], after, (drawn, after)

    start = jnp.arange(batch, dtype=jnp.int32)
    fn = rlfx.compile(writes, length=length, batch=batch)
    (_, (_, (drawn, after))) = jax.jit(fn)(w, start, KEY)
    np.testing.assert_array_equal(after, np.argmax(np.asarray(drawn), -1))
    assert ARGMAX not in operations(lambda w: fn(w, start, KEY), w)
    reference = rlfx.reference(writes, length=length, batch=batch)(w, start, KEY)
    np.testing.assert_array_equal(after, reference[1][1][1])
