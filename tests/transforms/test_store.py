"""Values in fewer bits: half the bytes, the same results as the reference has for the rounded values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rlfx
from rlfx.errors import DomainError, ProgramError

T, B, SHAPE = 8, 4, (3, 8, 8)
SIZE = int(np.prod(SHAPE))
KEY = jax.random.key(0)
W = (jax.random.normal(KEY, (SIZE, 8), dtype=jnp.float32) / SIZE**0.5, jnp.ones(8, jnp.float32))
STATE = jnp.arange(B, dtype=jnp.int32)


def pixels(state):
    return ((jnp.arange(SIZE, dtype=jnp.int32).reshape(SHAPE) * 7 + state * 31) % 251).astype(jnp.uint8)


def program(see, acts=False):
    """An agent that sees images; ``see`` makes of the environment's pixels what it computes with; ``acts``: on what it sees."""

    def loss(w, state, t):
        x = see(pixels(state))
        h = jnp.tanh(x.reshape(-1) @ w[0])
        reward = rlfx.series(jax.lax.stop_gradient(jnp.sum(h * w[1])))
        likely = jax.nn.sigmoid(jnp.sum(h)) if acts else jnp.float32(0.5)
        action = jax.random.bernoulli(t.key, likely).astype(jnp.int32)
        target = rlfx.discounted_sum(reward[t:], 0.9)
        return (jnp.sum(h * w[1]) - target) ** 2, state + action + 1

    return loss


MIX = jax.random.randint(KEY, (SIZE, SIZE), -3, 4).astype(jnp.float32)


def noise(x):
    """Floats that cost too much to be computed again from the pixels. Exact: in whatever order, they round alike."""
    return MIX @ x.astype(jnp.float32).reshape(-1) / 2048


def run(f, **options):
    compiled = rlfx.compile(f, length=T, batch=B, **options)
    value, grad = jax.value_and_grad(lambda w: compiled(w, STATE, KEY)[0])(W)
    return compiled.explain(W, STATE, KEY).stored_bytes, value, grad


def by_reference(f):
    reference = rlfx.reference(f, length=T, batch=B)
    return jax.value_and_grad(lambda w: reference(w, STATE, KEY)[0])(W)


def close(got, want, rtol=2e-5):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * np.abs(w).max()), got, want)


OBSERVATIONS = T * B * SIZE


@pytest.mark.parametrize("plan", [rlfx.Plan("blocks", T), rlfx.Plan("blocks", 2), rlfx.Plan("replay", 4)], ids=str)
def test_bfloat16_is_half(plan):
    exact, f = program(noise), program(lambda x: rlfx.store(noise(x)))
    wide, _, want = run(exact, plan=rlfx.Plan("blocks", T))
    narrow, value, grad = run(f, plan=plan)
    assert 4 * OBSERVATIONS <= wide < 4.2 * OBSERVATIONS
    assert 2 * OBSERVATIONS <= narrow < 2.2 * OBSERVATIONS
    close((value, grad), by_reference(f))
    error = jax.tree.map(lambda g, w: float(jnp.linalg.norm(g - w) / jnp.linalg.norm(w)), grad, want)
    assert 0 < max(jax.tree.leaves(error)) < 2**-7


def test_pixels_are_kept_as_they_are_without_being_asked():
    f = program(lambda x: x.astype(jnp.float32) * (1 / 127.5) - 1.0)
    in_blocks = rlfx.Plan("blocks", 2)  # at once the learner sees the pixels itself: nothing that acts does
    stored, value, grad = run(f, plan=in_blocks)
    assert OBSERVATIONS <= stored < 1.2 * OBSERVATIONS
    explained = rlfx.compile(f, length=T, batch=B, plan=in_blocks).explain(W, STATE, KEY, verbose=True)
    assert "u8[8,4,3,8,8]" in str(explained)
    close((value, grad), by_reference(f))


@pytest.mark.parametrize("plan", [rlfx.Plan(), rlfx.Plan("blocks", 2), rlfx.Plan("replay", 4)], ids=str)
@pytest.mark.parametrize("pixel", ["bytes", "halves"])
def test_pixels_that_decide_the_next_image_are_kept_as_they_are(plan, pixel):
    def see(x):
        narrow = x if pixel == "bytes" else x.astype(jnp.float16)
        return jnp.expand_dims(narrow, 0).astype(jnp.float32) * (1 / 127.5) - 1.0

    f = program(see, acts=True)
    stored, value, grad = run(f, plan=plan)
    assert stored < 1.2 * OBSERVATIONS
    close((value, grad), by_reference(f))


def test_by_name_in_a_transform():
    f = program(lambda x: checkpoint_name(noise(x), "obs"))
    stored, value, grad = run(f, transform=lambda p: rlfx.store(p, "float16", names=("obs",)))
    assert stored < 2.2 * OBSERVATIONS
    close((value, grad), by_reference(program(lambda x: rlfx.store(noise(x), "float16"))))
    traced = rlfx.trace(f, W, STATE, KEY, length=T, batch=B)
    changed = rlfx.store(traced, names=["obs"])
    close(rlfx.lower(changed)(W, STATE, KEY)[0], rlfx.reference(changed)(W, STATE, KEY)[0])
    twice = rlfx.store(changed, names=("obs",))
    np.testing.assert_array_equal(rlfx.lower(twice)(W, STATE, KEY)[0], rlfx.lower(changed)(W, STATE, KEY)[0])


def test_under_until_and_in_a_carry():
    def f(w, x, t):
        x = rlfx.store(jnp.tanh(x * w + 0.1 * t.now.astype(jnp.float32)))
        return jnp.sum(x), x

    start = jnp.linspace(-1.0, 1.0, B, dtype=jnp.float32)
    options = {"length": T, "batch": B, "until": lambda x: x > 0.55}
    got, want = (
        jax.value_and_grad(lambda w, m=m: m(f, **options)(w, start)[0])(0.7) for m in (rlfx.compile, rlfx.reference)
    )
    close(got, want, rtol=1e-2)  # where a sum rounds otherwise, a step of bfloat16


@pytest.mark.parametrize("as_", ["bfloat16", "float16"])
def test_values_and_what_is_left_alone(as_):
    x = jax.random.normal(KEY, (100,), jnp.float32) * 10
    got = rlfx.store({"x": x, "n": jnp.arange(3, dtype=jnp.int32), "half": x.astype(jnp.float16), "k": KEY}, as_)
    np.testing.assert_array_equal(got["x"], x.astype(as_).astype(jnp.float32))
    assert got["n"].dtype == jnp.int32
    np.testing.assert_array_equal(got["half"], x.astype(jnp.float16))
    np.testing.assert_array_equal(jax.jit(rlfx.store, static_argnums=1)(x, as_), got["x"])
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(rlfx.store(x, as_) * 3.0))(x), 3.0)


def test_bad_arguments():
    traced = rlfx.trace(program(noise), W, STATE, KEY, length=T, batch=B)
    with pytest.raises(ProgramError, match=r'as_ must be "bfloat16" or "float16"'):
        rlfx.store(jnp.ones(2, jnp.float32), "uint8")
    with pytest.raises(ProgramError, match=r"is for a program.*\n.*\n.*transform=lambda p: rlfx.store\(p"):
        rlfx.store(jnp.ones(2, jnp.float32), names=("obs",))
    with pytest.raises(DomainError, match="No value of loss is named 'obs'"):
        rlfx.store(traced, names=("obs",))
