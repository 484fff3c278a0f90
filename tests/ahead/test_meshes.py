"""PPO's update over a mesh: where devices meet, how memory falls, weights on a second axis. "cpu:8" needs no plugin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import rlfx
from tests.ahead import programs
from tests.ahead.conftest import installed

PLUGIN = {"h200": "cuda", "v5e": "tpu"}
GRADIENT = 4 * sum(leaf.size for leaf in jax.tree.leaves(programs.ppo_params()))


def there(name):
    plugin = PLUGIN.get(name.partition(":")[0])
    if plugin is not None:
        installed(plugin)
    return rlfx.target(name)


MESHES = ["cpu:8", *(pytest.param(name, marks=pytest.mark.aot) for name in ("h200:8", "h200:2x8", "v5e:4x4"))]


def one_epoch_meets(found):
    """Devices meet for the gradient and the loss, and for the mean and deviation of advantages: never in a loop."""
    assert {c.kind for c in found.collectives} == {"all-reduce"}
    assert not any(c.in_loop for c in found.collectives), "none inside the acting loop"
    moved = sum(c.bytes * c.count for c in found.collectives)
    assert GRADIENT <= moved <= GRADIENT + 64, "the gradient once, and numbers"


def minibatches_meet(found):
    """Samples go to all devices once; each minibatch's gradient is a sum over devices. None meet while acting."""
    steps = programs.EPOCHS * programs.MINIBATCHES
    inside = [c for c in found.collectives if c.in_loop]
    assert {c.kind for c in inside} == {"all-reduce"}
    assert {c.count for c in inside} == {steps}, "as often as there are minibatches, not timesteps"
    moved = sum(c.bytes * c.count for c in inside) // steps
    assert GRADIENT <= moved <= GRADIENT + 64
    once = [c for c in found.collectives if not c.in_loop]
    assert {c.kind for c in once} == {"all-gather"}
    points, numbers = programs.PPO_STEPS * programs.BATCH, 4 * 4
    whole, narrow = (points * (numbers + width * programs.OBSERVED) for width in (4, 2))
    moved = sum(c.bytes * c.count for c in once)
    assert moved == (narrow if found.plugin == "tpu" else whole), "all of the data, once; TPUs multiply bfloat16"


@pytest.mark.parametrize("name", MESHES)
def test_devices_of_one_epoch_meet_for_the_gradient(name):
    target = there(name)
    fn, shapes = programs.ppo_gradient(programs.BATCH, target.mesh("b"))
    found = target.compile(fn, *shapes)
    assert found.devices == target.devices
    one_epoch_meets(found)


@pytest.mark.parametrize("name", MESHES)
def test_devices_of_minibatches_meet_for_each_gradient(name):
    target = there(name)
    fn, shapes = programs.ppo_minibatches(programs.BATCH, target.mesh("b"))
    minibatches_meet(target.compile(fn, *shapes))


@pytest.mark.parametrize("name", MESHES)
def test_the_memory_of_a_device_is_its_share(name):
    target = there(name)
    alone = rlfx.target(name.partition(":")[0])
    fn, shapes = programs.ppo_gradient(programs.BATCH * target.devices, target.mesh("b"))
    wide = target.compile(fn, *shapes).temp_bytes
    fn, shapes = programs.ppo_gradient(programs.BATCH)
    assert wide <= 1.1 * alone.compile(fn, *shapes).temp_bytes


@pytest.mark.parametrize(
    "name", ["cpu:8", *(pytest.param(name, marks=pytest.mark.aot) for name in ("h200:2x8", "v5e:4x4"))]
)
def test_weights_on_a_second_axis_are_gathered_once(name):
    """They may be split over another axis than the environments: each call gathers them before it acts, never in a loop."""
    target = there(name)
    mesh = jax.sharding.AbstractMesh(
        (2, target.devices // 2), ("m", "b"), (AxisType.Auto,) * 2, abstract_device=target.mesh("b").abstract_device
    )
    weights = NamedSharding(mesh, PartitionSpec(None, "m"))
    fn, shapes = programs.ppo_gradient(programs.BATCH, mesh, weights)
    found = target.compile(fn, *shapes)
    assert not any(c.in_loop for c in found.collectives)
    assert {c.kind for c in found.collectives} <= {"all-reduce", "all-gather", "collective-permute"}
    gathered = [c for c in found.collectives if c.kind == "all-gather"]
    assert sum(c.bytes * c.count for c in gathered) == 4 * programs.OBSERVED * programs.UNITS


def test_values_with_weights_on_a_second_axis():
    """On four devices: as on one, and the weights that come back lie where they lay."""
    batch = 8
    mesh = jax.make_mesh((2, 2), ("m", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    keys = jax.random.split(jax.random.key(1), 4)
    params = {
        name: 0.3 * jax.random.normal(k, s.shape)
        for k, (name, s) in zip(keys, programs.ppo_params().items(), strict=False)
    }
    obs, key = jax.random.normal(keys[3], (batch, programs.OBSERVED)), jax.random.key(2)
    fn, _ = programs.ppo_gradient(batch)
    wanted = jax.jit(fn)(params, obs, key)
    weights = NamedSharding(mesh, PartitionSpec(None, "m"))
    lay = {**jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params), "body": weights}
    fn, _ = programs.ppo_gradient(batch, mesh)
    split = NamedSharding(mesh, PartitionSpec("b"))
    found = jax.jit(fn, out_shardings=(lay, split, None))(jax.device_put(params, lay), jax.device_put(obs, split), key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    assert found[0]["body"].sharding.is_equivalent_to(weights, 2)
    assert float(jnp.abs(found[0]["body"] - params["body"]).max()) > 1e-5
