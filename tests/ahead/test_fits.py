"""`benchmarks/fits.py`: its points and programs, and what it says of a budget, on this machine's own compiler."""

import jax
import jax.numpy as jnp
import pytest

import rlfx

S = jax.ShapeDtypeStruct


@pytest.fixture
def fits(script, monkeypatch):
    fits = script("fits")
    monkeypatch.setattr(fits, "LENGTH", 32)
    monkeypatch.setattr(fits, "BATCH", 8)
    return fits


def test_the_grid_has_every_value_of_every_factor_once(fits):
    points = fits.points()
    assert {p["B"] for p in points} == {16384}
    assert {p["T"] for p in points} == {125, 250, 500, 2000}
    assert {p["units"] for p in points} == {16, 64, 256}
    assert {p["layers"] for p in points} == {1, 2, 4, 16}
    assert len(points) == 9, "of twelve, four have the sizes of the centre"


def test_there_are_twenty_programs(fits):
    assert len(fits.NETWORKS) * len(fits.RETURNS) == 20


def test_a_budget_is_met_and_the_plans_that_were_compiled_are_counted(fits):
    f = lambda *shape: S(shape, jnp.float32)  # noqa: E731
    arguments = {"body": f(16, 16), "more": f(16, 16), "pi": f(8, 16), "v": f(16)}, f(8, 16), fits.KEY
    here, program = rlfx.target("cpu"), fits.actor(fits.layers, fits.RETURNS["8 steps"])
    whole = here.compile(fits.gradient(program, here, plan=rlfx.Plan())[1], *arguments).temp_bytes
    row = fits.within(program, here, whole // 2, arguments)
    assert row["temp_bytes"] <= row["budget"] == whole // 2
    assert 1 <= row["compiled_plans"] <= 3
    none = fits.within(program, here, 64, arguments)
    assert "does not fit into memory_budget=64" in none["refused"]
    assert none["compiled_plans"] <= 3
