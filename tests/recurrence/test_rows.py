"""Products with weights on the left, as equinox has them: rows first, the same values and gradients; and what stays as it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.ir.interpret import inlined_body
from rlfx.recurrence.rewrite.invariant import with_invariants_before
from rlfx.recurrence.rewrite.rows import with_rows_first
from rlfx.recurrence.rewrite.transposes import absorb_transposes
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, IN, OUT = 5, 3, 4, 6
K = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    "w": jax.random.normal(K[0], (OUT, IN)), "v": jax.random.normal(K[1], (OUT,)),
    "several": jax.random.normal(K[2], (3, OUT, IN)), "x": jax.random.normal(K[3], (T, B, IN)),
    "wide": jax.random.normal(K[4], (20, IN)), "square": jax.random.normal(K[0], (20, 20)) / 5.0,
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)
DOT = J.primitive("dot_general")


def layers(p, x, scale):
    """Vectors on both sides: of a layer and a head."""
    return p["v"] @ jnp.tanh(p["w"] @ x) * scale


def of_entities(p, x, scale):
    """Layers of each of several entities, as ``jax.vmap`` has them."""
    entities = jnp.outer(jnp.arange(1.0, 4.0), x) * scale
    y = jax.vmap(lambda e: p["v"] * jnp.tanh(p["w"] @ e))(entities)
    return (y.max(0) * jax.vmap(lambda e: jnp.cos(p["several"] @ e))(entities).sum((0, 1))).sum()


def ensemble(p, x, scale):
    """Members of an ensemble, of one input, and of inputs of their own."""
    y = jax.vmap(lambda w: w @ (x * scale))(p["several"])
    return (jax.vmap(lambda w, z: jnp.sin(w.T @ z))(p["several"], jnp.tanh(y)) ** 2).sum()


def any_axes(p, x, scale):
    """Weights that are added up along their first axis, and along two."""
    return (jnp.einsum("io,i->o", p["w"].T, x * scale) ** 2).sum() + jnp.tensordot(p["w"], jnp.outer(p["v"], x), 2) ** 2


def of_loops(p, x, scale):
    """Weights that a loop reads, on both sides of rows, and of several entities; turned in it; in a function of its own."""
    layer = jax.jit(lambda w, h: jnp.tanh(w @ h))

    def step(h, i):
        each = jax.vmap(lambda e: p["w"] @ (0.1 * (e + h)))(jnp.outer(jnp.arange(1.0, 3.0), x))
        return jnp.sin(0.2 * (layer(p["w"], h) @ p["w"]) + 0.1 * (h @ p["w"].T)[:IN]) + i, each.sum() + p["v"] @ each[1]

    h, ys = jax.lax.scan(step, x * scale, jnp.linspace(0.0, 1.0, 5), reverse=True)
    again = lambda c, _: ((c[0], jnp.tanh(p["w"] @ c[0]).sum() * c[1]), None)  # what it begins with is what it gives  # noqa: E731
    (h, z), _ = jax.lax.scan(again, (h, scale), None, length=2)
    return (h**2).sum() + ys.sum() + z


def of_columns(p, x, scale):
    """Entities along the last axis: weights on the left of matrices, and ``jax.vmap`` over columns, both several layers deep."""
    columns = jnp.outer(x, jnp.arange(1.0, 4.0)) * scale
    y = jnp.tanh(p["wide"] @ columns)
    z = jnp.sin(p["square"] @ y + y)
    each = jax.vmap(lambda e: jnp.cos(jnp.tanh(e @ p["wide"].T) @ p["square"]), in_axes=1, out_axes=1)(columns)
    return (z.max(1) * each.sum(1)).sum() + (p["square"] @ each).max()


PROGRAMS = [layers, of_entities, ensemble, any_axes, of_loops, of_columns]


@pytest.mark.parametrize("sums", PROGRAMS)
def test_values_and_gradients_are_those_of_loops(sums):
    found = of_points.gradient(sums, CPU, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(sums, CARRY, T, (0, 1))(PARAMS, CARRY))


def traced(sums):
    return of_points.traced(sums, PARAMS, CARRY, T)


def left(program):
    """How many products have weights first."""
    products = (e for e in program.equations if e.op is DOT and program.dims_of(e.outputs[0]))
    return sum(not program.dims_of(e.inputs[0]) for e in products) + sum(left_in_loop(e, program) for e in program.equations)


def left_in_loop(e, program):
    """How many of a loop's products have weights first, and how many weights it turns."""
    if e.op is not J.SCAN:
        return 0
    body = inlined_body(e.params["jaxpr"]).jaxpr
    consts = zip(body.invars[: J.scan_counts(dict(e.params))[0]], e.inputs, strict=False)
    weights = [v for v, given in consts if not program.dims_of(given)]
    return sum(eqn.primitive in (DOT, J.primitive("transpose")) and eqn.invars[0] in weights for eqn in body.eqns)


@pytest.mark.parametrize("sums", PROGRAMS)
def test_no_weights_are_first(sums):
    program = with_invariants_before(traced(sums))  # what a loop turns itself
    found = with_rows_first(program)
    assert left(program) > left(found) == 0
    assert with_rows_first(found) is found
    assert left(adapted(program, CPU)) == 0


def test_columns_are_turned_once_and_then_stay():
    """Of layers of columns, the entities alone are turned: what is the largest of them is found in any order."""
    after = absorb_transposes(with_rows_first(traced(of_columns)))
    turned = [e for e in after.equations if e.op is J.primitive("transpose") and after.dims_of(e.outputs[0])]
    assert len(turned) == 2, after  # for two networks
    assert all(e.inputs[0].shape == (IN, 3) for e in turned)
    products = [e for e in after.equations if e.op is DOT and after.dims_of(e.outputs[0])]
    assert all(e.params["dimension_numbers"][0][0] == (1,) for e in products)


def test_few_weights_leave_columns_where_they_are():
    """What mixes entities, and what adds them up, is as fast there."""
    mixes = np.full((3, 3), 0.5, np.float32)
    for sums in (
        lambda p, x, s: jnp.tanh(mixes @ (jnp.outer(jnp.arange(1.0, 4.0), x) * s)).sum(),
        lambda p, x, s: (jnp.full(100, 0.5) @ (jnp.outer(jnp.arange(100.0), x) * s)).sum(),
    ):
        program = traced(sums)
        assert with_rows_first(program) is program


def test_what_is_of_rows_or_has_no_points_stays():
    for sums in (
        lambda p, x, s: (x @ p["w"].T).sum() * s,
        lambda p, x, s: (p["w"] @ p["w"].T).sum() * s,  # of weights alone
        lambda p, x, s: ((p["w"] @ jnp.outer(x, x)) ** 2).sum() * s,  # of matrices, whose columns are wanted
        lambda p, x, s: (jnp.outer(x, x) @ x).sum() * s,  # of what each point has
    ):
        program = traced(sums)
        assert with_rows_first(program) is program


def test_precision_and_type_of_the_sum_are_kept():
    def sums(p, x, s):
        precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
        return jax.lax.dot_general(
            p["w"].astype(jnp.bfloat16), x.astype(jnp.bfloat16), (((1,), (0,)), ((), ())), precision, jnp.float32
        ).sum() * s  # fmt: skip

    (product,) = (e for e in with_rows_first(traced(sums)).equations if e.op is DOT)
    assert product.params["precision"] == (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)
    assert product.outputs[0].dtype == product.params["preferred_element_type"] == jnp.float32


def test_networks_of_equinox_are_as_those_of_rows():
    """A recurrent policy: the same gradient as by rows of matrices, whose programs multiply as many numbers, and turn no more."""
    cell, head = eqx.nn.GRUCell(IN, OUT, key=K[0]), eqx.nn.MLP(OUT, 2, 8, 2, key=K[1])
    params, static = eqx.partition((cell, head), eqx.is_array)
    data = PARAMS["x"]

    def by_modules(params, h, t):
        cell, head = eqx.combine(params, static)
        h = cell(rlfx.inputs(data)[t], h)
        return (head(h) ** 2).sum(), h

    def by_rows(params, h, t):
        cell, head = params
        of_x, of_h = jnp.split(rlfx.inputs(data)[t] @ cell.weight_ih.T + cell.bias, 3), jnp.split(h @ cell.weight_hh.T, 3)
        reset, update = jax.nn.sigmoid(of_x[0] + of_h[0]), jax.nn.sigmoid(of_x[1] + of_h[1])
        new = jnp.tanh(of_x[2] + reset * (of_h[2] + cell.bias_n))
        h = x = new + update * (h - new)
        for layer in head.layers[:-1]:
            x = jax.nn.relu(x @ layer.weight.T + layer.bias)
        return ((x @ head.layers[-1].weight.T + head.layers[-1].bias) ** 2).sum(), h

    def gradient(program):
        fn = rlfx.compile(program, length=T, batch=B, target=CPU)
        return jax.jit(jax.value_and_grad(lambda p: fn(p, jnp.zeros((B, OUT)))[0])).lower(params)

    mine, theirs = map(gradient, (by_modules, by_rows))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), mine.compile()(params), theirs.compile()(params)
    )
    for name in ("dot_general", "stablehlo.transpose"):
        assert mine.as_text().count(name) <= theirs.as_text().count(name)
