"""``incrementalize`` on ordinary functions of a batch: the same results, with the memory of one block."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError, ScheduleError
from rlfx.transforms.incrementalize import incrementalize, incrementalize_jaxpr
from tests.sampling import slow

N = 24


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def labels(seed, high, *shape):
    return jax.random.randint(jax.random.key(seed), shape, 0, high)


def nll(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]


# -- losses: (loss, params, batch); the first result is what is differentiated -----------------------------------------


def mlp():
    def loss(params, batch):
        x, y = batch
        h = jnp.tanh(x @ params["w"] + params["b"][None])
        each = nll(h @ params["out"], y)
        hit = (h @ params["out"]).argmax(1) == y
        more = {"each": each, "worst": each.max(), "which": each.argmax(), "least": each.argmin(), "hits": hit.sum()}
        return each.mean(), more | {"any": hit.any(), "all": hit.all()}

    return loss, {"w": normal(0, 5, 8), "b": normal(1, 8), "out": normal(2, 8, 4)}, (normal(3, N, 5), labels(4, 4, N))


def scalar_features():
    return lambda w, x: (jnp.mean((x * w) ** 2), jnp.prod(1.0 + 0.1 * x)), jnp.float32(0.7), normal(0, N)


def advantage_normalisation():
    def loss(w, batch):
        obs, action, advantage, old = batch
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(-nll(jnp.tanh(obs @ w), action) - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return -surrogate.mean(), {"ratio": ratio.mean()}

    return (
        loss,
        normal(0, 6, 3),
        (normal(1, N, 6), labels(2, 3, N), 3.0 * normal(3, N) + 1.0, -jnp.ones(N, jnp.float32)),
    )


def batch_norm():
    def norm(x):
        return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)

    def loss(params, batch):
        x, y = batch
        for w in params[:-1]:
            x = jax.nn.relu(norm(x @ w))
        return jnp.mean((x @ params[-1] - y) ** 2), x.mean(0)

    return loss, [normal(0, 5, 7), normal(1, 7, 6), normal(2, 6)], (normal(3, N, 5), normal(4, N))


def convolution_nhwc():
    def loss(params, batch):
        x, y = batch
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, params["c"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
        return nll(x.reshape(len(x), -1) @ params["w"], y).mean(), x.mean((1, 2))

    return loss, {"c": normal(0, 3, 3, 2, 4), "w": normal(1, 4 * 4 * 4, 3)}, (normal(2, N, 8, 8, 2), labels(3, 3, N))


def convolution_nchw_pooled():
    def loss(params, batch):
        x, y = batch
        x = jax.lax.conv(x, params["c"], (1, 1), "SAME")
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 2, 2), (1, 1, 1, 1), "SAME")
        return nll(x.reshape(len(x), -1) @ params["w"], y).mean(), None

    return loss, {"c": normal(0, 4, 2, 3, 3), "w": normal(1, 4 * 4 * 4, 3)}, (normal(2, N, 2, 8, 8), labels(3, 3, N))


def depthwise_convolution():
    def loss(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )
        return jnp.mean(y**2), None

    return loss, normal(0, 3, 3, 1, 4), normal(1, N, 6, 6, 2)


def transformer():
    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(p, batch):
        tokens, y = batch
        x = p["embed"][tokens]
        n, s, d = x.shape
        q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(n, s, 2, 3 * d // 2), 3, -1)
        scores = jnp.einsum("nshd,nthd->nhst", q, k)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf))
        x = x + jnp.einsum("nhst,nthd->nshd", weights, v).reshape(n, s, d) @ p["o"]
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        return nll(x @ p["embed"].T, y).mean(), None

    d = 8
    params = {"embed": normal(0, 11, d), "qkv": normal(1, d, 3 * d), "o": normal(2, d, d)}
    params |= {"up": normal(3, d, 16), "down": normal(4, 16, d)}
    return loss, params, (labels(5, 11, N, 6), labels(6, 11, N, 6))


def cell(p, h, x):
    r, z = jnp.split(jax.nn.sigmoid(x @ p["wx"] + h @ p["wh"]), 2, -1)
    return z * h + (1.0 - z) * jnp.tanh(x @ p["c"] + (r * h) @ p["ch"])


def gru():
    def loss(p, batch):
        xs, y = batch
        h, hs = jax.lax.scan(
            lambda h, x: (h := cell(p, h, x), h), jnp.zeros((len(xs), 4), jnp.float32), xs.swapaxes(0, 1), reverse=False
        )
        return jnp.mean((hs.reshape(-1, 4) @ p["out"] - y.T.reshape(-1)) ** 2), h

    params = {"wx": normal(0, 3, 8), "wh": normal(1, 4, 8), "c": normal(2, 3, 4), "ch": normal(3, 4, 4)}
    return loss, params | {"out": normal(4, 4)}, (normal(5, N, 7, 3), normal(6, N, 7))


def vmapped_rnn_with_embedding():
    def one(p, tokens):
        def step(h, token):
            h = jnp.tanh(h @ p["u"] + p["embed"][token])
            return h, h @ p["embed"].T

        _, logits = jax.lax.scan(step, p["h0"], tokens[:-1])
        return nll(logits, tokens[1:]).mean()

    def loss(p, tokens):
        return jax.vmap(one, (None, 0))(p, tokens).mean(), None

    return loss, {"u": normal(0, 5, 5), "embed": normal(1, 9, 5), "h0": normal(2, 5)}, labels(3, 9, N, 6)


def shuffled():
    def loss(w, batch):
        x, y, perm = batch
        return jnp.mean((x[perm] @ w - y) ** 2), x[perm].sum(0)

    return loss, normal(0, 4), (normal(1, N, 4), normal(2, N), jax.random.permutation(jax.random.key(3), N))


def shuffled_hidden():
    def loss(w, batch):
        x, perm = batch
        h = jnp.tanh(x @ w)
        return jnp.mean(h[perm] * h), None

    return loss, normal(0, 4, 3), (normal(1, N, 4), jax.random.permutation(jax.random.key(3), N))


def indexed_by_arange():
    def loss(w, batch):
        x, y = batch
        return -jax.nn.log_softmax(x @ w)[jnp.arange(len(y)), y].mean(), None

    return loss, normal(0, 4, 3), (normal(1, N, 4), labels(2, 3, N))


def contrastive():
    def loss(w, batch):
        a, b = batch
        logits = (a @ w) @ (b @ w).T
        return nll(logits, jnp.arange(len(a))).mean(), None

    return loss, normal(0, 4, 3), (normal(1, N, 4), normal(2, N, 4))


def median():
    def loss(w, x):
        return jnp.median(jnp.tanh(x @ w)), jnp.sort(x @ w)

    return loss, normal(0, 4), normal(1, N, 4)


def keys_in_the_batch():
    def loss(w, batch):
        x, keys = batch
        noise = jax.vmap(lambda k: jax.random.normal(k, (4,), jnp.float32))(keys)
        return jnp.mean(jnp.tanh((x + noise) @ w)), jax.vmap(jax.random.split)(keys)[:, 0]

    return loss, normal(0, 4), (normal(1, N, 4), jax.random.split(jax.random.key(2), N))


def dropout():
    def loss(w, batch):
        x, key = batch["x"], jax.random.key(7)
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.mean(jnp.where(kept, x, 0.0) @ w), None

    return loss, normal(0, 4), {"x": normal(1, N, 4)}


def checkpointed_loop():
    def loss(ws, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, ws)
        return jnp.mean(x**2), None

    return loss, normal(0, 3, 4, 4), normal(1, N, 4)


def scan_over_layers():
    """What the backward scan reads of the forward one depends on the batch in part."""

    def loss(p, x):
        def layer(x, w):
            centred = (x - x.mean(1, keepdims=True)) * jnp.exp(w["g"])[None]
            return x + jnp.tanh(centred @ (w["w"] * 2.0)), jnp.sum(w["g"] ** 2)

        x, norms = jax.lax.scan(layer, x, p)
        return jnp.mean(x**2), norms

    return loss, {"w": normal(0, 5, 4, 4), "g": normal(1, 5, 4)}, normal(2, N, 4)


def branches():
    def loss(p, x):
        y = jax.lax.cond(p["s"] > 0, lambda x: jnp.sin(x @ p["w"]), lambda x: jnp.cos(x @ p["w"]), x)
        return jnp.mean(y), None

    return loss, {"w": normal(0, 4, 2), "s": jnp.float32(1.0)}, normal(1, N, 4)


def while_loop():
    def loss(w, x):
        y = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)
        return jnp.mean(y), None

    return loss, normal(0, 4, 4), normal(1, N, 4)


def tracked_statistics():
    """Something that does not depend on the batch, and something that is a constant."""

    def loss(p, x):
        decay = 1e-2 * jnp.sum(p**2)
        return jnp.mean(x @ p) + decay, (decay, jnp.float32(3.0), jnp.linspace(0.0, 1.0, len(x), dtype=jnp.float32))

    return loss, normal(0, 4), normal(1, N, 4)


def solves():
    def loss(p, x):
        a = x[:, :, None] * x[:, None, :] + jnp.eye(3, dtype=jnp.float32)[None]
        return jnp.mean(jnp.linalg.solve(a, jnp.broadcast_to(p, (len(x), 3))[..., None])), jnp.linalg.cholesky(a)

    return loss, normal(0, 3), normal(1, N, 3)


LOSSES = [
    mlp, scalar_features, advantage_normalisation, batch_norm, convolution_nhwc, convolution_nchw_pooled,
    depthwise_convolution, transformer, gru, vmapped_rnn_with_embedding, shuffled, shuffled_hidden, indexed_by_arange,
    contrastive, median, keys_in_the_batch, dropout, checkpointed_loop, scan_over_layers, branches, while_loop,
    tracked_statistics, solves,
]  # fmt: skip


def close(got, want):
    def check(a, b):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        scale = max(1.0, float(np.abs(np.asarray(b, np.float64)).max())) if b.size else 1.0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * scale)

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(check, got, want)


@pytest.mark.parametrize("make", LOSSES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_whole_batch(make):
    loss, params, batch = make()
    blocked = incrementalize(loss, block_size=7)  # ragged: 24 = 7 + 7 + 7 + 3
    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    close(jax.jit(blocked)(params, batch), want[0])
    close(jax.jit(jax.value_and_grad(blocked, has_aux=True))(params, batch), want)


@pytest.mark.parametrize("make", [mlp, advantage_normalisation, convolution_nhwc, gru], ids=lambda f: f.__name__)
def test_a_gradient_function_runs_in_blocks(make):
    loss, params, batch = make()
    step = incrementalize(jax.value_and_grad(loss, has_aux=True), blocks=4)
    close(jax.jit(step)(params, batch), jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))


def test_a_batch_of_one():
    loss, params, batch = transformer()
    one = jax.tree.map(lambda x: x[:1], batch)
    step = jax.value_and_grad(incrementalize(loss, block_size=1), has_aux=True)
    close(jax.jit(step)(params, one), jax.jit(jax.value_and_grad(loss, has_aux=True))(params, one))


def test_from_jaxpr_to_jaxpr():
    loss, params, batch = mlp()
    step = jax.value_and_grad(loss, has_aux=True)
    args, structure = jax.tree.flatten((params, batch))
    whole, out = jax.make_jaxpr(lambda *args: step(*jax.tree.unflatten(structure, args)), return_shape=True)(*args)
    blocked = incrementalize_jaxpr(whole, [False] * 3 + [True] * 2, block_size=7)
    assert blocked.in_avals == whole.in_avals
    assert blocked.out_avals == whole.out_avals
    got = jax.jit(lambda *args: jax.core.eval_jaxpr(blocked.jaxpr, blocked.consts, *args))(*args)
    close(jax.tree.unflatten(jax.tree.structure(out), got), jax.jit(step)(params, batch))
    with pytest.raises(DomainError, match=r"argument 0\[0\] has 8 examples, argument 0\[1\] has 24"):
        incrementalize_jaxpr(whole, [False, True, False, True, False], block_size=7)


@pytest.mark.parametrize("size", [1, 24])
def test_single_examples_and_one_block(size):
    loss, params, batch = mlp()
    close(jax.jit(incrementalize(loss, block_size=size))(params, batch), jax.jit(loss)(params, batch))


# -- random losses -----------------------------------------------------------------------------------------------------


def random_loss(seed):
    """A loss of random operations on ``[N, 4]``: elementwise, contractions, statistics of the batch, shuffles."""
    rng = np.random.default_rng(seed)
    moves = [
        lambda x, w, e: jnp.tanh(x @ w),
        lambda x, w, e: x * jnp.sin(x) + x.mean(0, keepdims=True),
        lambda x, w, e: x - x.max(0, keepdims=True) * 0.3,
        lambda x, w, e: jnp.concatenate([x[:, 2:], x[:, :2]], 1) * w[0][None],
        lambda x, w, e: x[e] * 0.5 + x,
        lambda x, w, e: jax.nn.softmax(x @ w, axis=1) + jax.nn.softmax(x, axis=0),
        lambda x, w, e: x @ (x.T @ x) * 0.02,
        lambda x, w, e: jnp.cumsum(x, 1) - x.sum(1, keepdims=True) * 0.2,
        lambda x, w, e: x.reshape(-1, 2).sum(1, keepdims=True).reshape(-1, 2)[:, jnp.array([0, 1, 1, 0])],
        lambda x, w, e: jnp.where(x > x.mean(), x, w[1][None] * x),
        lambda x, w, e: jax.lax.scan(lambda h, c: (jnp.tanh(h + c), h * c), x[:, 0], x.T)[1].T,
    ]
    ends = [lambda x: jnp.mean(x**2), lambda x: jnp.sum(x.max(1)), lambda x: jnp.log(jnp.sum(jnp.exp(x * 0.1)))]
    chosen = [moves[i] for i in rng.integers(0, len(moves), 4)]
    end = ends[rng.integers(0, len(ends))]

    def loss(ws, batch):
        x, e = batch
        for w, move in zip(ws, chosen, strict=True):
            x = move(x, w, e)
        return end(x), (x.min(0), x[:, 1])

    n = int(rng.integers(2, 14))
    batch = normal(seed, n, 4), jnp.asarray(rng.permutation(n), jnp.int32)
    return loss, 0.6 * normal(seed + 1, 4, 4, 4), batch, int(rng.integers(1, n + 1))


@pytest.mark.parametrize("seed", [*range(12), *map(slow, range(12, 300))])
def test_random_losses(seed):
    loss, params, batch, size = random_loss(seed)
    # Operation by operation: XLA may compute what a maximum compares twice, and jax's derivative is 0 / 0 then (seed 38).
    want = jax.value_and_grad(loss, has_aux=True)(params, batch)
    got = jax.jit(jax.value_and_grad(incrementalize(loss, block_size=size), has_aux=True))(params, batch)
    close(got, want)


@pytest.mark.parametrize(("n", "size"), [(6, 1), (7, 1), (10, 9), (11, 6)])
@pytest.mark.parametrize("extreme", [jnp.max, jnp.min], ids=["max", "min"])
def test_extremes_of_what_is_computed_again(extreme, n, size):
    """Of the batch, of an example, and of everything: something attains each, however XLA rounds the elements."""

    def loss(w, x):
        y = jax.nn.softmax(x @ w, axis=1) + jax.nn.softmax(x, axis=0)
        y = y - 0.3 * extreme(y, axis=0, keepdims=True)
        return jnp.sum(extreme(y, axis=1)) + extreme(y * y), None

    w, x = 0.6 * normal(2, 4, 4), normal(1, n, 4)
    blocked = jax.value_and_grad(incrementalize(loss, block_size=size), has_aux=True)
    close(jax.jit(blocked)(w, x), jax.value_and_grad(loss, has_aux=True)(w, x))


def test_extremes_that_tie_share_their_derivative():
    """And those of what is not a number have none, as in jax."""

    def loss(w, x):
        y = x * w[None]  # computed again
        same = y[:, ::-1] == y.max(0, keepdims=True)  # no comparison with its own
        return jnp.sum(y.max(0) * jnp.array([1.0, 2.0])) + y.max(), same.sum()

    blocked, whole = (
        jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True)) for f in (incrementalize(loss, block_size=2), loss)
    )
    for x in (jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]]), jnp.array([[1.0, jnp.nan], [1.0, 2.0], [0.0, 2.0]])):
        close(blocked(jnp.ones(2), x), whole(jnp.ones(2), x))


# -- composition -------------------------------------------------------------------------------------------------------


def square_error(w, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


@pytest.fixture
def regression():
    return normal(0, 4), (normal(1, N, 4), normal(2, N))


def test_blocks_of_blocks(regression):
    nested = incrementalize(incrementalize(square_error, block_size=12), block_size=5)
    close(jax.jit(jax.value_and_grad(nested))(*regression), jax.value_and_grad(square_error)(*regression))


def test_vmap_over_parameters(regression):
    w, batch = regression
    ws = jnp.stack([w, 2.0 * w, -w])
    step = jax.value_and_grad(incrementalize(square_error, block_size=5))
    close(
        jax.jit(jax.vmap(step, (0, None)))(ws, batch), jax.vmap(jax.value_and_grad(square_error), (0, None))(ws, batch)
    )


def test_gradients_for_the_batch_and_for_captured_arrays(regression):
    w, batch = regression

    def outer(of, scale, batch):
        return of(lambda w, batch: square_error(w * scale, batch))(w, batch)

    blocked = jax.jit(jax.grad(lambda s, b: outer(lambda f: incrementalize(f, block_size=5), s, b), (0, 1)))
    plain = jax.grad(lambda s, b: outer(lambda f: f, s, b), (0, 1))
    close(blocked(jnp.float32(1.3), batch), plain(jnp.float32(1.3), batch))


def test_cotangents_of_per_example_results(regression):
    def errors(w, batch):
        x, y = batch
        return (jnp.tanh(x @ w) - y) ** 2

    def weighted(f):
        return lambda w, batch: jnp.sum(f(w, batch) * jnp.arange(1, N + 1, dtype=jnp.float32))

    got = jax.jit(jax.value_and_grad(weighted(incrementalize(errors, block_size=5))))(*regression)
    close(got, jax.value_and_grad(weighted(errors))(*regression))


def test_cotangents_of_the_loss_and_of_another_result(regression):
    def both(w, batch):
        return square_error(w, batch), jnp.sum(jnp.sin(w)) + jnp.max(batch[0] @ w)

    def total(f):
        return lambda w, batch: 2.0 * f(w, batch)[0] + f(w, batch)[1] ** 2

    got = jax.jit(jax.grad(total(incrementalize(both, block_size=5))))(*regression)
    close(got, jax.grad(total(both))(*regression))


def test_keyword_arguments_and_several_batch_arguments():
    def loss(w, x, scale, y, *, power):
        return jnp.mean(jnp.abs(x @ w * scale - y) ** power)

    args = normal(0, 4), normal(1, N, 4), jnp.float32(2.0), normal(2, N)
    blocked = incrementalize(loss, batch_argnums=(1, 3), block_size=7)
    close(jax.jit(lambda *a: blocked(*a, power=2))(*args), loss(*args, power=2))


# -- structure -----------------------------------------------------------------------------------------------------------


def temp(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def wide_mlp():
    def loss(params, batch):
        x, y = batch
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return nll(x @ params[-1], y).mean()

    return (
        loss,
        [jnp.ones((16, 64), jnp.float32), jnp.ones((64, 64), jnp.float32), jnp.ones((64, 4), jnp.float32)],
        (jnp.ones((2048, 16), jnp.float32), labels(0, 4, 2048)),
    )


@pytest.mark.optimised
def test_memory_falls_as_one_over_the_number_of_blocks():
    loss, params, batch = wide_mlp()
    whole = temp(jax.value_and_grad(loss), params, batch)
    for blocks in (2, 4, 8):
        assert temp(jax.value_and_grad(incrementalize(loss, blocks=blocks)), params, batch) < 1.35 * whole / blocks


@pytest.mark.optimised
def test_statistics_of_the_batch_do_not_keep_the_network():
    """What needs no statistic is computed in the last pass, with what does: the first ones only read the advantages."""

    def loss(params, batch):
        x, action, advantage, target = batch
        for w in params[:-1]:
            x = jnp.tanh(x @ w)
        out = x @ params[-1]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return (nll(out[:, :4], action) * advantage).mean() + jnp.mean((out[:, 4] - target) ** 2), out.max()

    params = [jnp.ones((16, 64), jnp.float32), jnp.ones((64, 64), jnp.float32), jnp.ones((64, 5), jnp.float32)]
    batch = jnp.ones((2048, 16), jnp.float32), labels(0, 4, 2048), normal(1, 2048), jnp.ones(2048, jnp.float32)
    blocked = incrementalize(loss, blocks=8)
    report = blocked.explain(params, batch, gradient=True)
    assert (report.loops, report.kept) == (3, ())
    step = jax.value_and_grad(blocked, has_aux=True)
    assert temp(step, params, batch) < temp(jax.value_and_grad(loss, has_aux=True), params, batch) / 5


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(item, "jaxpr") or hasattr(item, "eqns"):
                    yield from equations(getattr(item, "jaxpr", item))


@pytest.mark.parametrize("make", [convolution_nhwc, convolution_nchw_pooled], ids=lambda f: f.__name__)
def test_convolutions_in_the_loop_are_channels_last(make):
    """Other layouts are 20 times slower in a loop on a CPU, weight gradients among them."""
    loss, params, batch = make()
    step = jax.value_and_grad(incrementalize(loss, block_size=8), has_aux=True)
    found = [
        e for e in equations(jax.make_jaxpr(step)(params, batch).jaxpr) if e.primitive.name == "conv_general_dilated"
    ]
    assert len(found) >= 2
    for equation in found:
        numbers = equation.params["dimension_numbers"]
        assert tuple(numbers.lhs_spec) == (0, 3, 1, 2)
        assert tuple(numbers.rhs_spec) == (3, 2, 0, 1)
        assert tuple(numbers.out_spec) == (0, 3, 1, 2)


def test_no_array_of_the_whole_batch_is_made_in_the_loop():
    loss, params, batch = wide_mlp()
    text = str(jax.make_jaxpr(jax.value_and_grad(incrementalize(loss, block_size=256)))(params, batch))
    assert not re.search(r"f32\[2048,64\]", text)
    assert re.search(r"f32\[256,64\]", text)


@pytest.mark.parametrize(
    ("make", "passes"),
    [(mlp, 1), (gru, 1), (transformer, 1), (convolution_nhwc, 1), (scan_over_layers, 1), (advantage_normalisation, 3)],
)
def test_passes_over_the_batch(make, passes):
    loss, params, batch = make()
    report = incrementalize(loss, block_size=8).explain(params, batch, gradient=True)
    assert report.loops == passes
    assert report.barriers == ()


def test_the_report_names_what_does_not_run_in_blocks():
    loss, params, batch = median()
    report = incrementalize(loss, block_size=8).explain(params, batch)
    assert any(re.match(r"sort at test_incrementalize.py:\d+ \(median.<locals>.loss\)", b) for b in report.barriers)
    assert "  not in blocks: sort at test_incrementalize.py:" in str(report)
    assert str(report).startswith("batch 24 in 3 blocks of 8, ")


# -- bad input -------------------------------------------------------------------------------------------------------


def test_strict_refuses_what_needs_the_whole_batch():
    loss, params, batch = median()
    with pytest.raises(ScheduleError, match=r"sort has no rule for blocks of the batch: it needs all 24 examples") as e:
        incrementalize(loss, block_size=8, strict=True)(params, batch)
    assert "at test_incrementalize.py:" in str(e.value)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_block_sizes_are_positive_integers(size):
    with pytest.raises(DomainError, match=f"block_size must be a positive integer or None, got {size!r}"):
        incrementalize(square_error, block_size=size)
    with pytest.raises(DomainError, match=f"blocks must be a positive integer or None, got {size!r}"):
        incrementalize(square_error, blocks=size)


def test_blocks_larger_than_the_batch(regression):
    with pytest.raises(DomainError, match="block_size=25 is not an integer between 1 and the number of examples"):
        incrementalize(square_error, block_size=25)(*regression)


def test_one_of_block_size_and_blocks():
    for given in ({}, {"block_size": 2, "blocks": 2}):
        with pytest.raises(DomainError, match="Give either block_size= or blocks="):
            incrementalize(square_error, **given)


def test_unequal_leading_axes_name_the_leaves():
    batch = {"x": jnp.ones((6, 4), jnp.float32), "y": {"target": jnp.ones(5, jnp.float32)}}
    message = r"argument 1\['x'\] has 6 examples, argument 1\['y'\]\['target'\] has 5"
    with pytest.raises(DomainError, match=message):
        incrementalize(lambda w, b: b["x"].sum(), block_size=2)(1.0, batch)


def test_a_batch_without_an_axis():
    with pytest.raises(DomainError, match=r"argument 1\['n'\] is a scalar: it has no batch axis"):
        incrementalize(lambda w, b: w, block_size=2)(1.0, {"n": 3.0})
    with pytest.raises(DomainError, match="The batch has no arrays"):
        incrementalize(lambda w, b: w, block_size=2)(1.0, ())
    with pytest.raises(DomainError, match="batch_argnums=2, but there are 2 arguments"):
        incrementalize(lambda w, b: w, batch_argnums=2, block_size=2)(1.0, jnp.ones(3, jnp.float32))
    with pytest.raises(DomainError, match="The batch is empty"):
        incrementalize(lambda w, b: w, block_size=2)(1.0, jnp.ones((0, 3), jnp.float32))


def test_over_is_for_per_timestep_functions():
    with pytest.raises(DomainError, match='over must be "t", "b" or "tb", got \'x\''):
        rlfx.compile(incrementalize(lambda w, x, t: (w * x, x), over="x", block_size=2), length=3)(
            1.0, jnp.ones((), jnp.float32)
        )
    with pytest.raises(DomainError, match="takes a function or a program, got 3"):
        incrementalize(3, block_size=2)


def test_a_loss_that_does_not_read_the_batch():
    with pytest.raises(DomainError, match="Nothing that the function returns depends on the batch"):
        incrementalize(lambda w, b: w**2, block_size=2)(1.0, jnp.ones(3, jnp.float32))
