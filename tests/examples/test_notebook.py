"""The notebooks are the documentation's pages, and their first cells keep the machine's jax. `make docs` executes the pages."""

import json
import re
import types

import jax
import pytest

from docs import notebooks

FOLDER = notebooks.ROOT / "examples" / "notebooks"


def code_of(name):
    return [
        "".join(c["source"])
        for c in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
        if c["cell_type"] == "code"
    ]


def test_every_notebook_is_what_the_generator_writes():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(notebooks.NOTEBOOKS)
    for name in notebooks.NOTEBOOKS:
        assert (FOLDER / f"{name}.ipynb").read_text() == notebooks.text_of(name), f"{name}: run `make notebooks`"


def test_cells_are_python_and_links_lead_to_the_site():
    for name in notebooks.NOTEBOOKS:
        for source in code_of(name):
            compile(source, name, "exec")
        text = (FOLDER / f"{name}.ipynb").read_text()
        assert not re.search(r"\]\((?!https?:)", text), name
        assert "{code-cell}" not in text


def test_a_notebook_runs_and_installs_nothing_that_is_there(capsys, lenient, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail(f"installs {args}"))
    variables = {}
    for source in code_of("returns"):
        exec(compile(source, "returns", "exec"), variables)
    printed = capsys.readouterr().out
    assert f"jax {jax.__version__} on" in printed
    assert "A CPU: everything here runs" in printed
    assert variables["returns"].tolist() == [2.0, 2.0, 10.5, 13.0]


def test_what_is_missing_is_installed_without_dependencies(monkeypatch):
    asked = []
    monkeypatch.setattr("subprocess.run", lambda command, check: asked.append(command[2:]))
    found = {"rlfx": None, "islpy": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda module: found.get(module, module))
    exec(notebooks.install_cell(), {})
    source = f"rlfx @ git+{notebooks.PROJECT['urls']['Repository']}"
    assert asked == [["pip", "install", "--quiet", "--no-deps", package] for package in ("islpy", source)]


@pytest.mark.parametrize("version", ["0.9.1", "0.10.1", "0.12.0"])
def test_another_jax_says_what_to_install_and_to_restart(monkeypatch, version):
    monkeypatch.setitem(__import__("sys").modules, "jax", types.SimpleNamespace(__version__=version))
    with pytest.raises(
        RuntimeError, match=rf"needs jax 0.10.2 or 0.11; this machine has {re.escape(version)}.*restart the runtime"
    ):
        exec(notebooks.install_cell(), {})
