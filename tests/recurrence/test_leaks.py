"""``jax.checking_leaks`` finds nothing: no rule of a derivative holds on to a value of the trace in which it was made."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import rlfx

T, B = 3, 2
REDUCED = {
    f"{op} over {over}": lambda v, op=op, over=over: getattr(rlfx, op)(v, over)
    for op, over in itertools.product(("max", "min", "sum", "mean"), ("b", "t", "tb"))
}
#: ``(reduction, parameter, carry, t) -> (a number, the next carry)``.
PLACES = {
    "at once": lambda r, p, c, t: (r(jnp.sin(p * c)), c),
    "in the loop": lambda r, p, c, t: (c, 0.5 * c + 0.1 * r(jnp.sin(p * c))),
    "of what is read": lambda r, p, c, t: (r(rlfx.series(p * c, end=0.0)[t + 1]) * p, 0.9 * c),
    "in a recurrence": lambda r, p, c, t: (rlfx.solve(lambda y: 0.5 * y[t - 1] + r(p * c), start=0.0), 0.9 * c),
    "beside slices": lambda r, p, c, t: (r(rlfx.series(p * c)[: t + 1].max()) + rlfx.series(p * c)[t:].min(), 0.9 * c),
}
OPTIONS = {"": {}, "until": {"until": lambda c: c > 0.7}, "blocks": {"plan": rlfx.Plan("blocks", 1)}}


def members():
    for reduced, place, options in itertools.product(REDUCED, PLACES, OPTIONS):
        over_time = not reduced.endswith("over b")
        if place == "in the loop" and over_time:
            continue  # the carry would depend on the future
        if options == "blocks" and (over_time or place not in ("at once", "in the loop")):
            continue  # the gradient flows through other timesteps
        yield reduced, place, options


def gradient(reduced, place, options):
    """Its jaxpr, as ``jax.jit`` makes it."""

    def program(p, c, t):
        return PLACES[place](REDUCED[reduced], p, c, t)

    fn = rlfx.compile(program, length=T, batch=B, **OPTIONS[options])
    return jax.make_jaxpr(jax.grad(lambda p, c: fn(p, c)[0]))(jnp.float32(0.5), jnp.ones(B, jnp.float32))


def test_reductions_hold_no_value_of_their_trace():
    """112 of them; at a stroke, since each check looks through all objects there are."""
    found = [*members()]
    assert len(found) >= 50
    with checking_leaks():
        jaxprs = jax.make_jaxpr  # one trace around all
        del jaxprs
        for member in found:
            assert gradient(*member).out_avals[0].shape == (), member
