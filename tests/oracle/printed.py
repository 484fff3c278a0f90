"""The rlfx side: a tree printed as a per-timestep program that can be pasted into a file."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import rlfx
from tests.oracle.forms import FORMS
from tests.oracle.tree import CAPACITY, Tree, filled, nodes

DTYPES = {"q": jnp.bfloat16, "lo": jnp.bfloat16, "rw": jnp.int8, "n": jnp.int32, "k": jnp.int32}


# custom derivatives: the value is x, the derivative -1, 2, k, a factor
@jax.custom_vjp
def reversal(x):
    return x


reversal.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_jvp
def scaled(x):
    return x


scaled.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def times(k, x):
    return x


times.defvjp(lambda k, x: (x, None), lambda k, _, g: (k * g,))


@jax.custom_vjp
def by(factor, x):
    return x


by.defvjp(lambda factor, x: (x, factor), lambda factor, g: (jnp.zeros_like(factor), factor * g))


def inner(q, c, t):
    return jnp.tanh(0.5 * c + q), rlfx.series(c)[: t + 1].sum()


def iterated(w, x, y):
    """A convolution, three times."""
    step = lambda s, _: (jnp.tanh(jax.lax.conv_general_dilated(s, 0.5 * w[None, None], (1, 1), "SAME")), None)  # noqa: E731
    return 0.3 * jax.lax.scan(step, jnp.outer(x, y)[None, None], None, length=3)[0].sum()


def combine(read):
    return read["x"] + 0.5 * read["y"][0][0]


def source(tree: Tree) -> str:
    """The tree as a per-timestep program."""
    every = nodes(tree)
    names = {node: f"v{i}" for i, node in enumerate(every)}
    series = {node: f"s{i}" for i, node in enumerate(every)}
    read = {arg for node in every for i, arg in enumerate(node.args) if f"@{i}" in FORMS[node.form].rlfx}
    lines = ["def program(p, carry, t):"]
    for node, name in names.items():
        lines.append(f"    {name} = {filled(FORMS[node.form].rlfx, node, names, series, name)}")
        if node in read:
            lines.append(f"    {series[node]} = rlfx.series({name})")
        if node == tree.history:
            lines.append(f'    H = rlfx.series({name}, history=carry["buffer"])')
    following = {k: names[n] for k, n in tree.carried} | {"k": 'carry["k"] + 1', "zero": 'carry["zero"] * 2'}
    if tree.history is not None:
        following["buffer"] = "H.history"
    loss = " + ".join(f"{names[r]}.sum() * {1 / (1 + i):.17g}" for i, r in enumerate(tree.roots))
    carry = ", ".join(f'"{k}": {v}' for k, v in following.items())
    lines.append(f"    return {loss}, {{{carry}}}, ({''.join(names[r] + ', ' for r in tree.roots)})")
    return "\n".join(lines) + "\n"


def program(tree: Tree) -> Callable:
    text = source(tree)
    name = f"<tree {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = {
        "jax": jax, "jnp": jnp, "np": np, "rlfx": rlfx, "S": rlfx.series, "F": jnp.dtype(tree.float).type, "B": tree.batch,
        "K": jnp.asarray([0.7, -0.4, 0.2], tree.float), "reversal": reversal, "scaled": scaled, "times": times,
        "by": by, "inner": inner, "iterated": iterated, "combine": combine, "checkpoint_name": checkpoint_name,
    }  # fmt: skip
    exec(compile(text, name, "exec"), scope)
    return scope["program"]


def options(tree: Tree) -> dict[str, Any]:
    until = {} if tree.until is None else {"until": lambda c: c["n"] >= tree.until}
    return {"length": tree.length, "batch": tree.batch, "reduce": tree.reduce, **until}


def arguments(tree: Tree, params: dict, carry: dict) -> tuple[dict, dict]:
    """Numbers of the NumPy side as arguments of the program."""

    def array(name: str, x: np.ndarray, lead: int) -> Any:
        if tree.batch is None and lead >= 0:
            x = x[(slice(None),) * lead + (0,)]
        return jnp.asarray(x, DTYPES.get(name, tree.float))

    leading = {"xs": 1, "us": 1, "lo": 1, "rw": 1, "bs": 0}
    p = {k: array(k, np.asarray(x), leading.get(k, -1)) for k, x in params.items()}
    kept = [*dict(tree.carried), "k", "zero", *(["buffer"] if tree.history is not None else [])]
    c = {k: array(k, np.asarray(carry[k]), -1 if k == "m" else 0) for k in kept}
    if "m" in c:
        c["m"] = rlfx.Shared(c["m"])
    if "buffer" in c:
        c["buffer"] = rlfx.History(CAPACITY, data=c["buffer"])
    return p, c
