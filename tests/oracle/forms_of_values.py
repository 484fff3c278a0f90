"""Forms of values at one point: leaves, operations, and reads of other points; see ``forms.py``."""

from __future__ import annotations

from tests.oracle.form import Form


def _leaf(name: str, out: str, rlfx: str, loops: str, extends: bool = True, **more) -> Form:
    return Form(name, out, "", rlfx, loops, extends=extends, **more)


LEAVES = [
    _leaf("h", "f", 'carry["h"]', 'carry("h", t, b)', weight=4),
    _leaf("a", "f", 'p["a"]', 'p["a"]'),
    _leaf("x", "f", 'rlfx.inputs(p["xs"])[t]', 'p["xs"][t, b]', extends=False, weight=4),
    _leaf("xt", "f", 'rlfx.inputs(p["ts"], axes="t")[t]', 'p["ts"][t]', extends=False),
    _leaf("xb", "f", 'rlfx.inputs(p["bs"], axes="b")[t]', 'p["bs"][b]', extends=False),
    _leaf("clock", "f", "jnp.sin(F(0.7) * t.now.astype(F))", "np.sin(0.7 * now(t))"),
    _leaf("low", "f", 'rlfx.inputs(p["lo"])[t].astype(F)', 'p["lo"][t, b]', extends=False),
    _leaf("param16", "f", 'p["q"].astype(F)', 'p["q"]'),
    _leaf("reward8", "f", 'rlfx.inputs(p["rw"])[t].astype(F) * 0.2', 'p["rw"][t, b] * 0.2', extends=False),
    _leaf("third", "f", 'p["w"][1]', 'p["w"][1]'),
    _leaf("m", "f", 'carry["m"]', 'carry("m", t, b)', until="shared under until"),
    _leaf("v", "v", 'carry["v"]', 'carry("v", t, b)', weight=3),
    _leaf("w", "v", 'p["w"]', 'p["w"]'),
    _leaf("u", "v", 'rlfx.inputs(p["us"])[t]', 'p["us"][t, b]', extends=False, weight=3),
    _leaf("n", "i", 'carry["n"]', 'carry("n", t, b)', weight=2),
    _leaf("now", "i", "t.now", "now(t)"),
    _leaf("k", "i", 'carry["k"]', 'carry("k", t, b)'),
    _leaf("int8", "i", 'rlfx.inputs(p["rw"])[t].astype(jnp.int32)', 'int(p["rw"][t, b])', extends=False),
    _leaf("even", "b", "t.now % 2 == 0", "now(t) % 2 == 0"),
    _leaf("late", "b", "t > 1", "now(t) > 1"),
]


def _map(name: str, types: str, rlfx: str, loops: str, **more) -> Form:
    return Form(name, types[-1], types[:-1], rlfx, loops, extends=True, **more)


POINTWISE = [
    _map("tanh", "ff", "jnp.tanh(1.3 * $0)", "np.tanh(1.3 * $0)"),
    _map("sin", "ff", "jnp.sin($0 + 0.2)", "np.sin($0 + 0.2)"),
    _map("square", "ff", "0.5 * $0 * $0", "0.5 * $0 * $0"),
    _map("relu", "ff", "jax.nn.relu($0 + 0.05)", "np.where(more($0 + 0.05, 0), $0 + 0.05, 0)"),
    _map("abs", "ff", "jnp.abs($0 - 0.03)", "np.where(more($0 - 0.03, 0), 1, -1) * ($0 - 0.03)"),
    _map("stop", "ff", "jax.lax.stop_gradient($0)", "stop(&, t, b, $0)"),
    _map("reversed", "ff", "reversal($0)", "bent(&, t, b, $0, -1.0)"),
    _map("scaled", "ff", "scaled($0)", "bent(&, t, b, $0, 2.0)"),
    _map("with_static", "ff", "times(3, $0)", "bent(&, t, b, $0, 3.0)"),
    _map("add", "fff", "jnp.tanh($0 + $1)", "np.tanh($0 + $1)", weight=2),
    _map("multiply", "fff", "$0 * $1 * 0.8", "$0 * $1 * 0.8", weight=2),
    _map("subtract", "fff", "$0 - 0.5 * $1", "$0 - 0.5 * $1"),
    _map("larger", "fff", "jnp.where($0 > $1, $0, 0.5 * $1)", "np.where(more($0, $1), $0, 0.5 * $1)"),
    _map("if", "bfff", "jnp.where($0, $1, $2)", "$1 if $0 else $2"),
    _map("cond", "bfff", "jax.lax.cond($0, lambda: jnp.sin($1), lambda: $2)", "np.sin($1) if $0 else $2"),
    _map("float", "if", "$0.astype(F) * 0.2", "0.2 * $0"),
    _map("scan", "fff", "jax.lax.scan(lambda s, k: (jnp.tanh(s + k * $1), s), $0, K)[0]", "chain($0, $1)"),
    _map("vstop", "vv", "jax.lax.stop_gradient($0)", "stop(&, t, b, $0)"),
    _map("pair", "ffv", "jnp.stack([$0, 0.5 * $1])", "np.array([$0, 0.5 * $1])"),
    _map("matmul", "vv", 'jnp.tanh(p["W"] @ $0)', 'np.tanh(p["W"] @ $0)'),
    _map("vadd", "vvv", "jnp.sin($0 + 0.5 * $1)", "np.sin($0 + 0.5 * $1)"),
    _map("dot", "vvf", "0.5 * ($0 @ $1)", "0.5 * ($0 @ $1)"),
    _map("first_of", "vf", "$0[0]", "$0[0]"),
    _map("vsum", "vf", "0.5 * $0.sum()", "0.5 * $0.sum()"),
    _map("count", "iii", "($0 + 2 * $1) % 5", "($0 + 2 * $1) % 5"),
    _map("halve", "ii", "$0 // 2", "$0 // 2"),
    _map("equal", "iib", "$0 % 3 == $1 % 2", "$0 % 3 == $1 % 2"),
    _map("both", "bbb", "jnp.logical_and($0, ~$1)", "$0 and not $1"),
    _map("above", "ffb", "$0 > $1", "more($0, $1)"),
    _map("middle", "ffff", "jnp.sort(jnp.stack([$0, 1.1 * $1 + 0.2, $2 - 0.1]))[1]",
         "ordered(np.array([$0, 1.1 * $1 + 0.2, $2 - 0.1]))[1]"),
    _map("matrices", "vvv", "jnp.tanh(jnp.outer($0, $1) @ (0.3 * jnp.outer($1, $0) + jnp.eye(2, dtype=F)))[0]",
         "np.tanh(np.outer($0, $1) @ (0.3 * np.outer($1, $0) + np.eye(2)))[0]"),
    _map("solved", "vvv", "jnp.tanh(jnp.linalg.solve(0.1 * jnp.outer($0, $0) + jnp.eye(2, dtype=F), $1))",
         "np.tanh(np.linalg.solve(0.1 * np.outer($0, $0) + np.eye(2), $1))"),
    _map("branches", "bvvv", 'jax.lax.cond($0, lambda: jnp.tanh(p["W"] @ $1), lambda: $2 * p["w"])',
         'np.tanh(p["W"] @ $1) if $0 else $2 * p["w"]'),
    _map("three_branches", "ivf",
         'jax.lax.switch($0 % 3, [lambda: 0.3 * (p["W"] @ $1).sum(), lambda: $1[0] * p["a"], lambda: jnp.sin(p["w"] @ $1)])',
         '[lambda: 0.3 * (p["W"] @ $1).sum(), lambda: $1[0] * p["a"], lambda: np.sin(p["w"] @ $1)][$0 % 3]()'),
    _map("one_row", "vv", '(jnp.tanh($0[None] @ p["W"]) @ p["W"])[0]', 'np.tanh($0 @ p["W"]) @ p["W"]'),
    _map("one_of_three", "vvv", 'jnp.tanh(jnp.stack([$0, $1, $0 + $1]) @ p["W"])[1]', 'np.tanh($1 @ p["W"])'),
    _map("transposed", "vv",
         'jax.lax.conv_transpose($0.reshape(1, 2, 1, 1), p["W"].reshape(2, 2, 1, 1), (2, 2), "VALID").sum((0, 2, 3))[1:3]',
         '$0 * p["W"].sum(1)'),
    _map("iterated", "vvf", 'iterated(p["W"], $0, $1)', 'iterated(p["W"], $0, $1)'),
]
POINTWISE += [
    Form(
        "every2", "f", "ff", "rlfx.every(2, lambda: jnp.sin($0), otherwise=$1)", "np.sin($0) if now(t) % 2 == 0 else $1"
    ),
    Form("every3", "f", "ff", "rlfx.every(3, lambda: $0, otherwise=0.5 * $1)", "$0 if now(t) % 3 == 0 else 0.5 * $1"),
    Form("now2", "v", "vv", 'jnp.where((t.now + 1) % 2 == 0, jnp.tanh(p["W"] @ $0), $1)',
         'np.tanh(p["W"] @ $0) if (now(t) + 1) % 2 == 0 else $1'),
    Form("now3", "f", "vf", 'jnp.where(t.now % 3 != 1, $1, (p["W"] @ $0).sum())',
         '$1 if now(t) % 3 != 1 else (p["W"] @ $0).sum()'),
    Form("inner", "f", "ff", "rlfx.unroll(inner, length=3)($1, $0)[1].sum() * 0.3", "inner($1, $0) * 0.3"),
    Form("empty", "f", "f", '$0 + S(carry["zero"])[:t + 1].sum()', "$0"),
    Form("empty_tree", "f", "f", 'S({"x": $0, "e": {}, "n": ()})[t]["x"]', "$0"),
]


def _read(name: str, ins: str, rlfx: str, loops: str, at: str = "point", **more) -> Form:
    return Form(name, ins[-1], ins[:-1], rlfx, loops, at, past=at in ("point", "start"), **more)


READS = [
    *(_read("read_" + k, k * 2, "@0[#0]", "read(@0, #0, b)", weight=2 if k == "f" else 1) for k in "fvib"),
    _read("read_start", "fff", "rlfx.series($0, start=$1)[#0]", "read(@0, #0, b, start=@1)", "start", weight=2),
    _read("read_end", "fff", "rlfx.series($0, end=$1)[#0]", "read(@0, #0, b, end=@1)", "end", weight=2),
    _read("read_both", "ffff", "rlfx.series($0, start=$1, end=$2)[#0]", "read(@0, #0, b, @1, @2)", "both", weight=2),
    _read("read_number", "ff", "rlfx.series($0, start=1, end=-0.2)[#0]", "read(@0, #0, b, 1, -0.2)", "both"),
    _read("read_int", "ii", "rlfx.series($0, start=7, end=-1)[#0]", "read(@0, #0, b, 7, -1)", "both"),
    _read("vread_both", "vvv", "rlfx.series($0, start=0.3, end=$1)[#0]", "read(@0, #0, b, V(0.3), @1)", "both"),
    _read("read_trees", "fvf", 'combine(S({"x": $0, "y": ($1,)})[#0])', "combine(read(@0, #0, b), read(@1, #0, b))"),
    _read("beyond", "ff", "@0[t + 1]", "@0(t + 1, b)", "end", feature="beyond"),
    *(
        Form(k + "ended", k, k + k, "rlfx.series($0, end=$1)[t]", "read(@0, t, b, end=@1)", ended=True,
             feature="values behind ends", weight=3)
        for k in "fv"
    ),
    # reads inside of control flow, and functions that close over them
    _read(
        "read_in_scan",
        "fff",
        "jax.lax.scan(lambda s, k: (jnp.tanh(s + k * @0[#0]), s), $1, K)[0]",
        "chain($1, read(@0, #0, b))",
    ),
    _read(
        "read_in_cond",
        "bfff",
        "jax.lax.cond($0, lambda: 0.5 * @1[#0], lambda: $2)",
        "0.5 * read(@1, #0, b) if $0 else $2",
    ),
    _read(
        "read_in_switch",
        "iffff",
        "jax.lax.switch($0 % 3, [lambda: @1[#0], lambda: jnp.tanh($2), lambda: $3])",
        "[lambda: read(@1, #0, b), lambda: np.tanh($2), lambda: $3][$0 % 3]()",
    ),
    _read(
        "read_in_vmap",
        "fff",
        "jax.vmap(lambda k: jnp.tanh(k * @0[#0] + $1))(K).sum() * 0.4",
        "np.tanh(KS * read(@0, #0, b) + $1).sum() * 0.4",
    ),
    _read("read_in_jit", "fff", "jax.jit(lambda z: jnp.sin(z * @0[#0]))($1)", "np.sin($1 * read(@0, #0, b))"),
    _read(
        "read_in_checkpoint", "fff", "jax.checkpoint(lambda z: jnp.sin(z * @0[#0]))($1)", "np.sin($1 * read(@0, #0, b))"
    ),
    _read("read_in_rule", "fff", "by(@0[#0], $1)", "bent(&, t, b, $1, read(@0, #0, b))"),
    _read(
        "read_shared",
        "ff",
        "rlfx.shared(lambda x: jnp.tanh(x.mean() + x[0]), @0[#0])",
        "np.tanh(np.mean([read(@0, #0, c) for c in every]) + read(@0, #0, 0))",
        until="values of ended environments",
        batch=True,
    ),
    Form(
        "window",
        "f",
        "ff",
        "(jnp.cos(jnp.arange(#1 - (#0)).astype(F)) * @0.window(#0, #1, fill=$1)).sum()",
        "(np.cos(np.arange(#1 - (#0))) * window(@0, #0, #1, t, b, $1)).sum()",
        "window",
        weight=3,
    ),
    Form(
        "window_valid",
        "f",
        "f",
        "jnp.where(S(True).window(#0, #1, fill=False), @0.window(#0, #1), 0.1).sum()",
        "window(@0, #0, #1, t, b, 0.1).sum()",
        "window",
        feature="boolean fill",
    ),
]


def _look(name: str, ins: str, rlfx: str, loops: str, **more) -> Form:
    return Form(name, ins[-1], ins[:-1], rlfx, loops, **more)


# `into(i)` is an offset that stays within what this call has seen; the lookup itself is in absolute time.
_BACK = "t.now - jnp.minimum(jnp.abs({}), carry['k'])"
_WENT = "t - min(abs({}), carry('k', t, b))"
LOOKUPS = [
    _look("look", "fif", f"@0[{_BACK.format('$1')}]", f"@0({_WENT.format('$1')}, b)", weight=3),
    _look("vlook", "viv", f"@0[{_BACK.format('$1')}]", f"@0({_WENT.format('$1')}, b)"),
    _look(
        "look_env",
        "fiif",
        f"@0[{_BACK.format('$1')}, $2 % B]",
        f"@0({_WENT.format('$1')}, $2 % B)",
        batch=True,
        until="values of ended environments",
        weight=2,
    ),
    _look(
        "look_env_carry",
        "iif",
        f"S(carry['h'])[{_BACK.format('$0')}, $1 % B]",
        f"last_carry('h', {_WENT.format('$0')}, $1 % B)",
        batch=True,
        feature="lookups of ended environments",
    ),
    _look(
        "look_many",
        "fiif",
        f"(@0[jnp.stack([{_BACK.format('$1')}, t.now, {_BACK.format('$2')}])] * K).sum()",
        f"np.dot([@0({_WENT.format('$1')}, b), $0, @0({_WENT.format('$2')}, b)], KS)",
    ),
    _look(
        "look_vmap",
        "fif",
        f"jax.vmap(lambda k: @0[{_BACK.format('k')}])(jnp.stack([$1, $1 // 2])).sum()",
        f"@0({_WENT.format('$1')}, b) + @0({_WENT.format('($1 // 2)')}, b)",
        feature="vmap of lookups",
    ),
    _look(
        "look_vmap2",
        "fif",
        f"jax.vmap(jax.vmap(lambda k: @0[{_BACK.format('k')}] * k.astype(F)))"
        "(jnp.arange(4, dtype=jnp.int32).reshape(2, 2) + $1).sum()",
        f"sum(@0({_WENT.format('(j + $1)')}, b) * (j + $1) for j in range(4))",
        feature="vmap of lookups",
    ),
    _look(
        "look_outside",
        "fif",
        "jnp.nan_to_num(@0.lookup(t.now + 3 * $1 - 4), nan=0.25)",
        "@0(t + 3 * $1 - 4, b) if 0 <= t + 3 * $1 - 4 <= t else 0.25",
        feature="lookups out of range",
    ),
    _look(
        "look_clip",
        "fif",
        '@0.lookup(t.now + 3 * $1 - 4, outside="clip")',
        "@0(min(max(t + 3 * $1 - 4, 0), t), b)",
        feature="lookups that clip",
    ),
    _look("look_minimum", "fif", "@0[jnp.minimum(t.now, carry['k'] * 0 + t.now)] * $1.astype(F)", "$0 * $1"),
]
