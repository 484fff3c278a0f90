"""The quickstart on a simulated Colab: ``make colab``, or ``python -m docs.colab --python python3.12 --jax 0.7.2``.

An environment with Colab's packages and without rlfx; no accelerator. The notebook runs as it is, from its first cell; the
address of the repository leads to this checkout. If the first cell says that jax is too old, its advice is followed: install,
restart, run again. Fails if a cell does, if the agent has not learned, or if it all takes longer than three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docs.notebooks import PROJECT, ROOT

#: Colab's image of late 2025 (Python 3.12): its jax, and what it has of what the notebooks import.
IMAGE = "0.7.2"
PACKAGES = {
    "numpy": "2.0.2", "scipy": "1.16.3", "networkx": "3.6", "optax": "0.2.6", "flax": "0.11.2", "chex": "0.1.90",
    "matplotlib": "3.10.0", "pillow": "11.3.0", "absl-py": "1.4.0", "ipykernel": "6.17.1", "nbclient": "0.10.2",
}  # fmt: skip

#: In the environment: runs a notebook, and prints the seconds and the text of each cell as JSON.
RUN = """
import json, sys, time
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
book = nbformat.read(sys.argv[1], 4)
client = NotebookClient(book, timeout=180, kernel_name="python3")
cells, failed = [], None
with client.setup_kernel():
    for i, cell in enumerate(book.cells):
        if cell.cell_type != "code":
            continue
        begin = time.perf_counter()
        try:
            client.execute_cell(cell, i)
        except CellExecutionError as error:
            failed = str(error)
        text = "".join(o.get("text", "") for o in cell.outputs)
        cells.append((time.perf_counter() - begin, text))
        if failed:
            break
print(json.dumps({"cells": cells, "failed": failed}))
"""


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def environment(folder: Path, python: str, jax: str) -> Path:
    """A fresh environment with Colab's packages (or newer ones, for a newer jax) and this jax; its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside, which = folder / "bin" / "python", "==" if jax == IMAGE else ">="
    pip(inside, f"jax=={jax}", *(f"{name}{which}{version}" for name, version in PACKAGES.items()))
    return inside


def executed(python: Path, notebook: Path, folder: Path) -> dict:
    """The notebook's cells, in a kernel of their own: ``{"cells": [(seconds, text)], "failed": message or None}``."""
    checkout = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{ROOT}.insteadOf",
        "GIT_CONFIG_VALUE_0": PROJECT["urls"]["Repository"],
        "JAX_PLATFORMS": "cpu",
    }
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [python, "-c", RUN, notebook]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=kept | checkout | path)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="Colab's Python")
    parser.add_argument("--jax", nargs="+", default=[IMAGE, "0.11.0"], help="the jax that is there, one run each")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds from the first cell to a trained agent")
    arguments = parser.parse_args()
    for jax in arguments.jax:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), arguments.python, jax, arguments.limit)


def run(folder: Path, base: str, jax: str, limit: float) -> None:
    """The quickstart where this jax is installed."""
    notebook = ROOT / "examples" / "notebooks" / "quickstart.ipynb"
    python = environment(folder / "venv", base, jax)
    begin = time.perf_counter()
    found = executed(python, notebook, folder)
    if found["failed"] and (advice := re.search(r"%pip install -U 'jax\[cuda12\](\S+)'", found["failed"])):
        print(f"jax {jax}: the first cell asks for jax{advice[1]}")
        pip(python, "-U", f"jax{advice[1]}")
        found = executed(python, notebook, folder)
    if found["failed"]:
        sys.exit(found["failed"])
    seconds = time.perf_counter() - begin
    for took, text in found["cells"]:
        print(f"  {took:6.1f} s  {' '.join(text.split())[:100]}")
    returns = [float(x) for x in re.findall(r"mean return (\d+)", " ".join(text for _, text in found["cells"]))]
    print(f"jax {jax}: mean return {returns}, {seconds:.0f} s from the first cell to the last")
    if not returns or max(returns) < 475 or seconds > limit:
        sys.exit(f"not a trained agent in {limit:.0f} s")


if __name__ == "__main__":
    main()
