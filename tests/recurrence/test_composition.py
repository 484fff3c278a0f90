"""A compiled program is a pure function: it composes with jit, grad, vmap, jacobians, and with other programs."""

import copy
import itertools
import pickle

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import rlfx
from tests.sampling import met

KEY = jax.random.key(0)


def close(got, expected, **tolerance):
    chex.assert_trees_all_close(got, expected, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


def discounted(w, carry, t):
    """A loss that reads the future, carries state that depends on w, and returns it."""
    x = rlfx.series(jnp.tanh(w["a"] * carry + w["b"]), end=0.1)
    y = rlfx.solve(lambda y: x[t] + 0.9 * y[t + 1], end=0.0)
    return (y - x[t + 1]) ** 2, 0.5 * carry + w["a"], {"y": y, "x": x[t]}


def by_hand(w, carry):
    xs, c = [], carry
    for _ in range(4):
        xs.append(jnp.tanh(w["a"] * c + w["b"]))
        c = 0.5 * c + w["a"]
    ys, y = [], 0.0
    for x in reversed(xs):
        y = x + 0.9 * y
        ys.insert(0, y)
    following = [*xs[1:], 0.1 * jnp.ones_like(c)]
    loss = jnp.mean(jnp.stack([(y - f) ** 2 for y, f in zip(ys, following, strict=True)]))
    return loss, (c, {"y": jnp.stack(ys), "x": jnp.stack(xs)})


W = {"a": jnp.float32(0.7), "b": jnp.float32(-0.3)}
C = jnp.array([0.2, 1.5, -1.0])
program = rlfx.compile(discounted, length=4, batch=3)


def test_value_and_gradient_with_aux():
    close(jax.value_and_grad(program, has_aux=True)(W, C), jax.value_and_grad(by_hand, has_aux=True)(W, C))


def test_jit():
    close(jax.jit(program)(W, C), by_hand(W, C))
    close(jax.jit(jax.grad(lambda w, c: program(w, c)[0]))(W, C), jax.grad(lambda w, c: by_hand(w, c)[0])(W, C))


def test_gradient_with_respect_to_the_carry():
    close(jax.grad(lambda c: program(W, c)[0])(C), jax.grad(lambda c: by_hand(W, c)[0])(C))
    close(jax.grad(lambda w, c: program(w, c)[0], (0, 1))(W, C), jax.grad(lambda w, c: by_hand(w, c)[0], (0, 1))(W, C))


@pytest.mark.parametrize("until", [None, lambda c: c > 3.0])
def test_checks_inside_a_program(until):
    """``checkify`` finds them in the loss, and in its gradient."""

    def checking(w, carry, t):
        checkify.check(carry < w["limit"], "too large")
        return (w["a"] * carry) ** 2, carry + w["a"]

    run = rlfx.compile(checking, length=4, batch=2, **({} if until is None else {"until": until}))
    loss = lambda w: run(w, jnp.zeros(2))[0]  # noqa: E731
    for limit, message in ((10.0, ""), (1.5, "too large")):
        w = {"a": jnp.float32(0.7), "limit": jnp.float32(limit)}
        error, value = jax.jit(checkify.checkify(loss))(w)
        assert (error.get() or "").split(" (")[0] == message
        error, (again, slope) = jax.jit(checkify.checkify(jax.value_and_grad(loss)))(w)
        assert (error.get() or "").split(" (")[0] == message
        close((value, again), (np.mean([(0.49 * t) ** 2 for t in range(4)]),) * 2)
        close(slope["a"], np.mean([4 * 0.7**3 * t**2 for t in range(4)]))


def unrolled(w, carry, t):
    _, carry, aux = discounted(w, carry, t)
    return carry, aux


FORMS = {
    "loss": (rlfx.compile(discounted, length=4, batch=3), lambda out: out[0]),
    "aux": (rlfx.compile(discounted, length=4, batch=3), lambda out: (out[1][1]["y"] ** 2).sum() + out[0]),
    "unrolled": (rlfx.unroll(unrolled, length=4, batch=3), lambda out: (out[1]["y"] * out[1]["x"]).sum()),
    "last carry": (rlfx.unroll(unrolled, length=4, batch=3), lambda out: (out[0] ** 2).sum()),
    "until": (rlfx.compile(discounted, length=4, batch=3, until=lambda c: c > 1.4), lambda out: out[0]),
}


@pytest.mark.parametrize(("form", "jitted"), met(FORMS, [True, False]))
def test_one_function_is_differentiated_with_respect_to_this_and_that(form, jitted):
    """jax keeps the jaxpr of a jitted function: what one derivative of it has left there is not for the next."""
    run, of = FORMS[form]
    run = jax.jit(run) if jitted else run
    inputs = {"a": W["a"], "b": W["b"], "c": C}

    def objective(some, rest):
        x = some | rest
        return of(run({"a": x["a"], "b": x["b"]}, x["c"]))

    subsets = [n for k in (1, 2, 3) for n in itertools.combinations(inputs, k)]
    every = jax.grad(objective)(inputs, {})
    for names in (*subsets, *reversed(subsets)):  # each twice, with others between
        some, rest = ({n: x for n, x in inputs.items() if (n in names) is which} for which in (True, False))
        close(jax.grad(objective)(some, rest), {n: every[n] for n in names})
    many = jax.tree.map(lambda x: jnp.stack([x, x]), {"a": W["a"]})
    mapped = jax.vmap(jax.grad(objective), (0, None))(many, {"b": W["b"], "c": C})
    close(mapped, {"a": jnp.stack([every["a"]] * 2)})


def test_a_call_without_jit_is_compiled_once():
    """A second one traces and compiles nothing, nor does its gradient."""
    traced, seen = [], []

    def counted(w, carry, t):
        traced.append(t)
        return discounted(w, carry, t)

    def listen(event, duration, **_):
        seen.append(event)

    run = rlfx.compile(counted, length=4, batch=3)
    differentiate = jax.grad(lambda w: run(w, C)[0])
    first = run(W, C), differentiate(W)
    traced.clear()
    jax.monitoring.register_event_duration_secs_listener(listen)
    again = run(W, C), differentiate(W)
    jax.monitoring.unregister_event_duration_listener(listen)
    close(again, first)
    assert not traced
    assert not [event for event in seen if "compile" in event]


@pytest.mark.parametrize("what", ["carry", "y", "x", "all"])
def test_cotangents_of_carry_and_aux_are_honoured(what):
    def objective(fn):
        def total(w, c):
            loss, (final, aux) = fn(w, c)
            parts = {"carry": final, "y": aux["y"], "x": aux["x"]}
            chosen = [loss, *parts.values()] if what == "all" else [parts[what]]
            return sum(jnp.sum(jnp.sin(p)) for p in chosen)

        return total

    close(jax.grad(objective(program), (0, 1))(W, C), jax.grad(objective(by_hand), (0, 1))(W, C))


def test_jacobian_of_aux():
    close(jax.jacrev(lambda w: program(w, C)[1][1]["y"])(W), jax.jacrev(lambda w: by_hand(w, C)[1][1]["y"])(W))


def test_vmap_over_hyperparameters_and_carries():
    ws = {"a": jnp.array([0.1, 0.7]), "b": jnp.array([-0.3, 0.4])}
    close(jax.vmap(program, (0, None))(ws, C), jax.vmap(by_hand, (0, None))(ws, C))
    grads = jax.vmap(jax.grad(lambda w, c: program(w, c)[0]), (0, 0))(ws, jnp.stack([C, C[::-1]]))
    close(grads, jax.vmap(jax.grad(lambda w, c: by_hand(w, c)[0]), (0, 0))(ws, jnp.stack([C, C[::-1]])))


def test_vmap_over_a_captured_hyperparameter():
    def loss(gamma):
        def f(w, c, t):
            y = rlfx.solve(lambda y: w * c + gamma * y[t + 1], end=0.0)
            return y, c

        return rlfx.compile(f, length=3, reduce="sum")(2.0, jnp.float32(1.0))[0]

    gammas = jnp.array([0.0, 0.5, 1.0])
    close(jax.vmap(loss)(gammas), jnp.array([6.0, 2 + 3 + 3.5, 12.0]))
    # the sum is 6 + 4 gamma + 2 gamma^2
    close(jax.vmap(jax.grad(loss))(gammas), jnp.array([4.0, 6.0, 8.0]))


def test_captured_arrays_are_differentiable():
    def loss(captured):
        f = lambda w, c, t: (w * captured[t.now] ** 2, c + captured.sum())  # noqa: E731
        value, (final, _) = rlfx.compile(f, length=3)(2.0, jnp.float32(0.0))
        return value + final

    x = jnp.array([1.0, 2.0, 3.0])
    close(jax.grad(loss)(x), 4 * x / 3 + 3)
    close(jax.jit(jax.grad(loss))(x), 4 * x / 3 + 3)


def test_no_tracer_is_kept_between_calls():
    def loss(captured):
        return fn(captured)

    box = {}

    def f(w, c, t):
        return w * box["x"], c

    compiled = rlfx.compile(f, length=2)

    def fn(x):
        box["x"] = x
        return compiled(1.0, None)[0]

    close(jax.jit(loss)(3.0), 3.0)
    close(jax.jit(lambda x: loss(x) + 1)(5.0), 6.0)


def test_a_program_of_programs():
    inner = rlfx.compile(lambda p, c, t: ((p["w"] - rlfx.inputs(p["x"])[t]) ** 2, c), length=3)

    def iteration(p, c, i):
        w = c["w"]
        loss, grad = jax.value_and_grad(lambda w: inner({"w": w, "x": jnp.arange(3.0)}, None)[0])(w)
        lr = rlfx.solve(lambda lr: 0.5 * lr[i - 1], start=p)
        target = rlfx.every(2, lambda: w, otherwise=c["target"])
        return {"w": w - lr * grad, "target": target}, {"loss": loss, "lr": lr, "target": target}

    carry = {"w": jnp.float32(4.0), "target": jnp.float32(0.0)}
    final, out = jax.jit(rlfx.unroll(iteration, length=4))(jnp.float32(0.4), carry)
    w, lr, expected = 4.0, 0.4, {"loss": [], "lr": [], "target": []}
    for i in range(4):
        lr *= 0.5
        target = w if i % 2 == 0 else target  # noqa: F821
        expected["loss"].append(np.mean([(w - t) ** 2 for t in range(3)]))
        expected["lr"].append(lr)
        expected["target"].append(target)
        w = w - lr * np.mean([2 * (w - t) for t in range(3)])
    close(out, {k: jnp.array(v, jnp.float32) for k, v in expected.items()})
    close(final["w"], jnp.float32(w))


def test_meta_gradient_through_an_inner_gradient():
    inner = rlfx.compile(lambda w, c, t: ((w * c - 1.0 * t) ** 2, c), length=3)

    def updated(lr, w):
        g = jax.grad(lambda w: inner(w, jnp.float32(1.5))[0])(w)
        return inner(w - lr * g, jnp.float32(1.5))[0]

    def exact(lr, w):
        f = lambda w: jnp.mean((w * 1.5 - jnp.arange(3.0)) ** 2)  # noqa: E731
        return f(w - lr * jax.grad(f)(w))

    close(jax.grad(updated)(0.1, 2.0), jax.grad(exact)(0.1, 2.0))


def test_second_derivatives_in_reverse_mode():
    fn = rlfx.compile(lambda w, c, t: (jnp.sin(w * (1.0 + t)), c), length=3)
    got = jax.jacrev(jax.jacrev(lambda w: fn(w, None)[0]))(0.3)
    close(got, jnp.mean(-jnp.sin(0.3 * jnp.arange(1.0, 4.0)) * jnp.arange(1.0, 4.0) ** 2))


def test_forward_mode_is_refused_with_advice():
    with pytest.raises(TypeError, match=r"reverse-mode derivatives only(.|\n)*Use jax\.grad"):
        jax.jvp(lambda w: program(w, C)[0], (W,), (W,))


def test_calls_alternate_between_signatures():
    fn = rlfx.unroll(lambda p, c, t: (c, c * p), length=2)
    for dtype in (jnp.float32, jnp.int32, jnp.float32):
        out = fn(jnp.asarray(2, dtype), jnp.asarray(3, dtype))[1]
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, [6, 6])


def test_a_traced_program_prints_and_runs_in_the_reference():
    traced = program.trace(W, C)
    assert "discounted" in str(traced)
    close(rlfx.reference(traced)(W, C), by_hand(W, C))


def test_disable_jit():
    with jax.disable_jit():
        close(jax.value_and_grad(program, has_aux=True)(W, C), jax.value_and_grad(by_hand, has_aux=True)(W, C))


# -- pytrees and dataclasses ------------------------------------------------------------------------------------------


@chex.dataclass(frozen=True)
class ChexState:
    x: chex.Array
    n: chex.Array


@flax.struct.dataclass
class FlaxState:
    x: jax.Array
    n: jax.Array
    name: str = flax.struct.field(pytree_node=False, default="static")


class EquinoxState(eqx.Module):
    x: jax.Array
    n: jax.Array
    scale: float = eqx.field(static=True, default=2.0)


@pytest.mark.parametrize("make", [ChexState, FlaxState, EquinoxState])
def test_dataclasses_as_carry_params_series_and_aux(make):
    def f(p, c, t):
        s = rlfx.series(c, start=0, end=0)
        following = s[t + 1]
        new = jax.tree.map(lambda a, b: a + b, c, p)
        s2 = rlfx.solve(lambda v: jax.tree.map(jnp.add, v[t - 1], c), start=jax.tree.map(jnp.zeros_like, c))
        return jnp.sum(following.x), new, (following, s2)

    params = make(x=jnp.array([1.0, 2.0]), n=jnp.int32(1))
    carry = make(x=jnp.zeros((2, 2)), n=jnp.arange(2))
    _, (final, (following, total)) = rlfx.compile(f, length=3, batch=2)(params, carry)
    assert all(isinstance(x, make) for x in (final, following, total))
    close(final.x, jnp.array([[3.0, 6.0], [3.0, 6.0]]))
    np.testing.assert_array_equal(final.n, [3, 4])
    close(following.x[:, 0], jnp.array([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]))
    close(total.x[:, 0], jnp.array([[0.0, 0.0], [1.0, 2.0], [3.0, 6.0]]))


def test_none_and_empty_containers_in_pytrees():
    def f(p, c, t):
        x = rlfx.series({"a": c["x"], "none": None, "empty": ()}, end=0.0)
        return {"x": c["x"] + 1.0, "none": None, "empty": {}}, x[t + 1]

    final, out = rlfx.unroll(f, length=2)({}, {"x": jnp.float32(0.0), "none": None, "empty": {}})
    assert out["none"] is None
    assert out["empty"] == ()
    close(out["a"], jnp.array([1.0, 0.0]))
    assert final["none"] is None


def test_equinox_modules_as_policies():
    model = eqx.nn.MLP(2, 1, 4, 1, key=KEY)
    params, static = eqx.partition(model, eqx.is_array)

    def f(p, c, t):
        return eqx.combine(p, static)(rlfx.inputs(data)[t])[0] ** 2, c

    data = jax.random.normal(KEY, (4, 3, 2))
    fn = rlfx.compile(f, length=4, batch=3)
    by_vmap = lambda p: jnp.mean(jax.vmap(jax.vmap(eqx.combine(p, static)))(data) ** 2)  # noqa: E731
    close(jax.value_and_grad(lambda p: fn(p, None)[0])(params), jax.value_and_grad(by_vmap)(params))


def test_custom_derivatives_keep_their_rule():
    @jax.custom_vjp
    def clipped(x):
        return x * 3.0

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

    def f(w, c, t):
        return clipped(w * (1.0 + t)), c

    fn = rlfx.compile(f, length=3, reduce="sum")
    close(fn(2.0, None)[0], jnp.float32(36.0))
    close(jax.grad(lambda w: fn(w, None)[0])(2.0), jnp.float32(0.6))


def _copied(w, c, t):
    return jnp.sum(w * c), c * w


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fn: pickle.loads(pickle.dumps(fn))], ids=["copy", "pickle"])
def test_a_function_that_was_called_is_copied(copied):
    fn, w, c = rlfx.compile(_copied, length=3, batch=2), jnp.float32(0.5), jnp.ones(2)
    expected = jax.grad(lambda w: fn(w, c)[0])(w)
    fn.explain(w, c)
    other = copied(fn)
    np.testing.assert_array_equal(jax.grad(lambda w: other(w, c)[0])(w), expected)
