"""Every malformed call of a public function is refused in rlfx's words, and what is accepted is accepted on purpose."""

import ast
import contextlib
import inspect
import pathlib

import jax
import pytest

import rlfx
import rlfx.envs
import rlfx.place
import rlfx.profile
from rlfx import errors
from tests.signatures import ELSEWHERE, SIGNATURES


@contextlib.contextmanager
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Calls that are accepted may write."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_malformed_calls_are_refused_in_our_words(signature):
    with usual_promotion():
        calls = list(signature.malformed())
        wrong = [(c, o) for c, o in zip(calls, signature.outcomes(calls), strict=True) if not o.startswith("rlfx")]
    assert not wrong, "\n".join(f"{n}={w}: {o}" for (n, w), o in wrong)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_what_is_accepted_is_accepted_on_purpose(signature):
    with usual_promotion():
        calls = list(signature.accepted())
        wrong = [(c, o) for c, o in zip(calls, signature.outcomes(calls), strict=True) if o != "accepted"]
    assert not wrong, "\n".join(f"{n}={w}: {o}" for (n, w), o in wrong)


def test_every_public_function_has_its_malformed_calls():
    own = {n for n, v in vars(rlfx).items() if not n.startswith("_") and not inspect.ismodule(v)}
    public = own.union(*(package.__all__ for package in (rlfx.profile, rlfx.envs, rlfx.place)))
    assert public <= {s.name for s in SIGNATURES} | set(ELSEWHERE)
    count = sum(len(list(s.malformed())) for s in SIGNATURES)
    assert count >= 2_000, count


#: What composes the text of an error, with a fix.
TEXTS = {"located", "truncated", "wire.truncated"}


def test_every_error_in_the_sources_says_what_to_do():
    ours = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.RlfxError)}
    wrong = []
    for path in pathlib.Path(rlfx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "located":
                said = any(k.arg == "fix" for k in node.keywords)
            elif node.func.id in ours:
                text = node.args[0]
                quoted = "{error}" in ast.unparse(text)  # another error's text, with its fix
                said = quoted or (isinstance(text, ast.Call) and ast.unparse(text.func) in TEXTS)
            else:
                continue
            if not said:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not wrong, "\n".join(wrong)
