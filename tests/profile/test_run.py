"""`python -m rlfx.profile run`: which part of a script it captures, whatever the script computes with."""

import collections
import functools
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import ProfileError
from rlfx.profile import outside as named
from rlfx.profile import progress, read, window
from rlfx.profile.capture import capturing
from rlfx.profile.window import Window

pytestmark = pytest.mark.optimised


def outside(tmp_path, script, *options, arguments=()):
    """`python -m rlfx.profile run` as a user runs it: in a process of its own."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "rlfx.profile", "run", "--out", "out", *options, "script.py", *arguments]
    path = os.pathsep.join([str(pathlib.Path(rlfx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)


FAILS = """
import jax.numpy as jnp
x = jnp.ones(3) + 1
raise {error}
"""


def test_run_ends_with_the_status_of_the_script(tmp_path):
    done = outside(tmp_path, FAILS.format(error="SystemExit(3)"))
    assert done.returncode == 3
    assert done.stdout.startswith("1 process, ")
    done = outside(tmp_path, FAILS.format(error="ValueError('simulator broke')"))
    assert done.returncode == 1
    traceback = done.stderr.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[1].startswith('  File "script.py", line 4')
    assert "ValueError: simulator broke" in traceback
    assert done.stdout.startswith("1 process, ")


LATE = """
import time
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once jax has started
import jax.numpy as jnp
f = jax.jit(lambda a: jnp.sin(a) * 2)
x = jnp.ones(3)
end = time.time() + 1
while time.time() < end:
    x = f(x)
x.block_until_ready()
assert len(jax.devices()) == 3
"""


def test_run_lets_the_script_choose_its_devices_and_ends_the_capture_in_time(tmp_path):
    done = outside(tmp_path, LATE, "--duration", "0.3")
    assert done.returncode == 0
    assert (
        "the capture ended after 0.3 s, and the script went on; --start, --duration, --events and --memory choose"
        in done.stderr
    )
    assert read(tmp_path / "out").window_ns >= 0.3e9


#: Until a second part has been captured for a while, however loaded the machine is; `alone` seconds where there is none.
LASTS = """
import pathlib, time

def lasts(alone=120.0):
    parts, end = pathlib.Path("out/plugins/profile"), time.time() + alone
    parts = parts if alone > 100 else pathlib.Path("none")
    while time.time() < end:
        if parts.is_dir() and len(list(parts.iterdir())) > 1:
            end = min(end, time.time() + 1.0)
            parts = pathlib.Path("none")
        yield
"""

SETTLES = LASTS + """
import sys
import jax, jax.numpy as jnp

f = jax.jit(lambda a: jnp.sin(a) * 2)
for size in (3, 4):  # compiles three times, 0.3 s apart
    state, end = jnp.ones(size), time.time() + 0.3
    while time.time() < end:
        state = f(state)
        time.sleep(0.005)
state = jnp.ones(5)
for _ in lasts(*map(float, sys.argv[1:])):
    state = f(state)
    time.sleep(0.005)
"""


def test_run_ends_the_capture_a_second_after_the_last_compilation(tmp_path):
    done = outside(tmp_path, SETTLES)
    assert done.returncode == 0
    assert "this is what the script repeated, " in done.stderr
    assert not read(tmp_path / "out").compiled  # the newer one
    (said,) = [line for line in done.stderr.splitlines() if "with what it compiled" in line]
    report = read(tmp_path / said.split()[-1])
    assert {c.function: c.count for c in report.compiled}["<lambda>"] == 3
    assert report.window_ns > 1.6e9
    whole = outside(tmp_path, SETTLES, "--duration", "0", "--out", "whole", arguments=["3.0"])
    assert "the capture ended" not in whole.stderr
    assert read(tmp_path / "whole").window_ns > 3.5e9


def test_run_of_scripts_that_leave_nothing_to_capture(tmp_path):
    done = outside(tmp_path, "print(1)")
    assert done.returncode == 1
    assert done.stderr == (
        "rlfx.profile: The script ended before the capture began: it ran nothing of jax, and hardly anything but imports.\n"
        "  Fix: Give a smaller --start; with one, a script without jax is captured, too.\n"
    )
    done = outside(tmp_path, "import nothing_of_this_name")
    assert done.returncode == 1
    last = "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert done.stderr.endswith(f"{last}\nrlfx.profile: the script failed before the capture began, with status 1\n")
    own = (
        "import jax.numpy as jnp\nfrom rlfx.profile import capture\nwith capture('own'):\n    print(jnp.ones(3) + 1)\n"
    )
    done = outside(tmp_path, own)
    assert done.stdout == "[2. 2. 2.]\n"
    assert done.returncode == 1
    assert "The script captures itself, and a process has one capture at a time.\n  Fix: Run it with" in done.stderr
    assert read(tmp_path / "own").window_ns > 0


IMPORTS = LASTS + """
import jax, jax.numpy as jnp
scale = jnp.ones(3) * 2  # a first tiny trace, while things are set up
time.sleep(1.6)

@jax.jit
def train(a):
    return jax.lax.fori_loop(0, 100, lambda i, c: jnp.tanh(c @ a), a)

a = jnp.ones((100, 100))
for _ in lasts():
    train(a).block_until_ready()
"""


def test_run_does_not_end_before_the_script_has_worked(tmp_path):
    done = outside(tmp_path, IMPORTS)
    assert done.returncode == 0, done.stderr
    assert "the script repeated" in done.stderr or "a second after the last compilation" in done.stderr
    assert "jit(train)" in {row.path[0] for row in read(tmp_path / "out").device_rows if row.path}


@jax.jit
def train(a, n):
    return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ a), a)


def steps_of(a, seconds):
    """So many steps of `train` last at least so long."""
    train(a, 1).block_until_ready()
    taken = []
    for _ in range(5):  # the fastest
        begin = time.perf_counter()
        train(a, 2000).block_until_ready()
        taken.append(time.perf_counter() - begin)
    return int(2000 * seconds / min(taken))


def test_a_window_of_one_long_call_ends_in_time_and_says_what_it_is(tmp_path):
    a = jnp.ones((64, 64))
    long, thread = steps_of(a, 3.0), threading.get_ident()
    with Window(lambda: capturing(tmp_path, 0, None, False, 2, thread), 0.3, 0.3, 2 << 30) as window:
        train(a, long).block_until_ready()
    assert window.cut == "after 0.3 s"
    report = read(tmp_path)
    assert report.verdict.startswith("device-bound")
    assert report.one_call
    assert any("arrays not ready: 1" in p for p in report.problems)  # the call went on


def test_a_wait_that_began_in_an_earlier_capture_is_a_wait(tmp_path):
    a, begun, sessions, main = jnp.ones((64, 64)), threading.Event(), [], threading.get_ident()
    long = steps_of(a, 6.0)  # beginning and ending captures takes as long as the machine is busy

    def captures():
        for name in ("first", "second"):
            with capturing(tmp_path / name, 0, None, False, 2, main) as session:
                begun.set()  # the wait begins in the first one, which wraps it
                time.sleep(0.3)
            sessions.append((session, result.is_ready()))

    side = threading.Thread(target=captures)
    result = train(a, long)
    side.start()
    begun.wait()
    jax.block_until_ready((result, a))
    side.join()
    assert not sessions[1][1]
    report = sessions[1][0].report()
    assert report.total(host="wait") > 0.9 * report.window_ns, report.by("host")


GROWS = """
import time
import jax.numpy as jnp
x = jnp.ones(3) + 1
held = []
for _ in range(40):
    held.append(bytearray(b"x") * (8 << 20))
    time.sleep(0.02)
"""


def test_run_ends_the_capture_when_memory_is_used_up(tmp_path):
    done = outside(tmp_path, GROWS, "--memory", "100", "--duration", "0")
    assert done.returncode == 0, done.stderr
    assert "the capture ended at 100 MB of memory, and the script went on" in done.stderr


EVENTFUL = """
import pathlib, time
import jax, jax.numpy as jnp
f = jax.jit(lambda a: jax.lax.fori_loop(0, 2000, lambda i, c: jnp.tanh(c @ a), a))
a, end = jnp.ones((64, 64)), time.time() + 120
while time.time() < end and not list(pathlib.Path("out").rglob("*.xplane.pb")):
    a = f(a).block_until_ready()
"""


def test_run_ends_the_capture_at_a_number_of_events(tmp_path):
    done = outside(tmp_path, EVENTFUL, "--events", "100000", "--duration", "0")
    assert done.returncode == 0, done.stderr
    assert "the capture ended at the memory of 100,000 events, and the script went on" in done.stderr
    count = sum(kernel.count for kernel in read(tmp_path / "out").kernels.values())
    # An instruction has two; other memory that the process takes counts, too. What runs until the watch looks again, on a
    # machine at work, is recorded as well. Without the limit it would be two minutes of the script, some 30 million.
    assert 5_000 < count < 1_000_000


@pytest.mark.parametrize(
    ("grown", "limit", "why"),
    [
        (271 * 1000, 1 << 30, ""),
        (273 * 1000, 1 << 30, "at the memory of 1,000 events"),
        (200 * 1000, 1 << 19, "at 0 MB of memory"),
    ],
)
def test_a_capture_ends_at_what_its_events_take(grown, limit, why):
    window = Window(lambda: capturing("unused", 0, None, False, 2, 0), 0.0, 0.0, limit, 1000)
    assert window._over(0.1, grown, 0.0) == why


def test_run_of_a_script_without_jax(tmp_path):
    script = "import time\nend = time.time() + 1.5\nwhile time.time() < end:\n    sum(range(1000))\n"
    done = outside(tmp_path, script, "--start", "0.3", "--duration", "0.5")
    assert done.returncode == 0, done.stderr
    assert "host-bound" in done.stdout
    assert "script.py:4" in done.stdout


CAPTURES = """
import jax.numpy as jnp
from rlfx.profile import capture
print(jnp.ones(3) + 1)
with capture("own"):
    print(jnp.ones(4) + 1)
"""


def test_run_leaves_a_script_that_captures_itself_alone(tmp_path):
    done = outside(tmp_path, CAPTURES)
    assert done.stdout == "[2. 2. 2.]\n[2. 2. 2. 2.]\n"
    assert "The script captures itself" in done.stderr
    assert read(tmp_path / "own").window_ns > 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_run_that_is_ended_by_a_signal_reports_what_it_saw(tmp_path, number, status):
    script = (
        "import os, signal, time\nimport jax.numpy as jnp\nx = jnp.ones(3) + 1\ntime.sleep(0.2)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it\n"
        f"os.kill(os.getpid(), {int(number)})\ntime.sleep(20)\n"
    )
    done = outside(tmp_path, script, "--duration", "0")
    assert done.returncode == status
    assert done.stdout.startswith("1 process, ")
    assert read(tmp_path / "out").window_ns > 0.15e9


# The shapes of the scripts that people run, in this process.


def watched(folder, script, monkeypatch, short=1.0, patience=60.0):
    """A script as `run` captures it, with windows of a second."""
    monkeypatch.setattr(window, "SHORT", short)
    monkeypatch.setattr(window, "PATIENCE", patience)
    thread = threading.get_ident()
    with Window(lambda: capturing(folder, 0, None, False, 2, thread), 0.0, None, 2 << 30) as found:
        script(found)
    return found


def until(condition, most=120.0):
    """Goes on until it holds, so that a loaded machine has the time that it takes."""
    end = time.monotonic() + most
    while not condition() and time.monotonic() < end:
        yield


def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(2000))


def collect(seconds=0.4):
    busy(seconds)


def learn(seconds=0.4):
    busy(seconds)


def functions(part):
    return {code.co_name: n / part.mix[None] for code, n in part.mix.items() if hasattr(code, "co_name")}


def test_a_loop_without_jax_is_captured_with_all_its_phases(tmp_path, monkeypatch):
    def script(found):
        for _ in until(lambda: found.kept):
            collect()
            learn()

    found = watched(tmp_path, script, monkeypatch)
    shares = functions(found.kept)
    assert min(shares["collect"], shares["learn"]) > 0.2
    assert found.other.by <= window.ALIKE
    report = found.kept.session.report()
    assert report.verdict.startswith("host-bound")
    assert "jitted" not in report.verdict  # advice for a program that has no jax


def test_a_script_that_could_use_jax_and_does_not_is_captured_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "UNTRACED", 0.5)
    monkeypatch.setattr(progress, "_uses_jax", lambda before: True)

    def script(found):
        for _ in until(lambda: found.first, 30.0):
            collect()

    assert watched(tmp_path, script, monkeypatch).part is not None


def test_a_loop_of_small_jitted_calls_is_captured_without_its_compilations(tmp_path, monkeypatch):
    @jax.jit
    def small(x):
        return jnp.sin(x) * 2

    def script(found):
        x = jnp.ones(3)
        for _ in until(lambda: found.kept):
            x = small(x)
            busy(0.002)

    report = watched(tmp_path, script, monkeypatch).kept.session.report()
    assert not report.compiled
    assert report.count("python", "backend") > 5


def test_one_long_call_is_captured_after_its_compilation(tmp_path, monkeypatch):
    @jax.jit
    def train(a, n):
        return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ a), a)

    a = jnp.ones((64, 64))
    train(a, 1).block_until_ready()
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        train(a, 2000).block_until_ready()
        taken.append(time.perf_counter() - begin)
    long = int(2000 * 5.0 / min(taken))
    for attempt in range(4):  # longer ones where the machine was loaded while it was measured
        jax.clear_caches()
        call = functools.partial(train, a, long << attempt)
        found = watched(tmp_path / str(attempt), lambda found, call=call: call().block_until_ready(), monkeypatch)
        if found.kept:
            break
    report = found.kept.session.report()
    assert report.one_call
    assert report.verdict.startswith("device-bound")
    assert any(c.function == "train" for c in found.first.session.report().compiled)


def compiles(size):
    jax.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(size)).block_until_ready()


def test_a_script_that_compiles_one_after_the_other_is_captured_when_it_has_stopped_to(tmp_path, monkeypatch):
    def script(found):
        for size in range(1, 7):
            compiles(size)
            busy(0.5)
        for _ in until(lambda: found.kept):
            busy(0.1)

    report = watched(tmp_path, script, monkeypatch).kept.session.report()
    assert not report.compiled


def test_a_script_that_compiles_for_ever_is_captured_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "LONG", 1.0)

    def script(found):
        for size, _ in enumerate(until(lambda: found.kept), 1):
            compiles(size)
            busy(0.2)

    found = watched(tmp_path, script, monkeypatch, patience=1.0)
    assert found.kept.start > 2  # twice what the first one was
    assert found.kept.session.report().compiled


def test_what_a_script_does_later_takes_the_place_of_what_it_did_first(tmp_path, monkeypatch):
    first = []

    def script(found):
        for _ in until(lambda: found.kept):  # fills a buffer
            collect(0.2)
        first.append(found.kept)
        for _ in until(lambda: found.kept is not first[0]):
            learn(0.2)

    found = watched(tmp_path, script, monkeypatch)
    assert functions(found.kept)["learn"] > 0.8
    kept = {found.first.session.folder, found.kept.session.folder}
    assert set((tmp_path / "plugins/profile").iterdir()) == kept
    assert read(tmp_path).window_ns == found.kept.session.report().window_ns


def test_of_functions_that_differ_alike_the_innermost_is_named():
    mix = collections.Counter
    one = mix({None: 100, "main": 60, "update": 60, "loss": 58, progress.SETTING_UP: 40})
    assert progress.unlike(one, mix({None: 10, "main": 10, "update": 1, "loss": 1})).name == "loss"
    assert progress.unlike(one, mix({None: 10, "main": 10, "update": 6, "loss": 6})).name == progress.SETTING_UP
    assert progress.unlike(one, mix()).by == 0


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that is installed, which works for a while and calls jax when it is imported."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "heavy_package.py").write_text(
        "import time\nimport jax.numpy as jnp\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end:\n"
        "    sum(range(1000))\nscale = jnp.ones(7) * 3\n\ndef simulate(x):\n    return x + 1\n\n"
        "def make(x):\n    return lambda y: x + y\n\nclass Env:\n    def step(self, x):\n        return x + 2\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("heavy_package", None)


def test_imports_are_not_what_a_script_does(package, tmp_path, monkeypatch):
    begun = []

    def script(found):
        importlib.import_module("heavy_package")
        begun.append(time.monotonic())
        compiles(11)

    found = watched(tmp_path / "out", script, monkeypatch)
    assert found.progress.began + found.first.start > begun[0]  # the package's own call of jax is not the begin


def test_an_import_in_a_capture_is_a_state_of_its_own(package, tmp_path):
    from rlfx.profile import capture

    with capture(tmp_path / "out") as session:
        importlib.import_module("heavy_package")
    report = session.report()
    assert report.total(host="import") > 0.5e9
    assert report.verdict.startswith("import-bound")
    assert "begin the capture later" in report.verdict
    assert not any("jit" in gain.change for gain in report.gains())


def test_functions_of_packages_are_named_from_outside(package, tmp_path):
    from rlfx.profile import capture

    texts = ["simulation=heavy_package:Env.step", "made=heavy_package:make()", "lost=heavy_package:nothing"]
    with named.naming([named.parse(text) for text in texts]) as missing:
        heavy = importlib.import_module("heavy_package")
        original = heavy.simulate
        with capture(tmp_path / "out") as session:
            assert jax.jit(heavy.Env().step)(jnp.ones(5)).tolist() == [3.0] * 5
            assert heavy.make(1)(2) == 3
    assert {n.operation for n in missing} == {"lost"}
    assert heavy.simulate is original
    assert not hasattr(heavy.Env.step, "__wrapped__")  # the original again
    paths = {row.path for row in session.report().rows}
    assert {("simulation",), ("made",)} <= paths


def test_an_operation_from_outside_says_what_it_takes():
    with pytest.raises(ProfileError, match=r"does not say which function is which operation.*\n.*NAME=MODULE:FUNCTION"):
        named.parse("gymnasium.vector")


def test_jax_is_known_to_be_used_by_what_was_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "__main__", sys)
    for name, text in (("plain_module", "import math\n"), ("jax_module", "from jax import jit\n")):
        (tmp_path / f"{name}.py").write_text(text)
        assert not progress._uses_jax(before)
        importlib.import_module(name)
    assert progress._uses_jax(before)
    del sys.modules["plain_module"], sys.modules["jax_module"]


def test_a_compilation_under_way_at_the_begin_is_one(tmp_path):
    def slow(x):  # traced for a second
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            sum(range(1000))
        return x * 2

    thread = threading.get_ident()
    with Window(lambda: capturing(tmp_path, 0, None, False, 2, thread), 0.2, 0.4, 2 << 30):
        jax.jit(slow)(jnp.ones(13)).block_until_ready()
        busy(0.5)
    report = read(tmp_path)
    assert report.total(host="compile") > 0.25e9
    assert report.total(host="wait") == 0
