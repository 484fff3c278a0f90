"""A seed becomes a tree. Choices are NumPy's; the same seed and the same switches give the same tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from tests.oracle import forms
from tests.oracle.features import ON
from tests.oracle.forms import FORMS, POINTS, SLICES, WINDOWS, Form
from tests.oracle.tree import Node, Tree, nodes

_EDGES = {"point": (False, False), "start": (True, False), "end": (False, True), "both": (True, True)}


def out(node: Node) -> str:
    return FORMS[node.form].out


def past(node: Node) -> bool:
    """Whether a value depends on the present and the past alone, so that it may be carried."""
    form = FORMS[node.form]
    index = next((row[-2] for row in SLICES if f"{row[0]}:{row[1]}" in node.at), None)
    if form.at in _EDGES:
        index = next(row[1] for row in POINTS if row[0] == node.at[0])
    if form.at == "window":
        index = node.at[1] in ("0", "1", "np.int64(1)")
    return (form.past if index is None else index) and all(map(past, node.args))


def extends(node: Node) -> bool:
    """Whether it has a value at t = T."""
    form = FORMS[node.form]
    return form.ended or (form.extends and all(map(extends, node.args)))


def begins(node: Node) -> bool:
    """Whether it can be evaluated at t = 0 alone."""
    form = FORMS[node.form]
    return form.extends and not form.ended and all(map(begins, node.args))


def extent(node: Node) -> tuple:
    """Which timesteps a slice has: slices with the same extent have the same length."""
    form = FORMS[node.form]
    slices = [a for a in node.args if out(a) in "sw"]
    if form.at == "slice":
        return ("slice", *node.at)
    return extent(slices[0]) if slices and form.feature != "concatenations" else ("made", node)


class Grower:
    """Grows values from leaves, one form at a time."""

    def __init__(self, seed: int, on: Collection[str], until: bool, batch: int | None, only: Collection[str] = ()):
        self.rng, self.on, self.until, self.batch = np.random.default_rng(seed), on, until, batch
        self.values: list[Node] = []
        self.used: set[Node] = set()
        self.history: Node | None = None
        table = [f for f in FORMS.values() if self.allowed(f) and f.name != "recall"]
        self.table = [f for f in table if f.ins for _ in range(f.weight)]
        self.leaves = [f for f in table if not f.ins and f.out in "fvib" and not f.at for _ in range(f.weight)]
        self.favourites = [f for f in table if f.feature in only or f.name in only]

    def allowed(self, form: Form) -> bool:
        features = {form.feature, form.until if self.until else ""} - {""}
        return features <= set(self.on) and (self.batch is not None or not form.batch)

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def of(self, items: Sequence) -> Any:
        return items[self.below(len(items))]

    def make(self, form: Form, args: tuple[Node, ...], at: tuple[str, ...] = ()) -> Node:
        node = Node(form.name, args, at)
        self.values.append(node)
        self.used.update(args)
        return node

    def leaf(self, type_: str) -> Node:
        fitting = [f for f in self.leaves if f.out == type_]
        return self.make(self.of(fitting), ())

    def some(self, type_: str, fits: Callable[[Node], bool] = lambda _: True) -> Node:
        found = [v for v in self.values if out(v) == type_ and fits(v)]
        if found and self.below(100) < 75:
            unused = [v for v in found if v not in self.used]
            return self.of(unused[-3:] if unused and self.below(2) else found[-5:])
        made = self.leaf(type_)
        return made if fits(made) else self.make(FORMS["h" if type_ == "f" else "v"], ())

    def slice(self, type_: str, full: bool, like: Node | None = None) -> Node:
        """A slice, of the same extent as ``like``."""

        def fits(v: Node) -> bool:
            return (
                out(v) == type_ and (like is None or extent(v) == extent(like)) and (not full or self.filled_always(v))
            )

        found = [v for v in self.values if fits(v)]
        if found and self.below(100) < 60:
            return self.of(found[-4:])
        if like is not None and extent(like)[0] != "slice":
            return self.of(found) if found else like
        at = (like and extent(like)[1:]) or self.bounds(full)
        form = FORMS["slice" if type_ == "s" else "vslice"]
        return self.make(form, (self.some("f" if type_ == "s" else "v"),), at)

    def bounds(self, full: bool) -> tuple[str]:
        # t.length is T: under until= a slice from there may begin after an environment's end
        late = lambda r: self.until and (r[0] in ("4", "2 * t", "t + 2", "t - t % 3 + 3") or "t.length" in r[0])  # noqa: E731
        allowed = [r for r in SLICES if self.index_allowed(*r[:2]) and (self.surely_filled(r) or not full)]
        allowed = [r for r in allowed if not late(r) or "slices after the end" in self.on]
        row = self.of(allowed)
        return (f"{row[0]}:{row[1]}",)

    def surely_filled(self, row: tuple) -> bool:
        return row[3] and not (self.until and "t.length" in row[0] + row[1])

    def filled_always(self, node: Node) -> bool:
        made = extent(node)
        if made[0] == "slice":
            return self.surely_filled(next(r for r in SLICES if f"{r[0]}:{r[1]}" == made[1]))
        return made[1].form != "bounded_below"

    def index_allowed(self, *texts: str) -> bool:
        feature = forms.feature_of_index(*texts)
        return not feature or feature in self.on

    def grow(self) -> Node:
        form = self.of(self.favourites) if self.favourites and self.below(100) < 35 else self.of(self.table)
        at: tuple[str, ...] = ()
        if form.at == "slice":
            at = self.bounds(form.full)
        elif form.at == "window":
            at = self.of([w for w in WINDOWS if self.index_allowed(*w)])
        elif form.at in _EDGES:
            start, end = _EDGES[form.at]
            ends = lambda r: r[3] or (self.until and "t.length" in r[0])  # noqa: E731
            rows = [r for r in POINTS if (start or not r[2]) and (end or not ends(r)) and self.index_allowed(r[0])]
            if form.at == "both" and "unreached ends" not in self.on:
                rows = [r for r in rows if r[3]]
            if form.at != "point" and self.below(3):
                rows = [r for r in rows if r[2] or r[3]]
            at = (self.of(rows)[0],)
        if form.name == "beyond":
            ended = any(extends(v) and not begins(v) for v in self.values if out(v) == "f")
            value = self.some("f", lambda v: extends(v) and not (ended and begins(v)))
            return self.make(form, (value,), ("t + 1",))
        args: list[Node] = []
        like: Node | None = None
        for type_ in form.ins:
            if type_ in "sw":
                free = form.feature == "concatenations"
                args.append(self.slice(type_, form.full, None if free else like))
                like = like or args[-1]
            else:
                edge = f"start=${len(args)}" in form.rlfx
                args.append(self.some(type_, begins if edge else lambda _: True))
        if any(out(a) not in t for a, t in zip(args, form.ins, strict=True)):
            return self.leaf("f")  # no slice of that extent and type
        return self.make(form, tuple(args), at)

    def recalls(self) -> None:
        self.history = self.some("f", past)
        for back in range(1, 1 + self.below(3)):
            self.make(FORMS["recall"], (self.history,), (str(back),))

    def finish(self, wanted: int) -> tuple[Node, ...]:
        """Values that nothing has used yet, and as many more as are wanted; slices are summed, others made floats."""
        for v in [v for v in self.values if v not in self.used and out(v) in "swib" and FORMS[v.form].ins]:
            others = (self.some("f"), self.some("f")) if out(v) == "b" else ()
            self.make(FORMS[{"s": "sum", "w": "w_sum", "i": "float", "b": "if"}[out(v)]], (v, *others))
        loose = [v for v in self.values if v not in self.used and out(v) in "fv" and FORMS[v.form].ins]
        more = [v for v in self.values if v in self.used and out(v) in "fv" and FORMS[v.form].ins]
        return tuple(dict.fromkeys((loose + more[::-1])[:wanted])) or (self.make(FORMS["h"], ()),)


#: What a tree is grown for; the chance of each is its weight. Few lengths and batches, so that operations repeat.
LENGTHS, BATCHES = (1, 2, 3, 3, 4, 5, 5, 7, 8), (None, 1, 2, 2, 3)


def grow(seed: int, size: int = 9, on: Collection[str] = ON, only: Collection[str] = (), **fixed: Any) -> Tree:
    """The tree of a seed: ``size`` forms over leaves. ``only`` names features, or forms, to have much of.

    ``fixed`` are fields of the :class:`Tree` that are not drawn.
    """
    rng = np.random.default_rng([seed, 1])
    drawn: dict[str, Any] = {
        "length": int(rng.choice(LENGTHS)),
        "batch": BATCHES[int(rng.integers(len(BATCHES)))],
        "reduce": str(rng.choice(["mean", "sum"])),
        "until": int(rng.integers(3, 7)) if rng.random() < 0.25 else None,
        "t0": int(rng.choice([0, 0, 3, 5, 2**31 - 40] if "late" in on else [0, 0, 3, 5])),
        "data": seed,
    }
    drawn |= fixed
    if drawn["until"] is not None and "length" not in fixed:
        drawn["length"] += 2  # beyond every end
    if drawn["length"] == drawn["batch"] and "length" not in fixed:
        drawn["length"] += 1  # the axes of a result can be told apart
    g = Grower(seed, on, drawn["until"] is not None, drawn["batch"], only)
    for name in ("h", "x", "v"):
        g.make(FORMS[name], ())
    if rng.random() < 0.2:
        g.recalls()
    for _ in range(size):
        g.grow()
    roots = g.finish(wanted=1 + size // 2)
    carried = _carried(g, rng, roots, drawn["length"])
    return Tree(roots, carried, g.history, **drawn)


def _carried(
    g: Grower, rng: np.random.Generator, roots: tuple[Node, ...], length: int
) -> tuple[tuple[str, Node], ...]:
    causal = [v for root in roots for v in nodes(Tree((root,), ())) if past(v) and FORMS[v.form].ins]
    following = []
    for name, form in (("h", "add"), ("v", "vadd")):
        mine = Node(name)
        found = [v for v in causal if out(v) == out(mine)]
        last = found[g.below(len(found))] if found else mine
        node = Node(form, (Node("tanh", (last,)), mine) if name == "h" else (last, mine))
        following.append((name, node))
    if rng.random() < 0.5:  # the acting state carries no gradient: streams and replays are legal
        following[0] = ("h", Node("stop", (following[0][1],)))
        following[1] = ("v", Node("vstop", (following[1][1],)))
    elif rng.random() < 0.4:  # or none that goes back beyond every second timestep, or third: windows, where these divide T
        n = 3 if length % 2 else 2
        following = [(name, Node(f"{cut}{n}", (node,))) for cut, (name, node) in zip(("cut", "vcut"), following, strict=True)]
    following.append(("n", Node("next")))
    if any(n.form == "m" for n in nodes(Tree(roots, (), g.history))):
        following.append(("m", Node("share", (Node("h"), Node("m")))))
    return tuple(following)


#: Of the trees of a sweep. What goes wrong goes wrong with few forms, mostly, and time is in proportion to their number.
SIZES = (3, 3, 4, 3, 5, 4, 9)


def chosen(seed: int, on: Collection[str] = ON, only: Collection[str] = ()) -> Tree:
    """The tree of a sweep: of every ten one in float64, one over two calls; of every thirty one with T > 128, and one with states
    that begin anew."""
    if seed % 30 == 4:
        rng = np.random.default_rng([seed, 2])
        length = int(rng.choice([129, 131, 150, 191, 200]))
        return grow(seed, 3, on, only, length=length, batch=(None, 1, 2)[int(rng.integers(3))])
    if seed % 30 == 19:
        n = 2 + seed // 30 % 2
        return begun_anew(grow(seed, SIZES[seed % len(SIZES)], on, only, length=12, t0=0, until=None), n)
    more: dict[str, Any] = {3: {"float": "float64"}, 7: {"calls": 2}}.get(seed % 10, {})
    return grow(seed, SIZES[seed % len(SIZES)], on, only, **more)


def begun_anew(tree: Tree, n: int) -> Tree:
    """The tree with states that begin anew at every n-th timestep, 2 or 3: windows, where n divides T and t0 is 0."""
    anew = {Node(name): Node(f"{form}{n}", (Node(name), Node(data))) for name, form, data in _ANEW}

    @functools.cache
    def moved(node: Node) -> Node:
        return anew.get(node) or dataclasses.replace(node, args=tuple(map(moved, node.args)))

    return dataclasses.replace(
        tree,
        roots=tuple(map(moved, tree.roots)),
        carried=tuple((name, moved(node)) for name, node in tree.carried),
        history=None if tree.history is None else moved(tree.history),
    )


#: What has a value at t = T, too, and at t = 0 alone, as the carry has.
_ANEW = (("h", "anew", "clock"), ("v", "vanew", "w"))
