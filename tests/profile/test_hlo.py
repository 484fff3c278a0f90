"""Which operation an instruction belongs to: names, inheritance, and fusions of several."""

import pytest

from rlfx.profile.hlo import Module
from rlfx.profile.scopes import join, parse

pytestmark = pytest.mark.optimised


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(f)/rlfx.op:sim/tanh", ("sim",)),
        ("jit(f)/vmap(rlfx.op:sim)/while/body/closed_call/tanh", ("sim",)),
        ("jit(f)/transpose(jvp(rlfx.op:loss))/jvp(rlfx.op:loss)/checkpoint/rlfx.op:net/dot_general", ("loss", "net")),
        ("jit(f)/jvp(rlfx.op:loss)/Dense_0/dot_general", ("loss",)),
        ("jit(f)/jvp(ActorCritic)/Dense_0/dot_general", ("ActorCritic", "Dense_0")),
        ("jit(f)/cond/branch_1_fun/rlfx.op:reset/add", ("reset",)),
        ("jit(f)/vmap(a/b)/mul", ("a", "b")),
        ("jit(f)/while/body/add", ()),
        ("jit(f)/rlfx.op:loss/mul;jit(f)/rlfx.op:other/transpose", ("loss",)),
        ("jit(f)/rlfx.stage/2 parallel/rlfx.op:gae/while/body/mul", ("gae",)),
        ("jit(_train)/vmap(learner)/policy/dot_general", ("learner", "policy")),  # whoever names functions so
        ("jit(train)/act/jit(_normal)/jit(_uniform)/bits/mul", ("act",)),
    ],
)
def test_paths(op_name, path):
    assert parse(op_name).path == path
    assert parse(op_name).named


@pytest.mark.parametrize("op_name", ["", "x", "reduce_sum"])
def test_instructions_without_a_path_are_unnamed(op_name):
    assert not parse(op_name).named


def test_stages_and_phases():
    scope = parse("jit(f)/rlfx.phase:update/rlfx.stage/2 parallel/rlfx.op:gae/mul")
    assert (scope.phase, scope.stage, scope.path) == ("update", "2 parallel", ("gae",))


def test_an_operation_open_on_both_sides_counts_once():
    assert join(("train", "loss"), ("loss", "net")) == ("train", "loss", "net")
    assert join(("train",), ()) == ("train",)


def module(made, computations):
    raw = b"".join(
        made.message(f3=made.message(f1=name, f5=key, f2=instructions))
        for key, (name, instructions) in computations.items()
    )
    return Module("jit_f", 1, memoryview(raw)).ops


def test_copies_inherit_from_operands_then_users_then_the_loop(made):
    i = made.instruction
    ops = module(
        made,
        {
            1: ("main", [
                i(1, "p", "parameter", "x"),
                i(2, "copy.before", "copy", operands=[1]),
                i(3, "dot.3", "dot", "jit(f)/rlfx.op:policy/dot_general", operands=[2]),
                i(4, "gte", "get-tuple-element", operands=[3]),
                i(5, "copy.after", "copy", operands=[4]),
                i(6, "while.6", "while", "jit(f)/rlfx.op:rollout/while", operands=[1], f38=[2]),
            ]),
            2: ("body", [i(7, "q", "parameter"), i(8, "copy.carry", "copy", operands=[7])]),
        },
    )  # fmt: skip
    found = {name: ops[name].scopes[0][0].path for name in ("copy.before", "copy.after", "copy.carry")}
    assert found == {"copy.before": ("policy",), "copy.after": ("policy",), "copy.carry": ("rollout",)}
    assert ops["copy.carry"].inherited
    assert not ops["dot.3"].inherited


def test_fusions_of_several_operations_are_divided_by_work(made):
    i = made.instruction
    ops = module(
        made,
        {
            1: ("main", [i(1, "fusion.1", "fusion", "jit(f)/rlfx.op:a/add", f38=[2])]),
            2: ("fused", [
                i(2, "p", "parameter", dims=(100,)),
                i(3, "add", "add", "jit(f)/rlfx.op:a/add", operands=[2], dims=(100,)),
                i(4, "tanh", "tanh", "jit(f)/rlfx.op:b/tanh", operands=[3], dims=(100,)),
            ]),
        },
    )  # fmt: skip
    assert ops["fusion.1"].mixed
    assert {scope.path: weight for scope, weight in ops["fusion.1"].scopes} == {("a",): 100, ("b",): 1000}


def test_kinds(made):
    i = made.instruction
    ops = module(
        made,
        {1: ("main", [
            i(1, "w", "while", "jit(f)/while"),
            i(2, "c", "custom-call", "jit(f)/pure_callback", f28="xla_ffi_python_cpu_callback"),
            i(3, "d", "dot", "jit(f)/dot_general"),
        ])},
    )  # fmt: skip
    assert [ops[k].kind for k in "wcd"] == ["container", "callback", "leaf"]
