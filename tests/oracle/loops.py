"""The NumPy side: a tree printed as functions of one (t, b), and loops over both. It never sees rlfx.

Everything is float64. Derivatives are central differences along random directions, each of them of many leaves of the
parameters and of the carry. What stops or bends a gradient keeps its value from the unperturbed run. Where a comparison
of floats is closer than :data:`MARGIN`, rounding or a difference could decide it otherwise: the run says so, and is not
compared.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracle.forms import FORMS
from tests.oracle.tree import CAPACITY, Node, Tree, filled, nodes

MARGIN = 2e-4
STEP = 1e-5  # of the differences: fourth order, so their error is of 1e-11 and of rounding, 1e-10


@dataclass(frozen=True)
class Result:
    """Of one call. ``aux`` has axes [T, B], ``carry`` [B]; ``ends`` [B]; beyond an end aux is 0."""

    loss: float
    aux: list[np.ndarray]
    carry: dict[str, np.ndarray]
    ends: np.ndarray


@dataclass
class Tape:
    """What a run leaves behind: values whose gradient is stopped, and the closest comparison."""

    kept: dict[tuple, Any]
    recording: bool = True
    closest: float = np.inf

    def stop(self, name: str, t: int, b: int, x: Any) -> Any:
        if self.recording:
            self.kept[name, t, b] = x
        return self.kept.get((name, t, b), x)

    def note(self, gap: Any) -> None:
        """Of a comparison. What is equal in float64 is the same value twice, and decided alike everywhere.

        Unless a small change of the arguments tells them apart: then two values tie by chance.
        """
        gap = np.abs(np.asarray(gap, float))
        gap = gap[np.isfinite(gap) & (gap > 0)]
        if gap.size:
            self.closest = min(self.closest, float(gap.min()) * (1 if self.recording else 4))


def source(tree: Tree) -> str:
    """The tree as NumPy: one function of (t, b) for every node."""
    names = {node: f"v{i}" for i, node in enumerate(nodes(tree))}
    values = {node: f"{name}(t, b)" for node, name in names.items()}
    lines = []
    for node, name in names.items():
        at = node.at
        if FORMS[node.form].at == "slice":
            at = (f"{at[0].split(':')[0].strip() or '0'}, {at[0].split(':')[1].strip() or 't.length'}",)
        text = filled(FORMS[node.form].loops, Node(node.form, node.args, tuple(map(_bound, at))), values, names, name)
        body = text if "return " in text else "return " + text
        lines += ["@point", f"def {name}(t, b):", *("    " + line for line in body.splitlines())]
    return "\n".join(lines) + "\n"


def _bound(text: str) -> str:
    return text.replace("rlfx.minimum", "min").replace("rlfx.maximum", "max").replace("t.length", "T")


def point(fn: Callable) -> Callable:
    memo: dict[tuple[int, int], Any] = {}

    def at(t: Any, b: Any) -> Any:
        t, b = int(t), int(b)
        if (t, b) not in memo:
            memo[t, b] = fn(t, b)
        return memo[t, b]

    return at


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(initial=-np.inf))  # of nothing it is nothing
    return e / e.sum()


def discounted(x: Any, discount: Any) -> Any:
    """Sums of what follows each element: ``y[k] = x[k] + discount[k] * y[k + 1]``; the first of nothing is 0."""
    x, total = np.asarray(x, float), 0.0
    discount = np.broadcast_to(discount, len(x))
    sums = []
    for value, factor in zip(x[::-1], discount[::-1], strict=True):
        total = value + factor * total
        sums.insert(0, total)
    return np.array(sums) if len(sums) else np.zeros((1, *x.shape[1:]))


KS = np.array([0.7, -0.4, 0.2])


def chain(x: float, y: float) -> float:
    for k in KS:
        x = np.tanh(x + k * y)
    return x


def iterated(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """A convolution of 2 x 2 places, three times."""
    s = np.outer(x, y)
    for _ in range(3):
        wide = np.pad(s, ((0, 1), (0, 1)))
        s = np.tanh(0.5 * sum(w[i, j] * wide[i : i + 2, j : j + 2] for i in range(2) for j in range(2)))
    return 0.3 * s.sum()


def inner(q: float, c: float) -> float:
    """A program in a program: three timesteps, each with the sum of what its carry was."""
    total, past = 0.0, []
    for _ in range(3):
        past.append(c)
        total += sum(past)
        c = np.tanh(0.5 * c + q)
    return total


def scope(tree: Tree, p: dict, start: dict, t0: int, tape: Tape) -> dict[str, Any]:
    """What the printed functions may call."""
    envs = range(tree.batch or 1)
    ends: dict[int, int] = {}
    names: dict[str, Any] = {}
    printed = {node: f"v{i}" for i, node in enumerate(nodes(tree))}
    following = dict(tree.carried)

    def carry(name: str, t: int, b: int) -> Any:
        if name == "m":
            return start["m"] if t == 0 else names[printed[following["m"]]](t - 1, 0)
        if t == 0:
            return start[name][b]
        if name == "k":
            return carry("k", t - 1, b) + 1
        return names[printed[following[name]]](t - 1, b)

    def last_carry(name: str, t: int, b: int) -> Any:
        """What others see of an environment: after its end, its last carry."""
        return carry(name, min(t, stop_of(b)), b)

    def stop_of(b: int) -> int:
        if b not in ends:
            t = 1
            while t < tree.length and not (tree.until is not None and carry("n", t, b) >= tree.until):
                t += 1
            ends[b] = t
        return ends[b]

    def read(f: Callable, i: int, b: int, start: Any = None, end: Any = None) -> Any:
        edge, t = (start, 0) if i < 0 else (end, stop_of(b) - 1)
        if 0 <= i < stop_of(b):
            return f(i, b)
        assert edge is not None, f"{i} is outside, and nothing is given there"
        return edge(t, b) if callable(edge) else edge

    def at_edge(name: str, b: int, start: Any = None, end: Any = None) -> Callable:
        return lambda i: read(names[name], i, b, start, end)

    def span(f: Callable, name: str, lo: int, hi: int, b: int) -> np.ndarray:
        n = stop_of(b)
        lo, hi = min(max(int(lo), 0), n), min(max(int(hi), 0), n)
        values = [f(j, b) for j in range(lo, hi)]
        return np.array(values, float) if values else np.zeros((0, *np.shape(f(0, b))))

    def window(f: Callable, lo: int, hi: int, t: int, b: int, fill: Any) -> np.ndarray:
        return np.array([f(j, b) if 0 <= j < stop_of(b) else fill for j in range(t + lo, t + hi)], float)

    def over(op: str, axes: str, f: Callable, t: int, b: int) -> Any:
        points = [(s, c) for c in (envs if "b" in axes else [b]) for s in (range(stop_of(c)) if "t" in axes else [t])]
        values = np.array([f(s, c) for s, c in points if s < stop_of(c)])
        if op in ("max", "min"):
            return largest(values) if op == "max" else -largest(-values)
        result = getattr(np, op)(values)
        if op == "std":  # of equal values: a kink, without a derivative
            tape.note(max(result, 1e-9))
        return result

    def recall(f: Callable, back: int, t: int, b: int) -> Any:
        i = max(t0 + t - back, 0)
        return f(i - t0, b) if i >= t0 else start["buffer"][b][i % CAPACITY]

    def more(x: Any, y: Any) -> Any:
        tape.note(np.asarray(x) - y)
        return np.asarray(x) > y

    def largest(x: np.ndarray) -> Any:
        x = np.sort(np.asarray(x))
        if len(x) > 1 and x.dtype.kind == "f":
            tape.note(x[-1] - x[:-1])  # the same value may be there twice
        return x[-1]

    def rising(x: np.ndarray) -> np.ndarray:
        for i in range(1, len(x)):
            tape.note(x[i] - x[:i])
        return np.maximum.accumulate(x)

    def argmax(x: np.ndarray) -> int:
        gaps = x.max() - np.delete(x, np.argmax(x))
        tape.note(np.where(gaps == 0, MARGIN / 2, gaps))  # which of two equal ones is the first is not
        return int(np.argmax(x))

    def ordered(x: np.ndarray) -> np.ndarray:
        tape.note(np.diff(np.sort(x)))
        return np.sort(x)

    def size(x: float) -> float:
        tape.note(x)
        return abs(x)

    def bent(name: str, t: int, b: int, x: Any, factor: Any) -> Any:
        """Value x, derivative ``factor``."""
        kept, factor = tape.stop(name, t, b, x), tape.stop(name + "'", t, b, factor)
        return kept + factor * (np.asarray(x) - kept)

    names.update(
        np=np, p=p, carry=carry, last_carry=last_carry, N=stop_of, now=lambda t: t0 + t, every=envs, B=len(envs),
        T=tree.length, KS=KS, V=lambda x: np.full(2, x), combine=lambda x, y: x + 0.5 * y[0], point=point,
        stop=tape.stop, bent=bent, more=more, largest=largest, argmax=argmax, ordered=ordered, size=size, rising=rising,
        read=read, at_edge=at_edge, span=span, window=window, over=over, recall=recall,
        softmax=softmax, discounted=discounted, chain=chain, inner=inner, iterated=iterated,
    )  # fmt: skip
    return names


def run(tree: Tree, p: dict, start: dict, t0: int, tape: Tape) -> Result:
    """One call: loops over t and b."""
    names = scope(tree, p, start, t0, tape)
    exec(compile(source(tree), "<numpy>", "exec"), names)
    printed = {node: f"v{i}" for i, node in enumerate(nodes(tree))}
    batch = tree.batch or 1
    ends = np.array([names["N"](b) for b in range(batch)], np.int32)
    aux = []
    for root in tree.roots:
        values = np.zeros((tree.length, batch, *np.shape(names[printed[root]](0, 0))))
        for t in range(tree.length):
            for b in range(batch):
                if t < ends[b]:
                    values[t, b] = names[printed[root]](t, b)
        aux.append(values)
    losses = [sum(weight(i) * np.sum(x[t, b]) for i, x in enumerate(aux)) for b in range(batch) for t in range(ends[b])]
    final = {k: np.array([names["carry"](k, ends[b], b) for b in range(batch)]) for k in ("k", *dict(tree.carried))}
    if "m" in final:  # until the last environment has ended
        final["m"] = final["m"][np.argmax(ends)]
    if tree.history is not None:
        final["buffer"] = np.array([_buffer(names[printed[tree.history]], start, t0, ends[b], b) for b in range(batch)])
    return Result(float(np.mean(losses) if tree.reduce == "mean" else np.sum(losses)), aux, final, ends)


def _buffer(f: Callable, start: dict, t0: int, end: int, b: int) -> np.ndarray:
    data = np.array(start["buffer"][b], float)
    for t in range(end):
        data[(t0 + t) % CAPACITY] = f(t, b)
    return data


def weight(i: int) -> float:
    """Of a root in the loss."""
    return 1.0 / (1 + i)


def cotangent(i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Of the i-th result, where results have cotangents too."""
    return np.cos(1.0 + i + 0.37 * np.arange(np.prod(shape, dtype=int))).reshape(shape)


def slopes(tree: Tree, p: dict, start: dict, t0: int, tape: Tape, directions: list[dict]) -> dict:
    """Derivatives along each of some directions ``{("params" | "carry", leaf): change}``, without and with cotangents.

    Returns:
      ``{cotangents: {leaves of a direction: derivative of the objective}}``.
    """

    def objectives(direction: dict, step: float) -> np.ndarray:
        inputs = {"params": dict(p), "carry": dict(start)}
        for (group, leaf), change in direction.items():
            inputs[group][leaf] = inputs[group][leaf] + step * change
        result = run(tree, inputs["params"], inputs["carry"], t0, tape)
        others = sum(np.sum(cotangent(i, x.shape) * x) for i, x in enumerate(result.aux))
        floats = [result.carry[k] for k in ("h", "v") if k in result.carry]
        others += sum(np.sum(cotangent(9 + i, x.shape) * x) for i, x in enumerate(floats))
        return np.array([result.loss, result.loss + others])

    tape.recording = False
    found: dict[bool, dict] = {False: {}, True: {}}
    for direction in directions:
        up, down, up2, down2 = (objectives(direction, s * STEP) for s in (1, -1, 2, -2))
        slope = (8 * (up - down) - (up2 - down2)) / (12 * STEP)
        for cotangents in (False, True):
            found[cotangents][tuple(direction)] = float(slope[int(cotangents)])
    tape.recording = True
    return found


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Values are computed on demand, so T = 200 is 200 times as deep as one timestep."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 60_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
