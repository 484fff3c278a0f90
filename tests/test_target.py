"""Machines as values: which are known, what they are told from, and what nothing but a CPU does."""

from types import SimpleNamespace

import jax
import pytest

import rlfx
from rlfx._target import Rewrites, target_of

KINDS = {
    ("gpu", "NVIDIA H200"): "h200",
    ("gpu", "NVIDIA H100 80GB HBM3"): "h100",
    ("gpu", "NVIDIA A100-SXM4-80GB"): "a100",
    ("gpu", "Tesla T4"): "t4",
    ("gpu", "NVIDIA GeForce RTX 5090"): "gpu",
    ("tpu", "TPU v5 lite"): "v5e",
    ("tpu", "TPU v6 lite"): "v6e",
    ("tpu", "TPU v4"): "tpu",
}


class Device(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(("device", "name"), [*KINDS.items()])
def test_a_device_is_known_by_its_kind(device, name):
    platform, kind = device
    found = target_of(Device(platform=platform, device_kind=kind))
    assert found == rlfx.target(name)
    assert found.platform == platform
    gpus = {"packed": 1 << 16, "unroll": 4, "unrolled": 512, "deferred_rows": 1 << 30} if platform == "gpu" else {}
    ours = Rewrites(starts=True, affine=True, picks=1024, **gpus)
    assert found.rewrites == ours, "what is measured on CPUs is for CPUs"


def test_the_machine_at_hand():
    assert rlfx.target() == target_of(jax.devices()[0])
    assert rlfx.target().is_here
    assert rlfx.target("v6e").is_here == (jax.default_backend() == "tpu")


def test_a_platform_of_which_nothing_is_known_gets_no_rewrites():
    found = target_of(Device(platform="metal", device_kind="M9"))
    assert found.rewrites == Rewrites()


@pytest.mark.parametrize("name", ["h300", "H200"])
def test_an_unknown_name(name):
    with pytest.raises(rlfx.errors.ScheduleError, match=r"No machine named .* is known: cpu, gpu, t4, a100"):
        rlfx.target(name)


def test_a_target_must_be_one():
    with pytest.raises(rlfx.errors.ScheduleError, match=r'target=.*rlfx.target\("h200"\)'):
        rlfx.compile(lambda w, x, t: (w, x), length=2, target=200)
