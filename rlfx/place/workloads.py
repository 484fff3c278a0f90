"""The paper's four workloads (appendix C) with shardings that give its node counts: 112, 192, 215 and 215."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.place.explode import explode
from rlfx.place.graph import DataflowGraph

scope = jax.named_scope


@dataclass(frozen=True)
class Workload:
    """A function, its arguments' shapes, and a sharding choice."""

    name: str
    fn: Callable[..., Any]
    avals: tuple[Any, ...]
    splits: Mapping[str, tuple[int, ...]]
    fuse: tuple[str, ...] = ()
    out_splits: tuple[int, ...] | None = None
    one_device_seconds: float = field(default=1.0)  # the paper's measured time on one P100 (table 2)

    def graph(self) -> DataflowGraph:
        """The exploded graph."""
        return explode(
            self.fn, *self.avals, splits=self.splits, fuse=self.fuse, out_splits=self.out_splits, name=self.name
        )

    def arguments(self, key: jax.Array) -> tuple[Any, ...]:
        """Random arguments of the right shapes, float32, scaled so that every layer's output is of order one."""
        leaves, tree = jax.tree.flatten(self.avals)
        keys = jax.random.split(key, len(leaves))
        scale = [1.0 / max(1.0, float(a.shape[0]) ** 0.5) for a in leaves]
        return jax.tree.unflatten(
            tree, [s * jax.random.normal(k, a.shape, a.dtype) for k, a, s in zip(keys, leaves, scale, strict=True)]
        )


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chainmm(size: int = 10_000) -> Workload:
    """(A B) + (C (D E)) of square matrices (appendix C.1), 112 nodes.

    Example:
      >>> len(chainmm(size=16).graph().nodes)
      112
    """

    def fn(A: Any, B: Any, C: Any, D: Any, E: Any) -> jax.Array:
        with scope("DE"):
            inner = D @ E
        with scope("CDE"):
            right = C @ inner
        with scope("AB"):
            left = A @ B
        return left + right

    square = _f32(size, size)
    splits = {"DE": (2, 4, 2), "CDE": (4, 2, 2), "AB": (4, 2, 2)}
    return Workload("chainmm", fn, (square,) * 5, splits, one_device_seconds=0.4399)


def ffnn(batch: int = 2**15, features: int = 2**5, hidden: int = 2**16) -> Workload:
    """softmax(relu(X W1 + b1) W2 + b2) (appendix C.2), 192 nodes.

    Example:
      >>> len(ffnn(batch=64, features=8, hidden=32).graph().nodes)
      192
    """

    def fn(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> jax.Array:
        with scope("hidden"):
            h = jax.nn.relu(x @ w1 + b1[None, :])
        with scope("output"):
            z = h @ w2 + b2[None, :]
        with scope("softmax"):
            return jax.nn.softmax(z, axis=-1)

    avals = (_f32(batch, features), _f32(features, hidden), _f32(hidden), _f32(hidden, features), _f32(features))
    splits = {"hidden": (4, 1, 4), "output": (4, 4, 1), "output/add": (4,), "softmax": (16,), "b2": (4,)}
    return Workload("ffnn", fn, avals, splits, out_splits=(4,), one_device_seconds=0.1485)


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight[None, :]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of ``[tokens, heads, width]``."""
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos[:, None, :] + turned * sin[:, None, :]


def _attention(x: Any, weights: Any, heads: int) -> jax.Array:
    tokens, width = x.shape
    with scope("norm"):
        h = _rms_norm(x, weights["norm"])
    with scope("query"):
        query = (h @ weights["query"]).reshape(tokens, heads, -1)
    with scope("key"):
        key = (h @ weights["key"]).reshape(tokens, heads, -1)
    with scope("value"):
        value = (h @ weights["value"]).reshape(tokens, heads, -1)
    with scope("rotate_query"):
        query = _rotate(query, weights["cos"], weights["sin"])
    with scope("rotate_key"):
        key = _rotate(key, weights["cos"], weights["sin"])
    with scope("scores"):
        scores = jnp.einsum("qhd,khd->hqk", query, key)
    with scope("softmax"):
        with scope("mask"):
            causal = jnp.arange(tokens)[None, :, None] >= jnp.arange(tokens)[None, None, :]
            scores = jnp.where(causal, scores * (width / heads) ** -0.5, -1e30)
        with scope("exponentiate"):
            weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        with scope("normalize"):
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    with scope("mix"):
        mixed = jnp.einsum("hqk,khd->hqd", weight, value).transpose(1, 0, 2).reshape(tokens, width)
    with scope("project"):
        return x + mixed @ weights["project"]


def _attention_avals(tokens: int, width: int, heads: int) -> dict[str, jax.ShapeDtypeStruct]:
    square, table = _f32(width, width), _f32(tokens, width // heads)
    names = ("query", "key", "value", "project")
    return {**dict.fromkeys(names, square), "norm": _f32(width), "cos": table, "sin": table}


def llama_block(tokens: int = 4096, width: int = 4096, heads: int = 32) -> Workload:
    """The attention half of a Llama 7B layer, with its norm and residual (appendix C.3), 215 nodes."""

    def fn(x: Any, weights: Any) -> jax.Array:
        return _attention(x, weights, heads)

    splits = {
        "norm": (4,), "query": (4, 1, 4), "key": (4, 1, 4), "value": (4, 1, 4), "weights['cos']": (1,),
        "weights['sin']": (1,), "scores": (4, 4), "mix": (4, 4), "project": (4, 4),
    }  # fmt: skip
    return Workload(
        "llama-block", fn, (_f32(tokens, width), _attention_avals(tokens, width, heads)), splits,
        fuse=("norm", "rotate_query", "rotate_key", "mask", "exponentiate", "normalize"), out_splits=(4,),
        one_device_seconds=0.4628,
    )  # fmt: skip


def llama_layer(tokens: int = 4096, width: int = 4096, heads: int = 32, hidden: int = 11008) -> Workload:
    """A whole Llama 7B layer: attention and the gated feed-forward network (appendix C.3), 215 nodes."""

    def fn(x: Any, weights: Any) -> jax.Array:
        x = _attention(x, weights, heads)
        with scope("ffn_norm"):
            h = _rms_norm(x, weights["ffn_norm"])
        with scope("gate"):
            gate = h @ weights["gate"]
        with scope("up"):
            up = h @ weights["up"]
        with scope("swiglu"):
            h = jax.nn.silu(gate) * up
        with scope("down"):
            return x + h @ weights["down"]

    weights = _attention_avals(tokens, width, heads)
    weights |= {"ffn_norm": _f32(width), "down": _f32(hidden, width)}
    weights |= {"gate": _f32(width, hidden), "up": _f32(width, hidden)}
    splits = {
        "norm": (4,), "query": (2, 1, 4), "key": (2, 1, 4), "value": (2, 1, 4), "weights['cos']": (1,),
        "weights['sin']": (1,), "scores": (4, 2), "mix": (4, 2), "project": (4, 1, 2), "ffn_norm": (4,),
        "gate": (4, 1, 4), "up": (4, 1, 4), "down": (4, 4),
    }  # fmt: skip
    return Workload(
        "llama-layer", fn, (_f32(tokens, width), weights), splits,
        fuse=("norm", "rotate_query", "rotate_key", "mask", "exponentiate", "normalize", "ffn_norm", "swiglu"),
        out_splits=(1,), one_device_seconds=0.4832,
    )  # fmt: skip


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "chainmm": chainmm,
    "ffnn": ffnn,
    "llama-block": llama_block,
    "llama-layer": llama_layer,
}
