"""The table of forms: for each, its text as a per-timestep rlfx program and as NumPy at one (t, b).

``$0`` stands for the value of the first operand, ``@0`` for that operand at all times, ``#0`` for the first of the node's
own texts (an index, a bound, a number), ``&`` for the node's name. Indices read the same on both sides; what the names
in the texts mean is in ``printed.py`` and ``loops.py``, which share nothing.

Types: ``f`` a float, ``v`` two of them, ``i`` an int32, ``b`` a boolean; ``s`` and ``w`` are slices of floats and of
pairs, whose length depends on t.
"""

from __future__ import annotations

from tests.oracle.form import Form
from tests.oracle.forms_of_slices import SPANS
from tests.oracle.forms_of_values import LEAVES, LOOKUPS, POINTWISE, READS

_SOLVES = [
    ("fwd", "0.6 * s[t - 1] + $0", "0.6 * s(t - 1) + $0"),
    ("fwd", "jnp.tanh(s[t - 1] * $1 + $0)", "np.tanh(s(t - 1) * $1 + $0)"),
    ("fwd", "0.4 * s[t - 1] - 0.3 * s[t - 2] * $1 + $0", "0.4 * s(t - 1) - 0.3 * s(t - 2) * $1 + $0"),
    ("fwd", "$0 + 0.3 * jnp.sum(jnp.sin(s[:t]))", "$0 + 0.3 * sum(np.sin(s(j)) for j in range(t))"),
    (
        "fwd",
        "jnp.tanh($0 + $1 * s.window(-2, 0, fill=0.1).sum())",
        "np.tanh($0 + $1 * sum(s(j) if j >= 0 else 0.1 for j in (t - 2, t - 1)))",
    ),
    ("fwd", "jnp.where($0 > 0, s[t - 1], $1)", "s(t - 1) if more($0, 0) else $1"),
    ("fwd", "jnp.sin(s[t - 2] * $1) + 0.5 * $0", "np.sin(s(t - 2) * $1) + 0.5 * $0"),
    ("fwd", "0.5 * s[t // 2 - 1] + $0", "0.5 * s(t // 2 - 1) + $0"),
    ("bwd", "0.6 * s[t + 1] + $0", "0.6 * s(t + 1) + $0"),
    ("bwd", "$0 + $1 * 0.9 * s[t + 1]", "$0 + $1 * 0.9 * s(t + 1)"),
    ("bwd", "jnp.tanh(s[t + 1] * $1 + $0)", "np.tanh(s(t + 1) * $1 + $0)"),
    ("bwd", "0.4 * s[t + 1] - 0.3 * s[t + 2] * $1 + $0", "0.4 * s(t + 1) - 0.3 * s(t + 2) * $1 + $0"),
    ("bwd", "$0 + 0.3 * jnp.sum(jnp.sin(s[t + 1:]))", "$0 + 0.3 * sum(np.sin(s(j)) for j in range(t + 1, N(b)))"),
    ("bwd", "jnp.where($0 > 0, s[t + 1], $1)", "s(t + 1) if more($0, 0) else $1"),
    (
        "bwd",
        "$0 + 0.2 * s.window(1, 3, fill=0.3).sum()",
        "$0 + 0.2 * sum(s(j) if j < N(b) else 0.3 for j in (t + 1, t + 2))",
    ),
]
_REDUCTIONS = [(op, over) for op in ("sum", "mean", "max", "min") for over in ("t", "b", "tb")]


def _solve(i: int, side: str, rlfx: str, loops: str, feature: str = "") -> Form:
    edge, past = ("start", True) if side == "fwd" else ("end", False)
    text = f"s = at_edge(&, b, {edge}=@2)\nreturn {loops}"
    return Form(f"{side}{i}", "f", "fff", f"rlfx.solve(lambda s: {rlfx}, {edge}=$2)", text, past=past, feature=feature)


FORMS: dict[str, Form] = {
    f.name: f
    for f in [
        *LEAVES,
        *POINTWISE,
        *READS,
        *LOOKUPS,
        *SPANS,
        *(_solve(i, *row) for i, row in enumerate(_SOLVES)),
        _solve(20, "fwd", "reversal(s[t - 1]) * 0.5 + $0 * $1", "0.5 * bent(&, t, b, s(t - 1), -1.0) + $0 * $1",
               "custom derivatives"),
        _solve(21, "bwd", "scaled(s[t + 1]) * 0.5 + $0 * $1", "0.5 * bent(&, t, b, s(t + 1), 2.0) + $0 * $1",
               "custom derivatives"),
        *(
            Form(f"{op}_{over}", "f", "f", f'0.5 * rlfx.{op}($0, "{over}")', f'0.5 * over("{op}", "{over}", @0, t, b)',
                 past=over == "b")
            for op, over in _REDUCTIONS
        ),
        Form("last_t", "f", "f", "rlfx.last($0)", "@0(N(b) - 1, b)", past=False),
        Form("isum_t", "i", "i", '(rlfx.sum($0, "t") % 5).astype(jnp.int32)', 'over("sum", "t", @0, t, b) % 5', past=False),
        Form("std", "f", "f", "rlfx.std($0 + 2 * jnp.sin(F(1.3) * t.now.astype(F) + $0))",
             'over("std", "tb", lambda t, b: @0(t, b) + 2 * np.sin(1.3 * now(t) + @0(t, b)), t, b)', past=False),
        Form("normal", "f", "f", '($0 - rlfx.mean($0)) / (rlfx.max(jnp.abs($0 - 0.01), "b") + 0.5)',
             '($0 - over("mean", "tb", @0, t, b)) / (over("max", "b", lambda t, b: size(@0(t, b) - 0.01), t, b) + 0.5)',
             past=False),
        Form("shared", "f", "f", "rlfx.shared(lambda x: jnp.tanh(x.sum() + x[0]), $0)",
             "np.tanh(sum(@0(t, c) for c in every) + @0(t, 0))", until="values of ended environments", batch=True),
        Form("shared_carry", "f", "", "rlfx.shared(lambda x: jnp.tanh(x.sum() + x[0]), carry['h'])",
             "np.tanh(sum(last_carry('h', t, c) for c in every) + last_carry('h', t, 0))", feature="shared under until",
             batch=True),
        # of the carry
        *(
            Form(
                f"{name}{n}", type_, type_, f"jnp.where((t.now + 1) % {n} == 0, jax.lax.stop_gradient($0), $0)",
                f"stop(&, t, b, $0) if (now(t) + 1) % {n} == 0 else $0", weight=0,
            )
            for name, type_ in (("cut", "f"), ("vcut", "v")) for n in (2, 3)
        ),
        *(
            Form(
                f"{name}{n}", type_, type_ * 2, f"jnp.where(t.now % {n} == 0, $1, $0)",
                f"$1 if now(t) % {n} == 0 else $0", weight=0,
            )
            for name, type_ in (("anew", "f"), ("vanew", "v")) for n in (2, 3)
        ),
        Form("next", "i", "", 'carry["n"] + 1', 'carry("n", t, b) + 1', weight=0),
        Form("share", "f", "ff", '0.5 * $1 + rlfx.mean($0, "b")', '0.5 * $1 + over("mean", "b", @0, t, b)', weight=0),
        Form("recall", "f", "f", "H[jnp.maximum(t.now - #0, 0)]", "recall(@0, #0, t, b)", at="number"),
    ]
}  # fmt: skip

# index, only the past, needs a start, needs an end; NumPy's integers belong to "NumPy integers"
POINTS: list[tuple[str, bool, bool, bool]] = [
    ("t", True, False, False),
    ("rlfx.maximum(t - 1, 0)", True, False, False),
    ("rlfx.maximum(t - 3, 0)", True, False, False),
    ("t // 2", True, False, False),
    ("t - t % 3", True, False, False),
    ("0", True, False, False),
    ("rlfx.minimum(t // 2, t)", True, False, False),
    ("t // 3 + t % 3 // 3", True, False, False),
    ("rlfx.maximum(t - np.int64(2), np.int64(0))", True, False, False),
    ("t // np.int32(2)", True, False, False),
    ("t - t % np.int64(2)", True, False, False),
    ("t.length - 1 - t", False, False, False),
    ("rlfx.minimum(t + 1, t.length - 1)", False, False, False),
    ("rlfx.minimum(2 * t, t.length - 1)", False, False, False),
    ("t.length - 1", False, False, False),
    ("rlfx.minimum(t + np.int64(1), t.length - np.int32(1))", False, False, False),
    ("t - 1", True, True, False),
    ("t - 3", True, True, False),
    ("t // 2 - 1", True, True, False),
    ("t - np.int64(1)", True, True, False),
    ("t + 1", False, False, True),
    ("t + 2", False, False, True),
    ("2 * t", False, False, True),
    ("(t + 3) // 2", False, False, True),
    ("t // 2 * 2 + 1", False, False, True),
    ("t + np.int64(1)", False, False, True),
    ("t * np.int64(2)", False, False, True),
    ("np.int64(1) + t", False, False, True),
    ("np.int64(1)", False, False, True),
    ("2 * t - t.length", False, True, True),
    ("3 - t", False, True, True),
    ("t % 4 - 1", False, True, True),
]
# lower bound, upper bound, only the past, never empty
SLICES: list[tuple[str, str, bool, bool]] = [
    ("t", "", False, True),
    ("", "t + 1", True, True),
    ("", "", False, True),
    ("t", "t + 3", False, True),
    ("t - 2", "t + 1", True, True),
    ("t - 1", "t + 3", False, True),
    ("t - t % 3", "t - t % 3 + 3", False, True),
    ("t - t % 4", "t + 1", True, True),
    ("t // 2", "t + 1", True, True),
    ("t // 3", "t // 2 + 1", True, True),
    ("t.length - 1 - t", "", False, True),
    ("", "t.length - t", False, True),
    ("rlfx.maximum(t - 1, 0)", "rlfx.minimum(t + 2, t.length)", False, True),
    ("t", "t + np.int64(2)", False, True),
    ("t - t % np.int64(2)", "t + 1", True, True),
    ("", "t", True, False),
    ("t + 1", "", False, False),
    ("2 * t", "2 * t + 2", False, False),
    ("t + 2", "t + 5", False, False),
    ("t - 5", "t - 2", True, False),
    ("t - t % 3 + 3", "t - t % 3 + 6", False, False),
    ("t + np.int64(1)", "", False, False),
    ("4", "", False, False),
]
WINDOWS = [("-2", "1"), ("-1", "2"), ("-3", "0"), ("0", "3"), ("1", "3"), ("np.int64(-1)", "np.int64(1)"), ("-1", "1")]


def feature_of_index(*texts: str) -> str:
    """The switch that an index belongs to."""
    return "NumPy integers" if any("np." in t for t in texts) else ""
