"""A tree against the NumPy side: compiled, under a plan, and by the reference; values, final carry, aux, and gradients.

Tolerances are of float32: 5e-4 of the largest entry of a result and of a derivative, and 1e-5 beside it; with float64,
1e-7 and 1e-8. The derivative along a direction of a bfloat16 leaf may be off by its rounding, 2e-2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from rlfx.errors import RlfxError, ScheduleError
from tests.lanes import QUICK
from tests.oracle import loops, printed
from tests.oracle.features import FEATURES
from tests.oracle.tree import Tree, numbers

TOLERANCE = {"float32": (5e-4, 1e-5), "float64": (1e-7, 1e-8)}
LOW = 2e-2
DRAWS = 4  # of numbers, until no comparison of floats is close


@dataclass
class Verdict:
    """What differs, by how it ran; ``refused`` are rlfx's own errors, ``skipped`` says that comparisons were too close."""

    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    skipped: bool = False

    @property
    def outcome(self) -> str:
        return "skipped" if self.skipped else "wrong" if self.wrong else "refused" if self.refused else "right"


@dataclass(frozen=True)
class Expected:
    """Of one call: its arguments, its results, its derivatives with and without cotangents of the other results."""

    params: dict
    carry: dict
    t0: int
    result: loops.Result
    directions: dict
    slopes: dict[bool, dict]  # of groups of leaves


def expect(tree: Tree) -> list[Expected] | None:
    """The NumPy side of every call, or None where a comparison of floats is too close to be decided alike."""
    params, carry = numbers(tree)
    rng = np.random.default_rng([tree.data, 7])
    calls = []
    with loops.deep():
        for i in range(tree.calls):
            t0, tape = tree.t0 + i * tree.length, loops.Tape({})
            rows = slice(i * tree.length, (i + 1) * tree.length)
            p = {k: x[rows] if k in ("xs", "us", "ts", "lo", "rw") else x for k, x in params.items()}
            carry = carry | {"k": 0 * carry["k"]}
            result = loops.run(tree, p, carry, t0, tape)
            if tape.closest < loops.MARGIN or not all(np.isfinite(x).all() for x in [result.loss, *result.aux]):
                return None
            mine = printed.source(tree)
            leaves = [("params", k) for k, x in p.items() if np.asarray(x).dtype.kind == "f" and f'p["{k}"]' in mine]
            leaves += [("carry", k) for k in ("h", "v", "m", "buffer") if k in result.carry]
            directions = {(g, k): _direction(rng, np.shape((p if g == "params" else carry)[k])) for g, k in leaves}
            # one for all that is wide, one for what has 16 bits
            groups = [[leaf for leaf in leaves if (leaf[1] in ("q", "lo")) == low] for low in (False, True)]
            together = [{leaf: directions[leaf] for leaf in group} for group in groups if group]
            slopes = loops.slopes(tree, p, carry, t0, tape, together)
            if tape.closest < loops.MARGIN:
                return None
            calls.append(Expected(p, carry, t0, result, directions, slopes))
            carry = carry | result.carry
    return calls


def _direction(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)


def variants(tree: Tree, rng: np.random.Generator) -> list[tuple[str, dict, bool]]:
    """``(name, options of compile, whether other results have cotangents too)``, in random order."""
    near = max(1, min(3, tree.length))
    plans: list[tuple[str, dict, bool]] = [
        ("blocks", {"plan": rlfx.Plan("blocks", near)}, False),
        ("blocks of one", {"plan": rlfx.Plan("blocks", 1)}, False),
        ("stream", {"plan": rlfx.Plan("stream", near)}, False),
        ("replay", {"plan": rlfx.Plan("replay", near)}, False),
        ("cached", {"plan": rlfx.Plan("blocks", near, cached=True)}, False),
        ("offloaded", {"plan": rlfx.Plan("blocks", near, offload=1)}, False),
        ("incrementalize", {"transform": lambda f: rlfx.incrementalize(f, over="t", block_size=near)}, False),
        ("vectorize", {"transform": rlfx.vectorize}, True),
        ("fuse_steps", {"transform": rlfx.fuse_steps}, True),
    ]
    if (tree.batch or 1) > 1:
        plans.append(("blocks x environments", {"plan": rlfx.Plan("blocks", near, environments=1)}, False))
        tiles = lambda f: rlfx.incrementalize(f, over="tb", block_size=(near, 1))  # noqa: E731
        plans.append(("tiles", {"transform": tiles}, False))
    return [plans[i] for i in rng.permutation(len(plans))]


def check(tree: Tree, *, plans: int = 1, reference: bool = False, at_once: bool = True) -> Verdict:
    """Compare one tree: compiled ``at_once``, under ``plans`` plans chosen by its seed, and by the reference."""
    verdict = Verdict()
    wide = tree.float == "float64"
    strict = not wide or FEATURES["strict 64-bit promotion"].on
    with jax.enable_x64(wide), jax.numpy_dtype_promotion("strict" if strict else "standard"):
        for _ in range(DRAWS):
            calls = expect(tree)
            if calls is not None:
                break
            tree = dataclasses.replace(tree, data=tree.data + 1_000_003)
        else:
            verdict.skipped = True
            return verdict
        f = printed.program(tree)
        if at_once:
            _compare(tree, calls, "compiled", rlfx.compile(f, **printed.options(tree)), True, True, verdict)
        if reference:
            _compare(tree, calls, "reference", rlfx.reference(f, **printed.options(tree)), True, False, verdict)
        done = 0
        for name, more, cotangents in variants(tree, np.random.default_rng([tree.data, 9])):
            if done == plans or verdict.refused:
                break
            try:
                fn = rlfx.compile(f, **printed.options(tree), **more)
                _compare(tree, calls, name, fn, cotangents, True, verdict, illegal=True)
                done += 1
            except ScheduleError:
                continue  # not a plan for this program: another one
        if not (at_once or done):
            _compare(tree, calls, "compiled", rlfx.compile(f, **printed.options(tree)), True, True, verdict)
    return verdict


def _compare(
    tree: Tree,
    calls: list[Expected],
    name: str,
    fn: Callable,
    cotangents: bool,
    jit: bool,
    verdict: Verdict,
    illegal=False,
) -> None:
    for i, call in enumerate(calls):
        try:
            got, gradients = _outcome(tree, call, fn, cotangents, jit)
        except ScheduleError as error:
            if illegal:
                raise
            verdict.refused.append(f"{name}: {error}")
            return
        except RlfxError as error:
            ours = "is no program" in str(error)  # what a rewrite of ours made
            (verdict.wrong if ours else verdict.refused).append(f"{name}: {type(error).__name__}: {error}")
            return
        except Exception as error:
            verdict.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
            return
        where = f"{name}, call {i}" if len(calls) > 1 else name
        verdict.wrong += [f"{where}: {m}" for m in _differences(tree, call, got, gradients, cotangents)]


def _outcome(tree: Tree, call: Expected, fn: Callable, cotangents: bool, jit: bool) -> tuple[Any, Any]:
    params, carry = printed.arguments(tree, call.params, call.carry)
    floats = lambda x: {k: v for k, v in x.items() if k in MOVABLE and k not in ("zero",)}  # noqa: E731

    def objective(pf, cf):
        loss, (final, aux, *ends) = fn({**params, **pf}, {**carry, **cf}, t0=call.t0)
        total = loss
        if cotangents:
            for i, x in enumerate(aux):
                total = total + jnp.sum(jnp.asarray(_whole_cotangent(tree, call, i, x.shape), x.dtype) * x)
            for i, k in enumerate(("h", "v")):
                x = final[k]
                total = total + jnp.sum(
                    jnp.asarray(_environments(tree, loops.cotangent(9 + i, call.carry[k].shape)), x.dtype) * x
                )
        return total, {"loss": loss, "aux": aux, "carry": final, "ends": ends}

    differentiate = jax.value_and_grad(objective, (0, 1), has_aux=True)
    if jit:
        differentiate = jax.jit(differentiate, compiler_options=QUICK)
    (_, got), gradients = differentiate(floats(params), floats(carry))
    return jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, gradients)


MOVABLE = ("a", "b", "w", "W", "xs", "us", "ts", "bs", "q", "lo", "h", "v", "m", "buffer")


def _environments(tree: Tree, x: np.ndarray) -> np.ndarray:
    return x[0] if tree.batch is None else x


def _whole_cotangent(tree: Tree, call: Expected, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """The cotangent of [T, B, ...], summed over the axes that a result lacks (and, there, over what is alive)."""
    full = call.result.aux[i].shape
    weights = loops.cotangent(i, full)
    alive = np.arange(tree.length)[:, None] < call.result.ends[None, :]
    weights = weights * alive.reshape(alive.shape + (1,) * (len(full) - 2))
    return weights.sum(_missing(tree, full, shape))


def _missing(tree: Tree, full: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Which of the axes [T, B] a result lacks: what depends on neither is given once."""
    b = () if tree.batch is None else (full[1],)
    inner = full[2:]
    for missing, lead in (((), full[:1] + b), ((1,), full[:1]), ((0,), b), ((0, 1), ())):
        if tuple(shape) == (*lead, *inner):
            return tuple(sorted({*missing, *(() if b else (1,))}))
    raise AssertionError(f"a result of shape {shape}, where [T, B] = {full}")


def _differences(tree: Tree, call: Expected, got: dict, gradients: Any, cotangents: bool) -> list[str]:
    rtol, atol = TOLERANCE[tree.float]
    found = []

    def compare(what: str, x: Any, y: Any, rtol: float = rtol) -> None:
        x, y = np.asarray(x, float), np.asarray(y, float)
        scale = np.abs(y).max() if y.size else 0.0
        if x.shape != y.shape or not np.allclose(x, y, rtol=0, atol=atol + rtol * scale, equal_nan=True):
            found.append(f"{what} is {_short(x)}, and should be {_short(y)}")

    compare("the loss", got["loss"], call.result.loss)
    alive = np.arange(tree.length)[:, None] < call.result.ends[None, :]
    for i, (x, y) in enumerate(zip(got["aux"], call.result.aux, strict=True)):
        try:
            missing = _missing(tree, y.shape, x.shape)
        except AssertionError as error:
            found.append(f"root {i}: {error}")
            continue
        whole = np.broadcast_to(np.expand_dims(x.astype(float), missing), y.shape)
        compare(
            f"root {i}",
            whole[alive] if 0 in missing or (1 in missing and tree.batch) else whole,
            y[alive] if 0 in missing or (1 in missing and tree.batch) else y,
        )
    for k, y in call.result.carry.items():
        x = got["carry"][k]
        x = x.value if isinstance(x, rlfx.Shared) else x.data if isinstance(x, rlfx.History) else x
        compare(f"carry[{k!r}]", x, y if k == "m" else _environments(tree, y))
    if tree.until is not None:
        compare("the ends", got["ends"][0], _environments(tree, call.result.ends))
    groups = {"params": gradients[0], "carry": gradients[1]}
    size = max([1.0, *(abs(s) for s in call.slopes[cotangents].values())])
    for leaves, slope in call.slopes[cotangents].items():
        total = sum(_along(tree, groups[g][leaf], call.directions[g, leaf], g, leaf) for g, leaf in leaves)
        slack = LOW if any(leaf in ("q", "lo") for _, leaf in leaves) else rtol
        if not abs(total - slope) <= atol + slack * size:
            names = ", ".join(f"{g}[{leaf!r}]" for g, leaf in leaves)
            found.append(f"the derivative along {names} is {total:.7g}, and should be {slope:.7g}")
    return found


def _along(tree: Tree, g: Any, direction: np.ndarray, group: str, leaf: str) -> float:
    g = g.value if isinstance(g, rlfx.Shared) else g.data if isinstance(g, rlfx.History) else g
    if (group == "carry" and leaf != "m") or leaf == "bs":
        direction = _environments(tree, direction)
    elif leaf in ("xs", "us", "lo") and tree.batch is None:
        direction = direction[:, 0]
    return float(np.sum(np.asarray(g, float) * direction))


def _short(x: np.ndarray) -> str:
    return np.array2string(x.ravel()[:12], precision=5, suppress_small=True) + (f" {x.shape}" if x.ndim else "")
