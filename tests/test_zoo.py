"""`benchmarks/zoo`: what a timestep computes is what plain JAX does, value and gradient, in every entry."""

import importlib
from pathlib import Path

import jax
import pytest

from tests.sampling import spread

with pytest.MonkeyPatch.context() as patch:  # `benchmarks` is no package that is installed: it is found in the repository's root
    patch.syspath_prepend(str(Path(__file__).parents[1]))
    zoo, measure = (importlib.import_module(f"benchmarks.{name}") for name in ("zoo.__main__", "untuned.measure"))


@pytest.fixture(autouse=True)
def lenient():
    """Entries are written as jax allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", spread([*zoo.NETWORKS, *zoo.RECURRENCES], 12))
def test_an_entry_is_that_of_plain_jax(name):
    workload = zoo.workload(name, 8, 4)
    assert len(workload.forms) >= 5
    forms = {form: jax.jit(workload.forms[form]) for form in ("rlfx", "plain")}
    measure.check(workload, forms)


def test_forms_by_hand_are_alike():
    for name in ("layers", "linear_attention"):
        workload = zoo.workload(name, 8, 4)
        measure.check(workload, {form: jax.jit(fn) for form, fn in workload.forms.items()})
