"""examples/notebooks/*.ipynb from the documentation's pages: `make notebooks`.

A page is text with ``{code-cell}`` blocks. A notebook is the page, after a badge, a cell that installs rlfx beside the jax of
the machine, and a cell that says what the machine is. Addresses come from ``[project.urls]``.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Page(NamedTuple):
    """A page that becomes a notebook; one that ``chooses`` its devices does so before jax starts."""

    path: str
    chooses: bool = False


NOTEBOOKS = {
    "quickstart": Page("tutorials/cartpole"),
    "ten_steps": Page("tutorials/ten-steps"),
    "returns": Page("tutorials/truncation"),
    "memory": Page("tutorials/memory"),
    "attention": Page("tutorials/attention"),
    "fused_environments": Page("tutorials/fused"),
    "profiling": Page("tutorials/profile"),
    "devices": Page("tutorials/devices", chooses=True),
    "placement": Page("tutorials/placement", chooses=True),
    "seeds": Page("how-to/sweeps"),
    "grpo": Page("tutorials/grpo"),
}

#: What the notebooks import beside rlfx's own requirements, and what that imports: a package, and its module.
ALSO = {"optax": "optax", "absl-py": "absl", "matplotlib": "matplotlib", "pillow": "PIL"}
MINIMUM, BELOW = re.search(r"jax>=(\d+\.\d+\.\d+),<(\d+\.\d+)", "\n".join(PROJECT["dependencies"])).groups()  # type: ignore[union-attr]

INSTALL = """# Installs rlfx, and the packages that are missing. The jax of this machine stays as it is: it knows the accelerator.
import importlib.util
import subprocess
import sys

import jax

SUPPORTED = {minimum} <= tuple(map(int, jax.__version__.split(".")[:3])) < {below}
if not SUPPORTED:
    raise RuntimeError(
        f"rlfx needs jax {words}; this machine has {{jax.__version__}}. "
        "Run `%pip install -U 'jax[cuda12]>={oldest},<{newest}'` (without [cuda12] on a CPU; jax[tpu] on a TPU), "
        "restart the runtime, and run this cell again."
    )


def install(*packages):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)


def is_missing(module):
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


NEEDED = {needed}
missing = [package for package, module in NEEDED.items() if is_missing(module)]
if missing:
    install(*missing)
if is_missing("rlfx"):
    install("{source}")"""

MACHINE = """# What the machine is, and what to expect.
import jax

import rlfx

kind, target = jax.default_backend(), rlfx.target()
print(f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}")
if kind == "cpu":
    print("A CPU: everything here runs, in seconds to a minute.")
elif kind == "gpu" and not target.has_triton:
    print("A GPU without Triton's kernels (a T4, say): everything runs, in XLA's form.")
else:
    print("An accelerator: compilation takes longer than on a CPU, and the runs are small for it.")"""


def install_cell() -> str:
    """The cell that installs, with the requirements of pyproject.toml."""
    own = [re.match(r"[\w-]+", requirement).group() for requirement in PROJECT["dependencies"]]  # type: ignore[union-attr]
    needed = {package: package for package in own if package != "jax"} | ALSO
    minimum, below = (tuple(map(int, version.split("."))) for version in (MINIMUM, BELOW))
    words = " or ".join([MINIMUM, *(f"{minimum[0]}.{minor}" for minor in range(minimum[1] + 1, below[1]))])
    return INSTALL.format(
        minimum=minimum, below=below, oldest=MINIMUM, newest=BELOW, words=words, needed=json.dumps(needed, indent=4),
        source=f"rlfx @ git+{PROJECT['urls']['Repository']}",
    )  # fmt: skip


def cells_of(text: str) -> list[tuple[str, str]]:
    """``(kind, source)`` of each cell of a page, kind "markdown" or "code".

    Example:
      >>> cells_of("---\\nkernelspec: {}\\n---\\n# A\\n```{code-cell}\\n:tags: [x]\\n1 + 1\\n```\\nB")
      [('markdown', '# A'), ('code', '1 + 1'), ('markdown', 'B')]
    """
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    parts = re.split(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", body, flags=re.DOTALL | re.MULTILINE)
    cells = [("code" if i % 2 else "markdown", part) for i, part in enumerate(parts)]
    cells = [(kind, re.sub(r"\A(:[^\n]*\n)+", "", part) if kind == "code" else part) for kind, part in cells]
    return [(kind, part.strip()) for kind, part in cells if part.strip()]


def linked(text: str, page: str) -> str:
    """``text`` whose links to other pages lead to the site."""

    def absolute(match: re.Match) -> str:
        target = (DOCS / page).parent.joinpath(match[1]).resolve().relative_to(DOCS.resolve()).with_suffix(".html")
        return f"]({PROJECT['urls']['Documentation']}/{target}{match[2] or ''})"

    return re.sub(r"\]\((?!https?:)([^)#]+\.md)(#[^)]*)?\)", absolute, text)


def notebook(name: str) -> dict[str, Any]:
    """The notebook of a page, as nbformat 4.5."""
    page = NOTEBOOKS[name]
    blob = (
        PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
        + f"/blob/main/examples/notebooks/{name}.ipynb"
    )
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{blob})"
    cells = cells_of((DOCS / f"{page.path}.md").read_text())
    begin = [("markdown", badge), ("code", install_cell())]
    if page.chooses:
        first = next(i for i, (kind, _) in enumerate(cells) if kind == "code") + 1
        cells = [*begin, *cells[:first], ("code", MACHINE), *cells[first:]]
    else:
        cells = [*begin, ("code", MACHINE), *cells]

    def cell(i: int, kind: str, source: str) -> dict[str, Any]:
        source = linked(source, page.path) if kind == "markdown" else source
        common = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source.splitlines(keepends=True)}
        return common if kind == "markdown" else common | {"execution_count": None, "outputs": []}

    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [cell(i, *found) for i, found in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def text_of(name: str) -> str:
    """The file's text."""
    return json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every notebook."""
    for name in NOTEBOOKS:
        (ROOT / "examples" / "notebooks" / f"{name}.ipynb").write_text(text_of(name))


if __name__ == "__main__":
    main()
