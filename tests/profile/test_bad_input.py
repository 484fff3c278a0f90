"""Every way in which a trace can be unusable or misleading is said in words."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from rlfx.errors import ProfileError
from rlfx.profile import ProfileWarning, capture, operation, phase, read


def test_a_directory_without_a_trace(tmp_path):
    with pytest.raises(
        ProfileError, match=r"is a directory without a trace \(no \.xplane\.pb in it\)\.\n  Fix: Capture one"
    ):
        read(tmp_path)


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(ProfileError, match=r"nowhere' does not exist\.\n  Fix: Capture one first"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.999])
def test_truncated_traces(made, tmp_path, keep):
    path = made.gpu_space(3).write(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[: keep if isinstance(keep, int) else int(len(raw) * keep)])
    with pytest.raises(ProfileError, match=r"truncated or not an XSpace: .*\n  Fix: Capture again"):
        read(tmp_path)


def test_a_file_that_is_not_a_trace(tmp_path):
    (tmp_path / "x.xplane.pb").write_bytes(b"\x0f not a trace")
    with pytest.raises(ProfileError, match="truncated or not an XSpace: wire type 7 does not exist"):
        read(tmp_path)


def test_a_trace_without_events(made, tmp_path):
    space = made.Space()
    space.plane("/host:CPU")
    space.write(tmp_path)
    with pytest.raises(ProfileError, match=r"holds no event to attribute \(planes: /host:CPU, Task Environment\)"):
        read(tmp_path)


@pytest.mark.parametrize("notes", ["{", "", "[1]"])
def test_broken_notes_beside_a_trace(made, tmp_path, notes):
    made.gpu_space(1).write(tmp_path, notes=notes)
    with pytest.raises(ProfileError, match=r"rlfx.json beside the trace is not a JSON object\.\n  Fix: Capture again"):
        read(tmp_path)


def test_a_trace_without_annotations_is_shown_by_function(tmp_path):
    @jax.jit
    def train(a):
        return jnp.tanh(a @ a)

    a = jnp.ones((64, 64))
    jax.block_until_ready(train(a))
    with capture(tmp_path) as session:
        jax.block_until_ready(train(a))
    report = session.report()
    assert any(p.startswith("no operation is annotated: time is shown by jitted function") for p in report.problems)
    assert ("jit(train)",) in {row.path for row in report.rows}
    assert report.unattributed == 1


def test_a_trace_made_by_other_means(tmp_path):
    a = jnp.ones((64, 64))
    with jax.profiler.trace(tmp_path), operation("other"):
        jax.block_until_ready(a @ a)
    report = read(tmp_path)
    assert any("the trace was not made by rlfx.profile.capture" in p for p in report.problems)
    assert report.within("other") > 0
    assert sum(report.rows.values()) == report.window_ns


def test_dropped_events_are_noticed(made, tmp_path):
    space = made.gpu_space(1)
    host = space.planes[1]
    host.event("tf_XLAEigen/1", "ThreadpoolListener::StartRegion", 200, 0, _ct=15, _c=99)
    host.event("tf_XLAEigen/1", "ThreadpoolListener::StopRegion", 210, 0)
    space.write(tmp_path)
    (problem,) = [p for p in read(tmp_path).problems if "origin" in p]
    assert problem.startswith("1 of 1 tasks of XLA's threads have no recorded origin")


def test_two_captures_at_once(tmp_path):
    refused = pytest.raises(ProfileError, match=r"already running in this process.*\n  Fix: Leave the first")
    with capture(tmp_path), refused, capture(tmp_path / "second"):
        pass
    assert read(tmp_path).window_ns > 0


def _fails(directory):
    try:
        with capture(directory) as session:
            jax.block_until_ready(jnp.ones(3) + 1)
            raise ZeroDivisionError
    except ZeroDivisionError:
        return session


def test_an_exception_in_the_block_still_leaves_a_trace(tmp_path):
    session = _fails(tmp_path)
    assert session.report().count("python", "backend") >= 1
    with capture(tmp_path / "again"):
        pass


@pytest.mark.parametrize("name", ["", "a/b", "a#b", "f(x)", "a\nb", 3])
@pytest.mark.parametrize("kind", [operation, phase])
def test_names_that_cannot_be_read_back(kind, name):
    with pytest.raises(
        ProfileError, match=rf"{kind.__name__}\({re.escape(repr(name))}\): a name is a non-empty string"
    ):
        kind(name)


def test_host_levels(tmp_path):
    refused = pytest.raises(ProfileError, match="capture: host_level must be an integer from 1 to 3, got 7")
    with refused, capture(tmp_path, host_level=7):
        pass


def test_an_older_capture_of_the_same_process_is_set_aside(tmp_path):
    for name in ("old", "new"):
        with capture(tmp_path), operation(name):
            jax.block_until_ready(jnp.ones(3) + 1)
    report = read(tmp_path)
    assert report.within("new") > 0
    assert report.within("old") == 0
    assert any("an older capture of process 'MainProcess': ignored" in p for p in report.problems)


def test_a_session_reports_its_own_capture(tmp_path):
    sessions = []
    for name in ("first", "second"):
        with capture(tmp_path) as session, operation(name):
            jax.block_until_ready(jnp.ones(3) + 1)
        sessions.append(session)
    reports = [session.report() for session in sessions]
    assert [bool(r.within("first")) for r in reports] == [True, False]
    assert [bool(r.within("second")) for r in reports] == [False, True]


def test_a_directory_that_cannot_be_written_is_noticed_before_the_program_runs(tmp_path):
    (tmp_path / "file").write_text("")
    ran = []
    refused = pytest.raises(
        ProfileError, match=r"The trace cannot be written to .*file: Not a directory\.\n  Fix: Give a"
    )
    with refused, capture(tmp_path / "file"):
        ran.append(1)
    assert not ran


def test_run_notices_it_before_the_script_runs(tmp_path):
    (tmp_path / "file").write_text("")
    script = tmp_path / "script.py"
    script.write_text("print('it ran')")
    command = [sys.executable, "-m", "rlfx.profile", "run", "--out", str(tmp_path / "file"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "it ran" in done.stdout) == (1, False), done.stderr
    assert "The trace cannot be written to" in done.stderr
    assert "Give a directory that you can write to." in done.stderr


def test_a_capture_that_leaves_the_device_running(tmp_path):
    a = jnp.ones((400, 400))
    f = jax.jit(lambda a: jax.lax.fori_loop(0, 600, lambda i, c: jnp.tanh(c @ a), a))
    jax.block_until_ready(f(a))
    with capture(tmp_path) as session:
        y = f(a)
    jax.block_until_ready(y)
    (busy,) = [p for p in session.report().problems if "the device was still busy when the capture ended" in p]
    assert "arrays not ready: 1" in busy


STALE = """
import sys, warnings, jax, jax.numpy as jnp
from rlfx.profile import capture, operation
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_compilation_cache_include_metadata_in_key", sys.argv[4] == "keyed")
def f(a):
    with operation(sys.argv[3]):
        return jnp.tanh(a @ a)
a = jnp.ones((64, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with capture(sys.argv[2]) as session:
        jax.block_until_ready(jax.jit(f)(a))
report = session.report()
print([str(w.message) for w in caught if "persistent" in str(w.message)])
print(sorted({row.path for row in report.device_rows}))
print([p for p in report.problems if "persistent" in p])
"""


@pytest.mark.slow
def test_a_stale_compilation_cache_warns_and_metadata_in_the_key_cures_it(tmp_path):
    def run(name, mode):
        folder = str(tmp_path / f"{name}-{mode}")
        command = [sys.executable, "-c", STALE, str(tmp_path / "cache"), folder, name, mode]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        return done.stdout.splitlines()

    run("before", "bare")
    warned, paths, problems = run("after", "bare")
    assert "may come back with the operation names it had then" in warned
    assert "programs came from the persistent compilation cache" in problems
    assert "before" in paths  # the stale name: what the warning is about
    run("before", "keyed")
    warned, paths, _ = run("after", "keyed")
    assert warned == "[]"
    assert "after" in paths
    assert "before" not in paths


def test_a_compilation_cache_without_metadata_warns(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    try:
        with pytest.warns(ProfileWarning, match="operation names it had then"), capture(tmp_path / "trace"):
            pass
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
