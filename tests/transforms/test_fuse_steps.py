"""Fused steps equal scan over vmap, whatever the backend, N, K, policy and output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx.envs
from rlfx.envs import fast_prng
from rlfx.errors import ProgramError
from rlfx.transforms.fuse_steps import UnsupportedPrimitive, fuse_scan, fuse_steps, supported, tune
from rlfx.transforms.vectorize import vectorize
from tests.cuda import lowered
from tests.sampling import slow

CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Catch-bsuite"]
OURS = [*CLASSIC, "Breakout-MinAtar"]
GYMNAX = [f"gymnax/{name}" for name in (
    "CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Catch-bsuite",
    "DiscountingChain-bsuite", "MemoryChain-bsuite", "PointRobot-misc", "FourRooms-misc", "Reacher-misc",
    "FrozenLake-misc")]  # fmt: skip
IMPLS = {"threefry": "threefry2x32", "fast": fast_prng}


def start(env, n, impl="threefry2x32"):
    key = jax.random.key(0, impl=impl)
    return key, jax.vmap(env.reset)(jax.random.split(jax.random.fold_in(key, 1), n))


def plain(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_same(a, b, atol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = np.asarray(plain(x)), np.asarray(plain(y))
        if atol and x.dtype == np.float32:
            np.testing.assert_allclose(x, y, atol=atol, rtol=atol)
        else:
            np.testing.assert_array_equal(x, y)


def mlp(params, key, obs):
    hidden = jnp.tanh(obs @ params["w1"] + params["b1"])
    return jax.random.categorical(key, hidden @ params["w2"] + params["b2"]).astype(jnp.int32)


def mlp_params(n_in=4, hidden=8, n_out=2):
    keys = jax.random.split(jax.random.key(5), 2)
    return {
        "w1": jax.random.normal(keys[0], (n_in, hidden), jnp.float32),
        "b1": jnp.full(hidden, 0.1, jnp.float32),
        "w2": jax.random.normal(keys[1], (hidden, n_out), jnp.float32),
        "b2": jnp.zeros(n_out, jnp.float32),
    }


def test_known_elements_are_replaced_one_by_one():
    """A known array that is written to at a place that depends on data, then chosen from."""

    def body(shared, t, b, carry, x):
        written = jnp.zeros(3, jnp.float32).at[carry % 3].set(1.0)
        flags = jnp.array([True, False, False]).at[carry % 2].set(carry > 4)
        return carry + 1, (jnp.where(carry > 2, written, jnp.ones(3, jnp.float32)), flags, ~flags[0], jnp.sort(written))

    carry = jnp.arange(4, dtype=jnp.int32)
    reference, fused = (fuse_scan(body, 5, backend=b)(None, carry) for b in ("vmap", "scan"))
    assert_same(reference, fused)


CASES = [
    ("CartPole-v1", "scan", "threefry"),
    ("CartPole-v1", "interpret", "fast"),
    ("Pendulum-v1", "tile", "fast"),
    ("Breakout-MinAtar", "interpret", "fast"),
]


@pytest.mark.optimised  # trajectories of hundreds of steps: two programs that round alike
@pytest.mark.parametrize(("name", "backend", "impl"), CASES)
def test_trajectory_equals_scan_of_vmap(name, backend, impl):
    env = rlfx.envs.make(name)
    key, states = start(env, 21, IMPLS[impl])  # 21 is no multiple of any tile
    outputs = "statistics" if name.startswith("Breakout") else "trajectory"

    def run(backend, tile=None):
        return jax.jit(fuse_steps(env, 30, policy="random", outputs=outputs, backend=backend, tile=tile))(key, states)

    # XLA contracts multiplications and additions differently in differently fused loops.
    assert_same(run("vmap"), run(backend, 16 if backend != "scan" else None), atol=3e-6)


@pytest.mark.parametrize("name", ["Acrobot-v1", "Catch-bsuite", *map(slow, [*OURS, *GYMNAX])])
def test_random_policy_statistics(name):
    env = rlfx.envs.make(name)
    key, states = start(env, 6, fast_prng)
    reference, fused = (
        jax.jit(fuse_steps(env, 40, policy="random", outputs="statistics", backend=b))(key, states)
        for b in ("vmap", "scan")
    )
    assert_same(reference, fused, atol=2e-5)
    steps = fused[1].steps + fused[1].open_steps
    np.testing.assert_array_equal(steps, np.full(6, 40))


QUICK = ["CartPole-v1", "Catch-bsuite", "MountainCar-v0"]


@pytest.mark.parametrize("name", [*QUICK, *map(slow, [n for n in (*OURS, *GYMNAX) if n not in QUICK])])
def test_lowers_for_cuda_and_interprets(name):
    """The Triton kernel lowers without a GPU, and equals the plain scan when interpreted."""
    env = rlfx.envs.make(name)
    key, states = start(env, 8, fast_prng)

    def make(backend):
        return jax.jit(fuse_steps(env, 25, policy="random", outputs="statistics", backend=backend, tile=8))

    assert "triton" in lowered(make("triton"), key, states)
    assert supported(env, policy="random")
    if name != "Breakout-MinAtar":  # see test_trajectory_equals_scan_of_vmap
        assert_same(make("vmap")(key, states), make("interpret")(key, states), atol=2e-5)


@pytest.mark.parametrize(
    "name", ["Catch-bsuite", *map(slow, [*CLASSIC, "Breakout-MinAtar", "gymnax/CartPole-v1", "gymnax/FourRooms-misc"])]
)
@pytest.mark.filterwarnings("ignore:Using ``pl.pallas_call`` for Mosaic GPU:DeprecationWarning")
def test_lowers_for_mosaic_gpu(name):
    env = rlfx.envs.make(name)
    key, states = start(env, 128, fast_prng)
    run = jax.jit(fuse_steps(env, 25, policy="random", outputs="statistics", backend="mosaic_gpu"))
    assert "mosaic_gpu" in lowered(run, key, states)


@pytest.mark.parametrize("backend", ["tile", pytest.param("scan", marks=pytest.mark.slow), "interpret"])
def test_policy_inside(backend):
    env, params = rlfx.envs.make("CartPole-v1"), mlp_params()
    key, states = start(env, 20, fast_prng)

    def run(backend, tile=None):
        run = fuse_steps(env, 25, policy=mlp, outputs="trajectory", backend=backend, tile=tile)
        return jax.jit(run)(key, states, params)

    reference, fused = run("vmap"), run(backend, 8)
    assert_same(reference, fused, atol=1e-4)
    np.testing.assert_array_equal(reference[1].action, fused[1].action)
    assert 0 < float(fused[1].action.mean()) < 1
    kernel = jax.jit(fuse_steps(env, 25, policy=mlp, outputs="statistics", backend="triton"))
    assert "triton" in lowered(kernel, key, states, params)


def test_wide_policy_is_a_matrix_product():
    env, params = rlfx.envs.make("CartPole-v1"), mlp_params(hidden=64)
    key, states = start(env, 32, fast_prng)
    run = {b: jax.jit(fuse_steps(env, 10, policy=mlp, outputs="trajectory", backend=b)) for b in ("vmap", "scan")}
    assert_same(run["vmap"](key, states, params), run["scan"](key, states, params), atol=1e-4)


@pytest.mark.parametrize("backend", ["scan", "tile", "interpret"])
def test_given_actions_and_time_offset(backend):
    env = rlfx.envs.make("Pendulum-v1")
    key, states = start(env, 5)
    actions = jax.random.uniform(jax.random.key(9), (14, 5, 1), jnp.float32, minval=-2, maxval=2)
    whole = jax.jit(fuse_steps(env, 14, outputs="final", backend="vmap"))(key, states, actions)
    first = fuse_steps(env, 9, outputs="final", backend=backend, tile=4 if backend != "scan" else None)
    second = fuse_steps(env, 5, outputs="final", backend=backend, tile=4 if backend != "scan" else None)
    halves = second(key, first(key, states, actions[:9]), actions[9:], t0=9)
    assert_same(whole, halves, atol=1e-5)


def test_results_do_not_depend_on_the_shard():
    env = rlfx.envs.make("CartPole-v1")
    key, states = start(env, 12)
    run = fuse_steps(env, 20, policy="random", outputs="final", backend="scan")
    part = run(key, jax.tree.map(lambda x: x[8:], states), b0=8)
    assert_same(jax.tree.map(lambda x: x[8:], run(key, states)), part)


@pytest.mark.parametrize("backend", ["scan", pytest.param("interpret", marks=pytest.mark.slow)])
def test_general_bodies(backend):
    """Arrays, keys in the carry, gathers, scatters, sorts, reductions, cond, loops: against scan of vmap."""

    def body(shared, t, b, carry, x):
        key, grid, count = carry
        key, sub = jax.random.split(key)
        i = jax.random.randint(sub, (), 0, 4, jnp.int32)
        grid = grid.at[i, t % 3].add(x["gain"] * shared["w"][i])
        row = grid[i]
        top = jnp.argmax(row).astype(jnp.int32)
        order = jnp.sort(-row)
        total = jax.lax.cond(count % 2 == 0, lambda r: r.sum(), lambda r: r.max(), row)
        total = total + jax.lax.fori_loop(0, 40, lambda _, v: 0.5 * v + row[0], jnp.float32(0))
        window = jax.lax.dynamic_slice(grid, (i - 1, jnp.int32(0)), (2, 2))
        total = total + jnp.cumsum(window.reshape(-1))[-1] + jnp.prod(jnp.where(row > 0, row, 1.0))
        new = jax.lax.dynamic_update_slice(grid, window * 0.5, (jnp.int32(1), top % 2))
        return (key, new, count + 1), {
            "total": total,
            "order": order,
            "top": top,
            "b": b,
            "far": row.at[i].get(mode="fill", fill_value=-1.0),
        }

    n, k = 7, 9
    keys = jax.random.split(jax.random.key(3), n)
    carry = (
        keys,
        jnp.ones((n, 4, 3), jnp.float32) * jnp.arange(n, dtype=jnp.float32)[:, None, None],
        jnp.zeros(n, jnp.int32),
    )
    xs = {"gain": jax.random.normal(jax.random.key(4), (k, n), jnp.float32)}
    shared = {"w": jnp.arange(4, dtype=jnp.float32)}
    reference = fuse_scan(body, k, backend="vmap")(shared, carry, xs)
    assert_same(reference, jax.jit(fuse_scan(body, k, backend=backend))(shared, carry, xs), atol=1e-5)


def test_kernel_has_no_memory_operation_in_its_loop():
    """CartPole with automatic reset, random policy, final state: loads, one loop of registers, stores."""
    env = rlfx.envs.make("CartPole-v1")
    key, states = start(env, 128, fast_prng)
    run = fuse_steps(env, 100, policy="random", outputs="final", backend="triton", tile=128)
    jaxpr = jax.make_jaxpr(run)(key, states)
    (call,) = [e for e in walk(jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    kernel = call.params["jaxpr"]
    loops = [e for e in kernel.eqns if e.primitive.name in ("scan", "while")]
    assert len(loops) == 1
    inside = {e.primitive.name for v in loops[0].params.values() if hasattr(v, "jaxpr") for e in walk(v.jaxpr)}
    assert not inside & {"get", "swap", "load", "masked_load", "masked_swap", "store"}
    outside = [e.primitive.name for e in kernel.eqns]
    assert sum(name in ("get", "masked_load") for name in outside) >= 5
    assert sum(name in ("swap", "masked_swap") for name in outside) >= 5


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "eqns"):
                    yield from walk(inner)
                elif hasattr(inner, "jaxpr") and eqn.primitive.name != "pallas_call":
                    yield from walk(inner.jaxpr)


def test_no_gather_scatter_or_concatenate_is_left():
    env = rlfx.envs.make("gymnax/FourRooms-misc")
    key, states = start(env, 64)
    run = fuse_steps(env, 10, policy="random", outputs="final", backend="scan")
    (loop,) = [e for e in walk(jax.make_jaxpr(run)(key, states).jaxpr) if e.primitive.name == "scan"]
    inside = {e.primitive.name for e in walk(loop.params["jaxpr"].jaxpr)}
    assert not inside & {"gather", "scatter", "concatenate", "dynamic_slice", "reshape", "squeeze", "threefry2x32"}


@dataclasses.dataclass(frozen=True)
class Walks(rlfx.envs.Environment):
    """Steps until the sum of a random walk is positive: a loop whose length depends on data."""

    name = "walks"
    observation_space = rlfx.envs.spaces.Box(-jnp.inf, jnp.inf, ())
    action_space = rlfx.envs.spaces.Discrete(2)

    def reset(self, key):
        return jax.random.normal(key, (), jnp.float32)

    def observe(self, state):
        return state

    def transition(self, key, state, action):
        state = jax.lax.while_loop(lambda s: s < 0, lambda s: s + 1.0, state - 1.0)
        return state, rlfx.envs.Step(state, state > 5, state > 9, state)


def test_unsupported_says_what_and_where():
    answer = supported(Walks(), policy="random")
    assert not answer
    assert "primitive 'while' runs until a condition on data" in answer.reason
    assert "test_fuse_steps.py" in answer.reason
    assert "Fix: Give the loop a fixed number of iterations" in answer.reason
    key, states = start(Walks(), 4)
    with pytest.raises(UnsupportedPrimitive, match="runs until a condition on data"):
        fuse_steps(Walks(), 3, policy="random", backend="scan")(key, states)


class Leaking(Walks):
    kept = None

    def transition(self, key, state, action):
        state, Leaking.kept = state + (0 if Leaking.kept is None else Leaking.kept), state
        return state, rlfx.envs.Step(state, state > 5, state > 9, state)


def test_a_leaked_value_is_reported():
    key, states = start(Leaking(), 4)
    run = fuse_steps(Leaking(), 3, policy="random", backend="scan")
    run(key, states)
    with pytest.raises(ProgramError, match=r"leaked from another trace(.|\n)*Fix: Keep") as caught:
        run(key, states)
    assert "fuse_steps" in str(caught.value)


@pytest.mark.slow
def test_brax():
    """The spring pipeline has a scalar form, and lowers; the generalized one stops at a matrix factorisation."""
    pytest.importorskip("brax")
    env = rlfx.envs.make("brax/inverted_pendulum", backend="spring")
    assert supported(env, policy="random")
    key, states = start(env, 4, fast_prng)
    run = jax.jit(fuse_steps(env, 2, policy="random", outputs="final", backend="triton", tile=4))
    assert "triton" in lowered(run, key, states)
    answer = supported(rlfx.envs.make("brax/inverted_pendulum", backend="generalized"), policy="random")
    assert not answer
    assert "cholesky" in answer.reason


def test_too_large_is_unsupported():
    answer = supported(rlfx.envs.make("gymnax/Seaquest-MinAtar"), policy="random")
    assert not answer
    assert "makes the program too large" in answer.reason


def test_what_is_supported_depends_on_what_comes_out():
    env = rlfx.envs.make("gymnax/Freeway-MinAtar")
    assert supported(env, policy="random")
    assert supported(env, policy="random", outputs="statistics")
    answer = supported(env, policy="random", outputs="trajectory")
    assert not answer
    assert "(MinFreeway.get_obs)" in answer.reason
    for outputs, line in (("final", "while_sample_slots"), ("statistics", "while_sample_slots"), ("trajectory", "get_obs")):
        assert line in supported(rlfx.envs.make("gymnax/Asterix-MinAtar"), policy="random", outputs=outputs).reason
    with pytest.raises(ProgramError, match=r'supported: outputs must be "final", "statistics" or "trajectory", got \'all\''):
        supported(env, outputs="all")


@pytest.mark.parametrize("backend", ["scan", "tile"])
@pytest.mark.parametrize("outputs", ["final", "trajectory"])
def test_outside_of_jit(backend, outputs):
    """Small loops and calls that are the whole program: XLA has died of those."""
    env = rlfx.envs.make("CartPole-v1")
    key, states = start(env, 4)
    run = fuse_steps(env, 2, policy="random", outputs=outputs, backend=backend)
    assert_same(
        run(key, states),
        jax.jit(fuse_steps(env, 2, policy="random", outputs=outputs, backend="vmap"))(key, states),
        atol=3e-6,
    )


BAD = {
    "K = 0": (lambda env, key, s: fuse_steps(env, 0, policy="random"), "k must be a positive integer, got 0"),
    "K is no integer": (
        lambda env, key, s: fuse_steps(env, 2.5, policy="random"),
        "k must be a positive integer, got 2.5",
    ),
    "K is true": (lambda env, key, s: fuse_steps(env, True, policy="random"), "k must be a positive integer, got True"),
    "no environment": (lambda env, key, s: fuse_steps(3, 2), "fuse_steps: env must be an environment, got 3"),
    "nothing to support": (lambda env, key, s: supported("CartPole-v1"), "supported: env must be an environment"),
    "no key": (lambda env, key, s: fuse_steps(env, 2, policy="random")(0, s), "fuse_steps: key must be one key, got 0"),
    "many keys": (
        lambda env, key, s: fuse_steps(env, 2, policy="random")(jax.random.split(key), s),
        "key must be one key, got",
    ),
    "one number": (lambda env, key, s: fuse_steps(env, 2, policy="random")(key, 3.0), r"the shape \[\], and no axis \[N\]"),
    "policies": (lambda env, key, s: fuse_steps(env, 2, policy=np.zeros(2)), r"\(params, key, obs\), got array"),
    "nothing to tune": (lambda env, key, s: tune(3), r"tune: make must be a function of \(backend, tile\), got 3"),
    "no candidates": (lambda env, key, s: tune(lambda backend, tile: None, candidates=()), "candidates must be pairs"),
    "tile is true": (lambda env, key, s: fuse_steps(env, 2, tile=True), "positive integer or None, got True"),
    "vectorize": (lambda env, key, s: vectorize(3), "must be a program, or a function of .params, carry, t., got 3"),
    "tile = 0": (lambda env, key, s: fuse_steps(env, 2, backend="tile", tile=0), "positive integer or None, got 0"),
    "tile of Triton": (lambda env, key, s: fuse_steps(env, 2, backend="triton", tile=48), "is a power of two"),
    "tile of Mosaic": (lambda env, key, s: fuse_steps(env, 2, backend="mosaic_gpu", tile=64), "a multiple of 128"),
    "one state": (
        lambda env, key, s: fuse_steps(env, 2)(key, env.reset(key), jnp.zeros((2, 4), jnp.int32)),
        r"a leaf has the shape \[\], and no axis \[N\] of environments.\n.*vmap\(env.reset\)\(keys\) gives states",
    ),
    "no actions": (lambda env, key, s: fuse_steps(env, 2)(key, s), r"`extra` holds the actions \[K, N"),
    "actions outside": (
        lambda env, key, s: fuse_steps(env, 2)(key, s, jnp.zeros((2, 4), jnp.int32).at[1, 3].set(2)),
        "the action 2 of step 1 and environment 3 is outside Discrete",
    ),
    "N = 0": (
        lambda env, key, s: fuse_steps(env, 2, policy="random")(key, jax.tree.map(lambda x: x[:0], s)),
        "N = 0 environments",
    ),
    "policy": (lambda env, key, s: fuse_steps(env, 2, policy="best"), r"\(params, key, obs\), got 'best'"),
    "outputs": (lambda env, key, s: fuse_steps(env, 2, outputs="all"), "outputs must be .*\"trajectory\", got 'all'"),
    "backend": (lambda env, key, s: fuse_steps(env, 2, backend="cuda"), "backend must be .*\"interpret\", got 'cuda'"),
    "length of actions": (
        lambda env, key, s: fuse_steps(env, 2)(key, s, jnp.zeros((3, 4), jnp.int32)),
        r"K = 2 steps, and xs has \[3\]",
    ),
    "batch of actions": (
        lambda env, key, s: fuse_steps(env, 2)(key, s, jnp.zeros((2, 5), jnp.int32)),
        r"leading \[N\] axes differ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, message = BAD[case]
    env = rlfx.envs.make("CartPole-v1")
    key, states = start(env, 4)
    with pytest.raises(ProgramError, match=message):
        call(env, key, states)


def test_unstable_carry_is_refused():
    def body(shared, t, b, carry, x):
        return {"x": carry["x"].astype(jnp.int32)}, None

    with pytest.raises(ProgramError, match=r"carry\['x'\] is float32\[\] and comes back as int32\[\]"):
        fuse_scan(body, 2)(None, {"x": jnp.zeros(3, jnp.float32)})


def test_tune_measures_every_candidate():
    env = rlfx.envs.make("Catch-bsuite")
    key, states = start(env, 64, fast_prng)

    def make(backend, tile):
        return fuse_steps(env, 5, policy="random", backend=backend, tile=tile)

    best, seconds = tune(make, key, states, candidates=(("scan", None), ("tile", 32)), repeat=1)
    assert best in seconds
    assert set(seconds) == {("scan", None), ("tile", 32)}


@pytest.mark.parametrize("factors", [(1, 1), (3, 2)])
def test_parametric_cartpole_with_and_without_ballast(factors):
    env = rlfx.envs.make("CartPole-parametric", compute_factor=factors[0], state_factor=factors[1])
    key, states = start(env, 4, fast_prng)
    reference, fused = (jax.jit(fuse_steps(env, 12, policy="random", backend=b))(key, states) for b in ("vmap", "scan"))
    assert_same(reference, fused, atol=1e-5)


def test_statistics_count_episodes():
    env = rlfx.envs.make("MountainCar-v0")
    key, states = start(env, 3)
    _, s = jax.jit(fuse_steps(env, 450, policy="random", outputs="statistics"))(key, states)
    np.testing.assert_array_equal(s.episodes, [2, 2, 2])
    np.testing.assert_array_equal(s.steps, [400, 400, 400])
    np.testing.assert_array_equal(s.open_steps, [50, 50, 50])
    np.testing.assert_array_equal(s.returns, [-400.0] * 3)
    np.testing.assert_array_equal(s.reward, [-450.0] * 3)


def test_given_actions_may_be_closed_over():
    env, key = rlfx.envs.make("CartPole-v1"), jax.random.key(0)
    states, actions = jax.vmap(env.reset)(jax.random.split(key, 4)), jnp.ones((3, 4), jnp.int32)
    run = fuse_steps(env, 3)
    assert_same(jax.jit(lambda s: run(key, s, actions))(states), run(key, states, actions), atol=1e-6)
    with pytest.raises(ProgramError, match="the action 2 of step 1 and environment 3"):
        jax.jit(lambda s, bad=actions.at[1, 3].set(2): run(key, s, bad))(states)
