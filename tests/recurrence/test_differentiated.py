"""``wrt=``: what explain and plan take for differentiated is what the call differentiates; windows count at their widest."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import ProgramError
from rlfx.recurrence.analysis.cost import bytes_of
from rlfx.recurrence.language.primitives import inputs_p, series_p
from rlfx.recurrence.plan.predict import predict

T, B, WIDTH = 64, 8, 32
WEIGHTS = {"w": jnp.ones((WIDTH, WIDTH), jnp.float32), "scale": jnp.int32(2)}
DATA = jnp.ones((T, B, WIDTH), jnp.float32)
CARRY = jnp.zeros(B, jnp.float32)


def loss(params, carry, t):
    weights, data = params
    x = rlfx.inputs(data)[t]
    return jnp.mean(jnp.tanh(weights["w"] @ jnp.tanh(weights["w"] @ x)) ** 2), carry


COMPILED = rlfx.compile(loss, length=T, batch=B, plan=rlfx.Plan())
PARAMS = (WEIGHTS, DATA)


@pytest.mark.optimised
@pytest.mark.parametrize(("wrt", "argnums"), [((True, False), 0), ((False, True), 1), (None, (0, 1))])
def test_explained_is_the_call_that_is_made(wrt, argnums):
    """XLA takes as many bytes for the gradient that is explained as for the one that jax.grad makes."""

    def call(w, data):
        return COMPILED(({**WEIGHTS, "w": w}, data), CARRY)[0]

    gradient = jax.jit(jax.value_and_grad(call, argnums)).lower(WEIGHTS["w"], DATA).compile()
    explained = COMPILED.explain(PARAMS, CARRY, wrt=wrt, measure=True)
    assert explained.measured_bytes == pytest.approx(gradient.memory_analysis().temp_size_in_bytes, rel=0.02)


def test_what_follows_from_data_alone_is_not_differentiated():
    weights, data, both = (
        COMPILED.explain(PARAMS, CARRY, wrt=wrt).learner for wrt in ((True, False), (False, True), None)
    )
    assert both.active == data.active
    assert weights.active < both.active
    assert {e.op for e in both.active - weights.active} == {inputs_p, series_p}


@pytest.mark.parametrize(
    "wrt", [(True, False), ({"w": True, "scale": True}, False), ({"w": True, "scale": False}, False)]
)
def test_prefixes_mark_leaves_and_subtrees(wrt):
    (w,) = COMPILED.explain(PARAMS, CARRY, wrt=wrt).evaluator.order
    assert w.shape == (WIDTH, WIDTH)
    assert COMPILED.plan(PARAMS, CARRY, wrt=wrt) == rlfx.Plan()
    assert str(COMPILED.physical(PARAMS, CARRY, wrt=wrt)) == str(COMPILED.physical(PARAMS, CARRY, wrt=(True, False)))


def test_all_floats_by_default_and_said_so_where_they_are_data():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    text = str(COMPILED.explain(shapes, CARRY, verbose=True))
    assert "all floats of params count as differentiated: 64 KiB that rlfx.inputs reads, 4 KiB of other leaves" in text
    assert "wrt=(True, False)" in text
    for wrt in ((True, False), (False, True), True):
        assert "count as differentiated" not in str(COMPILED.explain(PARAMS, CARRY, wrt=wrt, verbose=True))


def test_no_note_where_weights_are_more_than_data():
    few = rlfx.compile(loss, length=2, batch=2)
    assert "count as differentiated" not in str(few.explain((WEIGHTS, DATA[:2, :2]), CARRY[:2], verbose=True))


@pytest.mark.parametrize(
    ("wrt", "fact"),
    [
        ((True,), "is no prefix of params, whose structure is PyTreeDef"),
        ({"w": True}, "is no prefix of params"),
        (("w", False), "wrt must be a pytree of bools, a prefix of params, got"),
        ((), "wrt must be a pytree of bools"),
        (False, "wrt=False marks no leaf of params that is a float"),
        (({"w": False, "scale": True}, False), "marks no leaf of params that is a float"),
    ],
)
@pytest.mark.parametrize("method", ["explain", "plan", "physical"])
def test_what_marks_nothing_is_refused(method, wrt, fact):
    with pytest.raises(ProgramError) as error:
        getattr(COMPILED, method)(PARAMS, CARRY, wrt=wrt)
    assert fact in str(error.value)
    assert "wrt=(True, False) of params=(weights, data)" in str(error.value)


@pytest.mark.parametrize(("stop", "width"), [(lambda t: t + 8, 8), (lambda t: None, T)])
def test_a_clipped_window_counts_at_its_widest(stop, width):
    def windows(w, x, t):
        y = rlfx.series(x)
        return jnp.sum(jax.nn.softmax(w * y[t : stop(t)])), 0.9 * x

    program = rlfx.trace(windows, jnp.float32(1.0), jnp.float32(1.0), length=T)
    ragged = [v for e in program.equations for v in e.outputs if any(not isinstance(d, int) for d in v.shape)]
    assert ragged
    assert {bytes_of(v, program.domain) // v.dtype.itemsize for v in ragged} == {width}


def test_the_cost_of_windows_does_not_grow_with_the_rollout():
    def windows(w, x, t):
        y = rlfx.series(x)
        return jnp.sum(jax.nn.softmax(w * y[t : t + 8])), 0.9 * x

    costs = []
    for length in (64, 1024):
        explained = rlfx.compile(windows, length=length).explain(jnp.float32(1.0), jnp.float32(1.0))
        costs.append(predict(explained.learner, rlfx.Plan(), 1, explained.evaluator.target).elements / length)
    assert costs[1] == pytest.approx(costs[0], rel=0.2)
