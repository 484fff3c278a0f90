"""Short captures: which calls are profiled, that results stay the same, and what happens when things go wrong."""

import jax
import jax.numpy as jnp
import pytest

from rlfx.errors import ProfileError
from rlfx.profile import capture, operation, sampled

pytestmark = pytest.mark.optimised


@jax.jit
def update(w):
    """One step of training."""
    with operation("loss"):
        return w - 0.1 * jax.grad(lambda v: jnp.sum(jnp.tanh(v) ** 2))(w)


def test_exactly_the_calls_asked_for_are_in_the_report(tmp_path):
    step = sampled(update, tmp_path, calls=2, skip=1, steps=64)
    w = jnp.ones(16)
    for _ in range(6):
        w = step(w)
    report = step.report()
    assert report.count("python", "backend") == report.count("backend", "dispatch") == 2
    assert report.steps == 128
    assert report.device_within("loss") > 0
    assert sum(report.rows.values()) == report.window_ns
    assert not [p for p in report.problems if "before the capture" in p or "still busy" in p]


def test_results_are_bit_equal_and_the_signature_stays(tmp_path):
    step = sampled(update, tmp_path, calls=1, skip=1)
    plain, noted = jnp.linspace(-1.0, 1.0, 32), jnp.linspace(-1.0, 1.0, 32)
    for _ in range(4):
        plain, noted = update(plain), step(noted)
    assert (plain == noted).all()
    assert (step.__name__, step.__doc__) == ("update", "One step of training.")


def test_a_report_before_the_calls_were_made(tmp_path):
    step = sampled(update, tmp_path, calls=3, skip=2)
    step(jnp.ones(4))
    with pytest.raises(ProfileError, match=r"update was called 1 times; calls 3 to 5 are profiled\.\n  Fix: Train for"):
        step.report()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"calls": 0}, "sampled: calls must be a positive integer, got 0"),
        ({"skip": -1}, "sampled: skip must be an integer >= 0, got -1"),
    ],
)
def test_nothing_to_profile(wrong, text):
    with pytest.raises(ProfileError, match=text):
        sampled(update, **wrong)


def test_an_exception_in_a_profiled_call_ends_the_capture(tmp_path):
    def fails(w):
        raise KeyError("simulator")

    step = sampled(fails, tmp_path / "one", calls=2, skip=0)
    with pytest.raises(KeyError, match="simulator"):
        step(jnp.ones(3))
    with capture(tmp_path / "two") as session:  # possible: none is running
        jax.block_until_ready(update(jnp.ones(4)))
    assert session.report().device_within("loss") > 0


def test_a_capture_around_it_is_refused_as_usual(tmp_path):
    step = sampled(update, tmp_path / "inner", skip=0)
    with (
        capture(tmp_path / "outer"),
        pytest.raises(ProfileError, match="already running"),
    ):
        step(jnp.ones(3))
