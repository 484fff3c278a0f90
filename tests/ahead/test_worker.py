"""Compiling in another process: the same path for the CPU as for a GPU; what is kept; what is said when it fails."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rlfx
from rlfx.ahead import environment, kept, process, worker
from rlfx.errors import MemoryBudgetError, TargetError
from tests.ahead import programs

S = jax.ShapeDtypeStruct
CPU = rlfx.target("cpu")
#: A machine that is not here, and compiled for as a CPU.
ELSEWHERE = dataclasses.replace(CPU, name="elsewhere", platform="gpu")


def product(x, y):
    return jnp.tanh(x @ y).sum()


PRODUCT = (S((256, 64), jnp.float32), S((64, 128), jnp.float32))


# -- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.optimised
def test_the_process_gives_what_compiling_here_gives():
    found = CPU.compile(programs.loops, *programs.LOOPS)
    here = jax.jit(programs.loops).lower(*programs.LOOPS).compile().memory_analysis()
    assert found.temp_bytes == here.temp_size_in_bytes
    assert (found.argument_bytes, found.output_bytes) == (here.argument_size_in_bytes, here.output_size_in_bytes)
    assert [loop.trips for loop in found.loops] == [programs.STEPS] * 2
    assert found.name == "loops"
    assert dict(found.versions)["jax"] == jax.__version__
    assert "compiled for cpu" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.temp_bytes = 0


test_the_process_gives_what_compiling_here_gives = pytest.mark.optimised(
    test_the_process_gives_what_compiling_here_gives
)


def test_arguments_of_every_kind():
    """Pytrees, arrays, numbers, keys of two implementations; keys as results; what is donated."""

    def fn(tree, scale, key, fast):
        new, other = jax.random.split(key)
        x = tree["x"] * scale + jax.random.normal(other, tree["x"].shape) + jax.random.uniform(fast, (8,))
        return {"x": x}, (new, fast)

    arguments = ({"x": jnp.ones(8)}, 2.0, jax.random.key(0), jax.random.key(0, impl=rlfx.envs.fast_prng))
    found = CPU.compile(fn, *arguments)
    words = sum(jax.random.key_data(k).nbytes for k in arguments[2:])
    assert found.argument_bytes == 8 * 4 + 4 + words
    assert found.alias_bytes == 0
    donated = CPU.compile(jax.jit(fn, donate_argnums=0), *arguments)
    assert donated.alias_bytes == 8 * 4


def test_devices_that_are_not_here_meet():
    mesh = rlfx.target("cpu:16").mesh("b")
    found = rlfx.target("cpu:16").compile(programs.split(mesh), programs.split_shape(mesh))
    assert {(c.kind, c.count, c.in_loop) for c in found.collectives} == {
        ("all-reduce", programs.ROUNDS, True),
        ("all-reduce", 1, False),
    }
    assert found.devices == 16
    assert found.argument_bytes == 64 * 256 * 4 // 16


def test_a_bound_function_has_its_name():
    assert CPU.compile(partial(product, jnp.ones((4, 4))), jnp.ones((4, 4))).name == "product"


# -- what is kept ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch):
    """The requests that reached a process."""
    seen, run = [], process.run

    def counted(place, request, *rest):
        seen.append(request["name"])
        return run(place, request, *rest)

    monkeypatch.setattr(process, "run", counted)
    return seen


def test_the_same_program_is_compiled_once(runs):
    first = CPU.compile(product, *PRODUCT)

    def product_again(x, y):  # another name, another line: the same program

        return jnp.tanh(x @ y).sum()

    assert CPU.compile(product_again, *PRODUCT).temp_bytes == first.temp_bytes
    assert CPU.compile(product, *PRODUCT) == first
    assert len(runs) == 1
    CPU.compile(product, S((128, 64), jnp.float32), PRODUCT[1])
    CPU.compile(jax.jit(lambda x: x + 1, donate_argnums=0), PRODUCT[0])
    CPU.compile(lambda x: x + 1, PRODUCT[0])
    rlfx.target("cpu:2").compile(product, *PRODUCT)
    assert len(runs) == 5, "other shapes, what is donated, other programs and machines are told apart"


def test_other_versions_are_compiled_anew(runs, monkeypatch):
    CPU.compile(product, *PRODUCT)
    found = environment.find("cpu", jax.__version__)
    other = dataclasses.replace(found, versions=(*found.versions, ("later", "2")))
    monkeypatch.setattr("rlfx.ahead.compilation.find", lambda *_: other)
    CPU.compile(product, *PRODUCT)
    assert len(runs) == 2


DAMAGED = {
    "empty": b"",
    "no gzip": b"no gzip",
    "cut off": gzip.compress(b'{"hlo": "", "memory": {}, "versions": {}}')[:-9],
    "no JSON": gzip.compress(b"{"),
    "a list": gzip.compress(b"[]"),
    "not all": gzip.compress(b'{"hlo": 1}'),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_as_none(how):
    answer = {"hlo": "", "memory": {}, "versions": {}}
    kept.write("key", answer)
    assert kept.read("key") == answer
    (file,) = (environment.cache_folder() / "compilations").iterdir()
    file.write_bytes(DAMAGED[how])
    assert kept.read("key") is None
    kept.write("key", answer)
    assert kept.read("key") == answer


def test_where_nothing_can_be_written_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLFX_CACHE", str(tmp_path / "file" / "cache"))
    assert CPU.compile(product, *PRODUCT).launches > 0


def test_old_files_go(monkeypatch):
    monkeypatch.setattr(kept, "AT_MOST", 3)
    for n in range(5):
        kept.write(f"{n}", {"hlo": "", "memory": {}, "versions": {}})
        os.utime(environment.cache_folder() / "compilations" / f"{n}.json.gz", (n, n))
    assert [n for n in range(5) if kept.read(f"{n}") is not None] == [2, 3, 4]


# -- what fails -----------------------------------------------------------------------------------------------------


def made_up(monkeypatch, tmp_path, script: str, jax_version: str = jax.__version__, plugin: str = "cuda"):
    """An environment whose Python is a script."""
    place = tmp_path / "made up"
    (place / "bin").mkdir(parents=True)
    site = place / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name, version in {"jax": jax_version, **dict.fromkeys(environment.PACKAGES[plugin], "1.0")}.items():
        (site / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    python = place / "bin" / "python"
    python.write_text(f"#!{sys.executable}\n{script}")
    python.chmod(0o755)
    monkeypatch.setenv(environment.variable(plugin), str(place))
    return place


def test_a_process_that_fails_says_its_last_lines(monkeypatch, tmp_path):
    script = "import sys\nfor i in range(100): print('line', i)\nsys.exit('RuntimeError: the compiler is broken')"
    place = made_up(monkeypatch, tmp_path, script)
    with pytest.raises(TargetError) as failed:
        rlfx.target("h200").compile(product, *PRODUCT)
    lines = str(failed.value).splitlines()
    assert lines[0] == "Compiling product for h200 failed (exit status 1). Its last lines:"
    assert lines[1:-1] == [f"    line {i}" for i in range(89, 100)] + ["    RuntimeError: the compiler is broken"]
    assert lines[-1] == f"  Fix: If {place}/bin/python itself is broken, make it again: python -m rlfx.ahead cuda"


def test_a_process_that_is_killed_names_the_signal(monkeypatch, tmp_path):
    made_up(monkeypatch, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(TargetError, match=r"^Compiling product for a100 failed \(signal SIGSEGV\)\.\n  Fix"):
        rlfx.target("a100").compile(product, *PRODUCT)


def test_a_process_that_writes_nothing_has_failed(monkeypatch, tmp_path):
    made_up(monkeypatch, tmp_path, "print('done')")
    with pytest.raises(TargetError, match=r"failed \(exit status 0\)\. Its last lines:\n    done"):
        rlfx.target("t4").compile(product, *PRODUCT)


def test_a_process_that_hangs_is_ended_with_what_it_started(monkeypatch, tmp_path):
    child = tmp_path / "child"
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\nprint('waiting', flush=True)\ntime.sleep(600)"
    )
    made_up(monkeypatch, tmp_path, script)
    with pytest.raises(TargetError) as ended:
        rlfx.target("h200").compile(product, *PRODUCT, limit=5)
    assert "Compiling product for h200 was not done after" in str(ended.value)
    assert (
        "and was ended. Its last lines:\n    waiting\n  Fix: Give it longer: target.compile(..., limit=3600)."
        in str(ended.value)
    )
    pid = int(child.read_text())
    for _ in range(100):
        if not _runs(pid):
            break
        time.sleep(0.1)
    assert not _runs(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="how a process ends with its parent")
def test_a_process_ends_with_whoever_waits_for_it(tmp_path):
    """A compilation that takes all memory does not stay behind when its parent is killed."""
    loaded = f"import runpy; runpy.run_path({str(process.WORKER)!r})['end_with_the_parent']()"
    child = f"{loaded}; print('ready', flush=True); import time; time.sleep(600)"
    parent = (
        f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    waiting = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(waiting.stdout.readline())
    assert _runs(pid)
    waiting.kill()
    waiting.wait()
    waiting.stdout.close()
    for _ in range(100):
        if not _runs(pid):
            break
        time.sleep(0.1)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split(")")[-1].split()[0] not in ("Z", "X")


def test_what_the_compiler_does_not_take_is_its_last_line():
    call = jax.ffi.ffi_call("no_such_call", S((4,), jnp.float32))
    with pytest.raises(TargetError) as failed:
        CPU.compile(lambda x: call(x), jnp.ones(4))
    text = str(failed.value)
    assert "failed (exit status 1). Its last lines:" in text
    assert "no_such_call" in text.splitlines()[-2]
    assert text.endswith("Fix: The last line is the compiler's: change what it does not take.")


EXHAUSTED = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(16.71G) exceeds available HBM (15.75G)."
)


def test_a_program_that_the_machine_has_no_room_for(monkeypatch, tmp_path):
    """An error, with the bytes, for who compiles it; a number for who asks whether it fits."""
    made_up(monkeypatch, tmp_path, f"import sys; sys.exit({EXHAUSTED!r})", plugin="tpu")
    needed = int(16.71 * 2**30)
    with pytest.raises(TargetError, match=r"(?s)exceeds available HBM.*Fix: Give memory_budget=") as failed:
        rlfx.target("v5e").compile(product, *PRODUCT)
    assert failed.value.needed == needed
    fn = rlfx.compile(loss, length=40, batch=64, target="v5e")
    assert fn.explain(W, X, measure=True).measured_bytes == needed
    with pytest.raises(MemoryBudgetError, match=f"needs {needed} bytes"):
        rlfx.compile(loss, length=40, batch=64, target="v5e", memory_budget=10**6).plan(W, X)


def test_nothing_of_this_process_changes(monkeypatch):
    """Its flags are not the other's, nor the other's its own."""
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_no_such_flag=1")
    before = dict(os.environ), jax.devices()
    CPU.compile(product, *PRODUCT)
    assert (dict(os.environ), jax.devices()) == before


# -- without an environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "name", "plugin"), [("h200", "CUDA", "cuda"), ("v5e", "TPU", "tpu")])
def test_without_an_environment_there_is_a_line_that_makes_it(target, name, plugin):
    with pytest.raises(TargetError) as refused:
        rlfx.target(target).compile(product, *PRODUCT)
    assert f"Compiling for {name} devices that are not here takes an environment of its own" in str(refused.value)
    assert str(refused.value).endswith(f"Fix: Make it: python -m rlfx.ahead {plugin}")


def test_a_variable_that_names_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("RLFX_AHEAD_CUDA", str(tmp_path / "none"))
    with pytest.raises(TargetError, match=r"RLFX_AHEAD_CUDA names .*none, where there is no Python environment"):
        rlfx.target("h200").compile(product, *PRODUCT)


def test_an_older_jax_and_lacking_packages(monkeypatch, tmp_path):
    place = made_up(monkeypatch, tmp_path, "", jax_version="0.9.9")
    with pytest.raises(
        TargetError, match=r"has jax 0\.9\.9, which can't read what jax .* exports\.\n  Fix: Make it again"
    ):
        rlfx.target("h200").compile(product, *PRODUCT)
    next(place.glob("lib/*/*/nvidia*")).rmdir()
    with pytest.raises(
        TargetError, match=r"lacks nvidia-cuda-nvcc-cu12\.\n  Fix: Make it again: python -m rlfx.ahead cuda"
    ):
        rlfx.target("h200").compile(product, *PRODUCT)


def test_where_environments_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.sys, "prefix", str(tmp_path / "project" / ".venv"))
    beside, cached = environment.places("tpu")
    assert (beside, cached) == (tmp_path / "project" / ".venv-aot-tpu", environment.cache_folder() / "aot-tpu")
    assert environment.folder("tpu") == cached
    monkeypatch.setenv("RLFX_AHEAD_TPU", str(tmp_path / "named"))
    assert environment.folder("tpu") == tmp_path / "named"
    monkeypatch.delenv("RLFX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert environment.cache_folder() == tmp_path / "xdg" / "rlfx"


def test_an_environment_has_the_version_that_exports():
    cuda = environment.requirements("cuda", "0.10.2")
    assert cuda[:3] == ["jax==0.10.2", "jax-cuda12-plugin==0.10.2", "jax-cuda12-pjrt==0.10.2"]
    assert environment.requirements("tpu", "0.11.0")[0] == "jax[tpu]==0.11.0"


def test_an_installation_that_fails_says_so(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no room left\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(TargetError, match=r"failed with 3:\n  no room left\n  Fix: Remove "):
        environment.install("cuda", "0.10.2", tmp_path / "place", str(python))


def test_the_command_that_makes_an_environment():
    said = subprocess.run(
        [sys.executable, "-m", "rlfx.ahead", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "{cuda,tpu}" in said


# -- what is refused before -----------------------------------------------------------------------------------------


def refused(fn, *shapes, target=CPU, **options) -> str:
    with pytest.raises(TargetError) as found:
        target.compile(fn, *shapes, **options)
    return str(found.value)


def test_what_can_not_leave_the_process():
    def prints(x):
        jax.debug.print("{}", x)
        return x

    for target in (CPU, ELSEWHERE):
        text = refused(prints, jnp.ones(3), target=target)
        assert text.startswith("prints calls back into Python (jax.debug.print, jax.pure_callback)")
    assert "An argument of product is no array: 'a'." in refused(product, "a")
    assert "fn must be a function" in refused(5)
    assert "limit must be a finite number > 0" in refused(product, *PRODUCT, limit=0)
    assert "Nothing is known of gpu that its compiler could be told" in refused(
        product, *PRODUCT, target=rlfx.target("gpu")
    )


def test_devices_that_do_not_fit():
    eight, four = rlfx.target("cpu:8"), rlfx.target("cpu:4")
    split = S((16,), jnp.float32, sharding=NamedSharding(eight.mesh("b"), PartitionSpec("b")))
    assert "runs on 8 devices, but cpu:4 is 4" in refused(lambda x: x + 1, split, target=four)
    other = S((16,), jnp.float32, sharding=NamedSharding(four.mesh("b"), PartitionSpec("b")))
    assert "The arguments are split over different meshes" in refused(lambda x, y: x + y, split, other, target=eight)
    text = refused(programs.split(eight.mesh("b")), S((64, 256), jnp.float32), target=eight)
    assert "runs on a mesh of 8 devices, but none of its arguments is on it" in text


def test_without_flatbuffers(monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    assert refused(product, *PRODUCT).endswith("Fix: pip install 'rlfx[targets]'")


# -- compile, budgets, explain --------------------------------------------------------------------------------------


def loss(w, x, t):
    y = jnp.tanh(x @ w)
    return jnp.sum((jax.lax.stop_gradient(y) @ w) ** 2), jax.lax.stop_gradient(y)


W, X = S((32, 32), jnp.float32), S((64, 32), jnp.float32)


def test_explain_measures_on_a_machine_that_is_not_here(runs):
    fn = rlfx.compile(loss, length=40, batch=64)
    shown = fn.explain(W, X, target=ELSEWHERE, measure=True)
    assert runs == ["cpu"]
    assert shown.compilation.name == "loss"
    assert shown.measured_bytes == shown.compilation.temp_bytes > 40 * 64 * 32 * 4
    assert 40 in [loop.trips for loop in shown.compilation.loops]
    text = str(shown)
    assert "measured by XLA" in text
    assert " loss compiled for elsewhere" in text
    assert "on this elsewhere" in text
    assert fn.explain(W, X).compilation is None
    assert fn.explain(W, X).evaluator.target == CPU


def test_a_budget_is_met_on_the_machine_that_is_named(runs):
    free = rlfx.compile(loss, length=40, batch=64, target=ELSEWHERE)
    needed = free.explain(W, X, measure=True).measured_bytes
    asked = rlfx.compile(loss, length=40, batch=64, target=ELSEWHERE, memory_budget=needed // 4)
    shown = asked.explain(W, X)
    assert shown.measured_bytes <= needed // 4
    assert shown.plan != free.plan(W, X)
    assert len(runs) <= 1 + 3, "a budget takes at most three compilations"
    with pytest.raises(MemoryBudgetError, match="memory_budget=100 "):
        rlfx.compile(loss, length=40, batch=64, target=ELSEWHERE, memory_budget=100).plan(W, X)


def test_without_the_compiler_a_budget_there_is_refused_and_a_plan_is_not():
    assert rlfx.compile(loss, length=40, batch=64, target="h200").plan(W, X) is not None
    with pytest.raises(TargetError, match=r"python -m rlfx\.ahead cuda"):
        rlfx.compile(loss, length=40, batch=64, target="h200", memory_budget=10**6).plan(W, X)
    with pytest.raises(TargetError, match=r"python -m rlfx\.ahead tpu"):
        rlfx.compile(loss, length=40, batch=64).explain(W, X, target="v6e", measure=True)


def test_a_target_by_name_is_the_value():
    named, valued = (rlfx.compile(loss, length=4, batch=64, target=t) for t in ("a100", rlfx.target("a100")))
    assert named.target == valued.target
    assert json.loads(named.plan(W, X).to_json()) == json.loads(valued.plan(W, X).to_json())
    with pytest.raises(rlfx.errors.ScheduleError, match="No machine named 'a10' is known"):
        rlfx.compile(loss, length=4, target="a10")


def test_an_assembler_that_dies_of_several_files_gets_fewer(tmp_path):
    """As ptxas 12.9 does of some: figures of all kernels come back, and the crash is not one of a compilation."""
    fake = tmp_path / "ptxas"
    fake.write_text('#!/bin/sh\n[ $# -gt 3 ] && kill -SEGV $$\necho "$1 $2"; [ -n "$3" ] && echo "$1 $3"; exit 0\n')
    fake.chmod(0o755)
    files = [f"{i}.ptx" for i in range(7)]
    assert worker.said_of([str(fake), "-v"], files, str(tmp_path)) == "".join(f"-v {file}\n" for file in files)
