"""What runs in the environment that compiles: a program from a file, its compilation into another. Imports jax alone.

    python worker.py FOLDER

FOLDER has ``request.json`` and ``program.bin`` (an exported program); ``answer.json`` is written beside them. Whoever starts it
reads its output if it ends otherwise.
"""

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time

#: How many files of PTX are assembled by one call.
AT_A_TIME = 32


def main(folder: str) -> None:
    end_with_the_parent()
    with open(os.path.join(folder, "request.json")) as file:
        request = json.load(file)
    dump = os.path.join(folder, "dump")
    if request["plugin"] == "cuda":
        newer = importlib.metadata.version("jax") >= "0.11"  # before, PTX was dumped without being asked for
        more = " --xla_dump_emitter_re=ptx" if newer else ""
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump}{more}"
    if request["plugin"] == "cpu":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={request['devices']}"
    os.environ.update(request["environment"])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)  # the program has its own types
    with open(os.path.join(folder, "program.bin"), "rb") as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    start = time.perf_counter()
    devices = devices_of(jax, request)
    try:
        compiled = compile_for(jax, devices, exported, request)
    except jax.errors.JaxRuntimeError as error:  # the compiler's own words
        sys.exit(f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    cost = None
    with contextlib.suppress(Exception):  # not every backend has one
        cost = compiled.cost_analysis()
    answer = {
        "seconds": seconds,
        "memory": {name: int(getattr(memory, name)) for name in dir(memory) if name.endswith("_in_bytes")},
        "cost": {
            name: float(value) for name, value in (cost or {}).items() if " " not in name or name == "bytes accessed"
        },
        "hlo": compiled.as_text(),
        "kernels": assembled(dump) if request["plugin"] == "cuda" else "",
        "thunks": thunks(dump),
        "versions": {name: version(name) for name in ("jax", "jaxlib", *request["packages"])},
    }
    partial = os.path.join(folder, "answer.partial")
    with open(partial, "w") as file:
        json.dump(answer, file)
    os.replace(partial, os.path.join(folder, "answer.json"))


def end_with_the_parent() -> None:
    """Do not go on if whoever waits for the answer is killed: a compilation that never ends takes all memory (Linux)."""
    import ctypes
    import signal

    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was killed meanwhile
            sys.exit("whoever asked is gone")


def devices_of(jax, request: dict) -> list:
    """The devices to compile for, which are not there."""
    from jax.experimental import topologies

    if request["plugin"] == "cpu":
        return jax.devices("cpu")
    if request["plugin"] == "cuda":
        import jax_plugins.xla_cuda12 as cuda

        with contextlib.suppress(jax.errors.JaxRuntimeError):  # if jax has done so itself
            cuda.initialize()
        more = {"target_config": request["description"], "topology": request["topology"]}
        return topologies.get_topology_desc(platform="cuda", topology_name=request["name"], **more).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=request["topology"]).devices


def compile_for(jax, devices: list, exported, request: dict):
    """The program, compiled for as many of the devices as it was exported for."""
    import numpy as np

    names, sizes = request["mesh"] or (["devices"], [exported.nr_devices])
    mesh = jax.sharding.Mesh(np.array(devices[: exported.nr_devices]).reshape(sizes), tuple(names))
    placed = exported.in_shardings_jax(mesh) if request["mesh"] else [None] * len(exported.in_avals)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or everywhere)
        for aval, sharding in zip(exported.in_avals, placed, strict=True)
    ]
    fn = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    return fn.lower(*shapes).compile()


def assembled(dump: str) -> str:
    """What ptxas says of every kernel."""
    import nvidia.cuda_nvcc

    files = sorted(glob.glob(os.path.join(dump, "*.ptx")))
    by_arch: dict = {}
    for path in files:
        with open(path) as file:
            found = re.search(r"^\.target (sm_\w+)", file.read(), re.MULTILINE)
        by_arch.setdefault(found.group(1) if found else None, []).append(path)
    by_arch.pop(None, None)
    ptxas = os.path.join(next(iter(nvidia.cuda_nvcc.__path__)), "bin", "ptxas")
    said = []
    for arch, paths in by_arch.items():
        for at in range(0, len(paths), AT_A_TIME):
            said.append(said_of([ptxas, "-v", f"-arch={arch}", "-c"], paths[at : at + AT_A_TIME], dump))
    return "".join(said)


def said_of(command: list, paths: list, folder: str) -> str:
    """What ptxas says of some files. It may die of several that it takes one by one (12.9 does): then by halves."""
    done = subprocess.run(
        [*command, *paths], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode == 0 or len(paths) == 1:
        return done.stdout
    half = len(paths) // 2
    return said_of(command, paths[:half], folder) + said_of(command, paths[half:], folder)


def thunks(dump: str) -> str:
    """What XLA:GPU launches, in order, with the shared memory of each kernel."""
    files = sorted(glob.glob(os.path.join(dump, "*.thunk_sequence.txt")), key=os.path.getsize)
    if not files:
        return ""
    with open(files[-1]) as file:
        return file.read()


def version(package: str):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1])
