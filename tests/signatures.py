"""One valid call of every public function, and what each of its arguments takes: see tests/malformed.py."""

import collections
import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import rlfx
import rlfx.profile
import rlfx.profile.attach
import rlfx.transforms.incrementalize
from tests import signatures_envs, signatures_place
from tests.malformed import (
    ANY_FUNCTION,
    BROADCAST,
    BYTES,
    COUNT,
    ENDS,
    FLAG,
    FLOATS,
    FUNCTION,
    KEYED,
    NAME,
    NATURAL,
    NOTHING,
    NUMBER,
    OPTIONAL,
    SHAPED,
    TREE,
    WRONG,
    Signature,
    takes,
)
from tests.signatures_envs import CARTPOLE, ENVS, RESETTING
from tests.signatures_place import PLACE

KEY = jax.random.key(0)

# -- valid arguments --------------------------------------------------------------------------------------------------


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


def step_of(t):
    return Step(1.0 * t, t > 2, t > 1, jnp.float32(1.0))


def returns_of(t):
    return {"step": step_of(t), "next_value": 1.0 * t, "gamma": 0.9}


def data_of(t):
    return {"rewards": rlfx.series(1.0 * t)[t:], "discount": 0.9}


def shapes_of(fn):
    """``fn`` traced, and not compiled."""
    return lambda *args, **given: jax.eval_shape(lambda: fn(*args, **given))


def shuffled(**given):
    return jax.eval_shape(lambda: rlfx.shuffle(**given))


class Started(Exception):
    """The capture began: its arguments were accepted."""


def captured(**options):
    with mock.patch("jax.profiler.start_trace", side_effect=Started), contextlib.suppress(Started):
        rlfx.profile.capture(**options).__enter__()


def spied(**options):
    with mock.patch("rlfx.profile.attach._program", side_effect=Started), contextlib.suppress(Started):
        rlfx.profile.attach.spy(**options)


def returned(x):
    return x


def compiled_ahead(fn, x, **options):
    with mock.patch("rlfx.ahead.process.run", side_effect=Started), contextlib.suppress(Started):
        rlfx.target("cpu:2").compile(fn, x, **options)


TRACED = rlfx.trace(idle, jnp.float32(1.0), jnp.zeros(3), length=4, batch=3)
COMPILED = rlfx.compile(idle, length=4, batch=3)
REFERENCE = rlfx.reference(idle, length=1, batch=3)
IN_BLOCKS = rlfx.incrementalize(lambda w, x: x.sum(), block_size=2)
REPORT = rlfx.profile.Report([], {}, {}, collections.Counter(), {}, [], [])
JAXPR = jax.make_jaxpr(batch_loss)(1.0, jnp.ones(6))
F = {"f": program, "length": 4}
PLAIN = {"params": jnp.float32(1.0), "carry": jnp.zeros(3)}
CALLED = {**PLAIN, "key": KEY, "t0": 0}
STATES = jax.vmap(RESETTING.reset)(jax.random.split(KEY, 3))
EPOCHS = {
    "update": lambda c, x: (c, None),
    "carry": 0.0,
    "data": jnp.ones((4, 2)),
    "epochs": 1,
    "minibatches": 2,
    "key": KEY,
}

# -- what arguments take ----------------------------------------------------------------------------------------------

MESH = {"mesh": OPTIONAL, "mesh_axis": NAME}  # without a mesh the name is not looked for
ITS_DEFAULT = takes("1", "its default, as if it was not given")
A_KEY = takes("key", "a key")
VALUE = BROADCAST | takes("True | np.bool_ | 1j | [1, 2, 3] | dict", "a pytree of numbers")
NO_LEAVES = takes("None | () | {}", "no leaves, whose shapes could be wrong")
MARKS = OPTIONAL | takes("True | np.bool_", "a bool for all leaves")
LEVEL = takes("1 | np.int64", "one of the levels")
DOMAIN = {"length": COUNT, "batch": COUNT | OPTIONAL, "until": OPTIONAL | FUNCTION, "dim": NOTHING}
PROGRAM = {**MESH, "mesh_axis": NAME | OPTIONAL, "transform": OPTIONAL | FUNCTION, "prng": OPTIONAL}
PLAN = {
    "plan": OPTIONAL | takes("Plan", "a plan"),
    "memory_budget": OPTIONAL | BYTES | takes("2.5 | np.float64", "a number of bytes"),
    "autotune": FLAG,
}
POINT = {"params": KEYED, "carry": NO_LEAVES, "key": A_KEY | OPTIONAL}
TIMES = takes("0 | 1 | -1 | np.int64", "any int32: it is the absolute time of the first timestep")
ARGNUMS = NATURAL | takes("() | set | [1, 2, 3]", "positions; that there are such arguments is seen in the call")
STORED = {"as_": NOTHING, "names": takes("()", "no names")}
HOSTED = {"names": takes("()", "no names"), "min_bytes": NATURAL}
CAPTURE = {"process": OPTIONAL | NAME, "python_tracer": FLAG, "host_level": LEVEL}

# -- the table ----------------------------------------------------------------------------------------------------------

# fmt: off
COMPILER = [
    Signature("History", rlfx.History, {"capacity": 3, "like": jnp.zeros(2)},
              {"capacity": COUNT, "batch": COUNT | OPTIONAL, "like": VALUE}),
    Signature("compile", rlfx.compile, F, {"f": FUNCTION, **DOMAIN, "reduce": NOTHING, **PROGRAM, **PLAN}),
    Signature("unroll", rlfx.unroll, F, {"f": FUNCTION, **DOMAIN, **PROGRAM, **{k: PLAN[k] for k in ("plan", "memory_budget")}}),
    Signature("reference", rlfx.reference, F, {"f": FUNCTION, **DOMAIN, "reduce": NOTHING, "loss": FLAG | OPTIONAL}),
    Signature("trace", rlfx.trace, {"f": idle, **PLAIN, "length": 4},
              {"f": FUNCTION, **POINT, "carry": KEYED, "length": COUNT, "batch": OPTIONAL | takes("", "3 are given"),
               "reduce": NOTHING, "until": OPTIONAL | FUNCTION, "loss": FLAG, "dim": NOTHING}),
    Signature("lower", rlfx.lower, {"program": TRACED}, {"program": NOTHING, **MESH, "mesh_axis": NAME | OPTIONAL}),
    Signature("compiled", shapes_of(COMPILED), CALLED, {**POINT, "t0": TIMES}),
    Signature("referred", REFERENCE, CALLED, {**POINT, "t0": TIMES}),
    Signature("lowered", shapes_of(rlfx.lower(TRACED)), CALLED,
              {"params": FLOATS, "carry": NOTHING, "key": A_KEY | OPTIONAL, "t0": TIMES}),
    Signature("compiled.trace", COMPILED.trace, PLAIN, POINT),
    Signature("compiled.explain", COMPILED.explain, PLAIN,
              {**POINT, "wrt": MARKS, "measure": FLAG, "target": OPTIONAL, "verbose": FLAG}),
    Signature("explain", rlfx.explain, {"f": lambda x: COMPILED(jnp.float32(1.0), jnp.zeros(3)), "x": jnp.ones(3)},
              {"f": takes("", "functions: what they are given they answer for", unasked="class | lambda: | lambda 7 | mesh"),
               "x": TREE | NO_LEAVES | A_KEY, "measure": FLAG, "verbose": FLAG}, ("f", "x")),
    Signature("compiled.plan", COMPILED.plan, PLAIN, {**POINT, "wrt": MARKS}),
    Signature("compiled.physical", COMPILED.physical, PLAIN, {**POINT, "wrt": MARKS}),
    Signature("target", rlfx.target, {"name": "h200"}, {"name": OPTIONAL}),
    Signature("target.compile", compiled_ahead, {"fn": returned, "x": jnp.ones(3), "limit": 5},
              {"fn": takes("", "functions: what they are given they answer for", unasked="class | lambda: | lambda 7 | mesh"),
               "x": TREE | NO_LEAVES | A_KEY, "limit": takes("1 | 2.5 | 2**40 | np.int64 | np.float64", "seconds")}, ("fn", "x")),
    Signature("target.mesh", lambda name: rlfx.target("h200:8").mesh(name), {"name": "b"}, {"name": NAME}),
    Signature("Plan", rlfx.Plan, {"form": "blocks", "block": 2},
              {"form": NOTHING, "block": COUNT, "environments": COUNT | OPTIONAL, "offload": BYTES | OPTIONAL, "cached": FLAG}),
    Signature("Plan.from_json", rlfx.Plan.from_json, {"text": rlfx.Plan().to_json()}, {"text": NOTHING}),
    Signature("use_all_cores", rlfx.use_all_cores, {"count": 1},
              {"count": takes("None | 1", "as many as there are in a test", unasked="np.int64"), "batch": COUNT | OPTIONAL}),
    Signature("shuffle", shuffled, {"key": KEY, "n": 5},
              {"key": A_KEY, "n": COUNT,
               "positions": OPTIONAL | takes("0 | 1 | -1 | np.int64 | [1, 2, 3] | i32[5]", "integers: they wrap")}),
    Signature("minibatch_epochs", shapes_of(rlfx.minibatch_epochs), EPOCHS,
              {"update": FUNCTION, "carry": KEYED, "data": takes("[2, 7]", "an array of two axes"), "epochs": COUNT,
               "minibatches": COUNT, "key": A_KEY, "axis": NOTHING, "shuffle": FUNCTION, **MESH}),
]

TRANSFORMS = [
    Signature("vectorize", rlfx.vectorize, {"target": program}, {"target": FUNCTION, "over": NOTHING}),
    Signature("remat", rlfx.remat, {"target": program, "every": 2}, {"target": FUNCTION, "every": COUNT}),
    Signature("store", rlfx.store, {"x": jnp.ones(2), "as_": "bfloat16"}, STORED, ("x",)),
    Signature("store of a program", rlfx.store, {"x": TRACED, "as_": "bfloat16"}, STORED, ("x",)),
    Signature("vectorize a program", rlfx.vectorize, {"target": TRACED}, {"over": NOTHING}),
    Signature("incrementalize", rlfx.incrementalize, {"target": batch_loss, "block_size": 2},
              {"target": ANY_FUNCTION, "over": OPTIONAL, "batch_argnums": ARGNUMS, "block_size": COUNT, "strict": FLAG}),
    Signature("incrementalize into blocks", rlfx.incrementalize, {"target": batch_loss, "blocks": 2}, {"blocks": COUNT}),
    Signature("incrementalize a program", rlfx.incrementalize, {"target": TRACED, "over": "t", "block_size": 2},
              {"over": OPTIONAL, "block_size": COUNT, "batch_argnums": ITS_DEFAULT, "blocks": OPTIONAL, "strict": NOTHING}),
    Signature("incrementalize t and b", rlfx.incrementalize, {"target": program, "over": "tb", "block_size": (2, 1)},
              {"target": FUNCTION, "over": NOTHING, "block_size": NOTHING}),
    Signature("incrementalize_jaxpr", rlfx.transforms.incrementalize.incrementalize_jaxpr,
              {"jaxpr": JAXPR, "batched": [False, True], "block_size": 2},
              {"jaxpr": NOTHING, "batched": NOTHING, "block_size": COUNT, "blocks": OPTIONAL}),
    Signature("in blocks", shapes_of(IN_BLOCKS), {"w": jnp.float32(1.0), "x": jnp.ones(6)},
              {"w": KEYED, "x": SHAPED}, ("w", "x")),
    Signature("offload", rlfx.offload, {"target": batch_loss, "block_size": 2},
              {"target": ANY_FUNCTION, "batch_argnums": ARGNUMS, "block_size": COUNT, "form": NOTHING}),
    Signature("offload stored values", rlfx.offload, {"target": program, "min_bytes": 1},
              {"target": FUNCTION, **HOSTED, "batch_argnums": ITS_DEFAULT, "block_size": OPTIONAL, "blocks": OPTIONAL,
               "form": NOTHING}),
    Signature("offload of a program", rlfx.offload, {"target": TRACED, "min_bytes": 1}, HOSTED),
    Signature("fuse_steps", rlfx.fuse_steps, {"env": RESETTING, "k": 3},
              {"env": NOTHING, "k": COUNT, "policy": FUNCTION | OPTIONAL, "outputs": NOTHING, "backend": NOTHING,
               "tile": COUNT | OPTIONAL}, ("env",)),
    Signature("fuse_steps of a program", rlfx.fuse_steps, {"program": TRACED}, {"backend": NOTHING, "tile": COUNT | OPTIONAL},
              ("program",)),
    Signature("fused steps", shapes_of(rlfx.fuse_steps(RESETTING, 3, policy="random", backend="vmap")),
              {"key": KEY, "states": STATES, "t0": 0, "b0": 0},
              {"key": A_KEY, "states": NOTHING, "t0": TIMES, "b0": TIMES}, ("key", "states")),
    Signature("supported", rlfx.transforms.fuse_steps.supported, {"env": CARTPOLE, "policy": "random"},
              {"env": NOTHING, "policy": FUNCTION | OPTIONAL, "outputs": NOTHING}),
    Signature("tune", rlfx.transforms.fuse_steps.tune, {"make": lambda backend, tile: lambda x: x, "x": 1.0, "repeat": 1},
              {"make": FUNCTION, "candidates": NOTHING, "repeat": COUNT}, ("make", "x")),
]

TIMES_NS = "1 | 2.5 | np.float64 | np.int64 | 2**40"
PROFILE = [
    Signature("operation", rlfx.profile.operation, {"name": "a"}, {"name": NAME}),
    Signature("phase", rlfx.profile.phase, {"name": "a"}, {"name": NAME}),
    Signature("capture", captured, {}, {"directory": OPTIONAL | NAME, "steps": NATURAL, **CAPTURE}),
    Signature("sampled", rlfx.profile.sampled, {"function": batch_loss},
              {"function": ANY_FUNCTION, "directory": OPTIONAL | NAME, "calls": COUNT, "skip": NATURAL, "steps": NATURAL,
               **CAPTURE, "no_such_option": NOTHING}),
    Signature("spy", spied, {"pid": 1}, {"pid": COUNT, "seconds": takes("1 | 2.5 | np.float64 | np.int64 | 2**40", "seconds")}),
    Signature("read", rlfx.profile.read, {"directory": "."}, {"directory": NOTHING}),
    Signature("Report.total", REPORT.total, {}, {"host": takes("|".join(WRONG), "no row has it"), "no_such_field": NOTHING}),
    Signature("Report.by", REPORT.by, {"key": "host"}, {"key": NOTHING}, ("key",)),
    Signature("Report.within", REPORT.within, {"operation": "a"}, {"operation": NAME}),
    Signature("Report.device_within", REPORT.device_within, {"operation": "a"}, {"operation": NAME}),
    Signature("Report.count", REPORT.count, {"source": "python", "target": "backend"},
              {"source": NOTHING, "target": NOTHING, "operation": OPTIONAL | NAME}),
    Signature("Report.text", REPORT.text, {}, {"depth": takes("", "of rows", unasked="None | 0 | 1 | np.int64 | 2**40")}),
    Signature("Report.corrected", REPORT.corrected, {}, {"overhead": takes("", "what this machine has", unasked="None")}),
    Signature("Report.gains", REPORT.gains, {}, {"count": COUNT, "plain_ns": OPTIONAL | takes(TIMES_NS, "ns")}),
    Signature("Report.compare", REPORT.compare, {}, {"after": NOTHING}),
]

LANGUAGE = [
    Signature("series", rlfx.series, lambda t: {"value": 1.0 * t}, {"value": KEYED, "window": COUNT | OPTIONAL}),
    Signature("series with ends", rlfx.series, lambda t: {"value": 1.0 * t, "start": 0.0, "end": 0.0},
              {"start": ENDS | OPTIONAL, "end": ENDS | OPTIONAL}),
    Signature("window", lambda x, **given: x.window(**given), lambda t: {"x": rlfx.series(1.0 * t), "lo": -2, "hi": 3},
              {"lo": takes("0 | 1 | -1 | np.int64", "below hi"), "hi": COUNT | takes("0 | -1", "above lo"), "fill": ENDS},
              ("x",)),
    Signature("lookup", lambda x, **given: x.lookup(**given), lambda t: {"x": rlfx.series(1.0 * t), "i": 1},
              {"i": takes("0 | 1 | -1 | np.int64 | i32[5] | 2**40", "times: what an int32 can't hold is outside"),
               "b": OPTIONAL | takes("0 | 1 | np.int64 | i32[5]", "environments"), "outside": NOTHING}, ("x",)),
    *(Signature(name, getattr(rlfx, name), lambda t: {"a": t, "b": 3},
                {"b": BROADCAST | takes("True | np.bool_ | 1j", "arrays, as in jnp.minimum")}, ("a", "b"))
      for name in ("minimum", "maximum")),
    Signature("inputs", rlfx.inputs, lambda t: {"xs": jnp.ones((4, 3))}, {"xs": NO_LEAVES, "axes": NOTHING}),
    Signature("solve", rlfx.solve, lambda t: {"fn": lambda x: x[t - 1] + 1.0, "start": 0.0},
              {"fn": FUNCTION, "end": ENDS | OPTIONAL}),
    *(Signature(name, getattr(rlfx, name), lambda t: {"x": 1.0 * t}, {"x": TREE, "over": NOTHING})
      for name in ("sum", "mean", "max", "min", "std")),
    Signature("last", rlfx.last, lambda t: {"x": 1.0 * t}, {"x": KEYED, "over": NOTHING}),
    Signature("Every", rlfx.Every, {"n": 2, "value": 0.0}, {"n": COUNT, "value": takes(" | ".join(WRONG), "wraps anything")}),
    Signature("effect", rlfx.effect, lambda t: {"fn": lambda x: None, "x": 1.0 * t, "every": 2},
              {"fn": FUNCTION, "x": TREE, "every": COUNT}, ("fn", "x")),
    Signature("every", rlfx.every, lambda t: {"n": 2, "fn": lambda: 1.0, "otherwise": 0.0},
              {"n": COUNT, "fn": FUNCTION, "otherwise": FLOATS}),
    Signature("shared", rlfx.shared, lambda t: {"fn": lambda x: 0.0, "x": 1.0 * t}, {"fn": FUNCTION, "x": KEYED}, ("fn", "x")),
    Signature("discounted_sum", rlfx.discounted_sum, data_of,
              {"rewards": SHAPED | takes("() | [1, 2, 3]", "a list is an array"), "discount": NUMBER}),
    Signature("next_value", rlfx.next_value, lambda t: {"critic": lambda obs: obs, "step": step_of(t), "value": 1.0 * t},
              {"critic": FUNCTION, "step": NOTHING, "value": FLOATS}),
    Signature("gae", rlfx.gae, lambda t: {**returns_of(t), "value": 0.0, "lam": 0.9},
              {"step": NOTHING, **dict.fromkeys(("value", "next_value", "gamma", "lam"), BROADCAST)}),
    Signature("lambda_return", rlfx.lambda_return, lambda t: {**returns_of(t), "lam": 0.9},
              {"step": NOTHING, **dict.fromkeys(("next_value", "gamma", "lam"), BROADCAST)}),
    Signature("n_step_return", rlfx.n_step_return, lambda t: {**returns_of(t), "n": 2},
              {"step": NOTHING, "next_value": BROADCAST, "gamma": BROADCAST, "n": COUNT}),
    Signature("vtrace", rlfx.vtrace, lambda t: {**returns_of(t), "value": 0.0, "log_rho": 0.0},
              {"step": NOTHING,
               **dict.fromkeys(("value", "next_value", "log_rho", "gamma", "lam", "clip_rho", "clip_c"), BROADCAST)}),
    Signature("retrace", rlfx.retrace, lambda t: {**returns_of(t), "q": 0.0, "log_rho": 0.0},
              {"step": NOTHING, **dict.fromkeys(("q", "next_value", "log_rho", "gamma", "lam", "clip"), BROADCAST)}),
    Signature("q_lambda", rlfx.q_lambda, lambda t: {**returns_of(t), "greedy": t > 1, "lam": 0.9},
              {"step": NOTHING, "greedy": FLAG, **dict.fromkeys(("next_value", "gamma", "lam"), BROADCAST)}),
    Signature("upgo", rlfx.upgo, lambda t: {**returns_of(t), "value": 0.0},
              {"step": NOTHING, **dict.fromkeys(("value", "next_value", "gamma"), BROADCAST)}),
]
# fmt: on

SIGNATURES = [*COMPILER, *TRANSFORMS, *PROFILE, *LANGUAGE, *ENVS, *PLACE]

#: Public names that are no calls, or are made by others.
ELSEWHERE = {
    **signatures_envs.ELSEWHERE,
    **signatures_place.ELSEWHERE,
    "Moments": "tests/test_moments.py",
    "normalize": "tests/test_moments.py",
    "Shared": "wraps anything",
    "Last": "wraps anything",
    "ProfileWarning": "a warning",
    "Report": "made by read",
    "Sampled": "made by sampled",
    "Session": "made by capture",
}
