"""Programs that rlfx compiled, profiled as they are; and processes that really run side by side."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
import rlfx.envs
from rlfx.profile import capture, operation, read, sampled
from tests.profile.busy import tries

pytestmark = pytest.mark.optimised

ENV = rlfx.envs.make("CartPole-v1")


def act(params, state, t):
    """One timestep of REINFORCE, without any annotation."""
    logits = ENV.observe(state) @ params
    action = jax.random.categorical(t.key_for("action"), logits)
    state, step = ENV.step(t.key_for("env"), state, action)
    reward = rlfx.series(step.reward, end=0.0)
    ret = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.99))
    return -jax.nn.log_softmax(logits)[action] * ret, state


def annotated(params, state, t):
    """The same, with the user's own names inside the timestep."""
    with operation("inference"):
        logits = ENV.observe(state) @ params
        action = jax.random.categorical(t.key_for("action"), logits)
    with operation("simulation"):
        state, step = ENV.step(t.key_for("env"), state, action)
    return -jax.nn.log_softmax(logits)[action] * step.reward, state


def training(f):
    loss = rlfx.compile(f, length=16, batch=8)
    states = jax.vmap(ENV.reset)(jax.random.split(jax.random.key(1), 8))

    @jax.jit
    def update(params, key):
        return params - 0.1 * jax.grad(lambda p: loss(p, states, key)[0])(params)

    return update


@pytest.fixture(scope="module")
def plain():
    return training(act)


def profiled(update, folder, seed):
    """The report of 20 updates, nearly all of whose work has a name."""
    start = jax.block_until_ready(update(jnp.zeros((4, 2)), jax.random.key(0)))
    keys = list(jax.random.split(jax.random.key(seed), 20))  # one call is a millisecond, most of it its own start

    def check(folder):
        params = start
        with capture(folder) as session:
            for key in keys:
                params = update(params, key)
            jax.block_until_ready(params)
        report = session.report()
        assert report.unattributed <= 0.05
        return report

    return tries(check, folder)


def test_a_program_without_annotations_is_attributed_to_its_stages_and_the_environment(plain, tmp_path):
    report = profiled(plain, tmp_path, 2)
    assert sum(report.rows.values()) == report.window_ns
    stages = {name for name in report.stages() if name}
    assert any("scan" in name for name in stages)
    assert report.device_within("rlfx.env.step") > 0
    assert {path for row in report.device_rows if (path := row.path) and path[0] in stages}
    assert "Stages of compiled programs" in report.text()


def test_operations_named_inside_a_timestep_survive_compilation(tmp_path):
    report = profiled(training(annotated), tmp_path, 3)
    assert report.device_within("inference") > 0
    assert report.device_within("simulation") > 0


def test_training_is_bit_equal_with_profiling_on_and_off(plain, tmp_path):
    def train(step):
        params = jnp.zeros((4, 2))
        for i in range(6):
            with operation("update"):
                params = step(params, jax.random.key(i))
        return np.asarray(params)

    without = train(plain)
    with capture(tmp_path / "whole"):
        within = train(plain)
    some = train(sampled(plain, tmp_path / "some", calls=2, skip=1))
    assert without.any()
    assert (without == within).all()
    assert (without == some).all()


WORKER = """
import sys, time, jax, jax.numpy as jnp
from rlfx.profile import capture, operation

f = jax.jit(lambda a: jnp.tanh(a @ a))
a = jax.block_until_ready(f(jnp.ones((64, 64))))
while time.time() < float(sys.argv[3]):
    time.sleep(0.001)
with capture(sys.argv[1], process=sys.argv[2]) as session:
    for _ in range(5):
        with operation("simulation"):
            time.sleep(0.01)
        with operation("inference"):
            a = jax.block_until_ready(f(a))
        session.steps += 1
"""


def test_processes_that_ran_side_by_side_are_merged_on_epoch_time(tmp_path):
    go = time.time() + 6.0  # jax has started in both by then, even on a loaded machine; else they overlap less
    names = ("worker_0", "worker_1")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), name, str(go)], env=environment)
        for name in names
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    report = read(tmp_path)
    assert {p.name for p in report.processes} == set(names)
    assert report.steps == 10
    assert sum(report.rows.values()) == report.window_ns == sum(p.window_ns for p in report.processes)
    assert report.span_ns >= max(p.window_ns for p in report.processes)
    assert report.within("simulation") >= 2 * 5 * 10_000_000
    assert report.count("python", "backend", "inference") == 10
    assert abs(report.processes[0].span[0] / 1e9 - go) < 60
