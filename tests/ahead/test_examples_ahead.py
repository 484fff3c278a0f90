"""`make targets`: no example is left out, what fails fails the command; a sample compiles, with the plugins (make test-aot)."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rlfx
from tests.ahead.conftest import installed
from tests.sampling import met

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ahead(script):
    return script("examples_ahead")


def test_every_example_is_compiled(ahead):
    shared = {"composed", "loops", "networks", "recipes", "tasks", "transitions"}  # without an update of their own
    elsewhere = {
        "place_block": "the devices of this process", "two_roles": "two of them", "distributed": "two of them",
        "which_machine": "computes nothing",
    }  # fmt: skip
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - shared - {*elsewhere}
    named = {name.partition(":")[0] for name in ahead.EXAMPLES}
    assert files <= named
    assert all(said in ahead.__doc__ for said in elsewhere.values())


def test_every_form_of_plan_is_compiled(ahead):
    assert {plan.form for plan in ahead.FORMS.values()} == {"at once", "blocks", "stream", "replay"}
    assert any(plan.offload for plan in ahead.FORMS.values())
    assert any(plan.cached for plan in ahead.FORMS.values())


def test_what_fails_is_said_and_fails_the_command(ahead, monkeypatch, capsys):
    refused = jax.ffi.ffi_call("no_such_call", jax.ShapeDtypeStruct((4,), jnp.float32))
    programs = {"fine": lambda: (jnp.sin, (jnp.ones(4),)), "wrong": lambda: (lambda x: refused(x), (jnp.ones(4),))}
    monkeypatch.setattr(ahead, "PROGRAMS", programs)
    monkeypatch.setattr(sys, "argv", ["examples_ahead.py", "--targets", "cpu"])
    with pytest.raises(SystemExit) as ended:
        ahead.main()
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert "cpu    fine" in said
    assert "no_such_call" in said.partition("FAILED")[2]
    assert "1 of 2 compile; 0 wait for a later jaxlib; 1 fail" in said
    monkeypatch.setattr(ahead, "PROGRAMS", {"fine": programs["fine"]})
    with pytest.raises(SystemExit) as ended:
        ahead.main()
    assert ended.value.code == 0


SAMPLE = ["a2c", "gru_bptt: carry", "ppo_cartpole", "recurrent_ppo", "sac: pendulum", "plan: stream", "plan: replay",
          "plan: blocks", "fused steps: CartPole-v1"]  # fmt: skip


@pytest.mark.aot
@pytest.mark.parametrize(("name", "machine"), met(SAMPLE, ["h200", "a100", "t4"]))
def test_a_sample_compiles(ahead, name, machine):
    installed("cuda")
    fn, arguments = ahead.PROGRAMS[name]()
    found = rlfx.target(machine).compile(fn, *arguments)
    assert found.launches_if(1) > 0
    assert found.spill_bytes == 0
