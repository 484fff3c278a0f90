"""Laws that need no oracle, over generated programs: a few of them by default, 200 with ``-m slow``."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.errors import RlfxError, ScheduleError
from rlfx.recurrence.execute.outputs import aux_dims
from tests import strategies
from tests.leaks import checking_leaks
from tests.recurrence.test_generated import QUICK, mismatches, outcome
from tests.strategies import GeneratedProgram, Statement

FEW, MANY = 2, 200
sizes = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])


def programs(count: int, fits: Callable[[GeneratedProgram], bool] = lambda p: True, **changes) -> Iterator:
    """The first programs that fit and are legal, with the outcome of each."""
    found = 0
    for seed in itertools.count(300_000):
        p = dataclasses.replace(strategies.program(seed, 2), **changes)
        if not fits(p):
            continue
        expected = run(p)
        if isinstance(expected, RlfxError):
            continue
        yield p, expected
        found += 1
        if found == count:
            return


def run(p: GeneratedProgram, fn: Callable | None = None, **options):
    fn = fn or rlfx.compile(p.function, **p.options(), **options)
    return outcome(fn, p, jit=True, options=QUICK)


def agree(p: GeneratedProgram, got, expected) -> None:
    found = mismatches(got, expected)
    assert not found, f"{p!r}" + "\n".join(found)


# -- plans -------------------------------------------------------------------------------------------------------------


def loss_and_gradient(p: GeneratedProgram, **options):
    params, carry, key = p.arguments()
    fn = rlfx.compile(p.function, **p.options(), **options)
    value_and_grad = jax.value_and_grad(lambda q: fn(q, carry, key, t0=p.t0), has_aux=True)
    return jax.jit(value_and_grad, compiler_options=QUICK)(params)


def plans(p: GeneratedProgram) -> list[Plan]:
    found = [Plan(form, b) for form in ("blocks", "stream", "replay") for b in (1, 2) if b <= p.length]
    return found if p.batch is None else [*found, Plan("blocks", 1, 1)]


def has_blocks(p: GeneratedProgram) -> bool:
    params, carry, key = p.arguments()
    fn = rlfx.compile(p.function, **p.options(), plan=Plan("blocks", 1))
    try:
        jax.eval_shape(jax.grad(lambda q: fn(q, carry, key)[0]), params)
    except RlfxError:
        return False
    return True


@sizes
def test_the_plan_does_not_matter(count: int):
    """Neither the form, nor the block, nor how many environments are taken at a time."""
    legal = 0
    for p, _ in programs(count, has_blocks, cotangents=False):
        expected = loss_and_gradient(p, plan=Plan())
        for plan in plans(p):
            try:
                got = loss_and_gradient(p, plan=plan)
            except ScheduleError:
                continue
            legal += 1
            agree(p, got, expected)
    assert legal


# -- rewriting the program ---------------------------------------------------------------------------------------------


@sizes
def test_scaling_the_loss_scales_the_gradient(count: int):
    for p, expected in programs(count, cotangents=False):
        scaled = dataclasses.replace(p, loss=f"-2.5 * {p.loss}")
        got = run(scaled)
        agree(p, got["gradients"], jax.tree.map(lambda g: -2.5 * g, expected["gradients"]))
        agree(p, got["loss"], -2.5 * expected["loss"])
        fn = rlfx.compile(p.function, **p.options())

        def after(*args, fn=fn, **kw):
            loss, rest = fn(*args, **kw)
            return -2.5 * loss, rest

        agree(p, run(p, after)["gradients"], got["gradients"])


IDENTITIES = [
    "{0}",
    "rlfx.series({0})[t]",
    "jax.jit(lambda z: z)({0})",
    "jax.checkpoint(lambda z: z)({0})",
    "jnp.where({0} == {0}, {0}, {0})",
    "jax.tree.map(lambda z: z, {0})",
]
DEAD = ["rlfx.series({0}, start={0})[t - 1]", "rlfx.sum({0})", "jax.random.normal(t.key_for('dead'))", "{0} / 0.0"]


def with_identities(p: GeneratedProgram) -> GeneratedProgram:
    statements = []
    for i, s in enumerate(p.statements):
        statements.append(s)
        if s.type in (strategies.F, strategies.V):
            statements.append(Statement(s.name, s.type, IDENTITIES[i % len(IDENTITIES)].format(s.name)))
            statements.append(Statement(f"dead{i}", "dead", DEAD[i % len(DEAD)].format(s.name)))
    return dataclasses.replace(p, statements=tuple(statements))


@sizes
def test_dead_code_and_identities_change_nothing(count: int):
    legal = 0
    for p, expected in programs(count):
        got = run(with_identities(p))
        # What is read beyond the end is evaluated there by its own equation, which a read of x[t] in its place is not.
        if not isinstance(got, rlfx.errors.BoundaryError):
            agree(p, got, expected)
            legal += 1
    assert legal


# -- symmetries --------------------------------------------------------------------------------------------------------


def tells_environments_apart(p: GeneratedProgram) -> bool:
    own = re.search(r"t\.key|v\[0\]|% \d+[\],]|lookup\(\w+, \w+ %", p.source)
    return p.batch is None or p.batch < 2 or own is not None


@sizes
def test_permuting_the_batch_permutes_the_results(count: int):
    for p, _ in programs(count, lambda p: not tells_environments_apart(p), cotangents=False):
        order = np.roll(np.arange(p.batch), 1)
        params, carry, key = p.arguments()
        fn = rlfx.compile(p.function, **p.options())
        dims = fn.trace(params, carry, key)

        def results(permute, p=p, params=params, carry=carry, key=key, fn=fn):
            moved = {k: v if k == "m" else jax.tree.map(lambda x: permute(x, 0), v) for k, v in carry.items()}
            data = params | {"xs": permute(params["xs"], 1)}
            grad = jax.value_and_grad(lambda q: fn(q, moved, key, t0=p.t0), has_aux=True)
            return jax.jit(grad, compiler_options=QUICK)(data)

        (loss, (final, aux, *lengths)), grads = results(lambda x, axis: x)
        (got_loss, (got_final, got_aux, *got_lengths)), got_grads = results(lambda x, axis: jnp.take(x, order, axis))
        agree(p, got_loss, loss)
        back = lambda tree, axis: jax.tree.map(lambda x: jnp.take(x, np.argsort(order), axis), tree)  # noqa: E731
        for name in final:
            agree(p, got_final[name] if name == "m" else back(got_final[name], 0), final[name])
        agree(p, back(got_lengths, 0), lengths)
        for axes, g, e in zip(aux_dims(dims), got_aux, aux, strict=True):
            agree(p, back(g, int("t" in axes)) if "b" in axes else g, e)
        agree(p, got_grads | {"xs": back(got_grads["xs"], 1)}, grads)


@sizes
def test_vmap_over_seeds_is_a_loop(count: int):
    for p, _ in programs(count, lambda p: "key" in p.source, cotangents=False):
        params, carry, _ = p.arguments()
        fn = rlfx.compile(p.function, **p.options())
        keys = jax.random.split(jax.random.key(5), 2)
        one = jax.value_and_grad(lambda q, k, fn=fn, carry=carry, p=p: fn(q, carry, k, t0=p.t0), has_aux=True)
        single = jax.jit(one, compiler_options=QUICK)
        many = jax.jit(jax.vmap(one, (None, 0)), compiler_options=QUICK)(params, keys)
        for i, k in enumerate(keys):
            agree(p, jax.tree.map(lambda x, i=i: x[i], many), single(params, k))


#: What depends on no other timestep but through the carry.
_LOCAL = [
    "number",
    "vector",
    "integer",
    "unary",
    "binary",
    "where",
    "every",
    "inner",
    "matmul",
    "pair",
    "element",
    "counting",
]
_LOCAL += ["compare", "from_integer", "shared"]


@sizes
def test_a_rollout_continues(count: int, monkeypatch):
    """T1 + T2 timesteps, the second part from the carry of the first at t0 + T1, are T timesteps."""
    monkeypatch.setattr(strategies, "_NAMES", _LOCAL)
    local = lambda p: p.length > 1 and p.until is None  # noqa: E731
    for p, _ in programs(count, local, cotangents=False, reduce="sum", aux=()):
        params, carry, key = p.arguments()
        first = 1 + p.seed % (p.length - 1)
        whole = rlfx.compile(p.function, **p.options())
        head, tail = (rlfx.compile(p.function, **p.options() | {"length": n}) for n in (first, p.length - first))

        def in_two(q, p=p, carry=carry, key=key, first=first, head=head, tail=tail):
            cut = lambda lo, hi: q | {k: q[k][lo:hi] for k in ("xs", "ts")}  # noqa: E731
            one, (between, _) = head(cut(0, first), carry, key, t0=p.t0)
            two, (final, _) = tail(cut(first, None), between, key, t0=p.t0 + first)
            return one + two, final

        def at_once(q, p=p, carry=carry, key=key, whole=whole):
            loss, (final, _) = whole(q, carry, key, t0=p.t0)
            return loss, final

        got, expected = (
            jax.jit(jax.value_and_grad(f, has_aux=True), compiler_options=QUICK)(params) for f in (in_two, at_once)
        )
        agree(p, got, expected)


# -- jax's own checks --------------------------------------------------------------------------------------------------


@sizes
def test_with_debug_nans(count: int):
    """Nothing that is computed and returned is NaN, with environments that end before T, too."""
    with jax.debug_nans(True):
        for p, expected in programs(count):
            agree(p, run(p), expected)


@sizes
def test_with_checking_leaks(count: int):
    for p, expected in programs(count):
        with checking_leaks():
            agree(p, run(p), expected)
