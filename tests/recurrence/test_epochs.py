"""Minibatch epochs: every epoch sees every point once, in an order of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError, ScheduleError

KEY = jax.random.key(0)
DATA = {"x": jnp.arange(12).reshape(3, 4), "y": jnp.arange(24.0).reshape(3, 4, 2)}


def seen(**options):
    return rlfx.minibatch_epochs(lambda c, m: (c + m["x"].sum(), m), 0, DATA, key=KEY, **options)


def test_every_epoch_sees_every_point_once_in_another_order():
    total, out = seen(epochs=3, minibatches=4)
    assert out["x"].shape == (3, 4, 3)
    assert out["y"].shape == (3, 4, 3, 2)
    assert total == 3 * 66
    orders = np.asarray(out["x"]).reshape(3, 12)
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(12))
    assert len({tuple(o) for o in orders}) == 3


def test_leaves_stay_together():
    _, out = seen(epochs=1, minibatches=2)
    np.testing.assert_array_equal(out["y"][..., 0], 2 * out["x"])


def test_sequences_stay_whole():
    _, out = seen(epochs=2, minibatches=2, axis="b")
    assert out["x"].shape == (2, 2, 3, 2)
    for minibatch in np.asarray(out["x"]).reshape(4, 3, 2):
        np.testing.assert_array_equal(minibatch - minibatch[0], [[0, 0], [4, 4], [8, 8]])
    np.testing.assert_array_equal(np.sort(np.asarray(out["x"])[0, :, 0].ravel()), np.arange(4))


def test_updates_are_sequential():
    final, order = rlfx.minibatch_epochs(
        lambda c, m: (0.5 * c + m.mean(), c), 1.0, jnp.arange(4.0)[:, None], epochs=2, minibatches=2, key=KEY
    )
    assert order.shape == (2, 2)
    assert order[0, 0] == 1.0
    assert final != order[1, 1]


def test_under_jit_and_vmap_over_keys():
    run = lambda key: rlfx.minibatch_epochs(lambda c, m: (c, m), 0, DATA["x"], epochs=1, minibatches=3, key=key)[1]  # noqa: E731
    many = jax.jit(jax.vmap(run))(jax.random.split(KEY, 5)).reshape(5, 12)
    np.testing.assert_array_equal(np.sort(many, 1), np.tile(np.arange(12), (5, 1)))
    assert len({tuple(np.asarray(m)) for m in many}) == 5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"minibatches": 5}, "minibatches=5 does not divide the 12 points"),
        ({"minibatches": 3, "axis": "b"}, "minibatches=3 does not divide the 4 environments"),
        ({"minibatches": 0}, "minibatches must be a positive integer, got 0"),
        ({"minibatches": 2, "epochs": 1.5}, "epochs must be a positive integer, got 1.5"),
        ({"minibatches": 2, "axis": "t"}, 'axis must be "tb" or "b", got \'t\''),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(DomainError, match=text):
        seen(**{"epochs": 1, **options})


def test_leaves_with_other_axes_are_refused():
    with pytest.raises(DomainError, match="same two leading axes"):
        rlfx.minibatch_epochs(
            lambda c, m: (c, m), 0, {"a": jnp.zeros((2, 3)), "b": jnp.zeros((3, 2))}, epochs=1, minibatches=1, key=KEY
        )


# -- the shuffle


def test_another_shuffle():
    _, backwards = seen(epochs=1, minibatches=1, shuffle=lambda _key, n: jnp.arange(n)[::-1])
    np.testing.assert_array_equal(backwards["x"].ravel(), np.arange(12)[::-1])
    _, sorting = seen(epochs=1, minibatches=3, shuffle=jax.random.permutation)
    np.testing.assert_array_equal(np.sort(sorting["x"].ravel()), np.arange(12))


def test_a_sorting_shuffle_gets_jaxs_numbers():
    """Keys become unrolled threefry, which draws the same."""
    _, out = seen(epochs=2, minibatches=1, shuffle=jax.random.permutation)
    for row, key in zip(out["x"].reshape(2, 12), jax.random.split(KEY, 2), strict=True):
        np.testing.assert_array_equal(row, jax.random.permutation(key, 12))


@pytest.mark.optimised
def test_the_shuffled_data_never_exist_as_a_whole():
    data = jnp.zeros((64, 64, 32))
    run = lambda data, key: rlfx.minibatch_epochs(  # noqa: E731
        lambda c, m: (c + jnp.tanh(m).sum(), None), 0.0, data, epochs=2, minibatches=16, key=key
    )
    temp = jax.jit(run).lower(data, KEY).compile().memory_analysis().temp_size_in_bytes
    assert temp < data.nbytes / 4


def test_no_sort():
    text = jax.jit(lambda key: rlfx.minibatch_epochs(lambda c, m: (c, None), 0, DATA, epochs=1, minibatches=2, key=key))
    assert "stablehlo.sort" not in text.lower(KEY).as_text()


# -- over the devices of a mesh


def regression(carry, batch):
    grads = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(carry)
    return carry - 0.1 * grads, batch["y"].mean()


@pytest.mark.parametrize("axis", ["tb", "b"])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.optimised
def test_a_mesh_changes_nothing(axis, devices):
    mesh = jax.make_mesh((devices,), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    x = jax.random.normal(jax.random.key(1), (64, 16, 3))
    data = {"x": x, "y": x.sum(-1)}
    run = lambda mesh: jax.jit(  # noqa: E731
        lambda key: rlfx.minibatch_epochs(
            regression, jnp.zeros(3), data, epochs=2, minibatches=4, key=key, axis=axis, mesh=mesh
        )
    )
    (got, got_aux), (expected, expected_aux) = run(mesh)(KEY), run(None)(KEY)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_aux, expected_aux, rtol=1e-5, atol=1e-6)
    text = run(mesh).lower(KEY).compile().as_text()
    rows = 64 * 16 // 4 // devices if axis == "tb" else 64
    assert "all-reduce" in text
    assert f"f32[{rows},3]" in text if axis == "tb" else f"f32[64,{16 // 4 // devices},3]" in text  # a part each


def test_the_mesh_that_jax_makes_is_a_mesh():
    """Of `jax.make_mesh` without more words, whose axes are explicit."""
    data, mesh = jax.random.normal(KEY, (4, 4)), jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    total = lambda mesh: jax.jit(  # noqa: E731
        lambda data: rlfx.minibatch_epochs(
            lambda c, x: (c + x.mean() * c, None), jnp.float32(1.0), data, epochs=2, minibatches=2, key=KEY, mesh=mesh
        )[0]
    )
    np.testing.assert_allclose(total(mesh)(data), total(None)(data), rtol=1e-6)


def test_minibatches_that_do_not_divide_over_the_mesh():
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ScheduleError, match=r"Minibatches of 6 cannot be split over the 4 devices of mesh axis 'b'"):
        seen(epochs=1, minibatches=2, mesh=mesh)
    with pytest.raises(ScheduleError, match="mesh_axis='x' is not an axis of the mesh"):
        seen(epochs=1, minibatches=3, mesh=mesh, mesh_axis="x")


def test_minibatches_in_blocks():
    x = jax.random.normal(jax.random.key(1), (64, 16, 3))
    data = {"x": x, "y": x.sum(-1)}

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def run(gradient):
        update = lambda w, batch: (w - 0.1 * gradient(w, batch), None)  # noqa: E731
        return rlfx.minibatch_epochs(update, jnp.zeros(3), data, epochs=2, minibatches=4, key=KEY)[0]

    blocked = jax.grad(rlfx.incrementalize(loss, block_size=64))
    np.testing.assert_allclose(run(blocked), run(jax.grad(loss)), rtol=1e-5, atol=1e-6)
