"""Environments of their own, with jax's plugins for machines that are not here: where they are, and how one is made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlfx.errors import TargetError, located

#: What an environment has beside jax, at jax's own version where that is "=".
PACKAGES = {
    "cuda": {"jax-cuda12-plugin": "=", "jax-cuda12-pjrt": "=", "nvidia-cuda-nvcc-cu12": "", "flatbuffers": ""},
    "tpu": {"libtpu": "", "flatbuffers": ""},
    "cpu": {"flatbuffers": ""},
}

_SIZE = {"cuda": "600 MB", "tpu": "700 MB"}


@dataclass(frozen=True)
class Environment:
    """A Python that compiles.

    Attributes:
      plugin: "cuda", "tpu", or "cpu": the Python that runs.
      python: its executable.
      versions: of jax, of jaxlib and of the packages that compile, by name.
    """

    plugin: str
    python: Path
    versions: tuple[tuple[str, str], ...]


def variable(plugin: str) -> str:
    """The variable that names an environment's folder."""
    return f"RLFX_AHEAD_{plugin.upper()}"


def folder(plugin: str) -> Path:
    """Where the environment of a plugin is, or would be made."""
    return places(plugin)[0] if os.environ.get(variable(plugin)) else places(plugin)[-1]


def places(plugin: str) -> tuple[Path, ...]:
    """Where it is looked for: what the variable names; or beside this environment, then among the user's cached files."""
    named = os.environ.get(variable(plugin))
    if named:
        return (Path(named).absolute(),)
    return Path(sys.prefix).parent / f".venv-aot-{plugin}", cache_folder() / f"aot-{plugin}"


def cache_folder() -> Path:
    """Where files are kept that can be made again: ``RLFX_CACHE``, or ``rlfx`` in the user's cache."""
    named = os.environ.get("RLFX_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named).absolute() if named else Path(base) / "rlfx"


def find(plugin: str, jax_version: str) -> Environment:
    """The environment of a plugin.

    Args:
      jax_version: of the jax that exports programs; an older one can't read them.

    Raises:
      TargetError: if there is none, or its jax is older. The fix is a line that installs one.
    """
    if plugin == "cpu":
        return Environment(plugin, Path(sys.executable), _versions(plugin, [Path(p) for p in sys.path if p]))
    for place in places(plugin):
        python = place / "bin" / "python"
        if python.exists():
            found = Environment(plugin, python, _versions(plugin, sorted(place.glob("lib/python*/site-packages"))))
            _check(found, place, jax_version)
            return found
    listed = " nor ".join(str(place) for place in places(plugin))
    fact = (
        f"Compiling for {plugin.upper() if plugin == 'tpu' else 'CUDA'} devices that are not here takes an environment of its "
        f"own ({_SIZE[plugin]}), and there is none: neither {listed}."
        if len(places(plugin)) > 1
        else f"{variable(plugin)} names {listed}, where there is no Python environment."
    )
    raise TargetError(located(fact, fix=f"Make it: {install_line(plugin)}"))


def _check(found: Environment, place: Path, jax_version: str) -> None:
    versions = dict(found.versions)
    missing = [name for name in ("jax", *PACKAGES[found.plugin]) if name not in versions]
    if missing:
        fact = f"The environment {place} lacks {', '.join(missing)}."
    elif _numbers(versions["jax"]) < _numbers(jax_version):
        fact = f"The environment {place} has jax {versions['jax']}, which can't read what jax {jax_version} exports."
    else:
        return
    raise TargetError(located(fact, fix=f"Make it again: {install_line(found.plugin)}"))


def install_line(plugin: str) -> str:
    """The line that makes an environment."""
    return f"python -m rlfx.ahead {plugin}"


def requirements(plugin: str, jax_version: str) -> list[str]:
    """What is installed in an environment."""
    more = [f"{name}=={jax_version}" if pinned else name for name, pinned in PACKAGES[plugin].items()]
    return [f"jax[tpu]=={jax_version}" if plugin == "tpu" else f"jax=={jax_version}", *more]


def install(plugin: str, jax_version: str, place: Path, python: str = sys.executable) -> None:
    """Make an environment (with pip, from the index that it uses).

    Raises:
      TargetError: a step failed, with its last lines.
    """
    for command in (
        [python, "-m", "venv", str(place)],
        [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements(plugin, jax_version)],
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            last = "\n  ".join(done.stdout.strip().splitlines()[-8:])
            fact = f"{' '.join(command[:5])} ... failed with {done.returncode}:\n  {last}"
            raise TargetError(located(fact, fix=f"Remove {place}, and see what is wrong there."))


def _versions(plugin: str, sites: list[Path]) -> tuple[tuple[str, str], ...]:
    """Versions of what is installed, from the names of its folders."""
    wanted, found = {"jax", "jaxlib", *PACKAGES[plugin]}, {}
    for site in sites:
        for info in sorted(site.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            name = name.replace("_", "-").lower()
            if name in wanted:
                found.setdefault(name, version)
    return tuple(sorted(found.items()))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
