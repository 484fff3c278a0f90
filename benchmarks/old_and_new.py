"""The compiler before its second architecture and now: five benchmarks, each commit in a process of its own, interleaved.

    python benchmarks/old_and_new.py [--old 7e268ad] [--new HEAD] [--workload ppo nstep gru images attention] [--out FILE.json]

Both commits run their own copies of the benchmarks' programs, which are the same text, on one core and with the same jax.
A worker compiles a program (CPU seconds of tracing, planning and compiling; XLA's temporary bytes), then runs it when it is
told to; the two take turns. Ratios are new to old, of medians of CPU seconds. Lines of Python are counted by package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
#: The last commit before "The second architecture".
OLD = "7e268ad"


def ppo():
    """PPO at the centre of the grid: T=250, B=512, two layers of 64."""
    timerl, nstep = map(importlib.import_module, ("ppo_timerl", "nstep_reinforce"))
    return timerl.compiled_by_rlfx(512), nstep.arguments(512)


def nstep():
    """REINFORCE with returns over 32 timesteps: T=250, B=512."""
    module = importlib.import_module("nstep_reinforce")
    return module.by_rlfx(32, 250, 512), module.arguments(512)


def gru():
    """A recurrent actor-critic, BPTT over T=512, B=64, 128 units."""
    import jax
    import jax.numpy as jnp

    module = importlib.import_module("through_time")
    start = jnp.zeros((64, module.OBS)), jnp.zeros(64, jnp.int32), module.zero_state("gru", (64,), 128)
    return module.by_rlfx("gru", 512, 64)[0], (module.weights("gru", 128), start, jax.random.key(1))


def images():
    """An actor-critic on images 3x32x32: T=64, B=16."""
    import jax
    import jax.numpy as jnp

    import rlfx

    module = importlib.import_module("memory_images")
    fn = rlfx.compile(module.ppo, length=64, batch=16)
    step = jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(1)), has_aux=True)
    return step, (module.parameters(jax.random.key(0), 32), jnp.zeros((16, 3, 32, 32)))


def attention():
    """The gradient of a causal attention layer: T=1024, width 64."""
    import jax

    module = importlib.import_module("attention_blocks")
    x, y = (jax.random.normal(jax.random.key(i), (1024, module.WIDTH)) for i in (1, 2))
    return module.loss_rlfx(1024, None), (module.weights(), (x, y))


WORKLOADS = {f.__name__: f for f in (ppo, nstep, gru, images, attention)}


def worker(name: str) -> None:
    """Compiles a workload, then runs it once for each line that it reads; answers in lines of JSON."""
    import jax

    fn, arguments = WORKLOADS[name]()
    began = time.process_time()
    program = jax.jit(fn).lower(*arguments).compile()
    seconds = time.process_time() - began
    first = float(jax.tree.leaves(program(*arguments))[0])
    temp = program.memory_analysis().temp_size_in_bytes
    print(json.dumps({"compile_s": seconds, "temp_bytes": temp, "loss": first}), flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        jax.block_until_ready(program(*arguments))
        print(json.dumps(time.process_time() - began), flush=True)


@contextlib.contextmanager
def tree_of(commit: str):
    """A work tree of a commit, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / commit
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def started(tree: pathlib.Path, name: str, core: int) -> subprocess.Popen:
    """A worker on one core; what a commit's benchmarks lack, it takes from the new ones."""
    paths = [tree, tree / "benchmarks", ROOT / "benchmarks"]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "XLA_FLAGS": flags}
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); import old_and_new; old_and_new.worker({name!r})"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tree,
    )


def answer(process: subprocess.Popen):
    """The next line of a worker."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended with {process.wait()}")
    return json.loads(line)


def compare(trees: dict[str, pathlib.Path], name: str, rounds: int, core: int) -> dict:
    """One workload, both commits in turn."""
    workers: dict[str, subprocess.Popen] = {}
    try:
        found = {}
        for which, tree in trees.items():  # one compiles at a time
            workers[which] = started(tree, name, core)
            found[which] = answer(workers[which])
        seconds: dict[str, list[float]] = {which: [] for which in workers}
        for _ in range(rounds):
            for which, w in workers.items():
                assert w.stdin is not None
                w.stdin.write("\n")
                w.stdin.flush()
                seconds[which].append(answer(w))
    finally:
        for w in workers.values():
            w.kill()
            w.wait()
    row = {which: {**found[which], "cpu_s": statistics.median(seconds[which])} for which in workers}
    ratios = {k: row["new"][k] / row["old"][k] for k in ("cpu_s", "temp_bytes", "compile_s")}
    pairs = statistics.median(n / o for n, o in zip(seconds["new"], seconds["old"], strict=True))
    print(
        f"{name:10} time {ratios['cpu_s']:.2f}x (of pairs {pairs:.2f}x)  bytes {ratios['temp_bytes']:.2f}x  "
        f"compile {ratios['compile_s']:.2f}x | {row['new']['cpu_s'] * 1e3:.1f} ms {row['new']['temp_bytes'] / 1e6:.2f} MB "
        f"{row['new']['compile_s']:.2f} s | loss {row['old']['loss']:.6g} {row['new']['loss']:.6g}",
        flush=True,
    )
    return {
        "workload": name,
        "what": WORKLOADS[name].__doc__,
        "rounds": rounds,
        "ratios": ratios | {"pairs": pairs},
        **row,
    }


def lines_of(tree: pathlib.Path) -> dict[str, int]:
    """Lines of Python in each package of a tree, and in all."""
    found: dict[str, int] = {}
    for file in (tree / "rlfx").rglob("*.py"):
        package = file.relative_to(tree / "rlfx").parts[0].removesuffix(".py")
        name = package if (tree / "rlfx" / package).is_dir() else "files of rlfx"
        found[name] = found.get(name, 0) + len(file.read_text().splitlines())
    return dict(sorted(found.items())) | {"all": sum(found.values())}


def short(commit: str) -> str:
    """The name of a commit."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", commit]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    import recorded

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", default=OLD)
    parser.add_argument("--new", default="HEAD")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    with tree_of(args.old) as old, tree_of(args.new) as new:
        trees = {"old": old, "new": new}
        rows = [compare(trees, name, args.rounds, args.core) for name in args.workload]
        lines = {which: lines_of(tree) for which, tree in trees.items()}
    if args.out:
        commits = {which: short(commit) for which, commit in (("old", args.old), ("new", args.new))}
        recorded.write(args.out, recorded.about("old_and_new") | {"commits": commits, "lines": lines, "results": rows})


if __name__ == "__main__":
    main()
