"""Distributions of actions against scipy in float64, in values and gradients, at saturation too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import rlfx
from rlfx.errors import ProgramError
from rlfx.training import Categorical, Normal, TanhNormal

KEY = jax.random.key(0)


def exact_log_prob(u, mean, std):
    """Of the action tanh(u), in float64: log(1 - tanh^2) = log 4 - 2 |u| - 2 log(1 + exp(-2 |u|))."""
    slope = np.log(4.0) - 2 * np.abs(u) - 2 * np.log1p(np.exp(-2 * np.abs(u)))
    return (scipy.stats.norm.logpdf(u, mean, std) - slope).sum(-1)


def test_a_category_may_be_a_number():
    policy = Categorical(jnp.array([0.0, 1.0, 2.0]))
    assert float(policy.log_prob(1)) == float(policy.log_prob(jnp.int32(1)))


@pytest.mark.parametrize("centre", [0.0, 3.0, -8.0, 12.0, 60.0, -300.0])
def test_tanh_normal_is_right_at_saturation(centre):
    mean, log_std = jnp.array([centre, 0.1]), jnp.array([-0.7, 0.2])
    u = TanhNormal(mean, log_std).sample(KEY)
    got, grads = jax.value_and_grad(lambda u, m, s: TanhNormal(m, s).log_prob(u), argnums=(0, 1, 2))(u, mean, log_std)
    u64, mean64, std64 = np.float64(u), np.float64(mean), np.exp(np.float64(log_std))
    np.testing.assert_allclose(got, exact_log_prob(u64, mean64, std64), rtol=1e-5)
    # Normal's gradients, and 2 tanh(u) for the volume.
    scaled = (u64 - mean64) / std64
    expected = (-scaled / std64 + 2 * np.tanh(u64), scaled / std64, scaled**2 - 1)
    # u - mean of large numbers has lost what float32 loses there.
    lost = np.spacing(np.abs(np.float32(centre))) * 10
    for g, e in zip(grads, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5 + lost)


def test_the_entropy_gradient_through_a_sample_is_that_of_the_volume():
    """SAC's: d/d mean of log_prob(sample) is 2 tanh(u), whatever the noise."""
    for centre in (0.0, 5.0, 30.0, -30.0):

        def log_prob(mean):
            policy = TanhNormal(mean, jnp.array([0.5]))
            return policy.log_prob(policy.sample(KEY))

        u = TanhNormal(jnp.array([centre]), jnp.array([0.5])).sample(KEY)
        np.testing.assert_allclose(jax.grad(log_prob)(jnp.array([centre])), 2 * np.tanh(u), rtol=1e-5)


def test_tanh_normal_is_a_density():
    """The integral over actions in (-1, 1) of exp(log_prob) is one."""
    policy = TanhNormal(jnp.array([0.4]), jnp.array([-0.3]))
    action = jnp.linspace(-1, 1, 4001)[1:-1, None]
    density = jax.vmap(lambda a: jnp.exp(policy.log_prob(policy.unsquash(a))))(action)
    np.testing.assert_allclose(np.trapezoid(density, action[:, 0]), 1.0, rtol=1e-3)


def test_what_is_squashed_is_found_again():
    u = jnp.array([-3.0, 0.0, 0.5, 4.0])
    np.testing.assert_allclose(TanhNormal.unsquash(TanhNormal.squash(u)), u, rtol=1e-3)
    assert jnp.abs(TanhNormal.unsquash(jnp.array([1.0, -1.0]))).max() <= 9.0


def test_normal_is_scipys():
    mean, log_std, x = jnp.array([0.3, -1.0]), jnp.array([0.5, -2.0]), jnp.array([1.0, -1.2])
    ours, theirs = Normal(mean, log_std), scipy.stats.norm(np.float64(mean), np.exp(np.float64(log_std)))
    np.testing.assert_allclose(ours.log_prob(x), theirs.logpdf(np.float64(x)).sum(), rtol=1e-5)
    np.testing.assert_allclose(ours.entropy(), theirs.entropy().sum(), rtol=1e-5)
    samples = jax.vmap(ours.sample)(jax.random.split(KEY, 20_000))
    np.testing.assert_allclose(samples.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(samples.std(0), np.exp(log_std), rtol=0.02)


def test_divergences_are_means_of_log_ratios():
    keys = jax.random.split(KEY, 20_000)
    pairs = [
        (Normal(jnp.array([0.1]), jnp.array([0.2])), Normal(jnp.array([-0.4]), jnp.array([0.0]))),
        (TanhNormal(jnp.array([0.1]), jnp.array([0.2])), TanhNormal(jnp.array([-0.4]), jnp.array([0.0]))),
        (Categorical(jnp.array([0.0, 1.0, 2.0])), Categorical(jnp.array([1.0, 0.0, 0.0]))),
    ]
    for p, q in pairs:
        x = jax.vmap(p.sample)(keys)
        ratios = jax.vmap(lambda x: p.log_prob(x) - q.log_prob(x))(x)
        np.testing.assert_allclose(p.kl(q), ratios.mean(), atol=4 * ratios.std() / len(keys) ** 0.5)
        np.testing.assert_allclose(p.kl(p), 0.0, atol=1e-6)


def test_masked_categories_do_not_exist():
    logits, mask = jnp.array([50.0, 0.3, -0.2]), jnp.array([False, True, True])
    masked, small = Categorical(logits, mask), Categorical(logits[1:])
    assert set(np.unique(jax.vmap(masked.sample)(jax.random.split(KEY, 100)))) == {1, 2}
    assert int(masked.mode()) == 1
    np.testing.assert_allclose(masked.entropy(), small.entropy(), rtol=1e-6)
    np.testing.assert_allclose(masked.log_prob(jnp.int32(2)), small.log_prob(jnp.int32(1)), rtol=1e-6)
    other = jnp.array([-9.0, 1.0, 0.0])
    np.testing.assert_allclose(masked.kl(Categorical(other, mask)), small.kl(Categorical(other[1:])), rtol=1e-5)

    def all_of_it(logits):
        policy = Categorical(logits, mask)
        return policy.entropy() + policy.log_prob(jnp.int32(2)) + policy.kl(Categorical(other, mask))

    gradient = jax.grad(all_of_it)(logits)
    assert gradient[0] == 0.0
    assert jnp.isfinite(gradient).all()
    only = Categorical(logits, jnp.array([False, True, False]))
    np.testing.assert_allclose([only.entropy(), only.log_prob(jnp.int32(1))], 0.0)
    with pytest.raises(ProgramError, match=r"the mask is float32\[3\] for logits \[3\]"):
        Categorical(logits, jnp.ones(3))


def test_logits_of_minus_infinity_are_a_mask():
    mask, logits = jnp.array([[False, True, True], [True, False, False]]), jax.random.normal(KEY, (2, 3))

    def cut(logits):
        return Categorical(jnp.where(mask, logits, -jnp.inf))

    def masked(logits):
        return Categorical(logits, mask)

    other = 0.5 - 2.0 * logits
    measures = {
        "entropy": lambda make: lambda x: make(x).entropy().sum(),
        "log_prob": lambda make: lambda x: make(x).log_prob(jnp.array([2, 0])).sum(),
        "kl": lambda make: lambda x: make(x).kl(make(other)).sum(),
        "other": lambda make: lambda x: make(other).kl(make(x)).sum(),
    }
    for name, measure in measures.items():
        found, expected = (jax.value_and_grad(measure(make))(logits) for make in (cut, masked))
        np.testing.assert_array_equal(found[0], expected[0], name)
        np.testing.assert_array_equal(found[1], expected[1], name)
        assert jnp.isfinite(found[1]).all()
    small = Categorical(logits[0, 1:])
    np.testing.assert_allclose(cut(logits).entropy(), [small.entropy(), 0.0], rtol=1e-6)
    np.testing.assert_array_equal(cut(logits).mode(), masked(logits).mode())
    np.testing.assert_array_equal(cut(logits).sample(KEY), masked(logits).sample(KEY))
    gradient = jax.grad(lambda x: Categorical(x).entropy())(jnp.array([1.0, -jnp.inf, 2.0]))
    np.testing.assert_allclose(gradient[::2], jax.grad(lambda x: Categorical(x).entropy())(jnp.array([1.0, 2.0])), rtol=1e-6)
    assert gradient[1] == 0.0
    assert jnp.isnan(Categorical(jnp.array([0.0, jnp.nan])).entropy())  # what went wrong is no mask


def test_in_a_program_and_on_its_slices():
    """A policy is a value of the language: its log-probabilities over a window are those of each timestep."""

    def f(params, carry, t):
        policy = TanhNormal(params * carry, jnp.zeros(2))
        u = rlfx.series(policy.sample(t.key_for("u")))
        window = jax.vmap(policy.log_prob)(u[t : t + 3])
        return jnp.sum(window), carry + 1.0, u[t]

    loss, (_, u) = rlfx.compile(f, length=5)(jnp.float32(0.1), jnp.zeros(2), KEY)
    means = 0.1 * np.arange(5.0)[:, None] * np.ones(2)
    sums = [sum(exact_log_prob(np.float64(u[s]), means[t], 1.0) for s in range(t, min(t + 3, 5))) for t in range(5)]
    np.testing.assert_allclose(loss, np.mean(sums), rtol=1e-5)
