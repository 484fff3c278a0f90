"""``offload`` on ordinary losses: placement, gradients, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.ahead.machines import MACHINES
from rlfx.ahead.program import surroundings
from rlfx.errors import DomainError, PlacementError, ScheduleError
from rlfx.transforms.blocks import offloaded as _offload_loss
from rlfx.transforms.offload import offload

N = 22
HOST = jax.memory.Space.Host


def loss(params, batch):
    x, y = batch["x"], batch["y"]
    h = jnp.tanh(x @ params["w"])
    each = (h @ params["v"] - y) ** 2
    return each.mean(), {"each": each, "worst": each.argmax(), "advantage": ((y - y.mean()) / y.std()).max()}


def params():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (5, 3), jnp.float32), "v": jax.random.normal(keys[1], (3,), jnp.float32)}


def batch():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(N, 5)).astype(np.float32), "y": rng.normal(size=N).astype(np.float32)}


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)


def placements(fn, *args):
    """How often the program, lowered for CUDA, puts something on the host and on the device."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'annotate_device_placement.*?_xla_buffer_placement = "(\w+)".*?\(tensor<(\w+)>\)', text)
    return [(where, shape) for where, shape in found]


@pytest.fixture(params=["numpy", "device", "host"])
def given(request):
    move = {"numpy": lambda x: x, "device": jnp.asarray, "host": lambda x: jax.device_put(x, HOST)}
    return jax.tree.map(move[request.param], batch())


@pytest.mark.parametrize("size", [8, 11])
def test_the_program_form(given, size):
    blocked = offload(loss, block_size=size)
    want = jax.value_and_grad(loss, has_aux=True)(params(), batch())
    close(blocked(params(), given), want[0])
    close(jax.jit(blocked)(params(), given), want[0])
    close(jax.jit(jax.value_and_grad(blocked, has_aux=True))(params(), given), want)


@pytest.mark.parametrize("size", [8, 11])
def test_the_driver_form(given, size):
    blocked = offload(loss, block_size=size, form="driver")
    want = jax.value_and_grad(loss, has_aux=True)(params(), batch())
    close(blocked(params(), given), want[0])
    for _ in range(2):
        close(jax.value_and_grad(blocked, has_aux=True)(params(), given), want)


def test_the_driver_compiles_once():
    traces = []

    def counted(w, x):
        traces.append(1)
        return jnp.mean((x @ w) ** 2)

    blocked = offload(counted, block_size=8, form="driver")
    for i in range(3):
        jax.grad(blocked)(jnp.full(5, float(i), jnp.float32), batch()["x"])
    assert len(traces) == 1
    assert len(blocked.compiled) == 1
    blocked(jnp.ones(5, jnp.float32), batch()["x"][:10])
    assert len(blocked.compiled) == 2


def test_the_driver_never_has_the_whole_batch_on_the_device(monkeypatch):
    put = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **k: (put.append(np.shape(x)), real(x, *a, **k))[1])
    jax.grad(offload(lambda w, x: jnp.mean((x @ w) ** 2), block_size=8, form="driver"))(
        jnp.ones(5, jnp.float32), batch()["x"]
    )
    blocks = [shape for shape in put if len(shape) == 2]
    assert blocks == [(8, 5)] * 4 + [(6, 5)] * 2  # each to pinned memory, and from there to the device


def test_the_driver_reads_a_memory_mapped_file(tmp_path):
    np.save(tmp_path / "x.npy", batch()["x"])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    square = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    close(
        jax.grad(offload(square, block_size=8, form="driver"))(jnp.ones(5, jnp.float32), mapped),
        jax.grad(square)(jnp.ones(5, jnp.float32), mapped),
    )


def test_vmap_of_the_program_form():
    stacked = jax.tree.map(lambda x: jnp.stack([x, -2.0 * x]), params())
    step = jax.grad(lambda p, b: offload(loss, block_size=8)(p, b)[0])
    want = jax.vmap(jax.grad(lambda p, b: loss(p, b)[0]), (0, None))(stacked, batch())
    close(jax.jit(jax.vmap(step, (0, None)))(stacked, batch()), want)


def test_cotangents_of_a_batch_on_the_host_are_on_the_host():
    x = jax.device_put(batch()["x"], HOST)
    square = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    got = jax.jit(jax.grad(offload(square, block_size=8), argnums=1))(jnp.ones(5, jnp.float32), x)
    assert got.sharding.memory_kind == "pinned_host"
    close(np.asarray(got), jax.grad(square, argnums=1)(jnp.ones(5, jnp.float32), batch()["x"]))


# -- placement, as a GPU would have it ---------------------------------------------------------------------------------


def test_the_batch_is_pinned_and_its_blocks_are_on_the_device():
    square = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    blocked = offload(square, block_size=11)
    device_batch, host_batch = jnp.asarray(batch()["x"]), jax.device_put(batch()["x"], HOST)
    # block 0 before the loop, block c + 1 inside of it
    fetched = [("device", "11x5xf32"), ("device", "11x5xf32")]
    for fn in (blocked, jax.grad(blocked)):
        assert placements(fn, jnp.ones(5, jnp.float32), device_batch) == [("pinned_host", "22x5xf32"), *fetched]
        assert placements(fn, jnp.ones(5, jnp.float32), host_batch) == fetched


def test_what_is_read_as_a_whole_goes_to_the_device():
    def shuffled(w, b):
        return jnp.mean((b["x"][b["perm"]] @ w) ** 2)

    full = {"x": batch()["x"], "perm": np.random.default_rng(1).permutation(N).astype(np.int32)}
    blocked = offload(shuffled, block_size=11)
    want = jax.grad(shuffled)(jnp.ones(5, jnp.float32), full)
    close(jax.jit(jax.grad(blocked))(jnp.ones(5, jnp.float32), full), want)
    assert ("device", "22x5xf32") in placements(blocked, jnp.ones(5, jnp.float32), full)
    report = blocked.explain(jnp.ones(5, jnp.float32), full)
    assert (report.host_bytes, report.on_device) == (4 * N, 4 * N * 5)
    assert "read as a whole, and so on the device: 440 bytes" in str(report)


def test_the_report_says_that_a_cpu_saves_nothing():
    report = offload(loss, block_size=11).explain(params(), batch())
    assert report.host_bytes == 4 * N * 6
    assert report.device_bytes == 2 * 4 * 11 * 6
    assert "Nothing is saved on cpu" in str(report)
    assert _offload_loss.note("gpu") == ""


def test_what_is_traced_for_another_machine_is_told_of_that_one(monkeypatch):
    """The report and the refusal are those of the machine around, as all that is decided while a program is traced."""
    program = rlfx.trace(lambda w, x, t: (jnp.tanh(w * x), x + 1.0), 2.0, jnp.float32(0.0), length=4)
    monkeypatch.setattr("rlfx.transforms.offload.JAXLIB", "0.10.2")
    given = params(), batch()
    for machine in ("h200", "v5e"):
        with jax.sharding.use_abstract_mesh(surroundings(MACHINES[machine])):
            assert offload(loss, block_size=11).explain(*given).note == ""
    with (
        jax.sharding.use_abstract_mesh(surroundings(MACHINES["h200"])),
        pytest.raises(ScheduleError, match=r"jaxlib 0\.10\.2 may read host memory in a loop in the wrong order"),
    ):
        offload(program, min_bytes=1)
    assert offload(program, min_bytes=1).directives.offload.min_bytes == 1  # here, on a CPU


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gpu", "cuda"])
def test_versions_with_wrong_gradients_are_refused(backend):
    for version in ("0.10.2", "0.11.0"):
        with pytest.raises(ScheduleError, match=f"jaxlib {version} may read host memory in a loop in the wrong order"):
            _offload_loss.refuse(backend, version)
    for fine in ((backend, "0.11.1"), (backend, "0.11.1.dev2"), (backend, "0.12.0"), ("cpu", "0.10.2")):
        _offload_loss.refuse(*fine)


def test_a_device_without_host_memory_is_refused():
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Memory()]

        def __str__(self):
            return "toy:0"

    with pytest.raises(PlacementError, match="toy:0 has no pinned host memory, only device: there is nowhere"):
        _offload_loss.require_host_memory(Device())


def test_the_driver_is_no_part_of_a_program():
    blocked = offload(loss, block_size=8, form="driver")
    with pytest.raises(ScheduleError, match="makes several jitted calls and reads the batch between them"):
        jax.jit(blocked)(params(), batch())
    with pytest.raises(ScheduleError, match="the batch cannot be traced or differentiated"):
        jax.grad(lambda p, b: blocked(p, b)[0], argnums=1)(params(), batch())


def test_the_driver_differentiates_the_loss_alone():
    def two(w, x):
        return jnp.mean(x @ w), jnp.sum(w**2)

    blocked = offload(two, block_size=8, form="driver")
    with pytest.raises(
        ScheduleError, match="differentiates its first result, the loss; another result has a cotangent"
    ):
        jax.grad(lambda w: sum(blocked(w, batch()["x"])))(jnp.ones(5, jnp.float32))


def test_a_loss_that_is_no_reduction_over_the_batch():
    blocked = offload(lambda w, x: x @ w, block_size=8, form="driver")
    with pytest.raises(
        ScheduleError, match=r"must be a real scalar: it is float32\[22\]. A loss is a reduction over the"
    ):
        jax.grad(lambda w: blocked(w, batch()["x"]).sum())(jnp.ones(5, jnp.float32))


@pytest.mark.parametrize("form", ["program", "driver"])
def test_bad_blocks_and_batches(form):
    with pytest.raises(DomainError, match="block_size must be a positive integer or None, got 0"):
        offload(loss, block_size=0, form=form)
    with pytest.raises(DomainError, match="block_size=23 is not an integer between 1 and the number of examples"):
        offload(loss, block_size=23, form=form)(params(), batch())
    with pytest.raises(DomainError, match=r"argument 1\['x'\] has 22 examples, argument 1\['y'\] has 5"):
        offload(loss, block_size=2, form=form)(params(), batch() | {"y": np.ones(5, np.float32)})


def test_bad_forms_and_targets():
    with pytest.raises(DomainError, match=r'form must be "program" or "driver", got .both.'):
        offload(loss, block_size=2, form="both")
    with pytest.raises(DomainError, match="offload takes a function, got 3"):
        offload(3, block_size=2)
