"""The public API from a user's file: pyright in strict mode, as if rlfx were installed; and the file runs."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from tests import downstream

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_types_are_known_in_strict_mode(tmp_path):
    shutil.copy(ROOT / "tests" / "downstream.py", tmp_path)
    settings = {"include": ["downstream.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    settings["reportUnnecessaryTypeIgnoreComment"] = "error"
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", tmp_path, "--pythonpath", sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # a search path of the interpreter: rlfx is a library there
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    told = [f"{d['range']['start']['line'] + 1}: {d['message']}" for d in found["generalDiagnostics"]]
    assert not told


def test_the_file_runs(tmp_path, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        downstream.main(tmp_path)
    out = capsys.readouterr().out
    assert "acting" in out
    assert (tmp_path / "cartpole.gif").exists()
    assert (tmp_path / "log").read_text().split() == ["2", "4"]
