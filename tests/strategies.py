"""Random per-timestep programs over the whole language, as Python source.

A program is a list of assignments with types: a failure prints as a function that can be pasted into a file, and shrinks
by replacing assignments with constants. The choices come from a :class:`Choices`: a seeded NumPy generator in the sweeps
(``program(seed)`` is always the same program), or Hypothesis (:func:`programs`), which shrinks by itself.
"""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import rlfx

F, V, I, B = "f32[]", "f32[2]", "i32[]", "bool[]"  # the types of values at one point
DEFAULT = {F: "jnp.float32(0.4)", V: "jnp.array([0.3, -0.2])", I: "jnp.int32(1)", B: "jnp.array(True)"}
CARRY = {"h": F, "v": V, "n": I, "done": B}
CAPACITY = 3


# -- choices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """Where random decisions come from."""

    below: Callable[[int], int]

    def of(self, items: Sequence) -> Any:
        return items[self.below(len(items))]

    def chance(self, percent: int) -> bool:
        return self.below(100) >= 100 - percent

    def number(self) -> str:
        return f"{(self.below(37) - 18) / 20:g}" if self.chance(90) else "0.0"


def seeded(seed: int) -> Choices:
    rng = np.random.default_rng(seed)
    return Choices(lambda n: int(rng.integers(n)))


# -- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """``name = source``; a series has the type of its values, prefixed ``series``."""

    name: str
    type: str
    source: str


@dataclass(frozen=True)
class GeneratedProgram:
    """A per-timestep function as source, with what it is compiled for."""

    statements: tuple[Statement, ...]
    loss: str
    carry: tuple[tuple[str, str], ...]
    aux: tuple[str, ...]
    length: int
    batch: int | None
    reduce: str = "mean"
    until: str | None = None
    t0: int = 0
    seed: int = 0
    cotangents: bool = False

    @property
    def source(self) -> str:
        lines = ["def program(p, carry, t):"]
        lines += [f"    {s.name} = {s.source}" for s in self.statements]
        carry = ", ".join(f"{k!r}: {v}" for k, v in self.carry)
        lines.append(f"    return {self.loss}, {{{carry}}}, ({''.join(a + ', ' for a in self.aux)})")
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        options = f"length={self.length}, batch={self.batch}, reduce={self.reduce!r}, t0={self.t0}, seed={self.seed}"
        until = f", until=lambda c: {self.until}" if self.until else ""
        return f"\n{self.source}# {options}{until}, cotangents={self.cotangents}\n"

    @property
    def function(self) -> Callable:
        name = f"<generated program {self.seed}: {hash(self.source)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        scope = {"jax": jax, "jnp": jnp, "rlfx": rlfx, "K": jnp.array([0.7, -0.4, 0.2], jnp.float32)}
        exec(compile(self.source, name, "exec"), scope)
        return scope["program"]

    def options(self) -> dict[str, Any]:
        until = {"until": eval(f"lambda c: {self.until}", {"jnp": jnp})} if self.until else {}
        return {"length": self.length, "batch": self.batch, "reduce": self.reduce, **until}

    def arguments(self) -> tuple[Any, Any, Any]:
        """``(params, carry, key)``, from the seed."""
        rng = np.random.default_rng(self.seed + 1)

        def floats(*shape):
            return jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32)

        lead = () if self.batch is None else (self.batch,)
        params = {
            "a": floats(),
            "w": floats(2),
            "W": floats(2, 2),
            "xs": floats(self.length, *lead),
            "ts": floats(self.length, 2),
        }
        carry: dict[str, Any] = {
            "h": floats(*lead),
            "v": floats(*lead, 2),
            "n": jnp.asarray(rng.integers(0, 5, lead), jnp.int32),
            "done": jnp.asarray(rng.integers(0, 2, lead), bool),
            "key": jax.random.key(3) if self.batch is None else jax.random.split(jax.random.key(3), self.batch),
            "buffer": rlfx.History(CAPACITY, data=floats(*lead, CAPACITY)),
            "m": rlfx.Shared(floats()),
        }
        return params, {k: carry[k] for k, _ in self.carry}, jax.random.key(7)


@dataclass(frozen=True)
class Var:
    """What the writer knows of a value.

    Attributes:
      causal: it does not depend on later timesteps, and so may be carried.
      extends: its equation can be evaluated at t = T.
    """

    name: str
    type: str
    causal: bool
    extends: bool


@dataclass(frozen=True)
class SeriesVar:
    name: str
    type: str
    causal: bool
    extends: bool
    start: bool
    end: bool
    history: bool = False


# index, whether it stays in [0, T), whether it only reaches into the past
_CLAMPED = [
    ("t", True),
    ("rlfx.maximum(t - 1, 0)", True),
    ("rlfx.maximum(t - 2, 0)", True),
    ("t // 2", True),
    ("t % 3 if {T} > 2 else t", True),
    ("t - t % 2", True),
    ("0", True),
    ("t.length - 1 - t", False),
    ("rlfx.minimum(t + 1, t.length - 1)", False),
    ("rlfx.minimum(2 * t, t.length - 1)", False),
    ("rlfx.minimum(t - t % 2 + 1, t.length - 1)", False),
    ("t.length - 1", False),
]
_BEHIND = ["t - 1", "t - 2", "t - 3", "t // 2 - 1", "2 * t - t.length"]
_AHEAD = ["t + 1", "t + 2", "t + 3", "t + 1 + t % 2", "2 * t", "2 * t + 1"]
# slice, past only, never empty
_SLICES = [
    ("t:", False, True),
    (":t + 1", True, True),
    ("t:t + 2", False, True),
    ("t:t + 3", False, True),
    ("t - 1:t + 1", True, True),
    ("t - 2:t + 1", True, True),
    ("t - 1:t + 2", False, True),
    ("t - t % 2:t - t % 2 + 2", False, True),
    ("t - t % 3:t - t % 3 + 3", False, True),
    (":", False, True),
    ("t // 2:t + 1", True, True),
    (":t", True, False),
    ("t + 1:", False, False),
    ("2 * t:2 * t + 2", False, False),
    ("t - 3:t", True, False),
    ("t + 1:t + 3", False, False),
    ("rlfx.maximum(t - 1, 0):rlfx.minimum(t + 2, t.length)", False, True),
]


@dataclass
class Writer:
    """Writes statements; every production adds what it made to ``vars`` or ``series``."""

    choose: Choices
    length: int
    batch: int | None
    fields: tuple[str, ...]
    statements: list[Statement] = field(default_factory=list)
    vars: list[Var] = field(default_factory=list)
    series: list[SeriesVar] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    buffered: str | None = None

    # -- plumbing

    def emit(self, type_: str, source: str, *args: Var, causal: bool = True, extends: bool = True) -> Var:
        name = f"a{len(self.statements)}"
        self.statements.append(Statement(name, type_, source))
        self.used |= {a.name for a in args}
        made = Var(name, type_, causal and all(a.causal for a in args), extends and all(a.extends for a in args))
        self.vars.append(made)
        return made

    def any(self, *types: str, causal: bool = False) -> Var:
        found = [v for v in self.vars if v.type in types and (v.causal or not causal)]
        # recent values more often: deep programs rather than wide ones
        if not found:
            return self.leaf(types[0])
        return self.choose.of(found[-4:] if self.choose.chance(70) else found)

    def leaf(self, type_: str) -> Var:
        c = self.choose
        if type_ == F:
            source = c.of(
                [
                    'p["a"]',
                    f"jnp.float32({c.number()})",
                    'rlfx.inputs(p["xs"])[t]',
                    "jnp.sin(0.7 * t).astype(jnp.float32)",
                ]
                + ['carry["h"]'] * 3
                + ['carry["m"]'] * (2 * ("m" in self.fields))
                + [
                    f"jax.random.uniform(t.key_for({c.of(['u', 'w'])!r}), dtype=jnp.float32)",
                    "jax.random.normal(t.key, dtype=jnp.float32)",
                ]
                + ["jax.random.uniform(t.shared_key, dtype=jnp.float32)", "K[t.now % 3]", 'p["w"][1]']
                + ['jax.random.uniform(carry["key"], dtype=jnp.float32)'] * ("key" in self.fields)
            )
        elif type_ == V:
            source = c.of(['carry["v"]', 'carry["v"]', 'p["w"]', 'rlfx.inputs(p["ts"], axes="t")[t]', "K[:2]"])
        elif type_ == I:
            source = c.of(['carry["n"]', 'carry["n"]', "t.now", "jnp.int32(2)", "t.now // 2"])
        else:
            source = c.of(['carry["done"]', "t % 2 == 0", "t > 1", "t.now == t.now // 3 * 3"])
        return self.emit(type_, source, extends="inputs" not in source)

    # -- productions: each returns the value it made

    def number(self) -> Var:
        return self.leaf(F)

    def vector(self) -> Var:
        return self.leaf(V)

    def integer(self) -> Var:
        return self.leaf(I)

    def unary(self) -> Var:
        x = self.any(F, V)
        forms = ["jnp.tanh(1.3 * {0})", "jnp.sin({0} + 0.2)", "0.7 * {0} + 0.1", "jax.nn.relu({0})", "jax.nn.silu({0})"]
        forms += ["jax.lax.stop_gradient({0})", "{0} * {0} * 0.5", "jnp.exp(-{0} * {0})", "jax.jit(jnp.cos)({0})"]
        return self.emit(x.type, self.choose.of(forms).format(x.name), x)

    def binary(self) -> Var:
        x = self.any(F, V)
        y = self.any(x.type, F)
        form = self.choose.of(["jnp.tanh({0} + {1})", "{0} * {1} * 0.8", "{0} - 0.5 * {1}", "jnp.sin({0}) * {1}"])
        return self.emit(x.type, form.format(x.name, y.name), x, y)

    def matmul(self) -> Var:
        x, y = self.any(V), self.any(V)
        if self.choose.chance(50):
            return self.emit(V, f'jnp.tanh(p["W"] @ {x.name})', x)
        return self.emit(F, f"{x.name} @ {y.name} * 0.5", x, y)

    def pair(self) -> Var:
        x, y = self.any(F), self.any(F)
        return self.emit(V, f"jnp.stack([{x.name}, 0.5 * {y.name}])", x, y)

    def element(self) -> Var:
        x = self.any(V)
        return self.emit(F, self.choose.of(["{0}[0]", "jnp.max({0})", "{0}.sum() * 0.5", "{0}[-1]"]).format(x.name), x)

    def counting(self) -> Var:
        x, y = self.any(I), self.any(I)
        form = self.choose.of(["({0} + {1}) % 5", "{0} // 2", "{0} * 3 % 7 - 1", "jnp.minimum({0}, {1})"])
        return self.emit(I, form.format(x.name, y.name), x, y)

    def compare(self) -> Var:
        if self.choose.chance(50):
            x = self.any(I)
            return self.emit(B, f"{x.name} > {self.choose.below(4)}", x)
        x, y = self.any(B), self.any(B)
        return self.emit(
            B, self.choose.of(["{0} & ~{1}", "{0} | {1}", "jnp.logical_xor({0}, {1})"]).format(x.name, y.name), x, y
        )

    def where(self) -> Var:
        c, x = self.any(B), self.any(F, V, I)
        y = self.any(x.type)
        form = self.choose.of(["jnp.where({0}, {1}, {2})"] * 2 + ["jax.lax.cond({0}, lambda: {1}, lambda: {2})"])
        return self.emit(x.type, form.format(c.name, x.name, y.name), c, x, y)

    def from_integer(self) -> Var:
        x = self.any(I)
        return self.emit(F, f"jnp.float32(0.2) * {x.name}.astype(jnp.float32)", x)

    def every(self) -> Var:
        x, y = self.any(F), self.any(F)
        n = 1 + self.choose.below(3)
        return self.emit(F, f"rlfx.every({n}, lambda: jnp.sin({x.name}), otherwise={y.name})", x, y)

    def inner(self) -> Var:
        x, y = self.any(F), self.any(F)
        form = self.choose.of(
            [
                "jax.grad(lambda z: jnp.sin(z) * {1})({0})",
                "jax.lax.scan(lambda c, k: (jnp.tanh(c + k * {1}), c), {0}, K)[0]",
                "jax.vmap(lambda k: jnp.tanh(k * {0} + {1}))(K).sum() * 0.4",
                "jax.lax.fori_loop(0, 2, lambda i, c: 0.5 * c + {1}, {0})",
                "jax.checkpoint(lambda z: jnp.sin(z) + {1})({0})",
            ]
        )
        return self.emit(F, form.format(x.name, y.name), x, y)

    def read_inside(self) -> Var:
        """Reads of other timesteps inside a scan or cond: they are moved out of it."""
        s = self._series(F)
        x, c = self.any(F), self.any(B)
        index, past = self.choose.of([ip for ip in _CLAMPED if "{T}" not in ip[0]])
        form = self.choose.of(
            [
                "jax.lax.scan(lambda c, k: (jnp.tanh(c + k * {s}[{i}]), None), {x}, K)[0]",
                "jax.lax.cond({c}, lambda: {s}[{i}] * 0.5, lambda: {x})",
                "jax.vmap(lambda k: k * {s}[{i}] + {x})(K).sum()",
            ]
        )
        self.used.add(s.name)
        return self.emit(
            F, form.format(s=s.name, i=index, x=x.name, c=c.name), x, c, causal=s.causal and past, extends=False
        )

    # -- series

    def make_series(self) -> SeriesVar:
        x = self.any(F, F, V, I)
        start, end = self.choose.chance(60), self.choose.chance(60)
        history = (
            self.buffered is None and "buffer" in self.fields and x.type == F and x.causal and self.choose.chance(50)
        )
        edges = "".join(f", {side}={self._boundary(x.type, x)}" for side, on in (("start", start), ("end", end)) if on)
        name = f"s{len(self.statements)}"
        more = ', history=carry["buffer"]' if history else ""
        self.statements.append(Statement(name, "series " + x.type, f"rlfx.series({x.name}{edges}{more})"))
        self.used.add(x.name)
        made = SeriesVar(name, x.type, x.causal, x.extends, start, end, history)
        self.series.append(made)
        if history:
            self.buffered = name
        return made

    def _boundary(self, type_: str, x: Var) -> str:
        c = self.choose
        if type_ == I:
            return str(c.below(3))
        options = [c.number(), c.number(), 'p["a"]', 'carry["h"]', "0.5 * t"]
        return c.of(options[:3] if c.chance(60) else options)

    def _series(self, *types: str) -> SeriesVar:
        found = [s for s in self.series if s.type in types]
        if found and self.choose.chance(70):
            return self.choose.of(found)
        made = self.make_series()
        while made.type not in types:
            made = self.make_series() if self.choose.chance(50) else self._fallback(types[0])
        return made

    def _fallback(self, type_: str) -> SeriesVar:
        self.leaf(type_)
        name = f"s{len(self.statements)}"
        x = self.vars[-1]
        self.statements.append(Statement(name, "series " + type_, f"rlfx.series({x.name})"))
        self.used.add(x.name)
        self.series.append(SeriesVar(name, type_, x.causal, x.extends, False, False))
        return self.series[-1]

    def point(self) -> Var:
        s = self._series(F, V, I)
        options = [(i.replace("{T}", str(self.length)), past, True) for i, past in _CLAMPED]
        if s.start:
            options += [(i, "length" not in i, False) for i in _BEHIND] * 2
        if s.end or s.extends:
            options += [(i, False, False) for i in _AHEAD] * 2
        index, past, _ = self.choose.of(options)
        if "2 * t" in index and "t.length" in index and "minimum" not in index and not s.start:
            index = "t"
        self.used.add(s.name)
        return self.emit(s.type, f"{s.name}[{index}]", causal=s.causal and past, extends=index == "t - 1")

    def _slice(self, s: SeriesVar, nonempty: bool) -> tuple[str, bool]:
        options = [(i, past) for i, past, full in _SLICES if full or not nonempty]
        index, past = self.choose.of(options)
        self.used.add(s.name)
        return f"{s.name}[{index}]", past and s.causal

    def reduce_slice(self) -> Var:
        s = self._series(F)
        x, y = self.any(F), self.any(F)
        safe = ["jnp.tanh(jnp.sum({0}))", "0.3 * jnp.sum(jnp.sin({0} * {1}))", "rlfx.discounted_sum({0}, 0.6) * 0.5"]
        safe += ["jnp.sum({0} * {0}) * 0.2 + {2}", "jnp.where({0} > 0.1, {0}, 0.2 * {0}).sum() * 0.3"]
        safe += ["jnp.tanh(jnp.cumsum({0}).sum())", "jnp.sum(jnp.arange({0}.shape[0]).astype(jnp.float32) * {0}) * 0.1"]
        full = ["jnp.mean({0} * {1})", "jnp.max({0})", "jnp.min({0}) * {1}", "jax.nn.logsumexp({0}) * 0.5", "{0}[0]"]
        full += ["{0}[-1] * {1}", "jax.nn.softmax({0} * {1}) @ jnp.cos({0})", "jnp.var({0})", "{0}[jnp.argmax({0})]"]
        full += [
            "jnp.sort({0})[0]",
            "jnp.flip({0})[0]",
            "jnp.cumsum(jax.nn.softmax({0}))[0]",
            "jnp.mean({0}[::-1] * {0})",
        ]
        nonempty = self.choose.chance(60)
        text, causal = self._slice(s, nonempty)
        # each operand of a form is written out: slices are values like any other
        form = self.choose.of(full if nonempty else safe)
        return self.emit(F, form.format(text, x.name, y.name), x, y, causal=causal, extends=False)

    def two_slices(self) -> Var:
        s, r = self._series(F), self._series(F)
        index, past = self.choose.of([(i, past) for i, past, _ in _SLICES])
        self.used |= {s.name, r.name}
        form = self.choose.of(
            [
                "jnp.tanh(jnp.sum({0} * {1}))",
                "rlfx.discounted_sum({0}, 0.8 * jnp.cos({1})) * 0.5",
                "0.2 * jnp.sum({0}[:, None] * jnp.sin({1})[None, :])",
                "jnp.tanh({0} @ jnp.sin({1}))",
                "0.3 * jnp.sum(jnp.where({0} > {1}, {0}, 0.1))",
            ]
        )
        text = form.format(f"{s.name}[{index}]", f"{r.name}[{index}]")
        return self.emit(F, text, causal=past and s.causal and r.causal, extends=False)

    def vector_slice(self) -> Var:
        s, q = self._series(V), self.any(V)
        nonempty = self.choose.chance(60)
        text, causal = self._slice(s, nonempty)
        forms = [(V, "jax.nn.softmax({0} @ {1}) @ {0}"), (V, "jnp.mean({0}, axis=0)"), (F, "jnp.max({0} @ {1})")]
        forms += [(V, "{0}[-1]"), (F, "jnp.max({0}) * {1}[0]")]
        if not nonempty:
            forms = [(V, "jnp.tanh(jnp.sum({0}, axis=0))"), (F, "jnp.tanh(jnp.sum({0} @ {1}))")]
            forms += [
                (V, 'jnp.sum(jnp.tanh({0} @ p["W"]), axis=0) * 0.3'),
                (F, "0.2 * jnp.sum(jnp.einsum('ni,i->n', {0}, {1}))"),
            ]
            forms += [(V, "rlfx.discounted_sum({0}, 0.5)")]
        type_, form = self.choose.of(forms)
        return self.emit(type_, form.format(text, q.name), q, causal=causal, extends=False)

    def window(self) -> Var:
        s = self._series(F)
        lo = self.choose.of([-2, -1, 0, 1])
        n = 1 + self.choose.below(3)
        fill = self.choose.of(["0.0", "0.5", 'p["a"]', 'carry["h"]'])
        self.used.add(s.name)
        form = self.choose.of(["({0} @ K[:{1}]) * 0.7", "jnp.max({0})", "jnp.sum(jnp.sin({0}))", "{0}[0]"])
        text = form.format(f"{s.name}.window({lo}, {lo + n}, fill={fill})", n)
        return self.emit(F, text, causal=s.causal and lo + n <= 1, extends=False)

    def lookup(self) -> Var:
        s = self._series(F, V)
        i = self.any(I)
        self.used.add(s.name)
        form = self.choose.of(['{0}.lookup({1}, outside="clip")', "jnp.nan_to_num({0}.lookup({1}), nan=0.3)"])
        if self.batch is not None and self.choose.chance(40):
            j = self.any(I)
            text = form.format(s.name, f"{i.name}, {j.name} % {self.batch}")
            return self.emit(s.type, text, i, j, causal=s.causal, extends=False)
        if self.choose.chance(30):
            text = form.format(s.name, f"jnp.stack([{i.name}, {i.name} + 1])") + ".mean(0)"
            return self.emit(s.type, text, i, causal=s.causal, extends=False)
        return self.emit(s.type, form.format(s.name, i.name), i, causal=s.causal, extends=False)

    def solve(self) -> Var:
        x, y = self.any(F), self.any(F)
        forward = self.choose.chance(55)
        start = self.choose.of(["0.2", "0.0", 'p["a"]', 'carry["h"]', "0.3 * t"])
        if forward:
            forms = ["jnp.tanh(0.8 * x[t - 1] + {0})", "0.5 * x[t - 1] + 0.3 * x[t - 2] + {0}"]
            forms += ["jnp.tanh({0} + {1} * x.window(-2, 0, fill=0.1).sum())", "{0} + 0.4 * jnp.sum(jnp.sin(x[:t]))"]
            forms += [
                "jnp.tanh({0} + jnp.sum(x[t - 2:t]))",
                "jnp.where(t % 2 == 0, {0}, 0.6 * x[t - 1])",
                "0.9 * x[t - 1] * {1} + {0}",
            ]
            forms += ["jnp.sin(x[t - 2] * {1}) + 0.5 * {0}"]
            side = "start"
        else:
            forms = ["{0} + 0.7 * x[t + 1]", "jnp.tanh({0} + {1} * x[t + 1])", "{0} + 0.3 * x[t + 1] - 0.2 * x[t + 2]"]
            forms += [
                "jnp.tanh({0} - jnp.sum(x[t + 1:t + 3]))",
                "{0} + 0.2 * x.window(1, 3, fill=0.3).sum()",
                "{0} + 0.3 * jnp.sum(x[t + 1:])",
            ]
            side = "end"
        body = self.choose.of(forms).format(x.name, y.name)
        if self.choose.chance(20):
            step = "t - 1" if forward else "t + 1"
            body = f"(jnp.tanh(x[{step}][1] + {x.name}), 0.5 * x[{step}][0] * {y.name})"
            text = f"rlfx.solve(lambda x: {body}, {side}=({start}, 0.1))[{self.choose.below(2)}]"
        else:
            text = f"rlfx.solve(lambda x: {body}, {side}={start})"
        return self.emit(F, text, x, y, causal=forward, extends=forward and "x[t - 1]" in body and "t - 2" not in body)

    def reduce(self) -> Var:
        x = self.any(F, F, V, I)
        over = self.choose.of(['"t"', '"b"', '("t", "b")'])
        op = self.choose.of(["sum", "mean", "max", "min", "last", "std"])
        if x.type == I:
            op = self.choose.of(["sum", "max", "min", "last"])
        if op == "last":
            over = '"t"'
        scale = {"sum": "0.2 * "}.get(op, "") if x.type != I else ""
        operand = x.name
        if op == "std":
            # away from zero variance, where the derivative does not exist
            over, operand = '("t", "b")', f"{x.name} + 2.0 * jnp.sin(1.3 * t)"
            scale = "1.0 * " if self.length > 1 else "0.0 * jax.lax.stop_gradient"
        text = f"{scale}rlfx.{op}({operand}, {over})" if "stop" not in scale else f"0.5 * {operand}"
        causal = over == '"b"' or self.length == 1
        return self.emit(x.type, text, x, causal=causal, extends=True)

    def shared(self) -> Var:
        x = self.any(F)
        if self.batch is None:
            return self.emit(F, f"rlfx.shared(lambda v: jnp.tanh(v), {x.name})", x)
        return self.emit(F, f"rlfx.shared(lambda v: jnp.tanh(v.sum() + v[0]), {x.name})", x)


PRODUCTIONS: list[tuple[int, str]] = [
    *[
        (2, n)
        for n in ("number", "vector", "integer", "unary", "binary", "where", "reduce", "every", "inner", "window")
    ],
    *[(1, n) for n in ("matmul", "pair", "element", "counting", "compare", "from_integer", "read_inside", "shared")],
    *[(4, n) for n in ("point", "reduce_slice", "solve")],
    *[(2, n) for n in ("two_slices", "vector_slice", "lookup", "make_series")],
]
_NAMES = [n for weight, n in PRODUCTIONS for _ in range(weight)]


def write(choose: Choices, seed: int = 0, size: int = 3) -> GeneratedProgram:
    """One random program. Mostly few lengths and batches: the operations of a sweep were then compiled before."""
    rare = choose.chance(8)
    length = choose.of([1, 3, 3, 3, 3, 3, 4, 4, 4, 2, 5, 6] if rare else [1, 2, 3, 3])
    batch = choose.of([None, 1, 2, 3] if rare else [None, None, 2])
    fields = tuple(
        k
        for k, percent in (("h", 100), ("v", 100), ("n", 100), ("done", 100), ("key", 15), ("buffer", 25), ("m", 20))
        if choose.chance(percent)
    )
    w = Writer(choose, length, batch, fields)
    for _ in range(2 + choose.below(size)):
        getattr(w, choose.of(_NAMES))()
    until = choose.of(['c["n"] >= 5', 'c["h"] > 0.3', 'c["done"]']) if choose.chance(12) else None
    aux = [choose.of(w.vars).name for _ in range(choose.below(3))] if w.vars else []
    carry = []
    for name in fields:
        carry.append((name, _next(w, name)))
    ends = [v for v in w.vars if v.type in (F, V) and v.name not in w.used] or [w.any(F)]
    terms = [f"{1 + i} * {v.name}" + (".sum()" if v.type == V else "") for i, v in enumerate(ends)]
    loss = w.emit(F, f"jnp.tanh({' + '.join(terms)})" if choose.chance(30) else f"0.5 * ({' + '.join(terms)})")
    return GeneratedProgram(
        tuple(w.statements),
        loss.name,
        tuple(carry),
        tuple(aux),
        length,
        batch,
        choose.of(["mean", "sum"]),
        until,
        choose.of([0, 0, 0, 2, 5]),
        seed,
        choose.chance(50),
    )


def _next(w: Writer, name: str) -> str:
    if name in CARRY:
        x = w.any(CARRY[name], causal=True)
        w.used.add(x.name)
        if name == "n":
            return f"{x.name} + 1" if w.choose.chance(60) else x.name
        if name in ("h", "v") and w.choose.chance(60):
            return f'jnp.tanh({x.name} + 0.5 * carry["{name}"])'
        return x.name
    if name == "key":
        return 'jax.random.split(carry["key"])[1]'
    if name == "buffer":
        return f"{w.buffered}.history" if w.buffered else 'carry["buffer"]'
    x = w.any(F, causal=True)
    w.used.add(x.name)
    form = w.choose.of(
        ['0.5 * carry["m"] + rlfx.mean({0}, "b")', 'rlfx.max({0}, "b")', "rlfx.shared(lambda v: v.mean(), {0})"]
    )
    return form.format(x.name)


def program(seed: int, size: int = 3) -> GeneratedProgram:
    """The program of a seed: always the same. ``size`` bounds the number of productions, each of several statements."""
    return write(seeded(seed), seed, size)


@st.composite
def programs(draw: Any) -> GeneratedProgram:
    """Programs whose choices Hypothesis makes, and shrinks."""
    return write(Choices(lambda n: draw(st.integers(0, n - 1))), draw(st.integers(0, 1000)))


# -- shrinking --------------------------------------------------------------------------------------------------------


def simplify(found: GeneratedProgram, fails: Callable[[GeneratedProgram], bool]) -> GeneratedProgram:
    """A smaller program that still fails: assignments become constants, then everything unused is dropped."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(found):
            if fails(smaller):
                found, progress = smaller, True
                break
    return found


def _smaller(p: GeneratedProgram):
    yield from _without_unused(p)
    if p.until:
        yield dataclasses.replace(p, until=None)
    if p.batch is not None:
        yield dataclasses.replace(p, batch=None)
    if p.batch is not None and p.batch > 1:
        yield dataclasses.replace(p, batch=p.batch - 1)
    if p.length > 1:
        yield dataclasses.replace(p, length=p.length - 1)
    for change in ({"cotangents": False}, {"aux": ()}, {"t0": 0}, {"reduce": "sum"}):
        if any(getattr(p, k) != v for k, v in change.items()):
            yield dataclasses.replace(p, **change)
    for i, (name, value) in enumerate(p.carry):
        if name not in p.source.replace(f"'{name}': ", ""):
            yield dataclasses.replace(p, carry=p.carry[:i] + p.carry[i + 1 :])
        if value != f'carry["{name}"]':
            yield dataclasses.replace(p, carry=(*p.carry[:i], (name, f'carry["{name}"]'), *p.carry[i + 1 :]))
    for i, s in enumerate(p.statements):
        if s.type in DEFAULT and s.source != DEFAULT[s.type]:
            yield _replaced(p, i, DEFAULT[s.type])
            for earlier in p.statements[:i]:
                if earlier.type == s.type and s.source != earlier.name:
                    yield _replaced(p, i, earlier.name)


def _replaced(p: GeneratedProgram, i: int, source: str) -> GeneratedProgram:
    s = dataclasses.replace(p.statements[i], source=source)
    return dataclasses.replace(p, statements=(*p.statements[:i], s, *p.statements[i + 1 :]))


def _without_unused(p: GeneratedProgram):
    import re

    kept, needed = [], set(re.findall(r"\b[as]\d+\b", f"{p.loss} {p.aux} {p.carry}"))
    for s in reversed(p.statements):
        if s.name in needed:
            kept.append(s)
            needed |= set(re.findall(r"\b[as]\d+\b", s.source))
    if len(kept) < len(p.statements):
        yield dataclasses.replace(p, statements=tuple(reversed(kept)))
