"""What recorded compilations say, read without the compilers: figures that are known from the programs themselves."""

import gzip
import json
from pathlib import Path

import pytest

from rlfx.ahead.compilation import Compilation, read
from rlfx.ahead.kernels import Kernel, kernels
from rlfx.ahead.launches import Collective, Loop, Transfer, count
from tests.ahead.programs import ROUNDS, STEPS
from tests.ahead.test_meshes import minibatches_meet, one_epoch_meets

FOLDER = Path(__file__).with_name("recorded")
PLUGINS = {"v": "tpu"}


def recorded(name: str, devices: int = 1) -> Compilation:
    answer = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    target = name.partition("-")[2]
    return read(name, target, PLUGINS.get(target[0], "cuda"), devices, answer)


@pytest.mark.parametrize("target", ["h200", "t4", "v5e"])
def test_loops_run_as_often_as_the_program_says(target):
    found = recorded(f"loops-{target}")
    assert [loop.trips for loop in found.loops] == [STEPS, STEPS]
    assert all(loop.kernels > 0 and loop.loops == () for loop in found.loops)
    outside = found.launches - STEPS * sum(loop.kernels for loop in found.loops)
    assert 0 < outside < 20
    assert found.launches_if(1000) == found.launches
    assert found.collectives == found.host_transfers == ()
    assert found.conditionals == 0


def test_bytes_are_those_of_the_shapes():
    found = recorded("loops-h200")
    x, w, kept = STEPS * 512 * 64 * 4, 64 * 64 * 4, STEPS * 512 * 64 * 4
    assert found.argument_bytes == x + w
    assert found.output_bytes == w
    assert found.temp_bytes >= 2 * kept, "what the loop forward keeps for the one backward"
    assert found.temp_bytes + found.argument_bytes <= found.peak_bytes
    assert found.host_temp_bytes == found.alias_bytes == 0


def test_the_launches_are_those_that_xla_lists():
    answer = json.loads(gzip.decompress((FOLDER / "loops-h200.json.gz").read_bytes()))
    launched = [line for line in answer["thunks"].splitlines() if "kCustomKernel" in line or "kCopy " in line]
    conditions = sum("loop_compare_fusion" in line for line in launched)  # not run where the length is known
    found = recorded("loops-h200")
    in_loops = sum(loop.kernels for loop in found.loops)
    assert len(launched) - conditions == in_loops + found.launches - STEPS * in_loops


def test_kernels_have_registers_and_shared_memory():
    found = recorded("loops-h200")
    products = [k for k in found.kernels if k.name.startswith("gemm_fusion")]
    assert len(products) == 3, "one forward, two backward"
    assert all(k.registers > 16 and k.shared_bytes >= 1024 and k.threads >= 32 and k.blocks > 1 for k in products)
    assert found.spill_bytes == 0
    assert all(0 < k.registers <= 255 for k in found.kernels)
    assert recorded("loops-v5e").kernels == ()


@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_a_loop_on_data_has_no_number(target):
    found = recorded(f"open_ended-{target}")
    assert found.launches is None
    (loop,) = found.loops
    assert loop.trips is None
    assert not loop.is_known
    assert [inner.trips for inner in loop.loops] == [ROUNDS]
    once = loop.kernels + ROUNDS * loop.loops[0].kernels
    assert found.launches_if(5) - found.launches_if(4) == once
    assert found.conditionals == 1
    assert "or more" in str(found)
    on_host = (Transfer("condition", 1, 1),) if target == "h200" else ()  # a TPU decides by itself
    assert found.host_transfers == on_host


@pytest.mark.parametrize(("name", "devices"), [("h200-8", 8), ("v5e-4x4", 16)])
def test_collectives_are_counted_where_they_are(name, devices):
    found = recorded(f"split-{name}", devices)
    in_loop, once = 256 * 4, 4
    assert set(found.collectives) == {
        Collective("all-reduce", ROUNDS, in_loop, True),
        Collective("all-reduce", 1, once, False),
    }
    assert f"{ROUNDS} all-reduce of 1.0 KiB in loops" in str(found)
    assert f"{devices} devices" in str(found)


@pytest.mark.parametrize("target", ["a100", "v5e"])
def test_rows_that_go_to_the_host_and_back(target):
    found = recorded(f"hosted-{target}")
    moved = {t.kind: (t.count, t.bytes) for t in found.host_transfers}
    row = 4096 * 4
    assert moved == {"to host": (STEPS, row), "to device": (STEPS, row)}
    assert found.host_temp_bytes >= STEPS * row
    assert found.temp_bytes < STEPS * row


def test_counted_loops_without_the_compilers_word():
    """From its condition and its body: LT, LE, GT, NE, steps other than one, copies of the counter."""
    assert [count(_module(*case)).loops[0].trips for case in _COUNTED] == [10, 11, 5, 4, 3, 0]
    assert [count(_module(*case)).loops[0].trips for case in _NOT_COUNTED] == [None] * 3


_COUNTED = [
    (0, "add", 1, "LT", 10),
    (0, "add", 1, "LE", 10),
    (9, "subtract", 2, "GE", 1),
    (10, "subtract", 3, "GT", 0),
    (0, "add", 3, "LT", 9),
    (5, "add", 1, "LT", 5),
]
_NOT_COUNTED = [(0, "multiply", 2, "LT", 10), (0, "add", 0, "LT", 10), (0, "add", 1, "EQ", 10)]


def _module(start, op, by, direction, end):
    return f"""HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
  %by = s32[] constant({by})
  %next = s32[] {op}(%i, %by)
  %held = s32[] copy(%next)
  %y = f32[8]{{0}} negate(%x)
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%held, %y)
}}

%condition (q: (s32[], f32[8])) -> pred[] {{
  %end = s32[] constant({end})
  %q = (s32[], f32[8]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %more = pred[] compare(%j, %end), direction={direction}
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  %start = s32[] constant({start})
  %counter = s32[] copy(%start)
  %init = (s32[], f32[8]{{0}}) tuple(%counter, %a)
  %loop = (s32[], f32[8]{{0}}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""


def test_the_dearest_branch_counts_and_calls_are_followed():
    text = """HloModule m

%one (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %n.1 = f32[8]{0} negate(%p.1)
}

%two (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %n.2 = f32[8]{0} negate(%p.2)
  ROOT %n.3 = f32[8]{0} exponential(%n.2)
}

ENTRY %main (a: f32[8], i: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %i = s32[] parameter(1)
  %c = f32[8]{0} conditional(%i, %a, %a), branch_computations={%one, %two}
  ROOT %d = f32[8]{0} call(%c), to_apply=%two
}
"""
    found = count(text)
    assert (found.kernels, found.loops, found.conditionals) == (1 + 2 + 2, (), 1)


def test_collectives_that_are_combined_are_counted_whole():
    """An asynchronous start holds operands, then results: one or several."""
    one, two = "f32[8,4]{1,0}", "s32[8]{0}"
    text = f"""HloModule m

ENTRY %main (a: f32[2,4], b: s32[2]) -> (f32[8,4], s32[8], f32[8,4]) {{
  %a = f32[2,4]{{1,0}} parameter(0)
  %b = s32[2]{{0}} parameter(1)
  %s = ((f32[2,4]{{1,0}}, s32[2]{{0}}), ({one}, {two})) all-gather-start(%a, %b), dimensions={{0}}
  %d = ({one}, {two}) all-gather-done(%s)
  %x = {one} get-tuple-element(%d), index=0
  %y = {two} get-tuple-element(%d), index=1
  %w = ((f32[2,4]{{1,0}}), {one}, u32[]) all-gather-start(%a), dimensions={{0}}
  %z = {one} all-gather-done(%w)
  ROOT %out = ({one}, {two}, {one}) tuple(%x, %y, %z)
}}
"""
    each = {Collective("all-gather", 1, 8 * 4 * 4 + 8 * 4, False), Collective("all-gather", 1, 8 * 4 * 4, False)}
    assert set(count(text).collectives) == each


MESHES = pytest.mark.parametrize(("name", "devices"), [("h200-8", 8), ("h200-2x8", 16), ("v5e-4x4", 16)])


@MESHES
def test_ppo_of_one_epoch_meets_for_its_gradient(name, devices):
    one_epoch_meets(recorded(f"one_epoch-{name}", devices))


@MESHES
def test_ppo_of_minibatches_meets_for_each_gradient(name, devices):
    minibatches_meet(recorded(f"minibatches-{name}", devices))


def test_spills_are_added_up():
    said = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'deep' for 'sm_80'
ptxas info    : Function properties for deep
    312 bytes stack frame, 300 bytes spill stores, 412 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem, 480 bytes cmem[0]
"""
    launched = (
        "007: kCustomKernel [source | sink] deep grid: [4, 2, 1] threads: [128, 1, 1]  shared_memory: 65536 bytes"
    )
    assert kernels(said) == (Kernel("deep", 255, 49152, 712),)
    assert kernels(said, launched) == (Kernel("deep", 255, 65536, 712, 128, 8),)
    assert kernels("") == ()


def test_loops_inside_of_loops_multiply():
    inner = Loop(7, 3)
    assert Loop(5, 2, (inner, inner)).launches() == 5 * (2 + 2 * 21)
    assert Loop(None, 2, (inner,)).launches(4) == 4 * 23
