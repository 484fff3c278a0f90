"""Weight gradients as a CPU does them best: the same numbers, another program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.contractions import DOT, MATRICES, by_matrices
from rlfx.recurrence.cpu.contractions import fast_contractions as on_target
from rlfx.recurrence.ir.interpret import rewritten

X = jax.random.normal(jax.random.key(0), (600, 5))
PARAMS = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(5, 16), (16, 16), (16, 1)], 1)]


def loss(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params[-1]) ** 2)


def fast_contractions(fn):
    return on_target(fn, rlfx.target("cpu"))


def copies(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("optimization_barrier")


def test_gradients_are_the_same():
    got = jax.jit(fast_contractions(jax.grad(loss)))(PARAMS, X)
    for a, b in zip(got, jax.grad(loss)(PARAMS, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_every_weight_gradient_is_changed_and_nothing_else():
    assert copies(fast_contractions(jax.grad(loss)), PARAMS, X) == 3
    assert copies(fast_contractions(jax.grad(jax.jit(loss))), PARAMS, X) == 3
    assert copies(fast_contractions(loss), PARAMS, X) == 0
    assert copies(fast_contractions(jax.grad(loss)), PARAMS, X[:100]) == 0


CONTRACT = jax.jit(lambda g, x: jax.lax.dot_general(g, x, (((0,), (0,)), ((), ()))))


@pytest.mark.parametrize(
    ("rows", "columns", "first"),
    [
        (600, (2, 16), 2), (600, (16, 2), 2), (600, (7, 7), 7), (600, (256, 2), 2), (600, (1024, 2), 2),
        (64, (256, 2), 2), (64, (200, 2), 200),  # a small product
        (64, (512, 65), 512), (600, (640, 601), 640),  # what results would be larger than what is multiplied
    ],
)  # fmt: skip
def test_the_narrow_operand_comes_first(rows, columns, first):
    g, x = (jax.random.normal(jax.random.key(i), (rows, n)) for i, n in enumerate(columns))
    (product,) = (e for e in jax.make_jaxpr(fast_contractions(CONTRACT))(g, x).eqns if e.primitive is DOT)
    assert product.invars[0].aval.shape == (rows, first)
    np.testing.assert_allclose(fast_contractions(CONTRACT)(g, x), g.T @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [
        (2560, (64, 64), 16),
        (2560, (128, 32), 16),
        (1024, (32, 32), 8),
        (2560, (64, 16), None),  # one operand is too narrow
        (2560, (48, 64), None),  # its columns are not read from the same lines of the cache
        (2560, (64, 129), None),  # one is too wide
        (64 * 160 + 160, (64, 64), None),  # too many parts
        (2557, (64, 64), None),  # a prime number of rows
    ],
)
def test_parts(rows, columns, parts):
    g, x = (jax.random.normal(jax.random.key(i), (rows, n)) for i, n in enumerate(columns))
    (product,) = (e for e in jax.make_jaxpr(fast_contractions(CONTRACT))(g, x).eqns if e.primitive is DOT)
    shape = product.outvars[0].aval.shape
    assert shape[:-2] == (() if parts is None else (parts,))
    np.testing.assert_allclose(fast_contractions(CONTRACT)(g, x), CONTRACT(g, x), rtol=1e-4, atol=1e-3)


def test_parts_are_not_rounded():
    """Numbers of 16 bits are added up in one product, which XLA does in 32 bits."""
    g, x = (jnp.ones((2560, 64), jnp.bfloat16) for _ in range(2))
    (product,) = (e for e in jax.make_jaxpr(fast_contractions(CONTRACT))(g, x).eqns if e.primitive is DOT)
    assert product.outvars[0].aval.shape == (64, 64)


@pytest.mark.parametrize("rows", [(30, 20), (600,)])
@pytest.mark.parametrize("narrow", [1, 3, 8])
def test_derivatives_of_matrices_have_the_narrow_operand_first(rows, narrow):
    """Of any order: those of the gradient, too."""
    x, w = jax.random.normal(jax.random.key(0), (*rows, 8)), jax.random.normal(jax.random.key(1), (8, narrow))
    loss = lambda product: lambda w: jnp.sum(jnp.sin(product(x, w)))  # noqa: E731
    as_written = loss(lambda x, w: x @ w)
    as_matrix = loss(rewritten(lambda x, w: x @ w, MATRICES))

    def twice(loss):
        return lambda w: jax.jvp(jax.grad(loss), (w,), (jnp.cos(w),))[1]

    text = str(jax.make_jaxpr(twice(as_matrix))(w))
    assert f"f32[{narrow},8] = dot_general" in text
    assert (f"f32[8,{narrow}] = dot_general" in text) == (narrow == 8)
    for order in (jax.grad, twice, lambda loss: jax.grad(lambda w: jnp.sum(twice(loss)(w) ** 2))):
        np.testing.assert_allclose(order(as_matrix)(w), order(as_written)(w), rtol=2e-4, atol=1e-3)


def in_loop(x, w):
    """``x[B, K]`` at every timestep; the weights are read in a loop, and before it."""
    first = jnp.cos(x @ w)
    step = lambda h, x: (jnp.tanh(x @ w + h), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros(first.shape[1:]), x)[0] + first.sum(0)


def products_with_weights(jaxpr):
    """The numbers of axes of what is multiplied, in loops too, where the product has no batch."""
    own = [e for e in jaxpr.eqns if e.primitive is DOT and e.params["dimension_numbers"][1] == ((), ())]
    inside = [body for e in jaxpr.eqns for body, _ in J.sub_jaxprs(dict(e.params))]
    return [v.aval.ndim for e in own for v in e.invars] + [n for body in inside for n in products_with_weights(body)]


@pytest.mark.parametrize("columns", [3, 20])
def test_rows_of_copies_are_those_of_one_matrix(columns):
    """In loops, too; and so are the derivatives."""
    x, w = jax.random.normal(jax.random.key(0), (7, 4, 5, 8)), jax.random.normal(jax.random.key(1), (8, columns))
    copied = jax.vmap(in_loop, (0, None))

    def gradients(fn):
        of = lambda x, w: jnp.sum(jnp.sin(fn(x, w)))  # noqa: E731
        once = jax.grad(of, (0, 1))
        return lambda x, w: (once(x, w), jax.grad(lambda w: jnp.sum(once(x, w)[1] ** 2))(w))

    together = gradients(by_matrices(copied, rlfx.target("cpu")))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), together(x, w), gradients(copied)(x, w)
    )
    found, as_written = (products_with_weights(jax.make_jaxpr(fn)(x, w).jaxpr) for fn in (together, gradients(copied)))
    assert set(found) == {2}
    assert set(as_written) != {2}
    assert len(found) == len(as_written)
    assert by_matrices(copied, rlfx.target("h200")) is copied
    plain = lambda w: jnp.tanh(w).sum()  # noqa: E731
    assert str(jax.make_jaxpr(by_matrices(plain, rlfx.target("cpu")))(w)) == str(jax.make_jaxpr(plain)(w))


@pytest.mark.parametrize("under", [jax.jit, jax.vmap])
def test_under_transformations(under):
    stacked = [jnp.stack([w, 2 * w]) for w in PARAMS], jnp.stack([X, X + 1])
    args = stacked if under is jax.vmap else (PARAMS, X)
    got, expected = under(fast_contractions(jax.grad(loss)))(*args), under(jax.grad(loss))(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_differentiable_and_structured():
    def step(params, batch):
        return {"params": [w - g for w, g in zip(params, jax.grad(loss)(params, batch), strict=True)]}, None

    def after(step):
        return lambda params: loss(step(params, X)[0]["params"], X)

    got, expected = jax.grad(after(fast_contractions(step)))(PARAMS), jax.grad(after(step))(PARAMS)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.optimised
def test_names_of_scopes_survive():
    def named(params, x):
        with jax.named_scope("the_learner"):
            return jax.grad(loss)(params, x)

    text = jax.jit(fast_contractions(named)).lower(PARAMS, X).compile().as_text()
    assert "the_learner" in text


def test_inside_a_scan():
    """As in gradients accumulated over blocks."""

    def accumulated(params, x):
        add = lambda total, block: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, block)), None)  # noqa: E731
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(2, 300, 5))[0]

    assert copies(fast_contractions(accumulated), PARAMS, X) == 3
    got, expected = jax.jit(fast_contractions(accumulated))(PARAMS, X), accumulated(PARAMS, X)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_weight_gradients_of_all_points_contract_over_rows():
    """Over t and b at once: XLA would transpose one of the operands."""

    def program(w, x, t):
        return jnp.tanh(x @ w["a"]) @ w["b"], 0.9 * jax.lax.stop_gradient(x)

    w = {"a": jax.random.normal(jax.random.key(0), (6, 5)), "b": jnp.arange(5.0)}
    x = jax.random.normal(jax.random.key(1), (3, 6))
    gradient = lambda make, **options: jax.grad(lambda w: make(program, length=4, batch=3, **options)(w, x)[0])  # noqa: E731
    for options in ({}, {"plan": rlfx.Plan("blocks", 2)}):
        got, jaxpr = gradient(rlfx.compile, **options)(w), jax.make_jaxpr(gradient(rlfx.compile, **options))(w)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, gradient(rlfx.reference)(w)
        )
        assert "dimension_numbers=(([0], [0]), ([], []))" in str(jaxpr)
        assert "([0, 1], [0, 1])" not in str(jaxpr)


MEMBERS = [  # shapes of the operands, dimension numbers, whether members are taken one by one
    ((300, 2, 16), (300, 2, 7), (((0,), (0,)), ((1,), (1,))), True),
    ((3, 20, 20, 16), (20, 3, 20, 64), (((1, 2), (0, 2)), ((0,), (1,))), True),  # a gradient, and what the layer was given
    ((20, 3, 20, 1), (20, 3, 20, 64), (((0, 2), (0, 2)), ((1,), (1,))), True),
    ((8, 40, 4, 5), (40, 4, 8, 6), (((1, 2), (0, 1)), ((0,), (2,))), False),  # few rows
    ((3, 300, 16), (3, 300, 7), (((1,), (1,)), ((0,), (0,))), False),  # each member's rows lie together
    ((300, 17, 4), (300, 17, 4), (((0,), (0,)), ((1,), (1,))), False),  # many members
    ((300, 1, 4), (300, 1, 4), (((0,), (0,)), ((1,), (1,))), False),  # one
    ((300, 2, 257), (300, 2, 4), (((0,), (0,)), ((1,), (1,))), False),  # wide
    ((20, 3, 20, 4), (20, 3, 20, 4), (((0, 2), (2, 0)), ((1,), (1,))), False),  # rows in another order
    ((300, 2, 5, 4), (300, 2, 5, 4), (((0,), (0,)), ((1,), (1,))), False),  # more than one axis is left
    ((4, 300, 2, 5), (4, 300, 2, 5), (((1,), (1,)), ((0, 2), (0, 2))), False),  # two axes of members
    ((300, 2, 16), (16, 2, 7), (((2,), (0,)), ((1,), (1,))), False),  # no contraction over rows
]


@pytest.mark.parametrize(("left", "right", "numbers", "apart"), MEMBERS)
def test_members_of_an_ensemble_one_by_one(left, right, numbers, apart):
    a, b = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((left, right)))

    def product(a, b):
        return jax.lax.dot_general(a, b, numbers)

    found = jax.make_jaxpr(fast_contractions(product))(a, b)
    dots = [e for e in found.eqns if e.primitive is DOT]
    assert len(dots) == (a.shape[numbers[1][0][0]] if apart else 1)
    assert all(not any(e.params["dimension_numbers"][1]) for e in dots) == apart
    np.testing.assert_allclose(fast_contractions(product)(a, b), product(a, b), rtol=1e-4, atol=1e-4)


def test_gradients_of_an_ensemble():
    """Of critics by `jax.vmap`, of several actions of each observation: under jit, and where they are differentiated again."""
    k = jax.random.split(jax.random.key(0), 3)
    w = [jax.random.normal(k[0], (3, 5, 8)), jax.random.normal(k[1], (3, 8, 1))]
    x = jax.random.normal(k[2], (64, 6, 5))

    def loss(w, x):
        one = lambda x: jax.vmap(lambda v, u: jnp.tanh(x @ v) @ u)(*w)  # noqa: E731
        return (jax.vmap(one)(x) ** 2).mean()

    for grad in (jax.grad(loss), lambda w, x: jax.grad(lambda w: sum((g**2).sum() for g in jax.grad(loss)(w, x)))(w)):
        got, expected = jax.jit(fast_contractions(grad))(w, x), grad(w, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, expected)


@pytest.mark.parametrize("columns", [(1, 3), (2, 3), (3, 3), (3, 2), (5, 5), (8, 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_small_ones_of_many(turned, columns):
    """Under ``jax.vmap`` XLA ended the process with some of these, if they stood behind a barrier before they were turned."""
    x, y = (jnp.sin(jnp.arange(80.0 * n)).reshape(2, 20, 2, n) for n in columns)
    w = jnp.linspace(0.0, 1.0, columns[0] * columns[1]).reshape(columns[::-1] if turned else columns)
    gradient = jax.value_and_grad(lambda w, x, y: (jnp.cos(y) * (jnp.sin(x) @ (w.T if turned else w))).sum())
    found, expected = (jax.jit(jax.vmap(f, (None, 0, 0)))(w, x, y) for f in (fast_contractions(gradient), gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
