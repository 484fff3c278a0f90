"""``jax.checking_leaks`` finds nothing: no rule of a derivative holds on to a value of the trace in which it was made."""

import itertools

import jax
import jax.numpy as jnp

import rlfx
from tests.leaks import checking_leaks

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


def allowed(reduced, place, options):
    """Whether the carry does not depend on the future, nor the gradient, in blocks, on other timesteps."""
    over_time = not reduced.endswith("over b")
    together = place in ("at once", "in the loop")
    return not (over_time and place == "in the loop") and (options != "blocks" or (together and not over_time))


PROGRAMS = {
    (place, options): [name for name in REDUCED if allowed(name, place, options)]
    for place, options in itertools.product(PLACES, OPTIONS)
}


def test_reductions_hold_no_value_of_their_trace():
    """112 of them, with and without ends, and in blocks: those of one place are one program."""
    assert sum(map(len, PROGRAMS.values())) == 112
    for (place, options), names in PROGRAMS.items():
        if not names:
            continue

        def program(p, c, t, place=place, names=names):
            losses, carries = zip(*(PLACES[place](REDUCED[name], p, c, t) for name in names), strict=True)
            return sum(losses), sum(carries) / len(carries)

        with checking_leaks():
            fn = rlfx.compile(program, length=T, batch=B, **OPTIONS[options])
            gradient = jax.make_jaxpr(jax.grad(lambda p, c, fn=fn: fn(p, c)[0]))
            assert gradient(jnp.float32(0.5), jnp.ones(B, jnp.float32)).out_avals[0].shape == ()
