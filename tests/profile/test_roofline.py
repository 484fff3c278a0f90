"""What instructions compute and move, against XLA's own analysis; and what is said of it beside the device's rates."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.profile import capture, operation, read, wire
from rlfx.profile.hlo import Module, read_module
from rlfx.profile.roofline import Roof, roofline
from rlfx.profile.rows import DeviceRow, Row
from rlfx.profile.timeline import Timeline
from rlfx.profile.verdict import verdict
from rlfx.profile.work import Work, work

pytestmark = pytest.mark.optimised


def counted(f, *args) -> tuple[Work, dict]:
    """What all instructions outside of loops do, and what XLA says of the program."""
    compiled = jax.jit(f).lower(*args).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    data = memoryview(module.as_serialized_hlo_module_proto())
    instructions, members, _, _, roots = read_module(data)
    total = Work()
    for key in members[wire.integer(wire.message(data), 6)]:
        total = total.plus(work(key, instructions, members, roots))
    return total, compiled.cost_analysis()


def program(x, w, k, image):
    """A product, one of a batch, a convolution, a reduction, a part, a choice and a transposition."""
    h = jnp.tanh(x @ w)
    y = jnp.einsum("bij,bjk->bik", h.reshape(4, 8, 32), k)
    numbers = ("NHWC", "HWIO", "NHWC")
    c = jax.lax.conv_general_dilated(image, jnp.ones((3, 3, 4, 8)), (1, 1), "VALID", dimension_numbers=numbers)
    return y.sum(1), c * 2 + 1, jax.lax.dynamic_slice(h, (3, 0), (2, 32)), jnp.where(h > 0, h, 0).T


def test_flops_are_those_of_xla_and_bytes_but_for_the_table_of_results():
    shapes = (32, 16), (16, 32), (4, 32, 6), (2, 9, 9, 4)
    found, xla = counted(program, *map(jnp.ones, shapes))
    assert found.products + found.elements == xla["flops"] + xla["transcendentals"]
    assert xla["bytes accessed"] - found.bytes in (0, 4 * 8)  # a pointer to each of the four results
    assert found.products == 2 * (32 * 16 * 32 + 4 * 8 * 32 * 6 + 2 * 7 * 7 * 8 * 3 * 3 * 4)


def test_what_is_changed_in_place_moves_only_the_change():
    def step(history, x, t):
        return jax.lax.dynamic_update_slice(history, jnp.tanh(x)[None], (t, 0))

    args = jnp.ones((1000, 8)), jnp.ones(8), 3
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    ops = Module("jit_step", 1, memoryview(module.as_serialized_hlo_module_proto())).ops
    (fused,) = [op for op in ops.values() if op.opcode == "fusion"]
    assert fused.work.elements >= 8
    assert 64 <= fused.work.bytes <= 128  # of 32,000


def test_a_small_loop_that_is_compiled_as_one_call_belongs_to_what_is_in_it(tmp_path):
    @jax.jit
    def loops(x):
        def body(c, _):
            with operation("policy"):
                return jnp.sin(c) * 1.01, None

        return jax.lax.scan(body, x, None, length=20_000)[0]

    x = jnp.ones(4)
    jax.block_until_ready(loops(x))
    with capture(tmp_path) as session:
        jax.block_until_ready(loops(x))
    report = session.report()
    by = collections.Counter({row.path: ns for row, ns in report.device_rows.items()})
    assert by["policy",] > 0.5 * by.total()
    assert read(tmp_path).processes[0].notes["rates"] == dataclasses.asdict(rlfx.target().rates)


RATES = {"flops": 1e12, "elements": 1e11, "bandwidth": 1e10, "overhead": 1e-6}


@pytest.mark.parametrize(
    ("done", "count", "near", "words"),
    [
        (Work(8e8, 0.0, 1e6), 1, "arithmetic", "arithmetic-bound: 0.8 of the rate that rlfx.target has; smaller"),
        (Work(1e6, 1e6, 8e6), 10, "memory", "memory-bound: 0.8 of the bandwidth; move less"),
        (Work(0.0, 1e6, 3e7), 10, "memory", "memory-bound: 3 of the bandwidth, partly out of caches; move"),
        (Work(1e3, 1e3, 1e3), 900, "starts", "bound by starting 900 instructions of 1.11 us"),
        (Work(1e6, 1e6, 1e6), 10, "", ""),
    ],
)
def test_a_millisecond_of_work_is_near_one_limit(done, count, near, words):
    path = ("update",)
    timeline = Timeline((0, 1), [], [], 0, work={("", path): done})
    timeline.launches["", path] = count
    rows = {DeviceRow("", path, ""): 1_000_000}
    (roof,) = roofline(rows, [(timeline, {"rates": RATES})])
    assert (roof.limit, roof.flops, roof.bytes) == (near, done.products + done.elements, done.bytes)
    assert roof.bandwidth == pytest.approx(done.bytes / 1e10 / 1e-3)
    assert str(roof).startswith(words)
    assert bool(words) == bool(str(roof))
    window = {Row("", path, "", "wait", "busy"): 100}
    said = verdict(window, 100, collections.Counter(), {roof.operation: str(roof)})
    assert said.endswith(str(roof) or "the device itself is the limit: make its work smaller")


def test_without_rates_there_is_work_and_no_share():
    timeline = Timeline((0, 1), [], [], 0, work={("", ()): Work(4.0, 2.0, 8.0)})
    (roof,) = roofline({DeviceRow("", (), ""): 1000}, [(timeline, {})])
    assert roof == Roof("(none)", 1e-6, 6.0, 8.0, 0)
    assert (roof.limit, str(roof)) == ("", "")
