"""Two processes with one device each train what one process with two devices trains, and write each file once."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed
import jax
import numpy as np
import processes
import pytest

import rlfx
from rlfx.training import run

ROOT = Path(rlfx.__file__).parents[1]


def together(directory):
    """Both processes, to their end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    flags = [flag for flag in environment.pop("XLA_FLAGS", "").split() if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join(flags)
    command = [sys.executable, processes.__file__]
    logs = [(directory / f"{i}.log").open("w") for i in (0, 1)]
    started = [
        subprocess.Popen([*command, str(i), address, str(directory)], env=environment, stdout=log, stderr=log)
        for i, log in enumerate(logs)
    ]
    try:
        status = [process.wait(timeout=600) for process in started]
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            log.close()
    assert status == [0, 0], "\n".join((directory / f"{i}.log").read_text()[-2000:] for i in (0, 1))


@pytest.mark.usefixtures("lenient")
def test_two_processes_are_one(tmp_path):
    together(tmp_path)
    with np.load(tmp_path / "result.npz") as file:
        given = list(file.values())

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("b",))
    agent, score = processes.tiny(mesh)
    drifted = run(processes.drift, processes.start(mesh), jax.random.key(6), updates=7).agent
    drifted = {**drifted, "key": jax.random.key_data(drifted["key"])}
    expected = [*jax.tree.leaves(agent.params), *jax.tree.leaves(drifted), score]
    for a, b in zip(given, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["update", *map(str, range(1, 8))]


def test_the_command_starts_processes_and_says_when_one_fails(monkeypatch):
    """Each gets the address, how many there are, and which one it is; a status that is not 0 is the command's."""
    commands = []

    class Started:
        def __init__(self, command):
            self.status = 3 * len(commands)  # the second one fails
            commands.append(command)

        def wait(self):
            return self.status

    monkeypatch.setattr(subprocess, "Popen", Started)
    assert distributed.main(["--local", "2", "--updates", "7", "--out", "o"]) == 3
    assert [command[-2:] for command in commands] == [["--process", "0"], ["--process", "1"]]
    assert {tuple(command[2:6]) for command in commands} == {("--updates", "7", "--out", "o")}
    addresses = {command[command.index("--coordinator") + 1] for command in commands}
    assert len(addresses) == 1
