"""README's snippet runs as it stands."""

import pathlib
import re

import jax
import numpy as np

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_snippet_runs(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(program, "README.md", "exec"), names)
    assert np.isfinite(names["loss"])
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in [names["grads"]["logits"]])
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(names["grads"]))
    assert "acting" in capsys.readouterr().out


def test_it_fits_one_screen_and_its_links_lead_somewhere():
    text = README.read_text()
    assert len(text.splitlines()) <= 60
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (README.parent / link).exists(), link
