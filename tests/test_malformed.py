"""Every malformed call of a public function is refused in rlfx's words, and what is accepted is accepted on purpose."""

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import rlfx
import rlfx.profile
import rlfx.transforms.incrementalize
from tests.malformed import (
    BYTES,
    COUNT,
    FLAG,
    FUNCTION,
    KEYED,
    NATURAL,
    NOTHING,
    NUMBER,
    OPTIONAL,
    SHAPED,
    TREE,
    Signature,
    takes,
)

KEY = jax.random.key(0)


@dataclass
class Step:
    reward: Any
    terminated: Any
    truncated: Any
    final_obs: Any


def program(p, c, t):
    return c, c


def idle(p, c, t):
    return jnp.float32(0.0), c


def batch_loss(w, x):
    return jnp.mean(x * w)


def closed_jaxpr():
    return jax.make_jaxpr(batch_loss)(1.0, jnp.ones(6))


def step_of(t):
    return Step(1.0 * t, t > 2, t > 1, jnp.float32(1.0))


def returns_of(t):
    return {"step": step_of(t), "next_value": 1.0 * t, "gamma": 0.9}


TRACED = rlfx.trace(idle, jnp.float32(1.0), jnp.zeros(3), length=4, batch=3)
COMPILED = rlfx.compile(idle, length=4, batch=3)
CALLED = {"params": jnp.float32(1.0), "carry": jnp.zeros(3), "key": KEY, "t0": 0}
LIKE = {"params": jnp.float32(1.0), "carry": jnp.zeros(3)}


def shapes_of(fn):
    """``fn`` traced, and not compiled."""
    return lambda **given: jax.eval_shape(lambda: fn(**given))


DOMAIN = {"length": COUNT, "batch": COUNT | OPTIONAL, "until": OPTIONAL | FUNCTION}


def shapes_of_args(fn):
    return lambda *args: jax.eval_shape(lambda: fn(*args))


def shapes_of_shuffle(key, **given):
    return jax.eval_shape(lambda: rlfx.shuffle(key, **given))


def captured(**options):
    with mock.patch("jax.profiler.start_trace", side_effect=Started), contextlib.suppress(Started):
        rlfx.profile.capture(**options).__enter__()


class Started(Exception):
    """The capture began: its arguments were accepted."""


PROGRAM = {
    "mesh": OPTIONAL,
    "mesh_axis": OPTIONAL | takes("a name", "any name: without a mesh it is not looked for"),
    "transform": OPTIONAL | FUNCTION,
    "prng": OPTIONAL,
}
REDUCE = {"reduce": NOTHING}
PLAN = {
    "plan": OPTIONAL | takes("Plan", "a plan"),
    "memory_budget": OPTIONAL | BYTES | takes("2.5 | np.float64", "a number of bytes"),
    "autotune": FLAG,
}
ARGUMENTS = {
    "params": KEYED,
    "carry": takes("", "every leaf has the axis of the environments") | takes("None | () | {}", "no leaves"),
    "key": takes("None | key", "a key, or none"),
    "t0": takes("0 | 1 | -1 | np.int64", "any int32: it is the absolute time of the first timestep"),
}
BLOCKS = {
    "batch_argnums": NATURAL
    | takes("() | set | [1, 2, 3]", "positions; that there are such arguments is seen in the call"),
    "block_size": COUNT,
    "strict": FLAG,
}
HOSTED = {"names": takes("()", "no names"), "min_bytes": NATURAL}
BROADCAST = NUMBER | SHAPED
FLOATS = takes("2.5 | nan | inf | np.float64", "of the dtype of the other side")
ENDS = NUMBER | takes("True | np.bool_", "as in a promotion of jax")
ANY_FUNCTION = FUNCTION | takes("lambda: | lambda 7", "a function of whatever it is called with")
ITS_DEFAULT = takes("1", "its default, as if it was not given")

OUTSIDE = [
    Signature(
        "compile", rlfx.compile, {"f": program, "length": 4}, {"f": FUNCTION, **DOMAIN, **REDUCE, **PROGRAM, **PLAN}
    ),
    Signature("unroll", rlfx.unroll, {"f": program, "length": 4}, {"f": FUNCTION, **DOMAIN, **PROGRAM}),
    Signature(
        "reference",
        rlfx.reference,
        {"f": program, "length": 4},
        {"f": FUNCTION, **DOMAIN, **REDUCE, "loss": FLAG | OPTIONAL},
    ),
    Signature(
        "trace",
        rlfx.trace,
        {"f": idle, "params": jnp.float32(1.0), "carry": jnp.float32(1.0), "length": 4},
        {
            "f": FUNCTION,
            "params": KEYED,
            "carry": TREE | takes("key", "keys are arrays"),
            "key": ARGUMENTS["key"],
            "length": COUNT,
            "batch": OPTIONAL,
            "reduce": NOTHING,
            "until": OPTIONAL | FUNCTION,
            "loss": FLAG,
        },
    ),
    Signature(
        "lower",
        rlfx.lower,
        {"program": TRACED},
        {"program": NOTHING, "mesh": OPTIONAL, "mesh_axis": PROGRAM["mesh_axis"]},
    ),
    Signature("compiled", shapes_of(COMPILED), CALLED, ARGUMENTS),
    Signature(
        "lowered",
        shapes_of(rlfx.lower(TRACED)),
        CALLED,
        {**ARGUMENTS, "params": takes("2.5 | nan | inf | np.float64", "float32[], as it was traced"), "carry": NOTHING},
    ),
    Signature("referred", rlfx.reference(idle, length=1, batch=3), CALLED, ARGUMENTS),
    Signature(
        "compiled.explain",
        COMPILED.explain,
        {k: CALLED[k] for k in ("params", "carry")},
        {"params": ARGUMENTS["params"], "carry": ARGUMENTS["carry"], "key": ARGUMENTS["key"], "measure": FLAG},
    ),
    Signature(
        "compiled.plan",
        COMPILED.plan,
        {k: CALLED[k] for k in ("params", "carry")},
        {"params": ARGUMENTS["params"], "carry": ARGUMENTS["carry"], "key": ARGUMENTS["key"]},
    ),
    Signature(
        "Plan",
        rlfx.Plan,
        {"form": "blocks", "block": 2},
        {
            "form": NOTHING,
            "block": COUNT,
            "environments": COUNT | OPTIONAL,
            "offload": BYTES | OPTIONAL,
            "cached": FLAG,
        },
    ),
    Signature("Plan.from_json", rlfx.Plan.from_json, {"text": rlfx.Plan().to_json()}, {"text": NOTHING}),
    Signature(
        "use_all_cores", rlfx.use_all_cores, {"count": 1}, {"count": COUNT | OPTIONAL, "batch": COUNT | OPTIONAL}
    ),
    Signature(
        "shuffle",
        shapes_of_shuffle,
        {"key": KEY, "n": 5},
        {
            "key": takes("key", "a key"),
            "n": COUNT,
            "positions": OPTIONAL | takes("0 | 1 | -1 | np.int64 | [1, 2, 3] | i32[5]", "integers"),
        },
    ),
    Signature(
        "minibatch_epochs",
        shapes_of(rlfx.minibatch_epochs),
        {
            "update": lambda c, x: (c, None),
            "carry": 0.0,
            "data": jnp.ones((4, 2)),
            "epochs": 1,
            "minibatches": 2,
            "key": KEY,
        },
        {
            "update": FUNCTION,
            "carry": KEYED,
            "data": takes("[2, 7]", "an array with the axes T and B"),
            "epochs": COUNT,
            "minibatches": COUNT,
            "key": takes("key", "a key"),
            "axis": NOTHING,
            "shuffle": FUNCTION,
            "mesh": OPTIONAL,
            "mesh_axis": takes("a name", "any name: without a mesh it is not looked for"),
        },
    ),
    Signature("vectorize", rlfx.vectorize, {"target": program}, {"target": FUNCTION, "over": NOTHING}),
    Signature("vectorize a program", rlfx.vectorize, {"target": TRACED}, {"over": NOTHING}),
    Signature(
        "incrementalize",
        rlfx.incrementalize,
        {"target": batch_loss, "block_size": 2},
        {"target": ANY_FUNCTION, "over": OPTIONAL, **BLOCKS},
    ),
    Signature(
        "incrementalize into blocks", rlfx.incrementalize, {"target": batch_loss, "blocks": 2}, {"blocks": COUNT}
    ),
    Signature(
        "incrementalize a program",
        rlfx.incrementalize,
        {"target": TRACED, "over": "t", "block_size": 2},
        {"over": OPTIONAL, "block_size": COUNT, "batch_argnums": ITS_DEFAULT, "blocks": OPTIONAL, "strict": NOTHING},
    ),
    Signature(
        "incrementalize t and b",
        rlfx.incrementalize,
        {"target": program, "over": "tb", "block_size": (2, 1)},
        {"target": FUNCTION, "block_size": NOTHING},
    ),
    Signature(
        "incrementalize_jaxpr",
        rlfx.transforms.incrementalize.incrementalize_jaxpr,
        {"jaxpr": closed_jaxpr(), "batched": [False, True], "block_size": 2},
        {"jaxpr": NOTHING, "batched": NOTHING, "block_size": COUNT, "blocks": OPTIONAL},
    ),
    Signature(
        "in blocks",
        shapes_of_args(rlfx.incrementalize(lambda w, x: x.sum(), block_size=2)),
        {"w": jnp.float32(1.0), "x": jnp.ones(6)},
        {"w": KEYED, "x": SHAPED},
        ("w", "x"),
    ),
    Signature(
        "offload",
        rlfx.offload,
        {"target": batch_loss, "block_size": 2},
        {"target": ANY_FUNCTION, "batch_argnums": BLOCKS["batch_argnums"], "block_size": COUNT, "form": NOTHING},
    ),
    Signature(
        "offload stored values",
        rlfx.offload,
        {"target": program, "min_bytes": 1},
        {
            "target": FUNCTION,
            **HOSTED,
            "batch_argnums": ITS_DEFAULT,
            "block_size": OPTIONAL,
            "blocks": OPTIONAL,
            "form": NOTHING,
        },
    ),
    Signature("offload of a program", rlfx.offload, {"target": TRACED, "min_bytes": 1}, HOSTED),
    Signature("operation", rlfx.profile.operation, {"name": "a"}, {"name": takes("a name", "a name")}),
    Signature("phase", rlfx.profile.phase, {"name": "a"}, {"name": takes("a name", "a name")}),
    Signature(
        "capture",
        captured,
        {},
        {
            "directory": OPTIONAL | takes("a name", "a path"),
            "steps": NATURAL,
            "process": OPTIONAL | takes("a name", "a name"),
            "python_tracer": FLAG,
            "host_level": takes("1 | np.int64", "a level"),
        },
    ),
    Signature(
        "sampled",
        rlfx.profile.sampled,
        {"function": batch_loss},
        {
            "function": ANY_FUNCTION | takes("class | mesh", "anything callable"),
            "directory": OPTIONAL | takes("a name", "a path"),
            "calls": COUNT,
            "skip": NATURAL,
            "steps": NATURAL,
            "process": OPTIONAL | takes("a name", "a name"),
            "python_tracer": FLAG,
            "host_level": takes("1 | np.int64", "a level"),
            "no_such_option": NOTHING,
        },
    ),
    Signature("read", rlfx.profile.read, {"directory": "."}, {"directory": NOTHING}),
]

INSIDE = [
    Signature("series", rlfx.series, lambda t: {"value": 1.0 * t}, {"value": KEYED}, inside=True),
    Signature(
        "series with ends",
        rlfx.series,
        lambda t: {"value": 1.0 * t, "start": 0.0, "end": 0.0},
        {"start": ENDS | OPTIONAL, "end": ENDS | OPTIONAL},
        inside=True,
    ),
    Signature(
        "inputs",
        rlfx.inputs,
        lambda t: {"xs": jnp.ones((4, 3))},
        {"xs": takes("None | () | {}", "no leaves"), "axes": NOTHING},
        inside=True,
    ),
    Signature(
        "solve",
        rlfx.solve,
        lambda t: {"fn": lambda x: x[t - 1] + 1.0, "start": 0.0},
        {"fn": FUNCTION, "end": ENDS | OPTIONAL},
        inside=True,
    ),
    *(
        Signature(
            name,
            getattr(rlfx, name),
            lambda t: {"x": 1.0 * t},
            {"x": TREE | (takes("key", "its last value") if name == "last" else NOTHING), "over": NOTHING},
            inside=True,
        )
        for name in ("sum", "mean", "max", "min", "std", "last")
    ),
    Signature(
        "every",
        rlfx.every,
        lambda t: {"n": 2, "fn": lambda: 1.0, "otherwise": 0.0},
        {"n": COUNT, "fn": FUNCTION, "otherwise": FLOATS},
        inside=True,
    ),
    Signature(
        "shared",
        rlfx.shared,
        lambda t: {"fn": lambda x: 0.0, "x": 1.0 * t},
        {"fn": FUNCTION, "x": KEYED},
        ("fn", "x"),
        inside=True,
    ),
    Signature(
        "discounted_sum",
        rlfx.discounted_sum,
        lambda t: {"rewards": rlfx.series(1.0 * t)[t:], "discount": 0.9},
        {"rewards": SHAPED | takes("() | [1, 2, 3]", "an array"), "discount": NUMBER},
        inside=True,
    ),
    Signature(
        "next_value",
        rlfx.next_value,
        lambda t: {"critic": lambda obs: obs, "step": step_of(t), "value": 1.0 * t},
        {"critic": FUNCTION, "step": NOTHING, "value": FLOATS},
        inside=True,
    ),
    Signature(
        "gae",
        rlfx.gae,
        lambda t: {**returns_of(t), "value": 0.0, "lam": 0.9},
        {"step": NOTHING, **dict.fromkeys(("value", "next_value", "gamma", "lam"), BROADCAST)},
        inside=True,
    ),
    Signature(
        "lambda_return",
        rlfx.lambda_return,
        lambda t: {**returns_of(t), "lam": 0.9},
        {"step": NOTHING, **dict.fromkeys(("next_value", "gamma", "lam"), BROADCAST)},
        inside=True,
    ),
    Signature(
        "n_step_return",
        rlfx.n_step_return,
        lambda t: {**returns_of(t), "n": 2},
        {"step": NOTHING, "next_value": BROADCAST, "gamma": BROADCAST, "n": COUNT},
        inside=True,
    ),
    Signature(
        "vtrace",
        rlfx.vtrace,
        lambda t: {**returns_of(t), "value": 0.0, "log_rho": 0.0},
        {
            "step": NOTHING,
            **dict.fromkeys(("value", "next_value", "log_rho", "gamma", "lam", "clip_rho", "clip_c"), BROADCAST),
        },
        inside=True,
    ),
]

SIGNATURES = [*OUTSIDE, *INSIDE]


@contextlib.contextmanager
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_malformed_calls_are_refused_in_our_words(signature):
    with usual_promotion():
        calls = list(signature.malformed())
        wrong = [(c, o) for c, o in zip(calls, signature.outcomes(calls), strict=True) if not o.startswith("rlfx")]
    assert not wrong, "\n".join(f"{n}={w}: {o}" for (n, w), o in wrong)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.name)
def test_what_is_accepted_is_accepted_on_purpose(signature):
    with usual_promotion():
        calls = list(signature.accepted())
        wrong = [(c, o) for c, o in zip(calls, signature.outcomes(calls), strict=True) if o != "accepted"]
    assert not wrong, "\n".join(f"{n}={w}: {o}" for (n, w), o in wrong)
