"""Weight gradients of recurrences, contracted after the backward loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.execute.loops import Scan
from rlfx.recurrence.gradient.deferred import Deferring
from tests.sampling import met

T, H, IN = 7, 13, 5  # primes: a shape names what it belongs to
KEY = jax.random.key(5)
MOST = rlfx.target().rewrites.deferred_rows
FEW, MANY = 3, MOST + 4

pytestmark = pytest.mark.skipif(not MOST, reason="weights are not deferred on this backend")


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "h": jax.random.normal(k1, (H, H)) / 4.0,
        "x": jax.random.normal(k2, (H, IN)) / 4.0,
        "o": jax.random.normal(k3, (H,)),
    }


def vanilla(params, carry, t):
    """One weight from the right, one from the left, the first one twice."""
    h, x = carry
    hidden = jnp.tanh(h @ params["h"] + params["x"] @ x)
    h = 0.5 * hidden + 0.5 * jnp.sin(hidden @ params["h"])
    return jnp.vdot(h, params["o"]) ** 2, (h, jax.lax.stop_gradient(0.9 * jnp.roll(x, 1) + 0.1))


def of_time(params, carry, t):
    """A weight that is made of the parameters within the step, and a product of constants alone."""
    weight = params["h"] * 0.5
    h = jnp.tanh(carry @ weight + (params["x"] @ jnp.ones(IN)))
    return jnp.sum(h) * jnp.cos(0.1 * t), h


def carries(f, batch):
    h = jax.random.normal(jax.random.key(1), (batch, H))
    return (h, jax.random.normal(jax.random.key(2), (batch, IN))) if f is vanilla else h


def gradient(make, f, batch, params, **options):
    fn = make(f, length=T, batch=batch, **options)
    fn = jax.jit(fn) if make is rlfx.compile else fn  # the reference runs operation by operation
    return jax.value_and_grad(lambda p, c: fn(p, c)[0], (0, 1))(params, carries(f, batch))


def agree(got, expected):
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), got, expected)


@pytest.mark.parametrize(("batch", "f"), met([1, FEW, MANY], [vanilla, of_time]))
def test_gradients_are_those_of_the_reference(f, batch):
    params = init(KEY)
    agree(gradient(rlfx.compile, f, batch, params), gradient(rlfx.reference, f, batch, params))


def test_over_seeds_on_a_mesh_and_of_aux():
    seeds = jax.random.split(KEY, 3)
    each = [gradient(rlfx.compile, vanilla, FEW, init(k)) for k in seeds]
    together = jax.vmap(lambda k: gradient(rlfx.compile, vanilla, FEW, init(k)))(seeds)
    agree(together, jax.tree.map(lambda *x: jnp.stack(x), *each))
    split = gradient(rlfx.compile, vanilla, 4, init(KEY), mesh=jax.make_mesh((2,), ("b",)))
    agree(split, gradient(rlfx.compile, vanilla, 4, init(KEY)))

    def outputs(make, **options):
        fn = make(vanilla, length=T, batch=FEW, **options)

        def total(p):
            loss, (carry, _) = fn(p, carries(vanilla, FEW))
            return loss + jnp.sum(jnp.cos(carry[0]))

        return jax.grad(total)(init(KEY))

    agree(outputs(rlfx.compile), outputs(rlfx.reference))


def carried_weights(jaxpr):
    """How often an array of a weight's shape is carried from iteration to iteration."""
    count = 0
    for e in jaxpr.eqns:
        if e.primitive is J.SCAN:
            consts, carried = J.scan_counts(e.params)
            count += sum(v.aval.shape == (H, H) for v in e.invars[consts : consts + carried])
        count += sum(carried_weights(body) for body, _ in J.sub_jaxprs(dict(e.params)))
    return count


@pytest.mark.parametrize(("batch", "expected"), [(FEW, 0), (MANY, 1)])
def test_few_rows_accumulate_nothing_in_the_loop(batch, expected):
    closed = jax.make_jaxpr(lambda p: gradient(rlfx.compile, vanilla, batch, p))(init(KEY))
    assert carried_weights(J.without_dead_code(closed).jaxpr) == expected


def test_a_loop_without_weights_is_a_scan():
    def step(state, at_t):
        return [state[0] * 0.5 + at_t[1][0]], [state[0]]

    args = step, [jnp.float32(1.0)], (jnp.arange(3), [jnp.ones(3)]), False, None
    texts = [str(jax.make_jaxpr(lambda f=f: f(*args))()) for f in (Deferring(most_rows=MOST), Scan())]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("plan", [rlfx.Plan(), rlfx.Plan("blocks", 3)], ids=lambda p: p.form)
def test_the_second_derivative_sees_the_weights(plan):
    """A deferred product's weights take no gradient inside the loop, but the gradient itself depends on them."""
    params = {"w": 0.3 * jnp.ones((3, 3)) + 0.1 * jnp.eye(3), "v": jnp.arange(3.0)}
    start = 0.1 * jnp.ones((4, 3)) * jnp.arange(1.0, 5.0)[:, None]

    def step(p, h, t):
        h = jnp.tanh(p["w"] @ h + 0.3 * t.now.astype(jnp.float32))
        return jnp.sum(h * p["v"]), h

    def by_hand(p):
        def body(h, t):
            h = jnp.tanh(h @ p["w"].T + 0.3 * t)
            return h, h @ p["v"]

        return jnp.mean(jax.lax.scan(body, start, jnp.arange(5.0))[1])

    def curvature(loss):
        slope = jax.grad(loss)
        return jax.jit(jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(slope(p)))))(params)

    loss_fn = rlfx.compile(step, length=5, batch=4, plan=plan)
    found, expected = curvature(lambda p: loss_fn(p, start)[0]), curvature(by_hand)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
