"""Random numbers are a function of (key, b, t0 + t, name): not of the schedule, the length or the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ProgramError
from rlfx.prng import fast_prng, seeded
from rlfx.recurrence.language import context

KEY = jax.random.key(42)


def draws(length, batch=None, t0=0, key=KEY, program=None):
    def f(p, c, t):
        u = jax.random.uniform
        return c, {"key": u(t.key), "a": u(t.key_for("a")), "b": u(t.key_for("b")), "shared": u(t.shared_key)}

    return rlfx.unroll(program or f, length=length, batch=batch)(None, None, key, t0=t0)[1]


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_all_uses_timesteps_and_environments_are_different():
    out = draws(5, 4)
    points = np.concatenate([np.asarray(out[k]).ravel() for k in ("key", "a", "b")])
    assert len(np.unique(points)) == points.size
    shared = np.asarray(out["shared"])
    assert (shared == shared[:, :1]).all()
    assert len(np.unique(shared)) == 5
    assert not np.isin(shared, points).any()


def test_the_length_does_not_matter():
    same(jax.tree.map(lambda x: x[:3], draws(6, 2)), draws(3, 2))


def test_the_batch_does_not_matter():
    same(jax.tree.map(lambda x: x[:, :2], draws(3, 5)), draws(3, 2))
    same(jax.tree.map(lambda x: x[:, 0], draws(3, 5)), draws(3))


def test_t0_continues_the_sequence():
    same(jax.tree.map(lambda x: x[2:], draws(5, 2)), draws(3, 2, t0=2))


def test_the_schedule_does_not_matter():
    def in_a_loop(p, c, t):
        u = jax.random.uniform(t.key_for("a"))
        return c + u, u

    def at_once(p, c, t):
        return c, jax.random.uniform(t.key_for("a"))

    def used_elsewhere(p, c, t):
        x = rlfx.series(jax.random.uniform(t.key_for("a")), start=0.0)
        rlfx.sum(x[t])
        return c, x[t]

    run = lambda f: rlfx.unroll(f, length=4, batch=2)(None, jnp.zeros(2), KEY)[1]  # noqa: E731
    same(run(in_a_loop), run(at_once))
    same(run(in_a_loop), run(used_elsewhere))


def test_the_gradient_uses_the_same_draws():
    def f(w, c, t):
        noise = jax.random.normal(t.key_for("noise"))
        return (w - noise) ** 2 / 2, c, noise

    fn = rlfx.compile(f, length=3, batch=2)
    (_, (_, noise)), grad = jax.value_and_grad(lambda w: fn(w, None, KEY), has_aux=True)(0.5)
    np.testing.assert_allclose(grad, 0.5 - noise.mean(), rtol=1e-5)


def test_the_reference_draws_the_same():
    f = lambda p, c, t: (c, jax.random.uniform(t.key_for("a")) + jax.random.uniform(t.shared_key))  # noqa: E731
    got = rlfx.unroll(f, length=3, batch=2)(None, None, KEY, t0=4)[1]
    same(got, rlfx.reference(f, length=3, batch=2, loss=False)(None, None, KEY, t0=4)[1])


def test_raw_keys_are_accepted():
    raw = jax.random.PRNGKey(42)
    same(draws(3, 2, key=raw), draws(3, 2, key=jax.random.wrap_key_data(raw)))


#: Generators whose numbers depend on what is drawn together.
TOGETHER = ["rbg", "unsafe_rbg"]


@pytest.mark.parametrize("impl", TOGETHER)
def test_generators_whose_numbers_depend_on_what_is_drawn_together_seed_another(impl):
    """Under ``jax.vmap`` jax takes all numbers from the first key: a program's depended on its plan, T, B and t0."""
    keys = [jax.random.key(seed, impl=impl) for seed in range(3)]
    whole = draws(6, 3, key=keys[0])["a"]
    same(whole[:, :1], draws(6, 1, key=keys[0])["a"])
    same(whole[2:4], draws(2, 3, key=keys[0], t0=2)["a"])
    assert len({float(draws(1, 1, key=key)["a"][0, 0]) for key in keys}) == 3

    def f(w, c, t):
        e, x = jax.random.normal(t.key_for("a")), jnp.tanh(c + jax.random.normal(t.key_for("b")))
        return w * (e + x), jax.lax.stop_gradient(x)

    def run(make, **how):
        fn = make(f, length=6, batch=3, **how)
        return jax.value_and_grad(lambda w, key: fn(w, jnp.zeros(3), key)[0])

    expected = [run(rlfx.reference)(2.0, key) for key in keys]
    for plan in (None, rlfx.Plan(), rlfx.Plan("blocks", 2), rlfx.Plan("stream", 2)):
        got = run(rlfx.compile, plan=plan)
        for key, at in zip(keys, expected, strict=True):
            np.testing.assert_allclose(got(2.0, key), at, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(got, (None, 0))(2.0, jnp.stack(keys)), np.transpose(expected), rtol=1e-5)


@pytest.mark.parametrize("impl", TOGETHER)
def test_a_program_draws_from_no_key_of_theirs(impl):
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)

    def carried(p, key, t):
        key, now = jax.random.split(key)
        return key, jax.lax.cond(t.now > 0, lambda: jax.random.uniform(now), lambda: jnp.float32(0))

    with pytest.raises(ProgramError, match=f"numbers of {impl} depend on all that is drawn(.|\n)*test_keys.py:(.|\n)*fast_prng"):
        rlfx.unroll(carried, length=4, batch=3)(None, keys)
    with pytest.raises(ProgramError, match=f"prng='{impl}': under jax.vmap the numbers of {impl}"):
        rlfx.compile(carried, length=4, prng=impl)


def test_keys_in_the_carry():
    def f(p, key, t):
        key, now = jax.random.split(key)
        return key, jax.random.uniform(now)

    keys = jax.random.split(KEY, 3)
    final, out = rlfx.unroll(f, length=4, batch=3)(None, keys)

    def by_hand(key):
        def step(key, _):
            key, now = jax.random.split(key)
            return key, jax.random.uniform(now)

        return jax.lax.scan(step, key, None, length=4)

    expected_keys, expected = jax.vmap(by_hand, out_axes=(0, 1))(keys)
    same(out, expected)
    same(jax.random.key_data(final), jax.random.key_data(expected_keys))


def test_vmap_over_seeds():
    f = lambda p, c, t: (c, jax.random.uniform(t.key))  # noqa: E731
    fn = rlfx.unroll(f, length=3, batch=2)
    keys = jax.random.split(KEY, 4)
    many = jax.vmap(lambda k: fn(None, None, k)[1])(keys)
    same(many, jnp.stack([fn(None, None, k)[1] for k in keys]))


GENERATORS = ["threefry2x32", "rbg", "unsafe_rbg", fast_prng]


@pytest.mark.parametrize("impl", GENERATORS, ids=["threefry2x32", "rbg", "unsafe_rbg", "fast"])
def test_keys_of_different_names_environments_and_timesteps_differ(impl):
    """Also where folding numbers into a key commutes, and for names that CRC32 does not tell apart."""
    names = ["plumless", "buckeroo", "", "\0", "t.key", "ab", "ba", "é", "\ud800", "x" * 300]

    def f(p, c, t):
        data = jax.random.key_data
        return c, [data(t.key), data(t.shared_key), *(data(t.key_for(n)) for n in names)]

    run = jax.jit(lambda t0: rlfx.unroll(f, length=12, batch=12)(None, None, jax.random.key(3, impl=impl), t0=t0)[1])
    for t0 in (0, 2**31 - 12):
        own, shared, *named = run(t0)
        assert (shared == shared[:, :1]).all()
        keys = np.concatenate([np.asarray(k).reshape(144, -1) for k in (own, *named)])
        keys = np.concatenate([keys, np.asarray(shared)[:, 0]])
        assert len(np.unique(keys, axis=0)) == len(keys) == 144 * 11 + 12


def test_names_that_cannot_be_told_apart(monkeypatch):
    monkeypatch.setattr(context, "name_words", lambda name: (1, 2))

    def f(p, c, t):
        return c, jax.random.uniform(t.key_for("policy")) + jax.random.uniform(t.key_for("env"))

    with pytest.raises(
        ProgramError, match=r"t.key_for\('policy'\) and t.key_for\('env'\) would be the same(.|\n)*Rename"
    ):
        rlfx.unroll(f, length=2)(None, None, KEY)

    def once(p, c, t):
        return c, jax.random.uniform(t.key_for("policy")) + jax.random.uniform((t + 1).key_for("policy"))

    rlfx.unroll(once, length=2)(None, None, KEY)


def test_a_generator_is_selected():
    """The key given seeds it; a key of that generator is used as it is; by default it is the key's own."""

    def f(w, c, t):
        return w * jax.random.uniform(t.key), c

    fast = rlfx.compile(f, length=4, batch=3, prng=fast_prng)
    plain = rlfx.compile(f, length=4, batch=3)
    run = lambda fn, key: jax.value_and_grad(lambda w: fn(w, None, key)[0])(2.0)  # noqa: E731
    own = seeded(KEY, fast_prng)
    same(run(fast, KEY), run(plain, own))
    same(run(fast, own), run(plain, own))
    same(run(fast, jax.random.key_data(KEY)), run(plain, own))
    assert run(fast, KEY)[0] != run(plain, KEY)[0]
    same(run(rlfx.compile(f, length=4, batch=3, prng="threefry2x32"), KEY), run(plain, KEY))
    assert str(fast.explain(2.0, None, verbose=True)) == str(plain.explain(2.0, None, own, verbose=True))
    assert fast.trace(2.0, None, jax.eval_shape(lambda: KEY)).key.dtype == own.dtype


def test_a_generator_is_selected_for_unrolled_programs():
    out = rlfx.unroll(lambda p, c, t: (c, jax.random.uniform(t.key)), length=3, prng=fast_prng)(None, None, KEY)[1]
    same(
        out,
        rlfx.unroll(lambda p, c, t: (c, jax.random.uniform(t.key)), length=3)(None, None, seeded(KEY, fast_prng))[1],
    )


@pytest.mark.parametrize("make", [rlfx.compile, rlfx.unroll])
@pytest.mark.parametrize("prng", ["fast", 3])
def test_there_is_no_such_generator(make, prng):
    with pytest.raises(
        ProgramError, match=rf"prng={prng!r} is no random number generator(.|\n)*Fix: Give rlfx.envs.fast_prng"
    ):
        make(lambda p, c, t: (c, c), length=2, prng=prng)
