"""Reads inside of loops and conditions: moved out of them, or refused with a fix that works."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ProgramError, UnsupportedSliceOp

T = 3
X = 1.3 ** np.arange(T)  # the carry
TWICE = np.ones(2, np.float32)

#: What is evaluated inside: ``(g, c, t) -> a number``; the same of the number v that g is.
INSIDE = {
    "cond": (lambda g, c, t: jax.lax.cond(c > 0, g, lambda: 0.0 * c), lambda v, c, t: v),
    "other branch": (lambda g, c, t: jax.lax.cond(c < 0, g, lambda: 0.5 * c), lambda v, c, t: 0.5 * c),
    "switch": (lambda g, c, t: jax.lax.switch(c.astype(jnp.int32), [lambda: c, g]), lambda v, c, t: v),
    "every": (lambda g, c, t: rlfx.every(2, g, otherwise=c), lambda v, c, t: v if t % 2 == 0 else c),
    "scan": (lambda g, c, t: jax.lax.scan(lambda a, k: (a + k * g(), None), c, TWICE)[0], lambda v, c, t: c + 2 * v),
    "map": (lambda g, c, t: jax.lax.map(lambda k: k * g(), jnp.arange(3, dtype=jnp.float32)).sum(), lambda v, c, t: 3 * v),
    "fori_loop": (lambda g, c, t: jax.lax.fori_loop(0, 2, lambda i, a: a + g(), c), lambda v, c, t: c + 2 * v),
    "fori_loop to t": (lambda g, c, t: jax.lax.fori_loop(0, t.now, lambda i, a: a + g(), c), lambda v, c, t: c + t * v),
    "while_loop": (
        lambda g, c, t: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] + g()), (0, c))[1],
        lambda v, c, t: c + 2 * v,
    ),
}  # fmt: skip
WORDS = {"while_loop": "a loop without a known count", "fori_loop to t": "a loop without a known count"}
WORDS |= dict.fromkeys(("scan", "map", "fori_loop"), "a loop (jax.lax.scan, map or fori_loop)")

#: What is read there: ``(x, c, t) -> a number``, the same by hand, and what the refusal says.
READS = {
    "past": (
        lambda x, c, t: x[: t + 1].sum(),
        lambda t: X[: t + 1].sum(),
        "A slice of a series is read",
        "Reduce it before",
    ),
    "future": (lambda x, c, t: x[t:].max(), lambda t: X[-1], "A slice of a series is read", "Reduce it before"),
    "lookup": (
        lambda x, c, t: x[(0 * c).astype(jnp.int32)],
        lambda t: 1.0,
        "A series is looked up",
        "Look up before what is needed, xs = x[indices]",
    ),
    "named inside": (
        lambda x, c, t: rlfx.series(2.0 * c, start=0.5)[t - 1],
        lambda t: 2 * X[t - 1] if t else 0.5,
        "A series is named and read",
        "Name and read it before",
    ),
    "solve": (
        lambda x, c, t: rlfx.solve(lambda s: 0.5 * s[t - 1] + c, start=0.0),
        lambda t: sum(X[s] * 0.5 ** (t - s) for s in range(t + 1)),
        "rlfx.solve stands",
        "Solve before",
    ),
    "mean of a read": (
        lambda x, c, t: rlfx.mean(x[0]),
        lambda t: 1.0,
        "Other timesteps or environments are read",
        "Read them before, and use the value inside",
    ),
    "return": (
        lambda x, c, t: rlfx.discounted_sum(x[t:], 0.5),
        lambda t: sum(X[s] * 0.5 ** (s - t) for s in range(t, T)),
        "A slice of a series is read",
        "Reduce it before",
    ),
}
#: What is moved out, where the number of iterations is known.
MOVED = {
    "before": (lambda x, c, t: x[t - 1], lambda t: X[t - 1] if t else 0.1),
    "after": (lambda x, c, t: x[t + 1], lambda t: X[t + 1] if t + 1 < T else 0.2),
    "window": (lambda x, c, t: x.window(-1, 1).sum(), lambda t: X[max(t - 1, 0) : t + 1].sum()),
    "mean": (lambda x, c, t: rlfx.mean(c), lambda t: X.mean()),
}
#: Slices as operands of what runs no single timestep of them.
OPERANDS = {
    "an operand of cond": lambda s, c: jax.lax.cond(c > 0, jnp.sum, jnp.max, s),
    "an operand of switch": lambda s, c: jax.lax.switch(c.astype(jnp.int32), [jnp.sum, jnp.max, jnp.min], s),
    "closed over by cond": lambda s, c: jax.lax.cond(c > 0, lambda: s.sum(), lambda: c),
    "closed over by scan": lambda s, c: jax.lax.scan(lambda a, k: (a + k * s.sum(), None), c, TWICE)[0],
    "closed over by fori_loop": lambda s, c: jax.lax.fori_loop(0, 2, lambda i, a: a + s.sum(), c),
    "an element in fori_loop": lambda s, c: jax.lax.fori_loop(0, 2, lambda i, a: a + s[i], c),
    "in while_loop": lambda s, c: jax.lax.while_loop(lambda a: a < 3, lambda a: a + 1 + s.sum(), c),
}


def values(members):
    """``{name: (x, c, t) -> number}`` at every t, of one program."""

    def f(p, c, t):
        x = rlfx.series(c, start=0.1, end=0.2)
        return c * 1.3, {name: fn(x, c, t) for name, fn in members.items()}

    return jax.jit(rlfx.unroll(f, length=T))(None, jnp.float32(1.0))[1]


def check(members, expected):
    got = values(members)
    for name in members:
        np.testing.assert_allclose(got[name], [expected(name, t) for t in range(T)], rtol=1e-5, err_msg=str(name))


def test_what_is_read_inside_is_refused_and_the_fix_works():
    """63 of them: refused in the words of what was written; read before, each is what it is by hand."""
    members = [*itertools.product(INSIDE, READS)]
    assert len(members) >= 50
    for inside, read in members:
        _, _, fact, fix = READS[read]
        with pytest.raises(ProgramError) as caught:
            rlfx.trace(
                lambda p, c, t, i=inside, r=read: (INSIDE[i][0](lambda: READS[r][0](rlfx.series(c), c, t), c, t), c),
                None, jnp.float32(1.0), length=T,
            )  # fmt: skip
        construct = WORDS.get(inside, "a condition (jax.lax.cond or switch, rlfx.every)")
        assert f"{fact} inside of {construct}" in str(caught.value)
        assert "at test_inside_loops.py:" in str(caught.value)
        assert f"Fix: {fix}" in str(caught.value)

    def before(inside, read):
        def member(x, c, t):
            v = READS[read][0](x, c, t)
            return INSIDE[inside][0](lambda: v, c, t)

        return member

    by_hand = lambda name, t: INSIDE[name[0]][1](READS[name[1]][1](t), X[t], t)  # noqa: E731
    check({m: before(*m) for m in members}, by_hand)


def test_what_depends_on_nothing_inside_is_moved_out():
    counted = [i for i in INSIDE if "without" not in WORDS.get(i, "")]
    members = {
        (i, r): lambda x, c, t, i=i, r=r: INSIDE[i][0](lambda: MOVED[r][0](x, c, t), c, t)
        for i, r in itertools.product(counted, MOVED)
    }
    check(members, lambda name, t: INSIDE[name[0]][1](MOVED[name[1]][1](t), X[t], t))


@pytest.mark.parametrize("name", OPERANDS)
def test_slices_are_no_operands(name):
    """Neither given nor closed over; reduced before, they are numbers."""
    for cut in (lambda x, t: x[: t + 1], lambda x, t: x[t:]):
        with pytest.raises(UnsupportedSliceOp) as caught:
            values({0: lambda x, c, t, cut=cut: OPERANDS[name](cut(x, t), c)})
        assert "a slice whose length depends on t" in str(caught.value)
        assert "at test_inside_loops.py:" in str(caught.value)
        fix = "Fix: Read a window of fixed length, x.window(lo, hi, fill=v), or reduce the slice first."
        assert fix in str(caught.value)


def test_windows_are_operands():
    got = values({name: lambda x, c, t, use=use: use(x.window(-1, 2, fill=0.5), c) for name, use in OPERANDS.items()})
    for t in range(T):
        s, c = np.array([X[i] if 0 <= i < T else 0.5 for i in (t - 1, t, t + 1)]), X[t]
        n = 0
        while c + n < 3:
            n += 1 + s.sum()
        expected = dict.fromkeys(OPERANDS, c + 2 * s.sum()) | dict.fromkeys(
            ["an operand of cond", "closed over by cond"], s.sum()
        )
        expected |= {
            "an operand of switch": s.max(),
            "an element in fori_loop": c + s[0] + s[1],
            "in while_loop": c + n,
        }
        for name in OPERANDS:
            np.testing.assert_allclose(got[name][t], expected[name], rtol=1e-5, err_msg=name)
