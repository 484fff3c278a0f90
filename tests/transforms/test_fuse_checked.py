"""A kernel is compared with XLA's form where it first runs: wrong, failing and slow ones are not used."""

import json
import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
import rlfx.envs
from rlfx import _target
from rlfx.transforms.fuse_steps import fuse_scan, fuse_steps
from rlfx.transforms.steps import checked, scan
from rlfx.transforms.steps.checked import differing, verdict

N = 64


def plain(carry):
    return carry + 1.0, jnp.stack([carry, carry])


def slow(carry):
    wait = lambda x: (time.sleep(0.05), x)[1]  # noqa: E731
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(carry.shape, carry.dtype), carry) + 1.0, plain(carry)[1]


def wrong(carry):
    after, ys = plain(carry)
    return after, ys.at[1].add(0.5)


def raises(carry):
    raise NotImplementedError("no rule for sort")


def arguments():
    return (jnp.arange(N, dtype=jnp.float32),)


@pytest.mark.parametrize(
    ("kernel", "other", "used", "warned", "why"),
    [
        (plain, slow, True, False, "microseconds"),
        (slow, plain, False, False, "microseconds"),
        (wrong, slow, False, True, "it gives other numbers in 64 of 64 environments"),
        (raises, plain, False, True, "it does not run: NotImplementedError, no rule for sort"),
    ],
)
def test_what_is_found(tmp_path, kernel, other, used, warned, why):
    found = verdict(kernel, other, arguments(), "a device", tmp_path)
    assert (found.kernel, found.wrong) == (used, warned)
    assert why in found.why


def test_it_is_found_once(tmp_path):
    ran = []

    def counted(carry):
        jax.debug.callback(lambda: ran.append(1))
        return plain(carry)

    ask = partial(verdict, counted, slow, arguments())
    first = ask("a device", tmp_path)
    jax.effects_barrier()
    times = len(ran)
    assert times > 0
    assert ask("a device", tmp_path) == first
    jax.effects_barrier()
    assert len(ran) == times
    ask("another device", tmp_path)
    jax.effects_barrier()
    assert len(ran) > times
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"kernel": true}', '{"kernel": true, "why": "", "seconds": [1], "wrong": 0}']
)
def test_a_corrupt_file_is_written_anew(tmp_path, text):
    found = verdict(wrong, plain, arguments(), "a device", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert verdict(wrong, plain, arguments(), "a device", tmp_path).why == found.why
    assert json.loads(path.read_text())["why"] == found.why


def test_where_nothing_can_be_written(tmp_path):
    place = tmp_path / "file"
    place.write_text("no folder")
    assert verdict(plain, slow, arguments(), "a device", place).kernel


def test_differences():
    key = jax.random.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(3, 2))
    carry = {"x": np.float32([1, np.nan, 3]), "key": key, "done": np.array([False, True, True])}
    ys = np.zeros((5, 3, 2), np.int32)
    assert not differing((carry, ys), (carry, ys)).any()
    for other, bad in (
        (({**carry, "x": np.float32([1.01, np.nan, 3])}, ys), [0, 0, 0]),
        (({**carry, "x": np.float32([1.1, np.nan, np.inf])}, ys), [1, 0, 1]),
        (({**carry, "key": key[::-1]}, ys), [1, 0, 1]),
        (({**carry, "done": np.array([True, True, True])}, ys), [1, 0, 0]),
        ((carry, ys + (np.arange(3) == 1)[:, None]), [0, 1, 0]),
    ):
        np.testing.assert_array_equal(differing((carry, ys), other), np.array(bad, bool))


# -- where it is used


@pytest.fixture
def accelerator(monkeypatch, tmp_path):
    """This CPU, taken for a machine that has Triton: its kernels are interpreted. Returns how to spoil them."""

    class Taken(_target.Target):
        has_triton, is_here = True, True

    cpu = _target.target("cpu")
    taken = Taken(cpu.name, cpu.platform, cpu.rates, cpu.room)
    monkeypatch.setattr(scan._target, "target", lambda name=None: taken)
    monkeypatch.setenv("RLFX_CACHE", str(tmp_path))
    monkeypatch.setattr(checked, "_timed", lambda fn, args: (jax.jit(fn)(*args), float("triton" not in fn.__name__)))

    def spoil(change):
        executed = scan._EXECUTORS["interpret"]

        def run(*args):
            out, ys = executed(*args)
            return change(out), ys

        monkeypatch.setitem(scan._EXECUTORS, "triton", run)

    spoil(lambda out: out)
    return spoil


def test_random_rollout_is_checked(accelerator, tmp_path):
    rollout = lambda: rlfx.envs.random_rollout("Catch-bsuite", num_envs=64, num_steps=2)(jax.random.key(0))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = rollout()
    assert len(list((tmp_path / "kernels").glob("*.json"))) == 1
    accelerator(lambda out: [x + 1 for x in out])
    with pytest.warns(
        UserWarning, match="fuse_steps: the kernel is not used on this device: it gives other numbers in 64 of 64"
    ):
        spoiled = rollout()
    np.testing.assert_allclose(spoiled.mean_reward, right.mean_reward)


def test_a_compiled_program_is_checked(accelerator):
    def f(w, x, t):
        x = jnp.tanh(w * x) + jax.random.uniform(t.key, (), jnp.float32)
        return x, x

    make = lambda transform: jax.jit(rlfx.unroll(f, length=5, batch=8, transform=transform))  # noqa: E731
    given = jnp.float32(0.5), jnp.ones(8, jnp.float32), jax.random.key(1)
    right, expected = make(fuse_steps)(*given), make(None)(*given)
    accelerator(lambda out: [x * 0 for x in out])
    with pytest.warns(UserWarning, match="it gives other numbers"):
        spoiled = make(fuse_steps)(*given)
    for found in (right, spoiled):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_what_was_asked_for_by_name_is_not_compared(accelerator, tmp_path):
    body = lambda shared, t, b, carry, x: (carry + 1, None)  # noqa: E731
    fuse_scan(body, 3, backend="interpret")(None, jnp.ones(4, jnp.float32))
    fuse_scan(body, 3, backend="vmap")(None, jnp.ones(4, jnp.float32))
    assert not (tmp_path / "kernels").exists()
