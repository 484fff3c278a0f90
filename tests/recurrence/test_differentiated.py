"""What explain and plan take for differentiated is what the call differentiates (``wrt=``, or by itself); windows count at their
widest."""

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx import _jaxpr as J
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
@pytest.mark.parametrize(("wrt", "argnums"), [((True, False), 0), ((False, True), 1), (True, (0, 1)), (None, 0)])
def test_explained_is_the_call_that_is_made(wrt, argnums):
    """XLA takes as many bytes for the gradient that is explained as for the one that jax.grad makes."""

    def call(w, data):
        return COMPILED(({**WEIGHTS, "w": w}, data), CARRY)[0]

    gradient = jax.jit(jax.value_and_grad(call, argnums)).lower(WEIGHTS["w"], DATA).compile()
    explained = COMPILED.explain(PARAMS, CARRY, wrt=wrt, measure=True)
    assert explained.measured_bytes == pytest.approx(gradient.memory_analysis().temp_size_in_bytes, rel=0.02)
    (seen,) = rlfx.explain(jax.value_and_grad(call, argnums), WEIGHTS["w"], DATA)
    assert [v.shape for v in seen.evaluator.order] == [v.shape for v in explained.evaluator.order]
    assert seen.predicted_bytes == explained.predicted_bytes


def test_what_follows_from_data_alone_is_not_differentiated():
    weights, data, both = (
        COMPILED.explain(PARAMS, CARRY, wrt=wrt).learner for wrt in ((True, False), (False, True), True)
    )
    assert data.active < both.active
    assert {e.op for e in both.active - data.active} == {J.primitive("transpose")}  # of weights
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


def test_data_are_not_differentiated_by_default_and_that_is_said():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    explained = COMPILED.explain(shapes, CARRY, verbose=True)
    assert [v.shape for v in explained.evaluator.order] == [(WIDTH, WIDTH)]
    said = "what rlfx.inputs alone reads of params (64 KiB) is not differentiated. If your call does: wrt=True"
    assert f"note: {said}" in str(explained)
    assert said in str(COMPILED.explain(shapes, CARRY))
    for wrt in ((True, False), (False, True), True):
        assert "note" not in str(COMPILED.explain(PARAMS, CARRY, wrt=wrt, verbose=True))


def order_of(f, params):
    return [v.shape for v in rlfx.compile(f, length=T, batch=B).explain(params, CARRY).evaluator.order]


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda w, d, t: rlfx.inputs(d / 255.0)[t] @ w, 1),  # data, changed alone
        (lambda w, d, t: rlfx.inputs(d @ w)[t], 2),  # a network outside of time: both lead there
        (lambda w, d, t: rlfx.inputs(d)[t] @ w + d[0, 0], 2),  # read elsewhere, too
        (lambda w, d, t: rlfx.inputs(d)[t] @ jnp.ones_like(w), 1),  # no other float: w is read by nobody
    ],
)
def test_what_counts_as_data(read, count):
    """A leaf that ``rlfx.inputs`` reads is data if nothing else reads it, and no other leaf is part of what is read."""
    assert len(order_of(lambda p, c, t: (jnp.mean(read(*p, t) ** 2), c), (WEIGHTS["w"], DATA))) == count


def test_where_there_are_data_alone_they_count():
    def moved(actions, carry, t):
        return jnp.mean(rlfx.inputs(actions)[t] ** 2), carry

    assert order_of(moved, DATA) == [DATA.shape]


# -- rlfx.explain: from the gradient itself


def target_loss(params, carry, t):
    """Of a target network that only the call leaves out."""
    (w, target), data = params
    x = rlfx.inputs(data)[t]
    return jnp.mean((jnp.tanh(w @ x) - jnp.tanh(target @ x)) ** 2), carry


def test_what_the_call_differentiates_is_seen_in_it():
    fn = rlfx.compile(target_loss, length=T, batch=B)
    arguments = WEIGHTS["w"], 2.0 * WEIGHTS["w"], DATA

    def gradient(w, target, data):
        return jax.grad(lambda w: fn(((w, target), data), CARRY)[0])(w)

    (once,) = rlfx.explain(gradient, *arguments)
    told = fn.explain((arguments[:2], DATA), CARRY, wrt=((True, False), False))
    assert [v.shape for v in once.evaluator.order] == [(WIDTH, WIDTH)]
    assert (once.plan, str(once)) == (told.plan, str(told))
    assert len(fn.explain((arguments[:2], DATA), CARRY).evaluator.order) == 2  # which plain explain cannot know
    jitted = jax.jit(gradient)
    jitted(*arguments)  # jax has it already, and traces nothing
    (again,) = rlfx.explain(lambda *args: jax.lax.fori_loop(0, 3, lambda _, w: w - jitted(w, *args[1:]), args[0]), *arguments)
    assert str(again) == str(once)


def test_axes_of_vmap_and_several_calls():
    def recurrent(w, h, t):
        h = jnp.tanh(w @ h)
        return jnp.mean(h**2), h

    fn, carry = rlfx.compile(recurrent, length=T, batch=B), jnp.zeros((B, WIDTH))

    def both(w, ws):
        return jax.vmap(jax.grad(lambda w: fn(w, carry)[0]))(ws), fn(w, carry)[0]

    ws = jnp.stack([WEIGHTS["w"]] * 64)
    seeds, values = rlfx.explain(both, WEIGHTS["w"], ws)
    assert [axis.size for axis in seeds.evaluator.axes] == [64]
    assert "mapped 64 times by jax.vmap" in str(seeds)
    assert values.values_only
    assert not seeds.values_only
    assert "nothing is differentiated" in str(values)


def test_an_unrolled_program_with_a_gradient_through_its_results():
    rollout = rlfx.unroll(lambda w, h, t: (jnp.tanh(w @ h), h), length=T, batch=B)
    carry = jnp.ones((B, WIDTH))
    (found,) = rlfx.explain(jax.grad(lambda w: jnp.sum(rollout(w, carry)[1] ** 2)), WEIGHTS["w"])
    assert not found.values_only
    assert found.plan == rlfx.Plan()


def test_what_calls_no_program_is_refused():
    with pytest.raises(ProgramError, match="calls no compiled program"):
        rlfx.explain(jnp.sin, 1.0)


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
