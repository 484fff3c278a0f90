"""The table of axes, row by row, against what the primitives compute: cut, turned round, padded with the identity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rlfx import _axes
from rlfx import _jaxpr as J


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.7, dtype)


def ints(*shape, most=5, dtype=np.int32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, most, shape), dtype)


def keys(*shape):
    return jax.random.split(jax.random.key(3), shape)


def booleans(*shape):
    return ints(*shape, most=2) > 0


def positive(*shape):
    return jnp.abs(normal(*shape)) + 0.1


def spd(*shape):
    x = normal(*shape)
    return x @ jnp.swapaxes(x, -1, -2) + jnp.broadcast_to(3 * jnp.eye(shape[-1]), shape)


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def take(operand, *index, **options):
    return operand.at[index].get(**options)


X, Y = normal(4, 6), normal(4, 6, seed=1)

#: name of the primitive -> ``(function, operands)``, each of whose traces has it.
SAMPLES = {
    "reduce_sum": [(lambda x: x.sum(1), X), (lambda x: x.sum((0, 2)), normal(4, 6, 2))],
    "reduce_prod": [(lambda x: x.prod(0), X)],
    "reduce_max": [
        (lambda x: x.max(1), X),
        (lambda x: x.max(0), ints(4, 6)),
        (lambda x: x.max(0), ints(4, 6, dtype=np.uint8)),
    ],
    "reduce_min": [(lambda x: x.min(1), X), (lambda x: x.min(0), ints(4, 6))],
    "reduce_and": [
        (lambda x: x.all(1), booleans(4, 6)),
        (lambda x: lax.reduce_and(x, (0,)), ints(4, 6, dtype=np.uint8)),
    ],
    "reduce_or": [(lambda x: x.any(0), booleans(4, 6))],
    "reduce_xor": [(lambda x: lax.reduce_xor(x, (1,)), ints(4, 6))],
    "cumsum": [(lambda x: lax.cumsum(x, 1), X), (lambda x: lax.cumsum(x, 0, reverse=True), X)],
    "cumprod": [(lambda x: lax.cumprod(x, 1), X)],
    "cummax": [(lambda x: lax.cummax(x, 0), X)],
    "cummin": [(lambda x: lax.cummin(x, 0), ints(4, 6))],
    "cumlogsumexp": [(lambda x: lax.cumlogsumexp(x, 1), X)],
    "argmax": [(lambda x: x.argmax(1), X)],
    "argmin": [(lambda x: x.argmin(0), X)],
    "broadcast_in_dim": [
        (lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 6), (1, 3)), X),
        (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), normal(4, 1)),
    ],
    "iota": [(lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1),)],
    "transpose": [(lambda x: x.transpose(2, 0, 1), normal(4, 6, 2))],
    "reshape": [
        (lambda x: x.reshape(4, 3, 2, 5), normal(4, 6, 5)),
        (lambda x: x.reshape(4, 1, 6), X),
        (lambda x: x.reshape(4, 6), normal(1, 4, 6)),
    ],
    "squeeze": [(lambda x: lax.squeeze(x, (1,)), normal(4, 1, 6))],
    "rev": [(lambda x: lax.rev(x, (1,)), X)],
    "sort": [(lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), ints(4, 6), Y)],
    "top_k": [(lambda x: lax.top_k(x, 2), X)],
    "concatenate": [(lambda x, y: lax.concatenate([x, y], 1), X, normal(4, 3))],
    "slice": [(lambda x: x[:, 2:5], X), (lambda x: x[:, ::2], X)],
    "dynamic_slice": [(lambda x, i: lax.dynamic_slice(x, (0, i), (4, 2)), X, jnp.int32(3))],
    "dynamic_update_slice": [(lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i)), X, normal(4, 2), jnp.int32(3))],
    "pad": [(lambda x: lax.pad(x, jnp.float32(0.5), [(0, 0, 0), (1, 2, 1)]), X)],
    "split": [(lambda x: tuple(lax.split(x, (2, 4), axis=1)), X)],
    "stack": [(lambda x, y: jnp.stack([x, y], 1), X, Y)],
    "unstack": [(lambda x: tuple(jnp.unstack(x, axis=1)), normal(4, 3, 6))],
    "tile": [(lambda x: jnp.tile(x, (1, 3)), X)],
    "dot_general": [
        (lambda x, y: x @ y, X, normal(6, 5)),
        (functools.partial(jnp.einsum, "abcd,cae->abed"), normal(2, 3, 4, 5), normal(4, 2, 6)),
        (lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((2,), (0,)))), normal(4, 3, 2), normal(2, 4, 5)),
    ],
    "conv_general_dilated": [
        (conv, normal(2, 5, 4, 6), normal(3, 3, 6, 8)),
        (functools.partial(conv, feature_group_count=2), normal(2, 5, 4, 6), normal(3, 3, 3, 8)),
        (functools.partial(conv, batch_group_count=2), normal(4, 5, 4, 6), normal(3, 3, 6, 8)),
    ],
    "gather": [
        (lambda x, i: x[i], X, ints(3, most=4)),
        (lambda x, i: take(x, slice(None), i, mode="fill"), X, ints(3, 2, most=9)),
        (lambda x, i: jnp.take_along_axis(x, i, 1), X, ints(4, 2, most=6)),
        (
            lambda x, i: jax.vmap(lambda row, j: lax.dynamic_slice(row, (j, 0), (2, 5)))(x, i),
            normal(3, 4, 5),
            ints(3, most=3),
        ),
    ],
    "reduce_window": [
        (lambda x: lax.reduce_window(x, jnp.int32(0), lax.bitwise_or, (1, 3), (1, 2), "VALID"), ints(4, 7))
    ],
    "reduce_window_sum": [(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 2), ((0, 0), (1, 1))), X)],
    "reduce_window_max": [(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"), X)],
    "reduce_window_min": [(lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 1), (2, 1), "VALID"), X)],
    "select_and_scatter_add": [
        (jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 3), "VALID").sum()), X)
    ],
    "select_and_gather_add": [
        (
            lambda x, v: jax.jvp(
                lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 3), "VALID"), (x,), (v,)
            )[1],
            X,
            Y,
        )
    ],
    "cholesky": [(jnp.linalg.cholesky, spd(2, 5, 3, 3))],
    "triangular_solve": [
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), spd(2, 3, 3), normal(2, 3, 4))
    ],
    "lu": [(lax.linalg.lu, spd(2, 3, 3))],
    "qr": [(lambda x: lax.linalg.qr(x, full_matrices=False), normal(2, 4, 3))],
    "eigh": [(lambda x: lax.linalg.eigh(x), spd(2, 3, 3))],
    "svd": [(lambda x: lax.linalg.svd(x, full_matrices=False), normal(2, 4, 3))],
    "householder_product": [(lax.linalg.householder_product, normal(2, 4, 3), normal(2, 3))],
    "fft": [(lambda x: jnp.fft.rfft(x).real, normal(3, 4, 6))],
    "random_bits": [(lambda k: jax.vmap(lambda k: jax.random.bits(k, (3,)))(k), keys(4))],
    "random_split": [(lambda k: jax.vmap(jax.random.split)(k), keys(4))],
    "random_seed": [(lambda s: jax.vmap(jax.random.key)(s), ints(4))],
    "random_fold_in": [(jax.vmap(jax.random.fold_in), keys(4), ints(4))],
    J.RANDOM_WRAP: [(jax.random.wrap_key_data, ints(4, 2, dtype=np.uint32))],
    J.RANDOM_UNWRAP: [(jax.random.key_data, keys(4))],
    "threefry2x32": [
        (lambda *xs: J.primitive("threefry2x32").bind(*xs), *(ints(4, dtype=np.uint32, seed=i) for i in range(4)))
    ],
    # Elementwise, where an operand is more than any number.
    "name": [(lambda x: checkpoint_name(x, "x"), X)],
    "clamp": [(lambda x: lax.clamp(jnp.float32(0), x, jnp.float32(0.5)), X), (lax.clamp, X, Y, X + 1)],
    "select_n": [(jnp.where, booleans(4, 6), X, Y), (lambda p, x, y: lax.select_n(p, x, y), jnp.asarray(True), X, Y)],
    "convert_element_type": [(lambda x: x.astype(jnp.bfloat16), X)],
    "reduce_precision": [(lambda x: lax.reduce_precision(x, 8, 4), X)],
    "integer_pow": [(lambda x: lax.integer_pow(x, 3), X)],
    "complex": [(lambda x, y: lax.complex(x, y).real, X, Y)],
    "real": [(lambda x: lax.real(lax.complex(x, x)), X)],
    "imag": [(lambda x: lax.imag(lax.complex(x, x)), X)],
    "conj": [(lambda x: lax.real(lax.conj(x)), X)],
    "copy": [(lambda x: jnp.array(x, copy=True), X)],
    "regularized_incomplete_beta": [(lambda a, b, x: lax.betainc(a, b, x), *[positive(4, 6)] * 2, positive(4, 6) / 4)],
    "random_gamma_grad": [(lambda a, x: lax.random_gamma_grad(a, x), positive(4, 6), positive(4, 6))],
    "polygamma": [(lambda x: lax.polygamma(jnp.ones_like(x), x), positive(4, 6))],
    "zeta": [(lambda x: lax.zeta(x + 2, x), positive(4, 6))],
    "igamma_grad_a": [(lambda a, x: lax.igamma_grad_a(a, x), positive(4, 6), positive(4, 6))],
}


def binding(op):
    """A function that binds an elementwise primitive of no parameters to operands that it takes."""
    for arity in (1, 2):
        for operands in (
            (positive(4, 6) / 4, positive(4, 6) / 5),
            (ints(4, 6), ints(4, 6, seed=1) + 1),
            (booleans(4, 6),) * 2,
        ):
            for params in ({}, {"accuracy": None}, {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN}):
                fn = lambda *xs, params=params: op.bind(*xs, **params)  # noqa: E731
                try:
                    fn(*operands[:arity])
                except Exception:
                    continue
                return fn, *operands[:arity]
    return None


def equation_of(op, fn, *operands):
    """The equation of a primitive in a function's trace, and its operands."""
    closed, found = jax.make_jaxpr(fn)(*operands), []

    def visit(eqn, values, _):
        if eqn.primitive is op and not found:
            found.append((eqn, values))
        return J.bind(eqn.primitive, eqn.params, *values)

    J.walk(closed.jaxpr, closed.consts, operands, visit)
    return found[0] if found else None


def rows():
    """Each primitive of the table with the samples of it."""
    by_op = {getattr(J.primitives, f"{op}_p", None) if isinstance(op, str) else op: of for op, of in SAMPLES.items()}
    by_op |= {J.SPLIT: SAMPLES["split"], **{op: SAMPLES[op.name] for op in J.STACKING}}
    for op in sorted(_axes.TABLE, key=lambda op: op.name):
        for i, sample in enumerate(by_op.get(op) or [None]):
            yield pytest.param(op, sample, id=f"{op.name}{i or ''}")


def words(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(words(a), words(b), rtol=2e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Row:
    """An equation, its loops, and what it computes of parts of its operands."""

    eqn: object
    operands: list
    loops: _axes.Nest

    def taken(self, loop, index, values, axes):
        index = np.asarray(index)
        return [x if loop not in of else jnp.take(x, index, of.index(loop)) for x, of in zip(values, axes, strict=True)]

    def run(self, operands, sizes=()):
        return J.bind(
            self.eqn.primitive, _axes.resized(self.eqn.primitive, self.eqn.params, self.loops, dict(sizes)), *operands
        )

    def of(self, loop, index):
        """What the equation computes of these positions of a loop."""
        return self.run(self.taken(loop, index, self.operands, self.loops.operands), {loop: len(index)})


@pytest.mark.parametrize(("op", "sample"), [*rows()])
def test_axes_are_what_the_table_says(op, sample):
    if sample is None:
        assert op in J.ELEMENTWISE, f"{op.name} has no sample"
        sample = binding(op)
        if sample is None:
            pytest.skip("this jax binds it from its own functions alone")
    found = equation_of(op, *sample)
    assert found is not None, f"the sample has no {op.name}"
    eqn, operands = found
    loops = _axes.nest_of(op, eqn.params, [x.shape for x in operands], [v.aval.shape for v in eqn.outvars])
    row = Row(eqn, operands, loops)
    whole = row.run(operands)
    rng = np.random.default_rng(1)
    for loop in loops.free:
        assert all(loop in axes for axes in loops.results)
        n = loops.sizes[loop]
        # Elementwise ones keep to one shape, so that each is compiled once.
        for index in (rng.permutation(n), *([] if op in J.ELEMENTWISE else [np.arange(max(1, n // 2))])):
            same(row.of(loop, index), row.taken(loop, index, whole, loops.results))
    for loop in loops.reduced:
        n = loops.sizes[loop]
        assert not any(loop in axes for axes in loops.results)
        first, second = (row.of(loop, index) for index in (np.arange(n // 2), np.arange(n // 2, n)))
        same([loops.monoid.combine(a, b) for a, b in zip(first, second, strict=True)], whole)
    if loops.monoid is not None:
        padded_with_the_identity(row, whole)


def padded_with_the_identity(row, whole):
    """Positions that hold the identity change nothing, before or behind the others: in products, zeros of one operand do."""
    loops, first = row.loops, row.operands[0]
    for loop in loops.reduced or loops.pinned:
        if loop not in loops.operands[0]:  # of a window
            continue
        axis, n = loops.operands[0].index(loop), loops.sizes[loop]
        shape = (*first.shape[:axis], 3, *first.shape[axis + 1 :])
        nothing = jnp.full(shape, loops.monoid.identity(first.dtype), first.dtype)
        for before in (True, False):
            index = np.r_[[0, 0, 0], np.arange(n)] if before else np.r_[np.arange(n), [0, 0, 0]]
            others = row.taken(loop, index, row.operands[1:], loops.operands[1:])
            outs = row.run([jnp.concatenate([nothing, first][:: 1 if before else -1], axis), *others], {loop: n + 3})
            same(row.taken(loop, np.arange(n) + 3 * before, outs, loops.results), whole)


def test_what_has_no_row_has_no_loops():
    assert _axes.nest_of(J.SCAN, {}, [], []) is None
