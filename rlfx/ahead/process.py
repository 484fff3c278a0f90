"""The compilation itself, in a process of its own, with a time limit; what it said, if it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from rlfx.ahead.environment import Environment, install_line
from rlfx.ahead.machines import Machine
from rlfx.ahead.program import Exported
from rlfx.errors import TargetError, located

WORKER = Path(__file__).with_name("worker.py")

#: Of a process that failed, so many lines are shown.
LINES = 12

#: Settings of this process that are not for the other one.
_OWN = ("XLA_FLAGS", "PYTHONPATH", "PYTHONHOME", "LIBTPU_INIT_ARGS", "TF_CPP_MIN_LOG_LEVEL")

#: Lines that say nothing about a failure.
_NOISE = ("WARNING: All log messages before absl", "cudart_stub.cc", "Jax plugin configuration error")


def request_for(machine: Machine, program: Exported, environment: Environment) -> dict[str, Any]:
    """What the process is asked for."""
    return {
        "name": machine.name,
        "plugin": machine.plugin,
        "devices": machine.devices,
        "topology": machine.topology,
        "description": machine.description,
        "mesh": program.mesh,
        "donated": list(program.donated),
        "environment": _tpu(machine) if machine.plugin == "tpu" else {},
        "packages": [name for name, _ in environment.versions],
    }


def _tpu(machine: Machine) -> dict[str, str]:
    """libtpu takes the machine that it is on from variables: one process for each kind."""
    kind = {"v5e": "v5litepod"}.get(machine.name, machine.name)
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{kind}-{max(4, machine.devices)}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock is for devices, and none is used
    }


def run(environment: Environment, request: dict[str, Any], program: Exported, limit: float) -> dict[str, Any]:
    """The worker's answer.

    Raises:
      TargetError: it failed, or was not done after ``limit`` seconds and was ended; with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rlfx-ahead-") as name:
        place = Path(name)
        (place / "request.json").write_text(json.dumps(request))
        (place / "program.bin").write_bytes(program.data)
        start = time.monotonic()
        with open(place / "said", "w") as said:
            process = subprocess.Popen(
                [str(environment.python), str(WORKER), name],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=name,
                env=_surroundings(environment),
                start_new_session=True,  # what it starts is ended with it
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        answer = place / "answer.json"
        if code == 0 and answer.exists():
            return json.loads(answer.read_text())
        what = f"Compiling {program.name} for {request['name']}"
        lines = _last_lines(place / "said")
        needed = _needed(lines)
        if code is None:
            fact = f"{what} was not done after {time.monotonic() - start:.3g} s, and was ended."
            fix = "Give it longer: target.compile(..., limit=3600)."
        else:
            by = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            fact = f"{what} failed ({by})."
            fix = "The last line is the compiler's: change what it does not take."
            if needed is not None:
                fix = "Give memory_budget= to rlfx.compile, a smaller batch, or more devices (mesh=)."
            elif "JaxRuntimeError" not in lines and environment.plugin != "cpu":
                fix = f"If {environment.python} itself is broken, make it again: {install_line(environment.plugin)}"
        raise TargetError(located(f"{fact} Its last lines:\n    {lines}" if lines else fact, fix=fix), needed)


def _surroundings(environment: Environment) -> dict[str, str]:
    """The variables of the process: this one's, but for those that are about this process's jax."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_") and name not in _OWN}
    if environment.plugin == "cpu" and "PYTHONPATH" in os.environ:  # it is this Python, with what this one finds
        kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return {**kept, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}


def _end(process: subprocess.Popen) -> None:
    """The process, and what it has started, if they still run."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(path: Path) -> str:
    lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if not any(part in line for part in _NOISE)]
    return "\n    ".join(telling[-LINES:])


_EXCEEDS = re.compile(r"RESOURCE_EXHAUSTED.*\(([\d.]+)([KMG]?)\) exceeds available")


def _needed(lines: str) -> int | None:
    """The bytes that a compiler says a program needs, if they are more than the device has.

    Example:
      >>> _needed("RESOURCE_EXHAUSTED: ... memory required for HLO temporaries (1.5G) exceeds available HBM (1.0G).")
      1610612736
    """
    found = _EXCEEDS.search(lines)
    return found and int(float(found.group(1)) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found.group(2)])
