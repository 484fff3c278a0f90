"""Machines by name, alone and several; what their compilers are told; the surroundings that programs are traced in."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx._target import target_of
from rlfx.ahead.machines import MACHINES
from rlfx.ahead.program import surroundings
from rlfx.errors import ScheduleError, TargetError

GRIDS = {
    "h200": (1, "1x1x1"),
    "h200:8": (8, "1x8x1"),
    "h200:2x8": (16, "2x8x1"),
    "v5e": (1, "v5e:2x2"),
    "v5e:8": (8, "v5e:2x4"),
    "v6e:4x4": (16, "v6e:4x4"),
    "cpu:4": (4, "4"),
}


@pytest.mark.parametrize(("name", "grid"), [*GRIDS.items()])
def test_several_of_a_machine_are_a_value(name, grid):
    found = rlfx.target(name)
    assert (found.devices, found.machine.topology) == grid
    assert found.name == name
    assert found == rlfx.target(name)
    one = rlfx.target(name.partition(":")[0])
    assert (found.rates, found.room) == (one.rates, one.room), "those of one device"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h200:0", "There is no machine h200:0."),
        ("h200:", "There is no machine h200:."),
        ("h200:a", "There is no machine h200:a."),
        ("h200:2x2x2", "A grid has one or two numbers"),
        ("v5e:3x3", "TPU hosts have 2 x 2 chips"),
        ("v5e:7", "chips along two axes, or one of 1, 4, 8"),
        ("cpu:2x2", "A CPU's devices are one number"),
        ("gpu:4", "of gpu not enough is known"),
        ("h300:2", "No machine named 'h300' is known"),
    ],
)
def test_grids_that_do_not_exist(name, text):
    with pytest.raises(ScheduleError, match="Fix: ") as refused:
        rlfx.target(name)
    assert text in str(refused.value)


def test_meshes_of_a_target():
    assert dict(rlfx.target("h200:2x8").mesh("b").shape) == {"b": 16}
    assert dict(rlfx.target("h200:2x8").mesh("host", "b").shape) == {"host": 2, "b": 8}
    assert dict(rlfx.target("v5e").mesh("b").shape) == {"b": 1}
    assert target_of(rlfx.target("v5e:4x4").mesh("b").abstract_device) == rlfx.target("v5e")
    with pytest.raises(TargetError, match=r"one axis, or 2; 3 are named(.|\n)*mesh\(\"b\"\)"):
        rlfx.target("h200:2x8").mesh("a", "b", "c")
    with pytest.raises(TargetError, match="0 are named"):
        rlfx.target("h200").mesh()


@pytest.mark.parametrize("name", ["h200", "a100", "t4", "h100"])
def test_descriptions_say_the_figures_of_the_target(name):
    machine, target = MACHINES[name], rlfx.target(name)
    device = machine.description.partition("platform_name")[0]
    found = dict(re.findall(r"(\w+): ([\d.]+)", device))
    assert float(found["memory_bandwidth"]) == pytest.approx(target.rates.bandwidth, rel=0.05)
    assert int(found["device_memory_size"]) == pytest.approx(target.room.memory, rel=0.06)
    assert int(found["l2_cache_size"]) == target.room.cache
    assert (int(found["major"]), int(found["minor"])) == machine.capability
    assert machine.kind in machine.description
    assert target_of(surroundings(machine).abstract_device) == target


def test_only_gpus_from_ampere_on_have_triton():
    having = {name for name in ("cpu", "t4", "a100", "h100", "h200", "gpu", "v5e") if rlfx.target(name).has_triton}
    assert having == {"a100", "h100", "h200", "gpu"}


def test_what_is_here():
    assert rlfx.target("cpu").is_here
    assert rlfx.target("cpu:4").is_here
    assert not rlfx.target("h200").is_here
    assert not dataclasses.replace(rlfx.target("cpu"), platform="gpu").is_here


@pytest.mark.parametrize("name", ["h200", "v6e"])
def test_a_trace_for_a_machine_is_told_of_it(name):
    seen = []

    def fn(x):
        seen.append((rlfx.target().name, J.platform()))
        return x

    with jax.sharding.use_abstract_mesh(surroundings(MACHINES[name])):
        jax.eval_shape(fn, jnp.zeros(3))
    jax.eval_shape(fn, jnp.zeros(3))
    assert seen == [(name, rlfx.target(name).platform), ("cpu", "cpu")]


def test_a_program_without_a_target_takes_that_of_the_trace():
    """Sums are an associative scan on a GPU, and a loop on a CPU."""
    fn = rlfx.unroll(lambda p, c, t: (c + jax.random.normal(t.key), c), length=4, batch=3)
    program = lambda c, key: fn(None, c, key)  # noqa: E731
    here = str(jax.make_jaxpr(program)(jnp.zeros(3), jax.random.key(0)))
    with jax.sharding.use_abstract_mesh(surroundings(MACHINES["h200"])):
        there = str(jax.make_jaxpr(program)(jnp.zeros(3), jax.random.key(0)))
    assert ("scan[" in here, "scan[" in there) == (True, False)
    assert str(jax.make_jaxpr(program)(jnp.zeros(3), jax.random.key(0))) == here


def test_a_mesh_of_devices_that_are_not_here_splits_a_program():
    mesh = rlfx.target("h200:8").mesh("b")
    fn = rlfx.compile(lambda w, x, t: ((w * x) ** 2, x), length=3, batch=16, mesh=mesh)
    program = str(jax.make_jaxpr(jax.grad(lambda w: fn(w, jnp.ones(16))[0]))(1.0))
    assert "psum" in program
    assert fn.explain(1.0, jnp.ones(16)).evaluator.target == rlfx.target("h200")
    assert fn.explain(1.0, jnp.ones(16)).evaluator.batch == 2
