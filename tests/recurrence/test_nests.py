"""Programs called in programs: names of dimensions, what is seen of an inner program, and nests against plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import BoundaryError, CausalityError, DomainError, ProgramError, UnsupportedSliceOp
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.verify import verify
from tests.recurrence import duals, nests
from tests.sampling import spread

T, B, I = 2, 2, 2
KEY = jax.random.key(0)


def act(w, x, t):
    noise = 0.1 * jax.random.normal(t.key)
    value = rlfx.series(w["v"] * x, end=0.0)
    advantage = jax.lax.stop_gradient(rlfx.solve(lambda a: value[t + 1] - x**2 + 0.9 * a[t + 1], end=0.0))
    return (w["k"] * x + noise - 1.0) ** 2 * advantage + value[t] ** 2, 0.9 * x + 0.1 * noise


def fall(w, x, t):
    return w["k"] * jnp.sin(x), x * w["v"] + 0.1 * t


loss_fn, unrolled = rlfx.compile(act, length=T, batch=B), rlfx.unroll(fall, length=T, batch=B)


def learn(rate, c, i):
    """An iteration: a value and gradient, a value, and a gradient of what is stacked; the parameters one iteration behind."""
    w, x = c
    ws = rlfx.series(w, start=w)
    (loss, (x, _)), grads = jax.value_and_grad(lambda w: loss_fn(w, x, i.key), has_aux=True)(ws[i - 1])
    more = jax.grad(lambda w: jnp.mean(unrolled(w, x)[1] ** 2))(w)
    test = loss_fn(w, x, i.key_for("test"))[0]
    w = jax.tree.map(lambda p, g, h: p - rate * g - 0.1 * h, w, grads, more)
    losses = rlfx.series(loss)
    return (w, x), (losses[: i + 1].mean(), test)


PARAMS = {"k": jnp.float32(0.1), "v": jnp.float32(0.2)}
CARRY = PARAMS, jnp.array([0.5, -1.0])
train = rlfx.unroll(learn, length=I, dim="i")


# -- names -------------------------------------------------------------------------------------------------------------


def member(_, w, i):
    """A member of a population, which knows its number, what all do, and the one before."""
    ws = rlfx.series(w, start=-1.0)
    return w + rlfx.mean(w, over="p"), (i.index("p"), ws[i - 1], rlfx.sum(w, over=("i", "p")), rlfx.max(w, "ip"))


def test_names_of_dimensions():
    f = rlfx.unroll(member, length=3, dim="i", batch={"p": 2})
    end, (number, before, total, most) = f(None, jnp.array([1.0, 2.0]))
    w = [np.array([1.0, 2.0])]
    for _ in range(3):
        w.append(w[-1] + w[-1].mean())
    np.testing.assert_allclose(end, w[3])
    np.testing.assert_array_equal(number, [[0, 1]] * 3)
    np.testing.assert_allclose(before, [[-1, -1], w[0], w[1]])
    np.testing.assert_allclose(total, np.full((3, 2), np.sum(w[:3])))
    np.testing.assert_allclose(most, np.full((3, 2), np.max(w[:3])))
    got = rlfx.reference(member, length=3, dim="i", batch={"p": 2}, loss=False)(None, jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(got[1][1], before)


def test_what_is_printed_has_the_names():
    f = rlfx.unroll(member, length=3, dim="i", batch={"p": 2})
    text = str(f.trace(None, jnp.ones(2)))
    assert text.splitlines()[0] == "member   I=3 P=2"
    assert "given  key=c i=a p=d" in text
    assert "[i - 1] (start=-1)" in text
    assert "reduce[op=sum over=i+p]" in text
    assert text.splitlines()[3].startswith("  ip ")
    assert "all i" in str(f.explain(None, jnp.ones(2), verbose=True))
    assert "because of x[i - 1] (past)" in str(train.explain(0.1, CARRY, KEY, verbose=True))
    assert "all i: " in str(f.physical(None, jnp.ones(2)))
    scopes = str(jax.jit(f).lower(None, jnp.ones(2)).as_text(debug_info=True))
    assert "rlfx.stage/1 forward scan over i" in scopes
    long = rlfx.unroll(lambda p, c, n: (c, rlfx.mean(c, over="agent")), length=2, dim="round", batch={"agent": 2})
    assert "ROUND=2 AGENT=2" in str(long.trace(None, jnp.ones(2)))
    assert long(None, jnp.array([1.0, 3.0]))[1].shape == (2, 2)


def _made_inside(w):
    kept = []

    def act(p, c, t):
        kept.append(rlfx.series(c))
        return c, c

    rlfx.unroll(act, length=2)(None, w)
    return kept[0]


def _deep(w):
    def deep(p, c, t):
        return c, rlfx.series(c, start={"i": 0.0})[t]

    return rlfx.unroll(deep, length=2)(None, w)[1]


REFUSED = {
    "a boundary": (
        lambda w, i: rlfx.series(w)[i - 1],
        BoundaryError,
        "x[i - 1] is read before the first i, and the series has no value there.",
    ),
    "a circle": (
        lambda w, i: rlfx.solve(lambda x: x[i - 1] + x[i + 1], start=0.0, end=0.0),
        CausalityError,
        "i + 1",
    ),
    "another name": (lambda w, i: rlfx.mean(w, over="t"), DomainError, 'over must be "i", "p" or both, got \'t\''),
    "an axis that is not there": (
        lambda w, i: i.index("b"),
        DomainError,
        "index('b') asks for a position on a parallel axis of the program, and its parallel axis is 'p'.",
    ),
    "its own dimension": (lambda w, i: i.index("i"), DomainError, "the number of i is i.now"),
    "an axis of the program around it": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, rlfx.mean(c, over="p")), length=2)(None, w),
        DomainError,
        "over='p' in <lambda> (over t): p is an axis of outer (over i), which calls it.",
    ),
    "the dimension of the program around it": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, rlfx.mean(c, over="i")), length=2)(None, w),
        DomainError,
        "over='i' in <lambda> (over t): i is the dimension of outer (over i), which calls it.",
    ),
    "a boundary inside": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, rlfx.series(c)[t - 1]), length=2)(None, w),
        BoundaryError,
        "x[t - 1] is read before the first timestep",
    ),
    "inputs": (lambda w, i: rlfx.inputs(jnp.ones((5, 2)))[i], DomainError, "its leading axes must be [4, 2] (i, p)"),
    "no key": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, jax.random.normal(t.key)), length=2)(None, w),
        ProgramError,
        "Fix: Call the compiled function with a key: <lambda>(params, carry, i.key).",
    ),
    "a length that differs": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, c), length=i.now + 1)(None, w),
        DomainError,
        "Fix: Give the longest that there is, an int, and let until= end what is shorter.",
    ),
    "the index for a length": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, c), length=i)(None, w),
        DomainError,
        "length= is computed, so it is known only when the program runs; a program is scheduled for one length.",
    ),
    "a series of the program around it": (
        lambda w, i: (lambda ws: rlfx.unroll(lambda p, c, t: (c, ws[i - 1]), length=2)(None, w))(rlfx.series(w)),
        DomainError,
        "Fix: Read it before the inner program is called, p = x[i - 1], and use p there.",
    ),
    "a series of the program inside": (
        lambda w, i: _made_inside(w)[i],
        DomainError,
        "A series of act (over t) is read in outer (over i), where it has no value.\n",
    ),
    "a value of the program inside": (
        lambda w, i: w + _made_inside(w)._leaves[0],
        ProgramError,
        "Fix: Return it from the program as aux instead of storing it.",
    ),
    "a circle through a call": (
        lambda w, i: rlfx.solve(
            lambda x: rlfx.unroll(lambda p, c, t: (c, p), length=2)(x[i - 1], w)[1][0] + x[i + 1], start=0.0, end=0.0
        ),
        CausalityError,
        "These reads depend on each other in a circle that needs both the past and the future of i:\n    x[i - 1] reads the past",
    ),
    "boundaries by the name of both": (
        lambda w, i: rlfx.unroll(lambda p, c, j: (c, rlfx.series(c, start={"i": 0.0})[j - 1]), length=2, dim="i")(
            None, w
        ),
        BoundaryError,
        "start={'i': ...} names the dimension of two programs, outer (over i) and <lambda> (over i).",
    ),
    "boundaries of what is further outside": (
        lambda w, i: rlfx.unroll(lambda p, c, k: (c, _deep(c)), length=2, dim="k")(None, w),
        BoundaryError,
        "start={'i': ...} names dimensions that are further outside than that of <lambda> (over k), which calls deep.\n",
    ),
    "boundaries by its own name alone": (
        lambda w, i: rlfx.series(w, start={"i": 0.0})[i - 1],
        BoundaryError,
        "Fix: Give start=v.",
    ),
    "a read inside of a gradient": (
        lambda w, i: jax.grad(lambda v: rlfx.series(v * w, start=0.0)[i - 1])(w),
        ProgramError,
        "jax.grad inside the program differentiates through a read of other i.",
    ),
    "a slice that is given": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, p.mean()), length=2)(rlfx.series(w)[: i + 1], w),
        UnsupportedSliceOp,
        "Fix: Reduce it before the inner program, or give that a window of fixed length: x.window(lo, hi, fill=v).",
    ),
    "the sum of two": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, rlfx.series(c, start=0.0)[i * 8 + t]), length=2)(None, w),
        DomainError,
        "The indices of two programs, outer (over i) and <lambda> (over t), are combined",
    ),
    "the index of the other": (
        lambda w, i: rlfx.unroll(lambda p, c, t: (c, rlfx.series(c, start=0.0)[i]), length=2)(None, w),
        DomainError,
        "of the other program use the number, i.now",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_the_names_of_the_program(case):
    read, error, text = REFUSED[case]

    def outer(_, w, i):
        return w, read(w, i)

    with pytest.raises(error) as caught:
        rlfx.unroll(outer, length=4, dim="i", batch={"p": 2})(None, jnp.ones(2))
    assert text in str(caught.value)
    assert "test_nests.py:" in str(caught.value)


def test_names_that_are_none():
    for given, text in (
        ({"dim": 3}, "dim must be a name"),
        ({"dim": "a b"}, "dim must be a name"),
        ({"dim": "b"}, "dim='b' is the name of the parallel axis, too"),
        ({"batch": {"p": 2, "q": 3}}, "batch must be the size of one parallel axis"),
        ({"batch": {"p": 0}}, "batch must be a positive integer"),
        ({"batch": {"t": 2}}, "dim='t' is the name of the parallel axis"),
    ):
        with pytest.raises(DomainError, match=text):
            rlfx.unroll(member, length=3, **given)


# -- what is seen of an inner program ----------------------------------------------------------------------------------


@functools.cache
def program():
    return train.trace(0.1, CARRY, KEY)


def test_a_call_is_one_equation():
    """A value, a value and gradient, a gradient of what is stacked: what they compute is in the inner program's equations."""
    calls = [e for e in program().equations if e.calls]
    assert [str(e.params["of"]) for e in calls] == [
        "act: value and gradient", "fall: value and gradient", "fall: pullback", "act",
    ]  # fmt: skip
    assert len(program().equations) < 75


def test_an_inner_program_is_printed_once():
    text = str(program())
    assert text.count("| act   T=2 B=2") == 1
    assert text.count("| fall   T=2 B=2") == 1
    assert "       |   tb" in text


def test_explain_is_a_tree():
    text = str(train.explain(0.1, CARRY, KEY, verbose=True))
    below = text[text.index("| act: value and gradient   T=2 B=2") :]
    assert "|   stage 1" in below
    assert "|  plan: the learner runs for all timesteps at once" in below
    assert "because of x[t + 1] (future)" in below
    assert "| fall: pullback" in text


def test_verify_sees_into_an_inner_program():
    call = next(e for e in program().equations if e.calls)
    of = call.params["of"]
    inner = dataclasses.replace(of.program, equations=of.program.equations[1:])
    rule = GradientRule(inner, of.rule.planner, of.rule.target)
    broken = dataclasses.replace(call, params={**call.params, "of": dataclasses.replace(of, rule=rule)})
    equations = tuple(broken if e is call else e for e in program().equations)
    with pytest.raises(ProgramError, match="What mine made of act is no program"):
        verify(dataclasses.replace(program(), equations=equations), "mine", program())


def test_the_cost_of_a_call_is_that_of_the_program():
    """Once, with or without a derivative around it."""
    from rlfx.recurrence.analysis.cost import flops_of

    def outer(w, c, i):
        return c, rlfx.unroll(lambda w, x, t: (w @ x, None), length=5)(w, jnp.ones(16))[0]

    traced = rlfx.unroll(outer, length=2, dim="i").trace(jnp.ones((16, 16)), None)
    (call,) = (e for e in traced.equations if e.calls)
    assert 5 * 2 * 16**2 <= flops_of(call, traced.domain) < 1.2 * 5 * 2 * 16**2


def test_a_nest_by_reference(monkeypatch):
    """Values and meta-gradients, without a compiled call."""
    ref = rlfx.reference(learn, length=I, loss=False, dim="i")
    of = lambda run: lambda rate: (lambda out: (jnp.sum(out[0]), out))(run(rate, CARRY, KEY)[1])  # noqa: E731
    (_, got), slope = jax.jit(jax.value_and_grad(of(train), has_aux=True))(0.1)
    monkeypatch.setattr(GradientRule, "__call__", None)
    (_, want), exact = jax.value_and_grad(of(ref), has_aux=True)(0.1)
    np.testing.assert_allclose(np.stack(got), np.stack(want), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, exact, rtol=1e-5)


def test_loops_and_branches_that_call_programs_by_reference():
    """Absolute times and ends of the program inside are numbers there, too: a loop is gone through in Python."""
    ending = {"length": 3, "until": lambda x: x > 0.9}
    grow = lambda w, x, t: (w * x * (1.0 + t), x + w, x)  # noqa: E731

    def outer(w, c, i):
        inner = lambda w, t0: rlfx.compile(grow, **ending)(w, 0.2, t0=t0)[0]  # noqa: E731
        looped = jax.lax.scan(lambda s, k: (s + inner(w, 2 * i.now + k), s), 0.0, jnp.arange(2), reverse=True)
        branch = jax.lax.cond(i.now % 2 == 0, lambda w: inner(w, i.now), lambda w: w**2, w)
        remade = jax.checkpoint(lambda w: inner(w, 1) ** 2)(w)
        counted = jax.lax.while_loop(
            lambda s: s[1] < 1.5, lambda s: (s[0] + 1, s[1] + inner(jnp.float32(0.5), 0)), (0, c)
        )
        return looped[0] + looped[1].sum() + branch + remade, c + 0.1, counted

    def by_loops(w):
        def inner(w, t0):
            x, total = 0.2, []
            for t in range(3):
                total.append(w * x * (1.0 + t0 + t))
                x = x + w
                if duals.number(x) > 0.9:
                    break
            return sum(total) / len(total)

        total, counts, c = 0.0, [], 0.0
        for i in range(2):
            first = inner(w, 2 * i + 1)
            branch, again = inner(w, i) if i % 2 == 0 else w * w, inner(w, 1)
            total = total + first + inner(w, 2 * i) + first + branch + again * again
            at, n = c, 0
            while at < 1.5:
                at, n = at + inner(0.5, 0), n + 1
            counts.append([n, at])
            c += 0.1
        return total * 0.5, counts

    want, slope, counts = duals.value_and_slope(by_loops, 0.4)
    for f in (rlfx.compile(outer, length=2, dim="i"), rlfx.reference(outer, length=2, dim="i")):
        (got, (_, counted)), grad = jax.value_and_grad(f, has_aux=True)(jnp.float32(0.4), jnp.float32(0.0))
        np.testing.assert_allclose([got, grad], [want, slope], rtol=1e-5)
        np.testing.assert_allclose(np.stack(counted, 1), counts, rtol=1e-5)


def test_second_order_where_environments_end():
    """The acting loop that ends early has a derivative, too: the value of an inner loss is differentiated again."""

    def inner(w, x, t):
        return w * rlfx.series(x, start=0.5)[t - 1] ** 2, x + w, rlfx.mean(x, "b")

    ending = rlfx.compile(inner, length=4, batch=2, until=lambda x: x > 1.0)

    def outer(_, w, i):
        start = jnp.array([0.1, 0.6]) * (1.0 + i)
        (loss, (x, mean, n)), g = jax.value_and_grad(lambda w: ending(w, start), has_aux=True)(w)
        return w - 0.1 * g, (loss, mean, x, n)

    run = rlfx.unroll(outer, length=3, dim="i")
    total = lambda w: (lambda o: o[0].sum() + o[1].sum() + o[2].sum())(run(None, w)[1])  # noqa: E731
    np.testing.assert_allclose(jax.grad(total)(jnp.float32(0.31)), jax.grad(_by_hand)(jnp.float32(0.31)), rtol=1e-5)


def _by_hand(w):
    total = 0.0
    for i in range(3):

        def loss(w, i=i):
            xs, losses, rest = [], [], 0.0
            for b in range(2):
                x, own = jnp.array([0.1, 0.6])[b] * (1 + i), []
                for t in range(4):
                    losses.append(w * (own[t - 1] if t else 0.5) ** 2)
                    own.append(x)
                    x = x + w
                    if x > 1.0:
                        break
                xs.append(own)
                rest += x
            for t in range(4):
                alive = [own[t] for own in xs if t < len(own)]
                rest += sum(alive) if alive else 0.0  # the mean, once for each that is there
            return sum(losses) / len(losses), rest

        (value, rest), g = jax.value_and_grad(loss, has_aux=True)(w)
        total += value + rest
        w = w - 0.1 * g
    return total


def test_a_run_goes_on_where_it_stopped():
    """With t0= of the outer program: the same draws, and the same bits."""

    def iteration(_, c, i):
        w, x = c
        (loss, (x, _)), g = jax.value_and_grad(lambda w: loss_fn(w, x, i.key, t0=T * i.now), has_aux=True)(w)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, w, g), x), loss

    whole, half = (jax.jit(rlfx.unroll(iteration, length=n, dim="i")) for n in (4, 2))
    end, losses = whole(None, CARRY, KEY)
    middle, first = half(None, CARRY, KEY)
    resumed, second = half(None, middle, KEY, t0=2)
    jax.tree.map(np.testing.assert_array_equal, (resumed, jnp.concatenate([first, second])), (end, losses))
    assert len(set(np.asarray(losses).tolist())) == 4


# -- nests at random ---------------------------------------------------------------------------------------------------


def _agree(seed, *, reference):
    level = nests.random_nest(seed)
    found = nests.compared(level, reference=reference)
    assert found["outcome"] in ("right", "close"), (seed, found, level)


@pytest.mark.parametrize("seed", [4, 8, 12])
def test_generated_nests(seed):
    _agree(seed, reference=seed == 8)


@pytest.mark.parametrize("seed", spread([1169, 2429, 1460], 1))
def test_derivatives_of_gradients_where_the_inner_environments_end(seed):
    """A branch of a mapped loop, a program inside of it, and a third derivative had none."""
    _agree(seed, reference=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(100))
def test_more_generated_nests(chunk):
    """2,000, of which 300 by reference; ``nest_sweep.py`` runs them one by one (``nests_swept.json``)."""
    for seed in range(1000 + 20 * chunk, 1020 + 20 * chunk):
        _agree(seed, reference=seed % 20 in nests.BY_REFERENCE)
    jax.clear_caches()


def test_the_loops_are_those_of_the_nest():
    """The oracle's derivatives, first and second order, are its differences."""
    level = next(
        n for n in map(nests.random_nest, range(1000)) if n.call == "gradient" and not n.until and not n.inner.until
    )
    loss = lambda w, x: duals.number(nests.Loops().run(level, w, x)[0])  # noqa: E731
    w, x = float(nests.W), float(nests.X)
    (_, _, by_w, by_x), _ = nests.loops_outcome(level)
    np.testing.assert_allclose(by_w, (loss(w + 1e-5, x) - loss(w - 1e-5, x)) / 2e-5, rtol=1e-6)
    np.testing.assert_allclose(by_x, (loss(w, x + 1e-5) - loss(w, x - 1e-5)) / 2e-5, rtol=1e-6)
