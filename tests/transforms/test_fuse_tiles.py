"""Acting with a network as one kernel: the values of the plain scan, for environments and networks defined here."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
import rlfx.envs
from rlfx import _jaxpr as J
from rlfx.envs import fast_prng
from rlfx.transforms.fuse_steps import UnsupportedPrimitive, fuse_scan, fuse_steps, supported
from rlfx.transforms.steps import pallas, tiled
from rlfx.transforms.steps.moved import moved
from rlfx.transforms.steps.program import trace_step
from tests.cuda import lowered
from tests.machines import AS_A_GPU
from tests.sampling import slow
from tests.transforms.test_fuse_steps import walk


def weights(seed, **shapes):
    draw = np.random.default_rng(seed)
    return {
        k: jnp.asarray(draw.normal(size=s) / np.sqrt(s[0] if len(s) > 1 else 4), jnp.float32) for k, s in shapes.items()
    }


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def keys(n):
    return jax.random.split(jax.random.key(1, impl=fast_prng), n)


def assert_same(expected, found, atol=2e-6):
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=atol, atol=atol)
        else:
            np.testing.assert_array_equal(x, y)


def both(body, steps, shared, carry, xs=None, tile=16, **options):
    def run(backend, tile):
        return jax.jit(fuse_scan(body, steps, backend=backend, tile=tile))(shared, carry, xs, **options)

    return run("vmap", None), run("interpret", tile)


# -- an environment: a point pushed about, that begins anew


def pushed(state, action, noise):
    place = 0.9 * state + 0.2 * (action - 1).astype(jnp.float32) + 0.1 * noise
    done = jnp.abs(place).max() > 1.0
    return jnp.where(done, 0.0, place), done


def mlp(p, x):
    for i in range(len(p) // 2):
        x = jnp.tanh(x @ p[f"w{i}"] + p[f"b{i}"])
    return x


def layers(seed, *sizes):
    shapes = {}
    for i, (n, m) in enumerate(zip(sizes, sizes[1:], strict=False)):
        shapes |= {f"w{i}": (n, m), f"b{i}": (m,)}
    return weights(seed, **shapes)


def acting(p, t, b, carry, x):
    """A policy and a critic, a drawn action, and what a learner needs of it."""
    key, state, score = carry
    key, act_key, env_key = jax.random.split(key, 3)
    log_probs = jax.nn.log_softmax(mlp(p["actor"], state) @ p["pi"])
    hidden = mlp(p["critic"], state)
    action = jax.random.categorical(act_key, log_probs)
    new, done = pushed(state, action, jax.random.uniform(env_key, state.shape, jnp.float32, -1.0, 1.0))
    score = jnp.where(done, 0, score + 1)
    return (key, new, score), (state, action, log_probs[action], hidden @ p["v"], done, hidden)


def networks(*sizes):
    return {"actor": layers(0, *sizes), "critic": layers(1, *sizes), **weights(2, pi=(sizes[-1], 3), v=(sizes[-1],))}


def beginning(n, size):
    return keys(n), 0.7 * numbers(3, n, size), jnp.zeros(n, jnp.int32)


@pytest.mark.parametrize(
    ("sizes", "n"), [((3, 16), 5), ((3, 24, 64), 33), pytest.param((2, 130, 48, 20, 16), 16, marks=pytest.mark.slow)]
)
def test_multilayer_perceptrons(sizes, n):
    expected, found = both(acting, 6, networks(*sizes), beginning(n, sizes[0]), b0=3)
    assert_same(expected, found)
    assert 0 < int(expected[1][4].sum()) < 6 * n  # some episodes end


def gru(p, h, x):
    gx, gh = x @ p["wx"] + p["bx"], h @ p["wh"] + p["bh"]
    (rx, zx, nx), (rh, zh, nh) = jnp.split(gx, 3), jnp.split(gh, 3)
    z = jax.nn.sigmoid(zx + zh)
    return (1 - z) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + z * h


def remembering(p, t, b, carry, x):
    state, h = carry
    h = gru(p, jnp.where(x["done"], 0.0, h), jax.nn.relu(state @ p["in"]))
    joined = jnp.concatenate([h, state])
    logits = joined @ p["out"]
    state, _ = pushed(state, jnp.argmax(logits), x["noise"])
    return (state, h), {
        "h": h,
        "best": jnp.argmax(h),
        "logits": logits,
        "norm": jnp.sqrt((h * h).sum()),
        "top": h.max(),
    }


@pytest.mark.parametrize("hidden", [16, slow(40)])
def test_a_gru_that_forgets_at_the_ends_of_episodes(hidden):
    shapes = {
        "in": (3, 20),
        "wx": (20, 3 * hidden),
        "bx": (3 * hidden,),
        "wh": (hidden, 3 * hidden),
        "bh": (3 * hidden,),
    }
    p = weights(0, **shapes, out=(hidden + 3, 3))
    n, steps = 18, 5
    xs = {"done": numbers(4, steps, n) > 1, "noise": numbers(5, steps, n, 3)}
    assert_same(*both(remembering, steps, p, (numbers(1, n, 3), numbers(2, n, hidden)), xs))


def drawn(key, s):
    """Of each environment its own numbers: two distributions, one in several axes."""
    key = jax.random.fold_in(key, (1000 * s).astype(jnp.int32))
    return jax.random.normal(key, (20,), jnp.float32) * jax.random.uniform(key, (4, 5), jnp.float32).reshape(20)


def whole(x):
    return x.astype(jnp.float32)


#: Of a hidden vector h, its weights p and a number s of an environment's own: what a kernel can do with tiles.
OPERATIONS = {
    "activations": lambda p, h, s: (
        jax.nn.silu(h) + jax.nn.gelu(h) + jax.nn.elu(h) + jax.nn.leaky_relu(h) + jax.nn.softplus(h)
    ),
    "softmax": lambda p, h, s: jax.nn.softmax(h),
    "layer norm": lambda p, h, s: (h - h.mean()) / jnp.sqrt(h.var() + 1e-5) * p["g"] + p["g"],
    "transposed weights": lambda p, h, s: p["w"] @ h + p["w"].T @ h,
    "weights computed inside": lambda p, h, s: h @ (jnp.tanh(p["w"]) * 0.5 + p["w"][::-1]),
    "parts": lambda p, h, s: jnp.concatenate([(h[4:] @ p["w"][4:])[:16], h[:4]]),
    "turned": lambda p, h, s: jnp.roll(h, 3) * jnp.flip(h)[::-1],
    "elements": lambda p, h, s: h * h[3] + h[-1],
    "selections": lambda p, h, s: jnp.where(h > s, h, jnp.where(s > 0, -h, 2.0)),
    "branches": lambda p, h, s: jax.lax.cond(s > 0, lambda h: h * 2, lambda h: h @ p["w"], h),
    "layers in a loop": lambda p, h, s: jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), h),
    "reductions": lambda p, h, s: (
        h * (h.max() - h.min() + whole((h > 0).any()) + whole((h > -9).all()) + whole(h.argmin()))
    ),
    "dots of two vectors": lambda p, h, s: h * (h @ jnp.tanh(h)) + (h @ p["g"]),
    "constants": lambda p, h, s: h * jnp.arange(20, dtype=jnp.float32) + jnp.linspace(0, 1, 20, dtype=jnp.float32),
    "shapes": lambda p, h, s: (h.reshape(1, 20) * s)[0] + h.reshape(5, 4)[None].reshape(-1),
    "16 bits": lambda p, h, s: (h.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32),
    "draws": lambda p, h, s: h + drawn(jax.random.key(0, impl=fast_prng), s) + drawn(jax.random.key(0), s),
    "not a number": lambda p, h, s: jnp.where(jnp.isnan(h / h.at[2].set(0.0) * 0), 1.0, h),
}


@pytest.mark.parametrize("names", [list(OPERATIONS)[i::3] for i in range(3)], ids=["a", "b", "c"])
def test_operations_on_tiles(names):
    """Each on the carry, so that what it gives goes through the loop; a loop of few steps."""

    def body(p, t, b, carry, x):
        h, s = carry
        found = {name: OPERATIONS[name](p, h, s) for name in names}
        return (jnp.tanh(sum(v for v in found.values()) / len(found)) + 0.1, s), found

    n = 17
    carry = numbers(0, n, 20), numbers(1, n)
    assert_same(*both(body, 3, weights(2, w=(20, 20), g=(20,)), carry), atol=2e-2 if "16 bits" in names else 1e-5)


def turned(p, t, b, carry, x):
    """Vectors that are wider than what is taken apart, cut and put together; booleans too."""
    h, n = carry
    both = jnp.concatenate([jnp.tanh(h @ p["w"])[:60], h[:20] + n])
    moved = jnp.roll(both, 7) + jnp.concatenate([h[70:], n[None], both[1:70]])
    done = jnp.roll(both > 0.1, -9)
    return (jnp.where(done, moved / 3, both), n + 1), (moved.mean(), done.any())


def test_wide_vectors_that_are_cut_and_joined():
    n = 6
    assert_same(*both(turned, 3, weights(0, w=(80, 80)), (numbers(2, n, 80), numbers(3, n))))


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32", "bool", "bfloat16", "float16", "int8"])
def test_moved_rows_keep_every_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, (32, 16), np.uint32)
    x = bits.view(np.float32) if dtype == "float32" else jnp.asarray(bits % 2**31).astype(dtype)
    x = jnp.asarray(x).at[3, 5].set(jnp.ones((), dtype)).at[4].set(jnp.zeros((), dtype))
    if dtype == "float32":
        x = x.at[7].set(jnp.nan).at[8].set(-jnp.inf).at[9].set(-0.0)
    y = jnp.flip(x, 1)
    with jax.default_matmul_precision("bfloat16"):
        found = moved([(x, [(0, 3, 29), (8, 32, -8)]), (y, [(4, 6, 1)])], 32)
    expected = jnp.concatenate([x[29:], jnp.zeros_like(x[:1]), y[5:7], jnp.zeros_like(x[:2]), x[:24]])
    view = {1: np.uint8, 2: np.uint16, 4: np.uint32}[found.dtype.itemsize]
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found).view(view), np.asarray(expected).view(view))


def test_a_tile_is_stored_without_a_transposition():
    """XLA moves one through all that it is made of, once for each path: random numbers would never be compiled."""

    def body(p, t, b, carry, x):
        return jnp.tanh(carry @ p["w"]), carry

    run = fuse_scan(body, 2, backend="interpret")
    text = str(jax.make_jaxpr(run)(weights(0, w=(20, 20)), numbers(1, 16, 20)))
    assert "pallas_call[" in text
    assert "transpose[" not in text


# -- what is refused


def of_its_own(p, t, b, carry, x):
    m, h = carry
    return (m, jnp.tanh(m @ h) + h @ p["w"]), None


def summed_up(p, t, b, carry, x):
    m, h = carry
    return (m, jnp.cumsum(jnp.tanh(h @ p["w"]))), None


def in_a_long_loop(p, t, b, carry, x):
    m, h = carry
    return (m, jax.lax.fori_loop(0, 100, lambda i, h: jnp.tanh(h @ p["w"]), h)), None


def by_hand(p, t, b, carry, x):
    m, h = carry
    return (m, (p["w"] * h[:, None]).sum(0) + jnp.tanh(h @ p["w"])), None


REFUSED = {
    "weights one by one": (by_hand, r"computes with \[80, 80\] numbers that all environments share, each by itself"),
    "matrices of an environment's own": (
        of_its_own,
        r"multiplies \[80, 80\] and \[80\]: a kernel multiplies a vector with weights",
    ),
    "sums along a vector": (summed_up, "is 80 numbers wide, and is used one by one; a kernel takes at most 64 apart"),
    "long loops": (in_a_long_loop, "runs 100 iterations on a value that is a tile"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_line(case):
    body, why = REFUSED[case]
    p, carry = weights(0, w=(80, 80)), (numbers(1, 4, 80, 80), numbers(2, 4, 80))
    with pytest.raises(UnsupportedPrimitive, match=why) as caught:
        fuse_scan(body, 3, backend="interpret")(p, carry)
    line = body.__code__.co_firstlineno + 2
    assert re.search(rf"test_fuse_tiles.py:({line}|{line + 1})", str(caught.value))
    assert tiled.why_not(trace_step(body, p, carry, None), pallas.TARGETS["triton"](128)) == str(caught.value)


# -- as programs, and ahead of time


class Pushed(rlfx.envs.Environment):
    """The point above as an environment."""

    name = "pushed"
    observation_space = rlfx.envs.spaces.Box(-1.0, 1.0, (3,))
    action_space = rlfx.envs.spaces.Discrete(3)

    def reset(self, key):
        return 0.5 * jax.random.normal(key, (3,), jnp.float32)

    def observe(self, state):
        return state

    def transition(self, key, state, action):
        new, done = pushed(state, action, jax.random.uniform(key, (3,), jnp.float32, -1.0, 1.0))
        return new, rlfx.envs.Step(jnp.abs(state).sum(), done, jnp.bool_(False), state)


ENV = rlfx.envs.auto_reset(Pushed())


def policy(p, key, obs):
    return jax.random.categorical(key, mlp(p["actor"], obs) @ p["pi"])


def parameters():
    return {"actor": layers(0, 3, 32, 16), **weights(2, pi=(16, 3), v=(16,))}


def test_an_environment_with_its_policy():
    n = 20
    states = jax.vmap(ENV.reset)(keys(n))
    run = lambda backend: jax.jit(fuse_steps(ENV, 6, policy=policy, outputs="trajectory", backend=backend))  # noqa: E731
    key = jax.random.key(5, impl=fast_prng)
    assert_same(*(run(backend)(key, states, parameters()) for backend in ("vmap", "interpret")))
    assert supported(ENV, policy=policy, params=parameters())


def learned(p, state, t):
    log_probs = jax.nn.log_softmax(mlp(p["actor"], ENV.observe(state)) @ p["pi"])
    value = mlp(p["actor"], ENV.observe(state)) @ p["v"]
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = ENV.step(t.key_for("env"), state, action)
    following = rlfx.next_value(lambda obs: mlp(p["actor"], obs) @ p["v"], step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, following, gamma=0.99, lam=0.9))
    return (value - advantage) ** 2 - advantage * log_probs[action], state, (action, step.done)


def test_a_program_that_learns():
    make = lambda transform: rlfx.compile(learned, length=6, batch=20, transform=transform)  # noqa: E731
    given = parameters(), jax.vmap(ENV.reset)(keys(20)), jax.random.key(5, impl=fast_prng)
    plain, fused = make(None), make(partial(fuse_steps, backend="interpret"))
    assert "fused: its steps are one kernel (interpret)" in str(fused.explain(*given, verbose=True))
    run = lambda fn: jax.jit(jax.value_and_grad(fn, has_aux=True))(*given)  # noqa: E731
    assert_same(run(plain), run(fused), atol=1e-4)


def test_on_which_machines_it_is_a_kernel():
    given = parameters(), jax.vmap(ENV.reset)(keys(20)), jax.random.key(5, impl=fast_prng)
    said = {
        name: str(
            rlfx.unroll(
                lambda *args: learned(*args)[1:], length=6, batch=20, transform=fuse_steps, target=name
            ).explain(*given, verbose=True)
        )
        for name in ("h200", "a100", "t4", "cpu")
    }
    for name, text in said.items():
        form = "kernel (triton)" if name in ("h200", "a100") else "scalarised program"
        assert f"fused: its steps are one {form}" in text, name


def acted(p, state, t):
    """What acting gives a learner: observations, the action's log-probability, a value of a second network."""
    obs = jnp.stack([state[0], state[1] * state[2]])
    log_probs = jax.nn.log_softmax(mlp(p["actor"], state) @ p["pi"])
    action = jax.random.categorical(t.key_for("action"), log_probs)
    new, done = pushed(state, action, jax.random.uniform(t.key_for("env"), (3,)))
    return new, (obs, log_probs[action], mlp(p["critic"], state) @ p["v"], done)


def around(jaxpr):
    """The names of operations that are in no kernel."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name != "pallas_call":
            for inner, _ in J.sub_jaxprs(eqn.params):
                yield from around(inner)


def test_a_kernel_has_what_needs_no_start_and_keeps_products_out():
    """The critic is a product of all timesteps; what else is computed of the states is in the kernel, keys and constants, too."""
    n = 20
    given = parameters() | {"critic": layers(4, 3, 16)}, 0.7 * numbers(3, n, 3), jax.random.key(5, impl=fast_prng)
    plain = rlfx.unroll(acted, length=6, batch=n)
    fused = rlfx.unroll(
        acted, length=6, batch=n, target=AS_A_GPU, transform=partial(fuse_steps, backend="interpret", tile=16)
    )
    assert_same(*(jax.jit(fn)(*given, t0=3) for fn in (plain, fused)), atol=1e-5)
    traced = jax.make_jaxpr(fused)(*given)
    (call,) = [e for e in walk(traced.jaxpr) if e.primitive.name == "pallas_call"]
    shapes = [(v.aval.shape, v.aval.dtype) for v in call.outvars]
    assert shapes.count(((6, 32, 2), np.float32)) == 1, "the observations"
    assert shapes.count(((6, 32), bool)) == 1, "done as it is returned"
    assert shapes.count(((6, 32), np.float32)) == 1, "log-probabilities of actions, no values"
    assert not [v for v in call.invars if v.aval.shape == (32, 2)], "keys of environments are made in the kernel"
    outside = list(around(traced.jaxpr))
    assert outside.count("dot_general") == 2, "the critic"
    assert not {"random_bits", "random_fold_in", "log", "select_n"} & set(outside)


def test_a_state_that_is_donated_stays_where_it_is():
    run = jax.jit(fuse_scan(acting, 3, backend="interpret", tile=16))
    traced = run.trace(networks(3, 16), beginning(16, 3))
    (call,) = [e for e in walk(traced.jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    aliases = dict(call.params["input_output_aliases"])
    assert sorted(aliases.values()) == [0, 1, 2], "each leaf of the state"
    for i, o in aliases.items():
        assert call.invars[i].aval == call.outvars[o].aval


def test_one_launch_with_products_in_its_loop():
    """Lowered for CUDA: dots of tiles inside the one loop, and no weights loaded there."""
    run = jax.jit(fuse_scan(acting, 9, backend="triton"))
    traced = run.trace(networks(3, 64, 64), beginning(32, 3))
    (call,) = [e for e in walk(traced.jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    (loop,) = [e for e in call.params["jaxpr"].eqns if e.primitive.name in ("scan", "while")]
    inside = [e.primitive.name for v in loop.params.values() if hasattr(v, "jaxpr") for e in walk(v.jaxpr)]
    assert inside.count("dot_general") == 2  # the first layers are sums of three, the heads sums over rows
    assert not {"get", "masked_load", "load"} & set(inside)
    assert "triton" in lowered(run, networks(3, 64, 64), beginning(32, 3))


def form(body, size):
    p, carry = weights(0, w=(20, 20)), numbers(2, 4, size)
    return tiled.form_of(trace_step(body, p, carry, None), pallas.TARGETS["triton"](128), 16)


def test_what_is_used_number_by_number_is_no_tile():
    together = lambda p, t, b, h, x: (jnp.tanh((h + drawn(jax.random.key(0), h[0])) @ p["w"]), None)  # noqa: E731
    found = form(together, 20)
    assert (found.wide, found.draws) == ({0}, True)

    def apart(p, t, b, h, x):
        key = jax.random.fold_in(jax.random.key(0, impl=fast_prng), (1000 * h[0]).astype(jnp.int32))
        walked = jnp.cumsum(jax.random.normal(key, (100,), jnp.float32))[:20]
        return jnp.concatenate([walked @ p["w"], h[20:]]), None

    assert not form(apart, 40).draws
