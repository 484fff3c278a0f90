"""Lines of Python: where the main thread computes is known from interrupts, and not from where it lets go of the lock."""

import collections
import json
import linecache
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.profile import capture, lines, read, ticks
from rlfx.profile.seen import by_line
from tests.profile.truths import burn

pytestmark = pytest.mark.optimised
double = jax.jit(lambda x: x * 2)


def simulate(seconds):
    burn(seconds)  # the simulator


def test_a_line_counts_for_all_that_it_calls_though_another_lets_go_of_the_lock(tmp_path):
    x = jnp.ones(3)
    np.asarray(double(x))
    with capture(tmp_path) as session:
        for _ in range(60):
            simulate(0.004)  # called here
            np.asarray(double(x))  # where threads that want the lock get it
    (process,) = session.report().processes
    found = max((line for line in by_line(process) if line.kind == "python"), key=lambda line: line.ns)
    source = linecache.getline(found.frame.file, found.frame.line)
    assert "asarray" not in source, found
    assert found.ns > 0.12e9  # of 0.24 s


@pytest.mark.skipif(ticks._libc is None, reason="timers on a thread's clock are Linux's")
def test_the_main_thread_is_interrupted_as_often_as_it_computes():
    seen = collections.Counter()
    with ticks.ticking(lambda frame: seen.update([frame.f_code.co_name])):
        begin = time.thread_time()
        burn(0.2)
        lasted = time.thread_time() - begin
        computed = seen.total()
        time.sleep(0.2)
    assert 0.2 * lasted < computed * ticks.TICK / 1e9 <= 1.1 * lasted + 0.01  # a kernel may tick at 100 Hz
    assert seen.total() <= computed + 2
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def test_a_program_that_uses_the_signal_itself_keeps_it(tmp_path):
    def own(number, frame):
        raise AssertionError

    signal.signal(signal.SIGPROF, own)
    try:
        with capture(tmp_path) as session:
            burn(0.05)
        assert signal.getsignal(signal.SIGPROF) is own
    finally:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    assert session.report().window_ns > 0


def test_in_another_thread_ticks_are_of_the_main_one():
    seen, begun, done = collections.Counter(), threading.Event(), threading.Event()

    def side():
        with ticks.ticking(lambda frame: seen.update([frame.f_code.co_name])):
            begun.set()
            done.wait()

    with ticks.handling():
        thread = threading.Thread(target=side)
        thread.start()
        begun.wait()
        burn(0.2)
        done.set()
        thread.join()
    assert seen["burn"] > 3


def test_lines_are_in_the_text(tmp_path):
    with capture(tmp_path) as session:
        burn(0.2)
    assert "Lines of Python, with what they call:" in session.report().text()


def framework(*ticks):
    """Notes of a script of one line, which calls a framework: samples of its frames, innermost first, and how often."""
    package = "/lib/python3.11/site-packages/framework"
    places = [
        ["script.py", 3, False, [], [[f"{package}/{f}", n, ""] for f, n in frames], ""] for frames, _ in ticks
    ]
    samples = [[10**6 * k, 10**6 * k, 0, 0] for k in range(11)]
    waits = [[10**6 * k, 0, 0, len(places)] for k in range(11)]  # a thread of the framework's
    places.append([f"{package}/writer.py", 5, False, [], [], ""])
    return {
        "line": 1, "places": places, "threads": [{"line": 1, "name": "MainThread", "samples": samples},
                                                 {"line": 2, "name": "writer", "samples": waits}],
        "ticks": [[1, 0, place] for place, (_, often) in enumerate(ticks) for _ in range(often)],
    }  # fmt: skip


def test_where_one_line_calls_a_framework_its_lines_say_more():
    learn = ("algorithm.py", 9)
    notes = framework(
        ([("tensor.py", 7), ("train.py", 20), learn], 60),
        ([("linear.py", 1), ("train.py", 30), learn], 20),
        ([("env.py", 4), ("collect.py", 8), ("algorithm.py", 11)], 20),
    )
    seen = lines.samples(notes, 0)
    assert {str(s.frame) for s in seen if s.tick} == {"tensor.py:7", "linear.py:1", "env.py:4"}
    found = lines.computed(notes, "rlfx.profile", 8)
    main = {f"{file.rpartition('/')[2]}:{line}": ns for (file, line), ns in found.items() if "writer" not in file}
    assert main == {"algorithm.py:9": 8_000_000, "algorithm.py:11": 2_000_000}  # where the program parts


def test_a_script_of_several_lines_is_shown_by_its_own():
    notes = framework(([("tensor.py", 7)], 60), ([("env.py", 4)], 40))
    notes["places"][1][1] = 8  # another line of the script
    assert {str(s.frame) for s in lines.samples(notes, 0) if s.tick} == {"script.py:3", "script.py:8"}


def test_lines_at_which_packages_are_imported_are_none_of_what_a_program_computes():
    notes = framework(([("tensor.py", 7)], 60), ([("env.py", 4)], 40))
    notes["places"][0][5] = "import"
    assert {s.frame.line for s in lines.samples(notes, 0) if s.tick} == {4}
    assert all("tensor" not in file for file, _ in lines.computed(notes, "rlfx.profile", 8))


def waiting(made, folder, others):
    """A second in which the main thread waits, seen 10 times, and another one, which is at `others` and was seen 90 times."""
    space = made.Space()
    host = space.plane("/host:CPU")
    host.event("python", "rlfx.capture", 0, 1_000_000)
    for name in ("python", "writer"):
        host.event(name, "rlfx.blocked:wait", 0, 1_000_000)
    samples = [[space.start_ns + k * 10**7, 0, 0, 0] for k in range(10)]
    waits = [[space.start_ns + k * 10**7, 0, 0, 1] for k in range(90)]
    threads = [{"line": 1, "name": "MainThread", "samples": samples}, {"line": 2, "name": "writer", "samples": waits}]
    places = [["/home/me/script.py", 3, False, [], [], ""], [others, 69, False, [], [], ""]]
    space.write(folder, notes=json.dumps({"line": 1, "threads": threads, "places": places}))
    (process,) = read(folder).processes
    return {str(line.frame): line.ns / 1e9 for line in by_line(process)}


def test_lines_of_two_threads_in_one_state_have_each_its_own_time(made, tmp_path):
    """They are not weighed together: one would have more than the window lasted."""
    assert waiting(made, tmp_path, "/home/me/actor.py") == {"script.py:3": 1.0, "actor.py:69": 1.0}


def test_a_package_s_own_thread_that_waits_is_no_line(made, tmp_path):
    assert waiting(made, tmp_path, "/lib/site-packages/tqdm/_monitor.py") == {"script.py:3": 1.0}


@pytest.mark.parametrize(("at", "state"), [((1, 1, 0, 1), "wait"), ((0, 0, 1, 0), "blocked"), ((0, 1, 0, 1), "blocked")])
def test_a_thread_with_a_call_of_jax_at_one_end_waits_as_it_does_otherwise(made, tmp_path, at, state):
    """Seen four times in three seconds, in which it never ran: in a call of jax (1) or not."""
    space = made.Space()
    space.plane("/host:CPU").event("python", "rlfx.capture", 0, 3_000_000)
    samples = [[space.start_ns + k * 10**9, 0, 0, place] for k, place in enumerate(at)]
    places = [["/home/me/script.py", line, of_jax, [], [], ""] for line, of_jax in ((3, False), (4, 2))]
    threads = [{"line": 1, "name": "MainThread", "samples": samples}]
    space.write(tmp_path, notes=json.dumps({"line": 1, "threads": threads, "places": places}))
    assert read(tmp_path).total(host=state) == 3_000_000_000


@pytest.mark.skipif(ticks._libc is None, reason="clocks of threads are Linux's")
def test_numpy_that_waits_for_an_array_of_jax_waits_for_the_device(tmp_path):
    # Two seconds on any machine: what lies between two samples, from 10 ms to a tenth of a second where processors are
    # scarce, is not known.
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 6000, lambda i, x: jnp.tanh(x @ x), x))
    x = jnp.ones((96, 96)) / 96
    np.any(slow(x))
    with capture(tmp_path) as session:
        stop = time.monotonic() + 2
        while time.monotonic() < stop:
            np.any(slow(x))
            np.isnan(slow(x))
    report = session.report()
    assert report.total(host="blocked") < 0.1 * report.window_ns
    assert report.total(host="wait") > 0.5 * report.window_ns
