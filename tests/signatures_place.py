"""One valid call of every public function of ``rlfx.place``, and what each of its arguments takes: see tests/malformed.py."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import place
from rlfx.place import checkpoint, compose, hardware, methods, pearl, replay, search, simulate
from tests.malformed import (
    BROADCAST,
    COUNT,
    FLAG,
    FUNCTION,
    KEYED,
    NAME,
    NATURAL,
    NOTHING,
    OPTIONAL,
    Signature,
    Takes,
    takes,
)
from tests.place import pearl_systems

KEY = jax.random.key(0)
X = jnp.ones((4, 4))
MACHINE = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)
ALL = hardware.uniform(len(jax.devices()), flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)
GRAPH = place.explode(lambda x: (x @ x) + x, X, splits=2)
PROBLEM = place.build(GRAPH, MACHINE)
DEVICE = np.zeros((1, PROBLEM.tasks), np.int32)
ORDER = simulate.run_order(PROBLEM, "critical-path")[None]
START = place.Assignment(DEVICE[0], ORDER[0])
CHAINS = search.initial(PROBLEM, [START], np.ones(1, np.float32), 1)
TREE = replay.make_tree(8)
RING = replay.insert(replay.make_replay(8, jnp.float32(0)), jnp.zeros(8))
TABLE = compose.Table(("a", "b"), {p: np.ones(2) for p in compose.PRIMITIVES}, np.ones((2, 2)))
WORK = compose.Workload(4, 4, 10, 10)


class Accepted(Exception):
    """The arguments were accepted, and the work would begin."""


def until(target, call):
    """``call``, up to what it does with arguments that it accepted."""

    def checked(*args, **given):
        with mock.patch(target, side_effect=Accepted), contextlib.suppress(Accepted):
            call(*args, **given)

    return checked


def solving(**given):
    with mock.patch.dict(methods.METHODS, heft=mock.Mock(side_effect=Accepted)), contextlib.suppress(Accepted):
        methods.solve(**given)


def traced(fn):
    """``fn`` traced, and not compiled."""
    return lambda **given: jax.eval_shape(lambda: fn(**given))


def matmul(x):
    return x @ x


PLACED = place.Placement(GRAPH, PROBLEM, tuple(jax.devices()[:2]), START, 1.0, "heft", 1)

A_KEY = takes("key", "a key")
ABOVE_ZERO = takes("1 | 2.5 | np.int64 | np.float64 | 2**40", "a finite number above zero")
NOT_NEGATIVE = ABOVE_ZERO | takes("0", "zero, too")
REAL = NOT_NEGATIVE | takes("-1", "any sign")
ARRAYS = BROADCAST | takes("True | np.bool_ | 1j | [1, 2, 3] | dict", "a pytree of numbers")
SPLITS = COUNT | OPTIONAL | takes("{}", "nothing is split")
PARTS = OPTIONAL | takes("() | [1, 2, 3] | set", "parts")
SCOPES = takes("()", "none")
RATES = dict.fromkeys(("flops", "memory_rate", "memory", "bandwidth", "latency", "overhead"), ABOVE_ZERO)
NOISE = OPTIONAL
USERS = takes("", "what a function of the user's raises is the user's", unasked="lambda: | lambda 7 | class | mesh")
ARGUMENT = Takes(frozenset(), "whether the function takes them is the user's", KEYED.names | {"2**40"})

PLACEMENT = [
    Signature(
        "assign",
        until("rlfx.place.placement.solve", place.assign),
        {"fn": matmul, "x": X, "hardware": ALL, "method": "heft"},
        {
            "fn": USERS,
            "devices": OPTIONAL,
            "method": NOTHING,
            "budget": COUNT,
            "splits": SPLITS,
            "fuse": SCOPES,
            "key": A_KEY | OPTIONAL,
        },
        ("fn", "x"),
    ),
    Signature(
        "assign to a machine",
        until("rlfx.place.placement.measured", until("rlfx.place.placement.solve", place.assign)),
        {"fn": matmul, "x": X, "devices": jax.devices()[:2]},
        {"hardware": OPTIONAL},
        ("fn", "x"),
    ),
    Signature(
        "staged",
        place.staged,
        {"fn": matmul, "x": X},
        {"fn": USERS, "x": ARGUMENT, "devices": COUNT, "at_most": COUNT, "name": NAME | OPTIONAL},
        ("fn", "x"),
    ),
    Signature("core_devices", place.core_devices, {"count": 1}, {"count": COUNT | OPTIONAL}),
    Signature(
        "assign_stages",
        until("rlfx.place.staging.solve", place.assign_stages),
        {"fn": matmul, "x": X, "hardware": ALL, "method": "heft"},
        {"fn": USERS, "devices": OPTIONAL, "method": NOTHING, "budget": COUNT, "key": A_KEY | OPTIONAL},
        ("fn", "x"),
    ),
    Signature(
        "explode",
        place.explode,
        {"fn": matmul, "x": X},
        {
            "fn": USERS,
            "x": ARGUMENT,
            "splits": SPLITS,
            "out_splits": PARTS,
            "fuse": SCOPES,
            "name": NAME | OPTIONAL,
        },
        ("fn", "x"),
    ),
    Signature(
        "build",
        place.build,
        {"graph": GRAPH, "hardware": MACHINE},
        {"graph": NOTHING, "hardware": NOTHING, "called": FLAG},
    ),
    Signature(
        "load",
        place.Placement.load,
        {"path": "no such file", "fn": matmul, "x": X},
        {"path": NOTHING},
        ("path", "fn", "x"),
    ),
    Signature(
        "improve",
        until("rlfx.place.placement.descend", PLACED.improve),
        {"x": X, "calls": 8},
        {"x": ARGUMENT, "calls": takes("2**40", "eight or more"), "key": A_KEY | OPTIONAL},
        ("x",),
    ),
    Signature(
        "solve",
        solving,
        {"problem": PROBLEM, "method": "heft", "key": KEY, "budget": 8},
        {"problem": NOTHING, "method": NOTHING, "key": A_KEY, "budget": COUNT},
    ),
    Signature(
        "uniform",
        hardware.uniform,
        {"devices": 2, **dict.fromkeys(RATES, 1.0)},
        {"devices": COUNT, **RATES, "name": NAME},
    ),
    Signature("p100_pcie", hardware.p100_pcie, {}, {"devices": COUNT, "bandwidth": ABOVE_ZERO, "memory": ABOVE_ZERO}),
    Signature(
        "v100_meshes",
        hardware.v100_meshes,
        {},
        {"devices": takes("np.int64", "an even number"), **dict.fromkeys(("nvlink", "bridge", "pcie"), ABOVE_ZERO)},
    ),
    Signature(
        "measured",
        until("rlfx.place.hardware._median_seconds", hardware.measured),
        {"size": 4},
        {"devices": OPTIONAL, "size": COUNT},
    ),
    Signature(
        "Hardware",
        place.Hardware,
        {
            "names": ("a",),
            **{n: np.ones(1) for n in ("flops", "memory_rate", "overhead", "memory")},
            "bandwidth": np.ones((1, 1)),
            "latency": np.ones((1, 1)),
        },
        {**dict.fromkeys(("names", "flops", "memory_rate", "overhead", "memory", "bandwidth", "latency"), NOTHING)},
    ),
    Signature("with_memory", MACHINE.with_memory, {"nbytes": 1e9}, {"nbytes": ABOVE_ZERO}),
    Signature("with_links", MACHINE.with_links, {"bytes_per_second": 1e9}, {"bytes_per_second": ABOVE_ZERO}),
    Signature("with_shared_links", MACHINE.with_shared_links, {}, {"slower_than": ABOVE_ZERO | takes("inf", "all links")}),
    Signature(
        "fitted",
        MACHINE.fitted,
        {"graph": GRAPH, "one_device_seconds": 1.0},
        {"graph": NOTHING, "one_device_seconds": ABOVE_ZERO},
    ),
    Signature(
        "run_order",
        simulate.run_order,
        {"problem": PROBLEM, "order": "critical-path"},
        {"problem": NOTHING, "order": NOTHING, "key": A_KEY | OPTIONAL},
    ),
    *(
        Signature(
            name,
            until(f"rlfx.place.simulate.{compiled}", getattr(simulate, name)),
            {"problem": PROBLEM, "assignment": DEVICE, "priority": ORDER},
            {
                "problem": NOTHING,
                "assignment": NOTHING,
                "priority": NOTHING,
                "fifo": FLAG,
                "exec_noise": NOISE,
                "transfer_noise": NOISE,
            },
        )
        for name, compiled in (("simulate", "_compiled"), ("makespan", "_makespan"))
    ),
    Signature(
        "search.initial",
        search.initial,
        {"problem": PROBLEM, "starts": [START], "costs": np.ones(1, np.float32), "chains": 1},
        {"problem": NOTHING, "starts": NOTHING, "costs": NOTHING, "chains": COUNT},
    ),
    Signature(
        "search.anneal",
        until("rlfx.place.search._search", search.anneal),
        {"problem": PROBLEM, "key": KEY, "state": CHAINS, "calls": 2, "hot": 1.0, "cold": 1.0},
        {
            "problem": NOTHING,
            "key": A_KEY,
            "state": NOTHING,
            "calls": COUNT,
            "hot": NOT_NEGATIVE,
            "cold": ABOVE_ZERO,
            "moves": NOTHING,
        },
    ),
    Signature(
        "save_policy",
        until("rlfx.place.checkpoint._orbax", checkpoint.save_policy),
        {"path": "no such path", "params": {"w": X}},
        {"path": NAME, "params": ARRAYS},
    ),
    Signature("load_policy", checkpoint.load_policy, {"path": "no such path", "like": {"w": X}}, {"path": NOTHING}),
]

COMPOSITION = [
    Signature(
        "Table",
        compose.Table,
        {"devices": TABLE.devices, "seconds": TABLE.seconds, "bandwidth": TABLE.bandwidth},
        {"devices": NOTHING, "seconds": NOTHING, "bandwidth": NOTHING},
    ),
    Signature(
        "Workload",
        compose.Workload,
        {"batch": 1, "actors": 1, "experience_bytes": 1, "weight_bytes": 1},
        {
            "batch": takes("1 | np.int64 | 2**40", "a positive integer"),
            **dict.fromkeys(("actors", "experience_bytes", "weight_bytes"), NATURAL),
        },
    ),
    Signature(
        "compose",
        compose.compose,
        {"table": TABLE, "work": WORK},
        {"table": NOTHING, "work": NOTHING, "actors": takes("0 | 1", "one of two devices")},
    ),
    Signature(
        "measure",
        compose.measure,
        {
            "primitives": dict.fromkeys(compose.PRIMITIVES, matmul),
            "arguments": dict.fromkeys(compose.PRIMITIVES, (X,)),
            "devices": (),
            "bandwidth": np.ones((0, 0)),
        },
        {
            "primitives": NOTHING,
            "arguments": NOTHING,
            "devices": takes("() | {} | empty", "no devices, an empty table"),
            "bandwidth": NOTHING,
            "repeats": COUNT,
        },
    ),
    Signature(
        "reallocate",
        compose.reallocate,
        {"pools": compose.Pools(4, 1, 0.5), "learner_seconds": 1.0, "actor_seconds": 1.0, "trainer_seconds": 1.0},
        {
            "pools": NOTHING,
            **dict.fromkeys(("learner_seconds", "actor_seconds", "trainer_seconds"), NOT_NEGATIVE),
            **dict.fromkeys(("threshold", "step"), ABOVE_ZERO),
        },
    ),
    Signature(
        "portability",
        compose.portability,
        {"throughputs": [1.0, 2.0]},
        {"throughputs": takes("[1, 2, 3] | [5] | i32[5]", "numbers")},
    ),
]

INDICES = takes("[1, 2, 3] | i32[5]", "indices of transitions")
NUMBERS = INDICES | takes("[5]", "real numbers")
BATCH = {"key": A_KEY, "batch": COUNT}

REPLAY = [
    Signature(
        "make_tree", replay.make_tree, {"capacity": 4}, {"capacity": COUNT, "fanout": takes("np.int64", "two or more")}
    ),
    Signature(
        "make_replay",
        replay.make_replay,
        {"capacity": 4, "example": jnp.float32(0)},
        {"capacity": COUNT, "example": ARRAYS, "fanout": takes("np.int64", "two or more")},
    ),
    Signature(
        "set_priorities",
        traced(replay.set_priorities),
        {"tree": TREE, "indices": jnp.arange(5), "priorities": jnp.ones(5)},
        {
            "tree": NOTHING,
            "indices": takes("i32[5]", "as many as priorities"),
            "priorities": takes("i32[5] | [5]", "as many"),
        },
    ),
    Signature(
        "update_priorities",
        traced(replay.update_priorities),
        {"replay": RING, "indices": jnp.arange(5), "priorities": jnp.ones(5)},
        {
            "replay": NOTHING,
            "indices": takes("i32[5]", "as many as priorities"),
            "priorities": takes("i32[5] | [5]", "as many"),
            "alpha": REAL,
        },
    ),
    Signature(
        "insert",
        traced(replay.insert),
        {"replay": RING, "batch": jnp.ones(3)},
        {"replay": NOTHING, "batch": takes("[5]", "five")},
    ),
    Signature("sample", traced(replay.sample), {"replay": RING, "key": KEY, "batch": 2}, {"replay": NOTHING, **BATCH}),
    Signature(
        "sample_uniform",
        traced(replay.sample_uniform),
        {"replay": RING, "key": KEY, "batch": 2},
        {"replay": NOTHING, **BATCH},
    ),
    Signature(
        "sample_indices",
        traced(replay.sample_indices),
        {"tree": TREE, "key": KEY, "batch": 2},
        {"tree": NOTHING, **BATCH},
    ),
    Signature(
        "importance_weights",
        traced(replay.importance_weights),
        {"probability": jnp.ones(3), "size": 3, "beta": 0.4},
        {
            "probability": NUMBERS | takes("()", "of nothing"),
            "size": takes("0 | 1 | -1 | np.int64", "an integer"),
            "beta": REAL,
        },
    ),
    Signature(
        "collision_free",
        traced(replay.collision_free),
        {"replay": RING, "count": 2, "sampled": jnp.arange(3)},
        {"replay": NOTHING, "count": COUNT | takes("0", "none"), "sampled": INDICES},
    ),
]

SYSTEM = pearl_systems.system(sub_batches=2)
STATE = jax.eval_shape(SYSTEM.init, KEY)  # for its shapes
RUNTIME = [
    Signature(
        "System",
        pearl_systems.system,
        {},
        {
            "env": NOTHING,
            **dict.fromkeys(("learner", "weights", "policy", "gradient", "apply"), FUNCTION),
            **dict.fromkeys(("actors", "envs", "length", "updates", "batch"), COUNT),
            "capacity": NOTHING,
            "sub_batches": COUNT,
            "warmup": takes("0 | 1 | np.int64", "no more than the capacity"),
            "ahead": NATURAL,
            **dict.fromkeys(("alpha", "beta"), NOT_NEGATIVE),
            "fanout": takes("np.int64", "two or more"),
        },
    ),
    Signature(
        "HostEnvironment",
        pearl.HostEnvironment,
        {"name": "CartPole-v1"},
        {"name": NAME, "kwargs": takes("() | {} | dict", "what gymnasium.make takes")},
    ),
    Signature("init", SYSTEM.init, {"key": KEY}, {"key": A_KEY}),
    Signature(
        "pearl.run",
        until("rlfx.place.pearl.runtime.Crew", pearl.run),
        {
            "system": SYSTEM,
            "state": STATE,
            "key": KEY,
            "composition": compose.Composition(0, 0, 0, 0, 1.0, 1.0),
            "devices": jax.devices(),
            "iterations": 1,
        },
        {
            **dict.fromkeys(("system", "state", "composition", "devices"), NOTHING),
            "key": A_KEY,
            "iterations": COUNT | takes("0", "none"),
            "after": OPTIONAL | FUNCTION,
            "patience": ABOVE_ZERO,
            "reallocate_every": OPTIONAL | COUNT,
        },
    ),
    Signature(
        "composed",
        until("rlfx.place.pearl.runtime.rehearsed", pearl.composed),
        {"system": SYSTEM, "state": STATE, "devices": jax.devices()[:1], "bandwidth": np.ones((1, 1)), "trials": 1},
        {**dict.fromkeys(("system", "state"), NOTHING), "trials": COUNT | takes("0", "none")},
    ),
    Signature(
        "workload", pearl.workload, {"system": SYSTEM, "state": STATE}, dict.fromkeys(("system", "state"), NOTHING)
    ),
    Signature(
        "pearl.reference",
        traced(lambda key, **given: pearl.reference(key=key, **given)),
        {"system": SYSTEM, "state": SYSTEM.init(KEY), "key": KEY, "iterations": 0},
        {
            **dict.fromkeys(("system", "state"), NOTHING),
            "key": A_KEY,
            "iterations": COUNT | takes("0", "none"),
        },
    ),
]

PLACE = [*PLACEMENT, *COMPOSITION, *REPLAY, *RUNTIME]

#: Public names that are no calls, or are made by others.
ELSEWHERE = {
    "Assignment": "made by the methods",
    "DataflowGraph": "made by explode",
    "Node": "made by explode",
    "Placement": "made by assign",
    "StagedGraph": "made by staged",
    "Problem": "made by build, and looked at by rlfx.place.problem.checked",
    "hardware": "a module: its functions are here",
    "workloads": "a module: sizes of the paper's four graphs",
}
