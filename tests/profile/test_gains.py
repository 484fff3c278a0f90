"""What leaving something out would gain: the replay against a walk nanosecond by nanosecond, and programs that know."""

import dataclasses
import inspect
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfx.profile import capture, lines, operation, sampled
from rlfx.profile.attributed import Process
from rlfx.profile.events import Line
from rlfx.profile.gains import Gain, gains, paid_in
from rlfx.profile.launches import Base
from rlfx.profile.lines import Frame
from rlfx.profile.replay import Replay
from rlfx.profile.sweep import sweep
from rlfx.profile.timeline import Context, Share, Timeline, Track
from tests.profile.test_sweep import STOP, timelines
from tests.profile.truths import PROGRAMS, burn

pytestmark = pytest.mark.optimised


def process_of(timeline):
    return Process("p", 1, 0, 0, sweep(timeline), timeline, [], {}, "")


def lasts(process, cost=None):
    contexts = len(process.sweep.contexts)
    return Replay.of_process(process).lasts(np.ones(contexts) if cost is None else np.asarray(cost, float))


@settings(max_examples=200, deadline=None)
@given(timelines())
def test_with_nothing_left_out_the_window_comes_out(timeline):
    assert lasts(process_of(timeline)) == STOP


@settings(max_examples=200, deadline=None)
@given(timelines(), st.data())
def test_less_work_never_takes_longer(timeline, data):
    process = process_of(timeline)
    costs = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(process.sweep.contexts))
    cost = np.asarray(data.draw(costs)[: len(process.sweep.contexts)])
    less = cost * np.asarray([data.draw(st.sampled_from([0.5, 1.0])) for _ in cost])
    assert -1e-9 <= lasts(process, less) <= lasts(process, cost) + 1e-9 <= STOP + 1e-6


HOST, WAITS, WORKS, LEARNS = range(4)


def overlapping():
    """The host acts for 10, launches at 5 what the device does for 25, acts on until 10, waits for it, acts for 10."""
    share, base = (Share("", ("a",)),), Base()
    contexts = [
        Context("python", "", share, base), Context("wait", "", share, base), Context(None, "leaf", share, base),
        Context("callback", "", share, base),
    ]  # fmt: skip
    main = Track(Line("", "main", "main"), np.asarray([0, 10, 30]), np.asarray([HOST, WAITS, HOST]))
    empty = Context(None, "", (), base)
    device = Track(Line("", "stream", "stream"), np.asarray([0, 5, 30]), np.asarray([4, WORKS, 4]))
    return process_of(Timeline((0, 40), [*contexts, empty], [main, device], 0))


@pytest.mark.parametrize(
    ("left_out", "ns"),
    [
        ((), 40),
        ((WORKS,), 20),  # the host's own 20
        ((HOST,), 25),  # the device's own 25
        ((WAITS,), 30),  # the host does not wait: the device ends last, 5 + 25
        ((HOST, WORKS), 0),
    ],
)
def test_what_overlaps_gains_nothing(left_out, ns):
    process = overlapping()
    assert lasts(process, [0.0 if i in left_out else 1.0 for i in range(len(process.sweep.contexts))]) == ns


def test_half_of_the_device_is_half_of_its_time():
    process = overlapping()
    cost = np.ones(len(process.sweep.contexts))
    cost[WORKS] = 0.5
    assert lasts(process, cost) == 10 + 7.5 + 10


def known(name, folder, operation_, tries=3):
    """Seconds that are left without an operation, by the tool and by the program's own clocks, until they agree."""
    found = []
    for i in range(tries):
        truth = PROGRAMS[name](folder / str(i), 0.3)
        window = truth.report.window_ns
        best = [g for g in truth.report.gains(8) if operation_ in g.what]
        if best:
            left, expected = window / best[0].speedup, window - truth.ns[operation_]
            found.append((left / window, expected / window))
            if abs(left - expected) < 0.05 * window:
                return best[0]
    raise AssertionError(found)


@pytest.mark.parametrize(
    ("program", "name"),
    [("nested", "inner"), ("processes", "simulation"), ("queues", "simulation"), ("tasks", "learning")],
)
def test_gains_are_what_programs_know_of_themselves(program, name, tmp_path):
    if name == "inner":  # with what is inside
        truth = PROGRAMS[program](tmp_path, 0.3)
        (gain,) = [g for g in truth.report.gains(8) if f"{g.what} ".startswith("operation outer/inner ")]
        inside = truth.ns["inner"] + truth.ns["innermost"]
        assert truth.report.window_ns * (1 - 1 / gain.speedup) == pytest.approx(inside, rel=0.1)
        return
    assert known(program, tmp_path, name).kind in ("operation", "blocked", "python")


def test_a_callback_is_named_by_the_line_that_asks_for_it(tmp_path):
    for i in range(3):
        truth = PROGRAMS["callbacks"](tmp_path / str(i), 0.3)
        gain = truth.report.gains()[0]
        lines_, first = inspect.getsourcelines(PROGRAMS["callbacks"])
        asked = next(first + i for i, text in enumerate(lines_) if "jax.pure_callback" in text)
        assert (gain.kind, gain.number) == ("callback", asked)
        assert gain.file.endswith("truths.py")
        assert str(gain).startswith(f"without the callback at truths.py:{asked}: ")
        left = truth.report.window_ns / gain.speedup
        if left <= (truth.report.window_ns - truth.ns["physics"]) * 1.05:
            return
    raise AssertionError(gain)


def test_a_line_of_a_compiled_program(tmp_path):
    a = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)

    def costly(x):
        return x @ a @ a @ a @ a @ a @ a

    @jax.jit
    def step(x):
        x = jnp.sin(x)
        return jax.lax.fori_loop(0, 30, lambda i, c: jnp.tanh(costly(c)), x)

    jax.block_until_ready(step(a))
    with capture(tmp_path) as session:
        jax.block_until_ready(step(a))
    gain = next(g for g in session.report().gains(8) if g.kind == "device")
    first = inspect.getsourcelines(costly)[1]
    inside = {first + 1, inspect.getsourcelines(step)[1] + 3}
    assert gain.file == __file__
    assert gain.number in inside
    assert gain.speedup > 2


def test_what_is_compiled_again_is_named_with_its_cause(tmp_path):
    @jax.jit
    def update(x):
        for _ in range(12):
            x = jnp.tanh(x) @ x
        return x

    a = jnp.ones((4, 4))
    jax.block_until_ready(update(a))
    with capture(tmp_path) as session:
        for size in (5, 6, 7):
            jax.block_until_ready(update(jnp.ones((size, size))))
    gain = next(g for g in session.report().gains(8) if g.kind == "compile" and "update" in g.what)
    assert "compiling update 3 times again" in gain.what
    assert "f32[5,5]" in gain.what
    assert gain.change == "keep shapes, dtypes and the function the same"


def test_a_jitted_function_is_left_out_with_all_that_it_does(tmp_path):
    a = jnp.ones((300, 300))

    @jax.jit
    def learn(x):
        return jax.lax.fori_loop(0, 10, lambda i, c: jnp.tanh(c @ a), x)

    jax.block_until_ready(learn(a))
    tries = []
    for i in range(16):  # other work on the cores delays some
        rest = 0.0
        with capture(tmp_path / str(i)) as session:
            for _ in range(8):
                jax.block_until_ready(learn(a))
                begin = time.perf_counter()
                burn(0.01)
                rest += time.perf_counter() - begin
        report = session.report()
        # Where no sample has met the line that calls it, the line that it computes says more.
        mine = lambda g: g.kind == "device" or (g.kind in ("program", "operation") and "jit(learn)" in g.what)  # noqa: E731
        gain = next(filter(mine, report.gains(8)), None)
        if gain is None:
            continue
        tries.append((report.window_ns / gain.speedup / 1e9, rest))
        if tries[-1][0] == pytest.approx(rest, rel=0.1):
            return
    raise AssertionError(tries)


def test_what_profiling_costs_is_taken_out():
    session = None

    def step(x):
        return jax.block_until_ready(chain(x))

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, 2000, lambda i, c: jnp.sin(c) + jnp.sort(c)[0], x)

    run = sampled(step, calls=2, skip=2)
    for _ in range(5):
        run(jnp.ones(8))
    session = run.session
    report = run.report()
    (process,) = report.processes
    assert process.notes["plain_ns"] == session.plain_ns > 0
    plain = 0.6 * report.window_ns
    paid = paid_in(report, plain)
    ones = np.ones(len(process.sweep.contexts))
    assert Replay.of_process(process, paid).lasts(ones) == pytest.approx(plain, rel=0.02)
    assert paid_in(report, 2.0 * report.window_ns) == dict.fromkeys(paid, 0.0)
    listed = str(report).partition("Gains:\n")[2].partition("\n\n")[0]  # the text says what the method does
    assert listed.splitlines() == [f"- {gain}" for gain in report.gains()]


def test_gains_are_in_the_text_and_in_json(tmp_path):
    with capture(tmp_path) as session:
        with operation("simulation"):
            burn(0.05)
        with operation("learning"):
            burn(0.01)
    report = session.report()
    gain = report.gains()[0]
    assert f"Gains:\n- {gain}" in report.text()
    assert report.as_dict()["gains"][0]["what"] == gain.what
    assert gain.seconds == pytest.approx(report.window_ns / 1e9)
    assert gains(report, 1) == [gain]


def table(made, places, frames):
    """A module's table of stack frames."""
    message = made.message
    return message(
        f17=message(
            f1=["train.py", "/lib/site-packages/net.py"],
            f2=["main", "apply"],
            f3=[message(f1=file, f2=function, f3=line) for file, function, line in places],
            f4=[message(f1=place, f2=caller) if caller else message(f1=place) for place, caller in frames],
        )
    )


def test_frames_of_instructions(made):
    from rlfx.profile import wire

    of = lines.stacks(wire.message(memoryview(table(made, [(1, 1, 7), (2, 2, 90)], [(1, 0), (2, 1)]))))
    assert of({15: [2]}) == (Frame("/lib/site-packages/net.py", 90, "apply"), Frame("train.py", 7, "main"))
    assert lines.own(of({15: [2]})) == (Frame("train.py", 7, "main"),)
    assert of({}) == of({15: [9]}) == ()
    assert of({3: [memoryview(b"old.py")], 4: [3]}) == (Frame("old.py", 3),)


def test_a_damaged_table_of_frames_ends(made):
    from rlfx.profile import wire

    of = lines.stacks(wire.message(memoryview(table(made, [(1, 1, 7)], [(1, 2), (1, 1)]))))
    assert len(of({15: [1]})) == 2
    assert lines.stacks({})({15: [1]}) == ()


def test_what_is_nearly_all_of_the_time_has_no_number():
    """What would be left is no more than the attribution's error."""
    one = Gain("program", "a.py", 3, "jit(f), called at a.py:3", "call it less often", 10.0, 19.9)
    assert "jit(f), called at a.py:3: 19.90x; call" in str(one)
    assert ": more than 20x (it is nearly all of the time); call" in str(dataclasses.replace(one, speedup=4612.76))
