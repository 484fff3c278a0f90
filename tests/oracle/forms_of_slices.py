"""Forms that make slices, of slices, and that reduce them; see ``forms.py``."""

from __future__ import annotations

from tests.oracle.form import Form


def _slices(name: str, types: str, rlfx: str, loops: str, **more) -> Form:
    return Form(name, types[-1], types[:-1], rlfx, loops, **more)


SPANS = [
    _slices("slice", "fs", "@0[#0]", "span(@0, &, #0, b)", at="slice", weight=4),
    _slices("vslice", "vw", "@0[#0]", "span(@0, &, #0, b)", at="slice", weight=2),
    _slices(
        "bounded",
        "fs",
        'S(jnp.where(carry["k"] >= 2, jnp.inf, $0))[:rlfx.minimum(t + 1, 2)]',
        "span(@0, &, 0, min(t + 1, 2), b)",
        feature="infinities outside",
    ),
    _slices(
        "bounded_below",
        "fs",
        'S(jnp.where(carry["k"] < 1, -jnp.inf, $0))[rlfx.maximum(t, 1):]',
        "span(@0, &, max(t, 1), N(b), b)",
        past=False,
        feature="infinities outside",
    ),
    _slices(
        "vbounded",
        "vw",
        'S(jnp.where(carry["k"] >= 2, jnp.nan, $0))[:rlfx.minimum(t + 1, 2)]',
        "span(@0, &, 0, min(t + 1, 2), b)",
        feature="infinities outside",
    ),
    _slices(
        "poisoned",
        "ff",
        "jnp.where(carry['k'] >= 2, 0.3, (lambda z: jnp.ones_like(z) @ z)(S(jnp.where(carry['k'] >= 2, "
        "jnp.inf, F(1)))[:t + 1])) * $0",
        "(0.3 if carry('k', t, b) >= 2 else t + 1) * $0",
        feature="infinities outside",
    ),
    _slices("concatenate", "sss", "jnp.concatenate([$0, $1])", "np.concatenate([$0, $1])", feature="concatenations"),
    _slices("append", "sfs", "jnp.concatenate([$0, $1[None]])", "np.append($0, $1)", feature="concatenations"),
    _slices(
        "split",
        "fs",
        "jnp.concatenate([@0[:t + 1], 2 * @0[t + 1:]])",
        "np.concatenate([span(@0, &, 0, t + 1, b), 2 * span(@0, &, t + 1, N(b), b)])",
        past=False,
        feature="concatenations",
    ),
    _slices(
        "ragged_series",
        "fs",
        "S(@0[:t + 1] * 0.7)[t]",
        "span(@0, &, 0, t + 1, b) * 0.7",
        feature="series of slices",
    ),
    # elementwise, with scalars, with one another
    _slices("s_tanh", "ss", "jnp.tanh($0)", "np.tanh($0)"),
    _slices("s_times", "sfs", "$0 * $1", "$0 * $1", weight=2),
    _slices("s_plus", "sfs", "jnp.sin($0 + $1)", "np.sin($0 + $1)"),
    _slices("s_where", "sfs", "jnp.where($0 > $1, $0, 0.1)", "np.where(more($0, $1), $0, 0.1)"),
    _slices("s_product", "sss", "$0 * jnp.cos($1)", "$0 * np.cos($1)", weight=2),
    _slices("s_flip", "ss", "$0[::-1]", "$0[::-1]", full=True),
    _slices("s_flip_empty", "ss", "jnp.flip($0)", "$0[::-1]"),
    _slices("s_cumsum", "ss", "jnp.cumsum($0) * 0.3", "np.cumsum($0) * 0.3"),
    _slices("s_softmax", "sfs", "jax.nn.softmax($0 * $1)", "softmax($0 * $1)", full=True, weight=2),
    _slices("s_stop", "ss", "jax.lax.stop_gradient($0)", "stop(&, t, b, $0)"),
    _slices("s_jit", "ss", "jax.jit(jnp.cos)($0)", "np.cos($0)"),
    _slices("s_vmap", "sfs", "jax.vmap(lambda x: jnp.sin(x * $1))($0)", "np.sin($0 * $1)", full=True),
    _slices("s_vmap_empty", "ss", "jax.vmap(jnp.sin)($0)", "np.sin($0)", feature="maps over empty slices"),
    _slices("s_checkpoint", "sfs", "jax.checkpoint(lambda x: jnp.tanh(x * $1))($0)", "np.tanh($0 * $1)"),
    _slices("s_name", "ss", 'checkpoint_name($0, "n")', "$0", feature="names of slices"),
    _slices("s_reversed", "ss", "reversal($0)", "bent(&, t, b, $0, -1.0)", feature="custom derivatives"),
    _slices("s_scaled", "ss", "scaled($0)", "bent(&, t, b, $0, 2.0)", feature="custom derivatives"),
    _slices("s_static", "ss", "times(3, $0)", "bent(&, t, b, $0, 3.0)", feature="custom derivatives"),
    _slices(
        "s_mapped", "ss", "jax.vmap(reversal)($0)", "bent(&, t, b, $0, -1.0)", full=True, feature="custom derivatives"
    ),
    _slices(
        "s_relu",
        "sss",
        "jax.nn.relu($0 - jax.lax.stop_gradient($0)) + $1",
        "0.0 * stop(&, t, b, $0) + $1",
        feature="custom derivatives",
    ),
    _slices(
        "s_arange",
        "ss",
        "$0 * jnp.arange($0.shape[0]).astype(F) * 0.2",
        "$0 * np.arange(len($0)) * 0.2",
        until="lengths under until",
    ),
    _slices(
        "s_reverse_scan",
        "ss",
        "jax.lax.scan(lambda s, x: (0.6 * s + x, s), jnp.zeros((), F), $0, reverse=True)[1]",
        "np.append(discounted($0, 0.6)[1:], 0.0)[: len($0)]",
        feature="results of scans over slices",
    ),
    _slices(
        "s_associative", "ss", "jax.lax.associative_scan(jnp.add, $0)", "np.cumsum($0)", feature="associative scans"
    ),
    _slices(
        "s_take",
        "ss",
        "jnp.take_along_axis($0, jnp.argsort($0), 0)",
        "ordered($0)",
        full=True,
        feature="take along a slice",
    ),
    _slices("s_cummax", "ss", "jax.lax.cummax($0)", "rising($0)", feature="running values"),
    _slices(
        "s_cummin", "ss", "jax.lax.cummin($0, reverse=True)", "-rising(-$0[::-1])[::-1]", feature="running values"
    ),
    _slices("s_cumprod", "ss", "jnp.cumprod(jnp.cos($0))", "np.cumprod(np.cos($0))", feature="running values"),
    _slices(
        "s_cumlogsumexp",
        "ss",
        "0.5 * jax.lax.cumlogsumexp($0)",
        "0.5 * np.log(np.cumsum(np.exp($0)))",
        feature="running values",
    ),
    _slices(
        "w_cumlogsumexp",
        "ww",
        "0.5 * jax.lax.cumlogsumexp($0, axis=0, reverse=True)",
        "0.5 * np.log(np.cumsum(np.exp($0[::-1]), 0))[::-1]",
        feature="running values",
    ),
    # products, attention
    _slices("scores", "wvs", "$0 @ $1", "$0 @ $1", weight=2),
    _slices("mix", "swv", "jax.nn.softmax($0) @ $1", "softmax($0) @ $1", full=True, weight=3),
    _slices("weigh", "swv", "0.3 * ($0 @ $1)", "0.3 * ($0 @ $1)", weight=2),
    _slices("layer", "ww", 'jnp.tanh($0 @ p["W"])', 'np.tanh($0 @ p["W"])', weight=2),
    _slices("w_times", "wvw", "$0 * $1[None]", "$0 * $1[None]"),
    _slices("w_mean", "wv", "$0.mean(0)", "$0.mean(0)", full=True),
    _slices("w_sum", "wv", "0.3 * jnp.sum(jnp.sin($0), axis=0)", "0.3 * np.sin($0).sum(0)"),
    _slices("w_last", "wv", "$0[-1]", "$0[-1]", full=True),
    _slices("gram", "wf", "0.1 * jnp.sum(jnp.tanh($0 @ $0.T))", "0.1 * np.tanh($0 @ $0.T).sum()"),
    _slices("w_column", "ws", "$0[:, 1]", "$0[:, 1]"),
    _slices("w_stack", "ssw", "jnp.stack([$0, $1], -1)", "np.stack([$0, $1], -1)"),
    _slices("w_discounted", "wv", "rlfx.discounted_sum($0, 0.5)", "discounted($0, 0.5)[0]"),
    # to numbers
    _slices("sum", "sf", "0.3 * jnp.sum($0)", "0.3 * np.sum($0)", weight=3),
    _slices("mean", "sf", "jnp.mean($0)", "np.mean($0)", full=True, weight=3),
    _slices("max", "sf", "$0.max()", "largest($0)", full=True, weight=2),
    _slices("min", "sf", "$0.min()", "-largest(-$0)", full=True),
    _slices("logsumexp", "sf", "jax.nn.logsumexp($0)", "np.log(np.exp($0).sum())", full=True),
    _slices("inner_product", "ssf", "0.3 * ($0 @ jnp.sin($1))", "0.3 * ($0 @ np.sin($1))", weight=2),
    _slices("last", "sff", "$0[-1] * $1", "$0[-1] * $1", full=True),
    _slices("first", "sf", "$0[0]", "$0[0]", full=True),
    _slices("variance", "sf", "jnp.var($0)", "np.var($0)", full=True),
    _slices("sorted", "sf", "jnp.sort($0)[0]", "-largest(-$0)", full=True),
    _slices("at_largest", "ssf", "$1[jnp.argmax($0)]", "$1[argmax($0)]", full=True),
    _slices(
        "outer",
        "ssf",
        "0.1 * jnp.sum(jnp.tanh($0[:, None] - $1[None, :]))",
        "0.1 * np.tanh($0[:, None] - $1[None, :]).sum()",
    ),
    _slices("discounted", "sf", "rlfx.discounted_sum($0, 0.7)", "discounted($0, 0.7)[0]", weight=3),
    _slices(
        "discounted2",
        "ssf",
        "rlfx.discounted_sum($0, 0.7 * jnp.cos($1))",
        "discounted($0, 0.7 * np.cos($1))[0]",
        weight=2,
    ),
    _slices(
        "decayed",
        "sf",
        "jax.lax.scan(lambda s, x: (0.6 * s + x, None), jnp.zeros((), F), $0)[0]",
        "discounted($0[::-1], 0.6)[0]",
    ),
    _slices("wins", "ssf", "jnp.sum($0 > $1).astype(F) * 0.2", "more($0, $1).sum() * 0.2"),
    _slices("any", "sff", "jnp.where(jnp.any($0 > 0.2), $1, 0.1)", "$1 if more($0, 0.2).any() else 0.1"),
    _slices(
        "per_length", "sf", "$0.sum() / (1 + $0.shape[0])", "$0.sum() / (1 + len($0))", until="lengths under until"
    ),
    _slices(
        "cond_operand",
        "bsf",
        "jax.lax.cond($0, lambda x: 0.2 * x.sum(), lambda x: jnp.tanh(x).sum(), $1)",
        "0.2 * $1.sum() if $0 else np.tanh($1).sum()",
        feature="slices in control flow",
    ),
    _slices(
        "switch_operand",
        "isf",
        "jax.lax.switch($0 % 2, [lambda x: 0.2 * x.sum(), lambda x: jnp.tanh(x).sum()], $1)",
        "np.tanh($1).sum() if $0 % 2 else 0.2 * $1.sum()",
        feature="slices in control flow",
    ),
    _slices(
        "slice_in_cond",
        "bff",
        "jax.lax.cond($0, lambda: 0.2 * @1[:t + 1].sum(), lambda: $1)",
        "0.2 * span(@1, &, 0, t + 1, b).sum() if $0 else $1",
        feature="slices in control flow",
    ),
    _slices("tail", "sf", "$0[-2:].sum() * 0.5", "$0[-2:].sum() * 0.5", full=True, feature="slices of slices"),
    _slices("strided", "sf", "$0[::2].sum() * 0.5", "$0[::2].sum() * 0.5", full=True, feature="slices of slices"),
    _slices(
        "reward_sum",
        "f",
        "rlfx.discounted_sum(rlfx.inputs(p['rw'])[t:], 0.5)",
        "discounted(p['rw'][t:N(b), b], 0.5)[0]",
        past=False,
        feature="integer rewards",
    ),
    _slices(
        "last_discount",
        "sf",
        "rlfx.discounted_sum($0, jnp.where(jnp.arange($0.shape[0]) == $0.shape[0] - 1, jnp.inf, 0.5))",
        "discounted($0, 0.5)[0]",
        feature="last discount",
        until="lengths under until",
    ),
]
