"""Environments split over the devices of a mesh: generated programs, data from outside, reductions; all the cores."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.cores import available_cores
from rlfx.errors import ScheduleError
from tests import strategies
from tests.recurrence.test_generated import QUICK, mismatches, outcome
from tests.sampling import spread

LENGTH, BATCH = 12, 8


def devices(count):
    return jax.make_mesh((count,), ("b",), devices=jax.devices()[:count])


def sweep(seeds, size):
    for seed in seeds:
        p = strategies.program(seed, size)
        if p.batch is None:
            continue
        p = dataclasses.replace(p, batch=4)
        one, two = (
            outcome(rlfx.compile(p.function, mesh=mesh, **p.options()), p, jit=True, options=QUICK)
            for mesh in (None, devices(2))
        )
        assert not (found := mismatches(two, one)), f"seed {seed}, size {size}\n{p!r}\n" + "\n".join(found)


@pytest.mark.parametrize("chunk", spread(range(4), 2))
def test_generated_programs_on_a_mesh(chunk):
    sweep(range(120 + 15 * chunk, 135 + 15 * chunk), size=2)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(40))
def test_more_generated_programs_on_a_mesh(chunk):
    sweep(range(100_000 + 25 * chunk, 100_025 + 25 * chunk), size=6)


def test_reductions_over_environments_of_what_they_share():
    """Each alone, of values that no environment has of its own: in a recurrence, at a point, at another timestep."""
    shared = {
        "state": lambda p, s, t: s[t - 1],
        "product": lambda p, s, t: p * s[t - 1],
        "parameter": lambda p, s, t: jnp.tanh(p) * (1.0 * t),
        "square": lambda p, s, t: (s[t - 1] + p) ** 2,
        "vector": lambda p, s, t: jnp.sin(p * s[t - 1] * jnp.arange(3.0)).sum(),
        "constant": lambda p, s, t: 1.0 * t,
        "chosen": lambda p, s, t: jnp.where(t > 1, s[t - 1], p),
    }
    ways = [(red, f) for red in (rlfx.max, rlfx.min, rlfx.mean, rlfx.sum) for f in shared.values()]

    def scales(red, i):  # the derivative of an extreme depends on the sign
        return (1.0, -0.5) if red in (rlfx.max, rlfx.min) else ((1.0, -0.5)[i % 2],)

    def gradients(**options):
        def one(red, f, scale):
            def program(p, c, t):
                s = rlfx.solve(lambda s: jnp.tanh(p * s[t - 1]) + 0.1 * red(f(p, s, t) * scale, "b"), start=0.1)
                return s * c, jnp.sin(c)

            compiled = rlfx.compile(program, length=3, batch=4, **options)
            return jax.value_and_grad(lambda p: compiled(p, jnp.arange(1.0, 5.0))[0])

        found = [one(red, f, scale) for i, (red, f) in enumerate(ways) for scale in scales(red, i)]
        return jax.jit(lambda p: [f(p) for f in found])(jnp.float32(0.5))

    one, two = gradients(), gradients(mesh=devices(2))
    assert len(one) == 42
    np.testing.assert_allclose(np.array(two), np.array(one), rtol=1e-5, atol=1e-6)


# -- data from outside


def fitted(p, carry, t):
    """Data with all the axes that they may have; nothing of them is differentiated."""
    x, y, z = (rlfx.inputs(p[axes], axes=axes) for axes in ("tb", "t", "b"))
    h = jax.lax.stop_gradient(jnp.tanh(0.5 * carry + x[t] + jax.random.uniform(t.key)))
    loss = (p["w"] * h + y[t] * p["w"] - z[t]) ** 2 + rlfx.mean(x[t], over="b") * p["w"]
    return loss, h, {"x": x[t], "z": z[t]}


def data():
    return {
        "tb": jax.random.normal(jax.random.key(1), (LENGTH, BATCH)),
        "t": jnp.linspace(-1.0, 1.0, LENGTH),
        "b": jnp.linspace(0.0, 2.0, BATCH),
        "w": jnp.float32(0.3),
    }


def fit(mesh=None, **options):
    fn = rlfx.compile(fitted, length=LENGTH, batch=BATCH, mesh=mesh, **options)
    loss = lambda w: fn({**data(), "w": w}, jnp.linspace(0.0, 1.0, BATCH), jax.random.key(0))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(data()["w"])


PLANS = [rlfx.Plan(), rlfx.Plan("blocks", 4), rlfx.Plan("blocks", 5, 2), rlfx.Plan("stream", 4)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"{p.form}-{p.block}-{p.environments}")
def test_data_are_split_with_the_environments(plan):
    assert not mismatches(fit(devices(2), plan=plan), fit(plan=rlfx.Plan()))


def test_data_are_split_under_a_budget():
    assert not mismatches(fit(devices(2), memory_budget=4096), fit())


@pytest.mark.optimised
def test_each_device_has_the_data_of_its_environments():
    """What is data and nothing else is not copied to every device."""
    fn = jax.jit(
        lambda p: rlfx.unroll(lambda p, c, t: (c, rlfx.inputs(p)[t]), length=LENGTH, batch=BATCH, mesh=devices(2))(
            p, None
        )
    )
    text = fn.lower(data()["tb"]).compile().as_text()
    assert f"f32[{LENGTH},{BATCH // 2}]" in text
    assert f"f32[{LENGTH},{BATCH}]" not in text


def test_data_that_are_used_otherwise_too():
    def program(p, carry, t):
        return (rlfx.inputs(p)[t] * carry - p.sum()) ** 2, carry

    def gradient(mesh):
        fn = rlfx.compile(program, length=LENGTH, batch=BATCH, mesh=mesh)
        return jax.jit(jax.grad(lambda c: fn(data()["tb"], c)[0]))(jnp.linspace(0.0, 1.0, BATCH))

    np.testing.assert_allclose(gradient(devices(4)), gradient(None), rtol=1e-5)


# -- reductions


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_on_several_devices_share_a_derivative(op):
    state = jnp.array([2.0, -1.0, 2.0, 0.0, -1.0, 2.0, 1.0, -1.0])

    def gradient(make, **options):
        program = lambda p, x, t: (p * getattr(rlfx, op)(x, over="b") ** 2, x)  # noqa: E731
        fn = make(program, length=3, batch=BATCH, **options)
        fn = jax.jit(fn) if make is rlfx.compile else fn  # the reference runs operation by operation
        return jax.value_and_grad(lambda p, x: fn(p, x)[0], (0, 1))(jnp.float32(0.5), state)

    expected = gradient(rlfx.reference)
    assert float(jnp.count_nonzero(expected[1][1])) == 3
    assert not mismatches(gradient(rlfx.compile, mesh=devices(2)), expected)
    assert not mismatches(gradient(rlfx.compile, mesh=devices(4)), expected)


def test_whole_numbers_and_truth_values_over_devices():
    def program(p, x, t):
        n = jnp.int32(x)
        return x, {"high": rlfx.max(n, over="b"), "low": rlfx.min(n), "some": rlfx.max(n > 6, over="b")}

    def run(mesh):
        return rlfx.unroll(program, length=2, batch=BATCH, mesh=mesh)(None, jnp.arange(float(BATCH)))

    assert not mismatches(run(devices(2)), run(None))


# -- all the cores


def process(code):
    code = "import jax, jax.numpy as jnp, rlfx\n" + textwrap.dedent(code)
    env = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_all_cores_become_devices_and_compute_the_same():
    ran = process("""
        mesh = rlfx.use_all_cores(3)
        assert mesh.size == jax.device_count() == 3 and mesh.axis_names == ("b",), mesh
        assert rlfx.use_all_cores(3) == mesh  # again: nothing changes
        assert [rlfx.use_all_cores(3, batch=n).size for n in (1, 2, 4, 6, 7, 8, 9)] == [1, 2, 2, 3, 1, 2, 3]
        step = lambda p, c, t: (p * (c + jax.random.normal(t.key)) ** 2, c)
        one, all = (rlfx.compile(step, length=4, batch=6, mesh=m) for m in (None, mesh))
        results = [jax.grad(lambda p, f=f: f(p, jnp.arange(6.0), jax.random.key(0))[0])(2.0) for f in (one, all)]
        assert abs(results[0] - results[1]) < 1e-4, results
        print("equal", jax.device_count())
    """)
    assert ran.stdout == "equal 3\n", ran.stderr


def test_all_cores_are_those_that_the_process_may_use():
    ran = process("print(rlfx.use_all_cores().size)")
    assert ran.stdout == f"{available_cores()}\n", ran.stderr


def test_too_late_for_all_the_cores():
    ran = process("jnp.zeros(1)\nrlfx.use_all_cores(2)")
    assert ran.returncode != 0
    assert "jax has started with 1 CPU device(s) already; 2 were asked for." in ran.stderr
    assert "at <string>:3 (<module>)" in ran.stderr
    assert "Call rlfx.use_all_cores() before the first jax computation of the process" in ran.stderr


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2"])
def test_numbers_of_cores_and_environments_that_are_refused(wrong):
    with pytest.raises(ScheduleError, match="count must be a positive integer or None, got") as count:
        rlfx.use_all_cores(wrong)
    assert "Give the number of cores, or leave it out." in str(count.value)
    with pytest.raises(ScheduleError, match="batch must be a positive integer or None, got") as batch:
        rlfx.use_all_cores(batch=wrong)
    assert "Give the number of environments, or leave it out." in str(batch.value)


def test_meshes_of_explicit_axes():
    """What `jax.make_mesh` makes by default: plain arrays are split as ever, arrays with axes in their types are refused."""
    script = """
        import jax, jax.numpy as jnp, rlfx
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
        w, x = jnp.full((4,), 0.3), jnp.ones((4, 4))
        f = lambda w, c, t: (jnp.sum(jnp.tanh(c * w)), c * 0.9)
        split, plain = rlfx.compile(f, length=3, batch=4, mesh=mesh, mesh_axis="d"), rlfx.compile(f, length=3, batch=4)
        gradient = lambda fn, w, x: jax.grad(lambda w: fn(w, x)[0])(w)
        assert jnp.allclose(gradient(split, w, x), gradient(plain, w, x))
        replicated = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
        def refused(fn, *args, match):
            try:
                gradient(fn, *args)
            except rlfx.errors.ScheduleError as error:
                assert match in str(error) and "axis_types=(jax.sharding.AxisType.Auto,)" in str(error), error
            else:
                raise AssertionError("it was not refused")
        refused(split, replicated, x, match="An argument is on a mesh whose axes ('d',) are Explicit")
        refused(plain, w, sharded, match="An argument is on a mesh whose axes ('d',) are Explicit")
        with jax.set_mesh(mesh):
            refused(split, w, x, match="Around the call is jax.set_mesh")
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)
