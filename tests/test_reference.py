"""Every public name is on the reference, and is documented: with an example, or with its arguments or attributes."""

import importlib
import inspect
import re
import types

import pytest

import rlfx
import rlfx.envs
import rlfx.errors
import rlfx.place.pearl
import rlfx.place.replay
import rlfx.profile
import rlfx.training
import rlfx.transforms.fuse_steps
from docs.notebooks import DOCS

PACKAGES = [
    rlfx,
    rlfx.envs,
    rlfx.training,
    rlfx.place,
    rlfx.place.pearl,
    rlfx.place.replay,
    rlfx.profile,
    rlfx.transforms.fuse_steps,
    rlfx.errors,
]

#: Functions whose example is a whole program, on this page.
ON_A_PAGE = dict.fromkeys(("composed", "run", "reference", "measured", "workload"), "place_replay") | {
    "read": "profile"
}


def public(package):
    """The public names of a package, with what they are."""
    names = getattr(package, "__all__", None) or [name for name in dir(package) if not name.startswith("_")]
    found = {name: getattr(package, name) for name in names}
    if package is rlfx.errors:  # and what writes their texts
        return {name: value for name, value in found.items() if inspect.isclass(value) and issubclass(value, Exception)}
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}


def referred():
    """What the reference's directives name: ``{dotted name: object}``."""
    text = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    found = {}
    for dotted in re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE):
        module, name = dotted.rsplit(".", 1)
        found[dotted] = getattr(importlib.import_module(module), name)
    return found


REFERENCE = referred()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_on_the_reference(package):
    here = {id(value) for value in REFERENCE.values()}
    missing = [name for name, value in public(package).items() if id(value) not in here]
    assert not missing, f"docs/reference/*.md lack {missing} of {package.__name__}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_documented(package):
    poor = []
    for name, value in public(package).items():
        text = inspect.getdoc(value) or ""
        if inspect.isclass(value):
            plain = issubclass(value, Exception | Warning) or not inspect.get_annotations(value)
            good = bool(text) and (plain or any(part in text for part in (">>>", "Args:", "Attributes:")))
        elif callable(value):
            page = ON_A_PAGE.get(name)
            good = ">>>" in text or (page is not None and f"{name}(" in (DOCS / f"{page}.md").read_text())
        else:
            good = True  # a constant: its text is a comment, which the reference shows
        if not good:
            poor.append(name)
    assert not poor, f"{package.__name__}: give {poor} an example, or describe their arguments or attributes"


def test_what_is_not_exported_but_met_is_there():
    met = {
        "rlfx.recurrence.language.time.Time",
        "rlfx.recurrence.language.series.Series",
        "rlfx.recurrence.api.compiled.Compiled",
    }
    assert met | {"rlfx._target.Target", "rlfx.recurrence.ir.program.Program"} <= set(REFERENCE)
