"""Slices of symbolic length in blocks, and over one's own past in sections: the same results, without ``[T, T]``."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.sections import Section
from rlfx.recurrence.schedule import sections, tiling
from tests.sampling import met, spread

WIDTH = 3
SLICES = [
    lambda x, t: x[: t + 1],
    lambda x, t: x[t:],
    lambda x, t: x[t - 2 : t + 1],
    lambda x, t: x[t // 2 : t + 1],
    lambda x, t: x[t : t + 4],
    lambda x, t: x[t - t % 3 : t - t % 3 + 3],
    lambda x, t: x[:],
    lambda x, t: x[t - 1 : t + 3],
]


@pytest.fixture
def in_pieces(monkeypatch):
    """Everything runs in blocks and sections, however small it is."""

    def choose(room: int, tile: int = 2):
        cpu = rlfx.target("cpu")
        small = replace(cpu, room=replace(cpu.room, at_once=0, in_block=room))
        monkeypatch.setattr("rlfx.recurrence.api.compiled.here", lambda sharding: small)
        monkeypatch.setattr(tiling, "SMALLEST_BLOCK", 1)
        monkeypatch.setattr(sections, "SMALLEST_TILE", tile)

    return choose


def attend(slice_, q, kind):
    keys, values = slice_
    if kind == 0:
        return jax.nn.softmax(keys @ q) @ values
    if kind == 1:
        return jnp.sum(jnp.exp(-jnp.abs(keys - q[None])) * values, 0)
    weights = jax.nn.softmax(jnp.einsum("td,d->t", jnp.tanh(keys), q))
    return jnp.einsum("td,t->d", values, weights) + jnp.max(keys, 0) + 0.1 * values[-1] + jnp.sort(keys @ q)[0]


def learner(slices, kinds):
    """Attention over inputs and, twice, over what attention found; the carry is not attended to."""

    def f(params, carry, t):
        obs = rlfx.inputs(params["obs"])[t]
        x = jnp.tanh(obs @ params["w"][0] + carry)
        found = obs
        for slice_, kind in zip(slices, kinds, strict=True):
            named = rlfx.series((found @ params["w"][1], x))
            found = jnp.tanh(attend(slice_(named, t), found @ params["w"][2], kind))
        return jnp.sum(jnp.cos(found + x)), 0.5 * carry + 0.1 * obs, found

    return f


def arguments(length, batch, seed):
    k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
    lead = () if batch is None else (batch,)
    params = {
        "obs": jax.random.normal(k1, (length, *lead, WIDTH)),
        "w": jax.random.normal(k2, (3, WIDTH, WIDTH)) * 0.5,
    }
    return params, jax.random.normal(k3, (*lead, WIDTH))


def value_and_gradient(fn, params, carry):
    def objective(params, carry):
        loss, (last, aux) = fn(params, carry)
        return loss, (last, aux)

    return jax.value_and_grad(objective, (0, 1), has_aux=True)(params, carry)


def at_once(fn, params, carry):
    """The same as one program."""
    return jax.jit(lambda p, c: value_and_gradient(fn, p, c))(params, carry)


def assert_close(got, expected):
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", spread(range(8), 3))
def test_random_slices_in_blocks(seed, in_pieces):
    """Blocked = at once = reference, values and gradients; block sizes that do not divide T; batch, and vmap."""
    rng = np.random.default_rng(seed)
    length, batch = int(rng.integers(5, 7)), [None, 2][seed % 2]
    slices = [SLICES[i] for i in (seed, int(rng.integers(len(SLICES))))]
    f = learner(slices, [int(k) for k in rng.integers(0, 3, 2)])
    params, carry = arguments(length, batch, seed)
    options = {"length": length, "batch": batch}
    plain = at_once(rlfx.compile(f, **options), params, carry)
    assert_close(plain, value_and_gradient(rlfx.reference(f, **options), params, carry))
    in_pieces(int(rng.integers(1, 400)))
    blocked = rlfx.compile(f, **options)
    if seed % 4 < 2:
        assert_close(at_once(blocked, params, carry), plain)
        return
    both = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    got = jax.jit(jax.vmap(lambda p: value_and_gradient(blocked, p, carry)))(both)
    assert_close(jax.tree.map(lambda x: x[0], got), plain)


def of_its_own_past(params, carry, t):
    past = rlfx.series((carry @ params["w"][0], carry @ params["w"][1]))
    query = carry @ params["w"][2]
    found = attend(past[: t + 1], query, 0) + jnp.sum(past[:t][1], 0)
    heads = jnp.einsum("thd,hd->h", past[: t + 1][0].reshape(-1, 1, WIDTH), query[None])
    new = jnp.tanh(found + 0.1 * heads[0] + 0.1 * rlfx.inputs(params["obs"])[t])
    return jnp.sum(new**2), new, new


@functools.cache
def meaning_of_its_own_past(options):
    return at_once(rlfx.reference(of_its_own_past, **dict(options)), *arguments(**dict(options), seed=3))


@pytest.mark.parametrize(("tile", "batch"), met([1, 3, 8], [2, None]))
def test_ones_own_past_in_sections(tile, batch, in_pieces):
    """Sections that do not divide T: values, and gradients through the recurrence."""
    options = {"length": 5, "batch": batch}
    params, carry = arguments(**options, seed=3)
    in_pieces(100, tile)
    compiled = rlfx.compile(of_its_own_past, **options)
    expected = meaning_of_its_own_past(tuple(options.items()))
    assert_close(at_once(compiled, params, carry), expected)
    assert_close(jax.jit(compiled)(params, carry)[0], expected[0][0])  # without gradients the loop is another one


def past_and_age(k, v, q):
    age = jnp.arange(k.shape[0])[::-1].astype(jnp.float32)
    return jax.nn.softmax(k @ q - 0.3 * age) @ v


def normalized(k, v, q):
    scores = (k / jnp.linalg.norm(k + 2.0, axis=1, keepdims=True)) @ q
    return jnp.where(scores > 0, scores, 0.1 * scores) @ jnp.tanh(v)


def summaries(k, v, q):
    ranges = jnp.max(k, 0) - jnp.min(v, 0) + jnp.prod(1 + 0.1 * k, 0)
    return ranges + jnp.where(jnp.all(k > -0.5) | jnp.any(v > 0.9), 0.5, -0.5) + jnp.mean(k * v) + jnp.max(k * q[None])


def by_heads(k, v, q):
    scores = jnp.einsum("thd,hd->ht", jnp.stack([k, 2 * v], 1), jnp.stack([q, q]))
    return jnp.einsum("ht,td->d", jax.nn.softmax(scores, -1), v) + jnp.sum(jax.nn.softmax(scores, 0), 1)[0]


#: What may be computed of one's own past, of which some stays in pieces.
OF_THE_PAST = {
    "softmax": lambda k, v, q: attend((k, v), q, 0),
    "exponentials": lambda k, v, q: attend((k, v), q, 1),
    "sort and last": lambda k, v, q: attend((k, v), q, 2),
    "age": past_and_age,
    "normalized": normalized,
    "summaries": summaries,
    "heads": by_heads,
    "outer product": lambda k, v, q: jnp.exp(-(k.T @ v)) @ q,
    "projected": lambda k, v, q: jnp.exp(jnp.outer(q, q) - 1) @ jnp.sum((k @ jnp.outer(q, q)) * v, 0),
    "products of products": lambda k, v, q: jnp.tanh(k @ q) @ jnp.cos(v @ jnp.outer(q, q)),
    "all with all": lambda k, v, q: jnp.sum(jnp.tanh(k @ v.T), 0) @ k,
    "infinite where nothing is": lambda k, v, q: (
        jnp.sum(jnp.exp(1 / (0.2 + jnp.abs(k))), 0) @ jnp.sum(1 / (v + 4), 0) * q
    ),
    "no product": lambda k, v, q: jax.nn.softmax(k @ q).max() + jnp.sum(jnp.log(2 + jnp.tanh(v)) / (1 + k**2), 0),
}


@pytest.mark.parametrize("what", OF_THE_PAST)
def test_what_is_computed_of_pieces(what, in_pieces):
    """Acting and learning, in sections of two timesteps, the last of one."""
    length, batch = 5, 2

    def f(params, carry, t):
        key, value, query = (jnp.tanh(carry @ w) for w in params["w"])
        found = OF_THE_PAST[what](*rlfx.series((key, value))[: t + 1], query)
        new = jnp.tanh(0.5 * found + 0.1 * rlfx.inputs(params["obs"])[t])
        return jnp.sum(new**2), new, new

    params, carry = arguments(length, batch, 5)
    options = {"length": length, "batch": batch}
    in_pieces(100, 2)
    expected = at_once(rlfx.reference(f, **options), params, carry)
    compiled = rlfx.compile(f, **options)
    assert_close(jax.jit(compiled)(params, carry)[0], expected[0][0])  # no derivative: pieces
    assert_close(at_once(compiled, params, carry), expected)


@pytest.mark.parametrize("length", [5, 8, 16])
def test_a_growing_tile_holds_every_timestep_and_is_never_copied_without_room(length, in_pieces, monkeypatch):
    """Sections of one timestep, as many as there are; which tiles each of them reads."""
    read, own = [], Section.read

    def reading(section, equation, tile):
        value = own(section, equation, tile)
        read.append(tuple(piece.shape[0] for piece in value.data.tiles))
        return value

    def f(params, x, t):
        past = rlfx.series(x)[: t + 1]
        return jnp.tanh(jax.nn.softmax(past @ x) @ past - 0.5), x

    in_pieces(100, 1)
    monkeypatch.setattr(sections, "MOST_SECTIONS", length)
    monkeypatch.setattr(Section, "read", reading)
    x = jnp.arange(1.0, 1 + WIDTH)
    got = rlfx.unroll(f, length=length)(None, x)
    assert_close(got, rlfx.reference(f, length=length, loss=False)(None, x))
    tiles = list(dict.fromkeys(read))
    assert [sum(sizes) for sizes in tiles] == list(range(1, length + 1))
    for before, after in zip(tiles, tiles[1:], strict=False):
        grown = len(after) == len(before)
        assert sum(after) + before[-1] * grown <= length
        assert grown or sum(after) + before[-1] > length


def test_what_is_not_written_yet_is_no_part_of_the_gradient(in_pieces):
    """Scores so low that ``exp(0 - maximum)`` is infinite: 0 is what the dot product of an empty position is."""

    def f(params, carry, t):
        past = rlfx.series((0 * carry + params[0], jnp.tanh(carry)))[: t + 1]
        new = jnp.tanh(jax.nn.softmax(past[0] @ params[1]) @ past[1] + 0.1)
        return jnp.sum(new), new

    params, carry = jnp.array([[10.0] * WIDTH, [-10.0] * WIDTH]), jnp.ones(WIDTH) * 0.3
    gradient = lambda fn: jax.jit(jax.grad(lambda p: fn(p, carry)[0]))(params)  # noqa: E731
    expected = gradient(rlfx.reference(f, length=6))
    for tile in (8, 2):
        in_pieces(100, tile)
        assert_close(gradient(rlfx.compile(f, length=6)), expected)


def test_sections_under_until(in_pieces):
    def f(params, carry, t):
        past = rlfx.series(carry["x"])[: t + 1]
        x = jnp.tanh(jax.nn.softmax(past @ params) @ past + carry["x"])
        return jnp.sum(x), {"x": x, "n": carry["n"] - 1}

    options = {"length": 7, "batch": 3, "until": lambda c: c["n"] <= 0}
    carry = {"x": jnp.ones((3, WIDTH)) * jnp.arange(1.0, 4)[:, None], "n": jnp.array([2, 7, 4])}
    params = jnp.array([0.3, -0.2, 0.5])
    in_pieces(100, 2)
    objective = lambda fn: jax.value_and_grad(lambda p: fn(p, carry)[0])  # noqa: E731
    got = jax.jit(objective(rlfx.compile(f, **options)))(params)
    assert_close(got, objective(rlfx.reference(f, **options))(params))


def causal_attention(length, scale=0.2):
    def f(params, carry, t):
        obs = rlfx.inputs(params["obs"])[t]
        keys = rlfx.series(obs @ params["w"][0])
        out = attend((keys[: t + 1], rlfx.series(obs @ params["w"][1])[: t + 1]), obs @ params["w"][2] * scale, 0)
        return jnp.sum(out**2), carry

    return rlfx.compile(f, length=length)


@pytest.mark.optimised
def test_long_attention_without_a_square():
    """At T = 2048 the gradient takes a quarter of the [T, T] program's memory, and is its gradient."""
    length = 2048
    params, _ = arguments(length, None, 0)

    def square(params):
        q, k, v = (params["obs"] @ params["w"][i] for i in (2, 0, 1))
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), q @ k.T * 0.2, -jnp.inf)
        return jnp.sum((jax.nn.softmax(scores) @ v) ** 2) / length

    fn = causal_attention(length)
    by_blocks, at_once = (
        jax.jit(jax.grad(g)).lower(params).compile() for g in (lambda p: fn(p, jnp.float32(0))[0], square)
    )
    used, before = (p.memory_analysis().temp_size_in_bytes for p in (by_blocks, at_once))
    assert used <= before / 4, (used, before)
    for got, expected in zip(*(jax.tree.leaves(p(params)) for p in (by_blocks, at_once)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-5)


def test_small_attention_runs_at_once_and_explain_says_so():
    params, _ = arguments(64, None, 0)
    assert "blocks of" not in str(causal_attention(64).explain(params, jnp.float32(0), verbose=True))
    params, _ = arguments(2048, None, 0)
    text = str(causal_attention(2048).explain(params, jnp.float32(0), verbose=True))
    assert "x[:t + 1]: blocks of 128 timesteps in 4 sections, a value of all of them would be 16 MiB" in text, text


@pytest.mark.optimised
def test_the_cache_of_a_decoding_loop_is_one_buffer_and_explain_says_so():
    length, batch = 1024, 4

    def f(params, x, t):
        past = rlfx.series((x @ params[0], x @ params[1]))[: t + 1]
        new = jnp.tanh(attend(past, x @ params[2], 0))
        return new, new

    decode = rlfx.unroll(f, length=length, batch=batch)
    params, x = jnp.ones((3, 64, 64)) * 0.1, jnp.ones((batch, 64))
    used = jax.jit(decode).lower(params, x).compile().memory_analysis().temp_size_in_bytes
    assert used <= 1.1 * 2 * length * batch * 64 * 4
    assert "x[:t + 1]: 8 sections of 128 timesteps, each reads only the past that is there" in str(
        decode.explain(params, x, verbose=True)
    )


@pytest.mark.parametrize("length", [2, 3, 7])
def test_a_tile_is_as_long_as_the_section_a_slice_only_as_what_it_may_hold(length):
    """``x[:t]`` never has T positions, the tile that it is read from has: both begin at 0."""

    def f(p, c, t):
        x = rlfx.series(jnp.tanh(p * c + 0.3))
        past = x[:t]
        weighted = jnp.sum(jnp.arange(past.shape[0]).astype(jnp.float32) * past)
        return weighted, jnp.tanh(weighted + 0.5 * c)

    args = jnp.float32(0.7), jnp.float32(0.2)
    values = [jax.jit(jax.value_and_grad(lambda p, c, g=g: g(p, c)[0], (0, 1)))(*args) for g in _both(f, length)]
    assert_close(*values)


def _both(f, length):
    return rlfx.compile(f, length=length), rlfx.reference(f, length=length)
