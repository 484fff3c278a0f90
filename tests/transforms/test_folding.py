"""What is known at trace time is computed with numpy, to the bits of XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlfx.transforms.steps import folding
from rlfx.transforms.steps.folding import MOVES, WHOLE, fold

X = np.random.default_rng(0).integers(0, 2**32, size=(3, 4, 2), dtype=np.uint32)
Y = np.random.default_rng(1).integers(0, 2**32, size=(3, 4, 2), dtype=np.uint32)
F = np.random.default_rng(2).normal(size=(3, 4, 2)).astype(np.float32)


def half(x):
    return jnp.asarray(x, jnp.bfloat16)


CASES = {
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 3, 5), (1,)), [X[:, 0, 0]]),
    "broadcast_in_dim of one": (lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), [X[:, :1, 0]]),
    "broadcast_in_dim of a number": (lambda x: lax.broadcast_in_dim(x, (2, 3), ()), [np.float32(2.5)]),
    "concatenate": (lambda *xs: lax.concatenate(xs, 1), [F, F[:, :2], F]),
    "concatenate of bfloat16": (lambda *xs: lax.concatenate(xs, 0), [np.asarray(half(F)), np.asarray(half(F))]),
    "reshape": (lambda x: lax.reshape(x, (4, 6)), [F]),
    "rev": (lambda x: lax.rev(x, (0, 2)), [F]),
    "slice": (lambda x: lax.slice(x, (1, 0, 0), (3, 2, 1)), [F]),
    "slice by steps": (lambda x: lax.slice(x, (0, 1, 0), (3, 4, 2), (2, 2, 1)), [F]),
    "split": (lambda x: lax.split(x, (1, 3), 1), [F]),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), [F[:, :1]]),
    "squeeze of the last": (lambda x: lax.squeeze(x, (-1,)), [F[..., :1]]),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [F]),
    "iota": (lambda: lax.broadcasted_iota(np.dtype("int32"), (3, 5, 2), 1), []),
    "iota of floats": (lambda: lax.iota(np.dtype("float32"), 5), []),
    "add": (lax.add, [X, Y]),
    "add of signed": (lax.add, [X.view(np.int32), Y.view(np.int32)]),
    "add of bytes": (lax.add, [X.astype(np.uint8), Y.astype(np.uint8)]),
    "add of numbers": (lax.add, [np.uint32(2**32 - 1), np.uint32(3)]),
    "add of floats": (lax.add, [F, F]),
    "sub": (lax.sub, [X, Y]),
    "mul": (lax.mul, [X, Y]),
    "mul of signed": (lax.mul, [X.view(np.int32), Y.view(np.int32)]),
    "and": (lax.bitwise_and, [X, Y]),
    "and of booleans": (lax.bitwise_and, [X > 2**31, Y > 2**31]),
    "or": (lax.bitwise_or, [X, Y]),
    "xor": (lax.bitwise_xor, [X, Y]),
    "tanh": (lax.tanh, [F]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_xla(case):
    fn, args = CASES[case]
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    found = fold(eqn.primitive, eqn.params, args)
    expected = jax.tree.leaves(fn(*args))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, np.ndarray)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == np.asarray(b).tobytes()


def test_every_rule_is_tested():
    tried = {jax.make_jaxpr(fn)(*args).eqns[0].primitive for fn, args in CASES.values()}
    assert tried >= {*MOVES, *WHOLE}


@pytest.mark.parametrize("case", CASES)
def test_xla_computes_the_rest_alone(case, monkeypatch):
    """Floats and booleans; moves and integers are compiled for nothing."""
    fn, args = CASES[case]
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    asked = []
    monkeypatch.setattr(folding.J, "bind", lambda op, params, *xs: asked.append(op) or [xs[0]])
    folding.fold(eqn.primitive, eqn.params, args)
    assert bool(asked) == (case in ("add of floats", "and of booleans", "tanh"))
