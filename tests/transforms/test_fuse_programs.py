"""``fuse_steps`` of a compiled program: the same values and gradients, and reasons where a loop is left as it is."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
import rlfx.envs
from rlfx.envs import fast_prng
from rlfx.errors import ProgramError
from rlfx.transforms.fuse_steps import fuse_loops, fuse_steps, tune
from rlfx.transforms.steps.loop import products_prevail
from tests import strategies
from tests.cuda import lowered
from tests.recurrence.test_generated import QUICK, mismatches, outcome

FUSED = "fused: its steps are one scalarised program"
ENV = rlfx.envs.make("CartPole-v1")
PENDULUM = rlfx.envs.make("Pendulum-v1")


def init(hidden=8):
    keys = jax.random.split(jax.random.key(4), 3)
    return {
        "in": jax.random.normal(keys[0], (4, hidden), jnp.float32) * 0.5,
        "pi": jax.random.normal(keys[1], (hidden, 2), jnp.float32),
        "v": jax.random.normal(keys[2], (hidden,), jnp.float32),
    }


def heads(params, obs):
    hidden = jnp.tanh(obs @ params["in"])
    return jax.nn.log_softmax(hidden @ params["pi"]), hidden @ params["v"]


def ppo(params, state, t):
    """One timestep of one environment: acting, advantages, a loss with bootstrapping at truncations."""
    log_probs, value = heads(params, ENV.observe(state))
    action = jax.random.categorical(t.key_for("action"), log_probs)
    state, step = ENV.step(t.key_for("env"), state, action)
    next_value = rlfx.next_value(lambda obs: heads(params, obs)[1], step, value)
    advantage = jax.lax.stop_gradient(rlfx.gae(step, value, next_value, gamma=0.99, lam=0.9))
    loss = (value - advantage - jax.lax.stop_gradient(value)) ** 2 - advantage * log_probs[action]
    return loss, state, {"advantage": advantage, "action": action, "done": step.done}


def start(n, impl="threefry2x32"):
    key = jax.random.key(0, impl=impl)
    states = jax.vmap(ENV.reset)(jax.random.split(key, n))
    late = jnp.arange(n) % 3 == 0  # some episodes are about to be truncated
    return states.__class__(
        states.x, states.x_dot, states.theta, states.theta_dot, jnp.where(late, jnp.int32(497), jnp.int32(0))
    )


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def both(f, compiler=rlfx.compile, **options):
    return compiler(f, **options), compiler(f, transform=fuse_steps, **options)


def gradient(fn):
    return jax.jit(jax.value_and_grad(fn, has_aux=True))


@pytest.mark.parametrize(("length", "n", "hidden", "impl"), [
    (1, 1, 8, "threefry2x32"), (7, 21, 8, fast_prng), (5, 300, 64, fast_prng)])  # fmt: skip
def test_ppo_has_the_same_values_and_gradients(length, n, hidden, impl):
    plain = rlfx.compile(ppo, length=length, batch=n)
    fused = rlfx.compile(ppo, length=length, batch=n, transform=partial(fuse_steps, backend="scan"))
    arguments = init(hidden), start(n, impl), jax.random.key(1, impl=impl)
    assert (FUSED in str(fused.explain(*arguments, verbose=True))) == (length > 1)  # one timestep is no loop
    assert FUSED not in str(plain.explain(*arguments, verbose=True))
    expected = gradient(plain)(*arguments)
    assert_close(expected, gradient(fused)(*arguments))
    assert length < 4 or bool(expected[0][1][1]["done"].any())


def test_the_loss_alone_and_a_time_offset():
    plain, fused = both(ppo, length=6, batch=5)
    arguments = init(), start(5), jax.random.key(1)
    assert_close(jax.jit(partial(plain, t0=3))(*arguments), jax.jit(partial(fused, t0=3))(*arguments))


def test_unrolled_programs_composed():
    """vmap over seeds, and a gradient through an unrolled program."""

    def f(params, state, t):
        _, state, aux = ppo(params, state, t)
        return state, aux

    plain, fused = both(f, rlfx.unroll, length=5, batch=4)
    keys = jax.random.split(jax.random.key(1), 3)
    run = lambda fn: jax.jit(jax.vmap(lambda k: fn(init(), start(4), k)))(keys)  # noqa: E731
    assert_close(run(plain), run(fused))


def test_through_the_recurrence():
    """What is differentiated keeps its own loops."""

    def f(w, x, t):
        x = jnp.tanh(w * x + 0.1)
        return x**2, x

    plain, fused = both(f, length=9, batch=3)
    assert_close(gradient(plain)(0.7, jnp.ones(3, jnp.float32)), gradient(fused)(0.7, jnp.ones(3, jnp.float32)))


@pytest.mark.parametrize("batch", [None, 2, 3])
def test_leaves_of_size_zero(batch):
    """They have no scalar that would tell how many timesteps and environments there are."""
    lead = () if batch is None else (batch,)
    shapes = [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0)]
    empty = {f"{d}{s}": jnp.zeros((*lead, *s), d) for d in ("float32", "int32", "bool", "uint8") for s in shapes}

    def f(w, carry, t):
        x = jnp.tanh(w * carry["x"])
        return (
            x**2,
            {**carry, "x": x},
            ({k: v for k, v in carry.items() if k != "x"}, {"size": carry["bool(0,)"] | True}),
        )

    plain, fused = both(f, length=4, batch=batch)
    for carry in (
        {"x": jnp.ones(lead, jnp.float32), **empty},
        {"bool(0,)": empty["bool(0,)"], "x": jnp.ones(lead, jnp.float32)},
    ):
        assert_close(gradient(plain)(0.7, carry), gradient(fused)(0.7, carry))
    nothing = {"only": jnp.zeros((*lead, 0), jnp.float32)}
    plain, fused = both(lambda w, c, t: (c, c["only"] * 2), rlfx.unroll, length=4, batch=batch)
    assert_close(plain(None, nothing), fused(None, nothing))


#: Numbers of arrays in which there is none.
OF_NOTHING = [
    jnp.sum,
    jnp.prod,
    lambda z: z.sum(0).sum(),
    lambda z: z.sum(1).sum(),
    lambda z: jnp.all(z > 0).astype(jnp.float32),
    lambda z: jnp.any(z > 0).astype(jnp.float32),
    lambda z: (z @ z.T).sum(),
    lambda z: (z.T @ z).sum(),
    lambda z: jnp.cumsum(z, 0).sum() + jnp.cumsum(z, 1).sum(),
    lambda z: jnp.concatenate([z.reshape(-1), jnp.ones(2, jnp.float32)]).sum(),
    lambda z: jnp.where(z > 0, z, 2.0).sum(),
    lambda z: jnp.sort(z, 0).sum(),
    lambda z: jnp.sin(z).reshape(-1).sum(),
    lambda z: jnp.stack([z, z]).sum(),
]


def test_what_is_computed_of_nothing():
    """56: a carry of each shape by each function."""
    shapes = [(0, 3), (3, 0), (0, 0), (0, 1)]
    assert len(shapes) * len(OF_NOTHING) >= 50

    def f(w, carry, t):
        x = jnp.tanh(w * carry["x"])
        of = [g(carry[str(s)]) for s in shapes for g in OF_NOTHING]
        return x, {**carry, "x": x + sum(of) * 0.1, str(shapes[0]): carry[str(shapes[0])] * x}, of

    carry = {"x": jnp.ones(2, jnp.float32), **{str(s): jnp.zeros((2, *s), jnp.float32) for s in shapes}}
    plain, fused = both(f, length=3, batch=2)
    assert_close(gradient(plain)(0.7, carry), gradient(fused)(0.7, carry))


@pytest.mark.parametrize("batch", [None, 4])
def test_shared_carries_and_programs_without_environments(batch):
    def f(w, carry, t):
        x, count = carry
        return (x * w + 0.1 * jnp.asarray(t).astype(jnp.float32), count + 1), (x, count)

    lead = () if batch is None else (batch,)
    carry = jnp.ones(lead, jnp.float32), jnp.int32(0) if batch is None else rlfx.Shared(jnp.int32(0))
    plain, fused = both(f, rlfx.unroll, length=5, batch=batch)
    assert_close(plain(0.5, carry), fused(0.5, carry))


def test_until():
    def f(w, x, t):
        return w * x, x + 0.6 * jax.random.uniform(t.key, (), jnp.float32)

    plain, fused = both(f, length=12, batch=6, until=lambda x: x > 2.0)
    arguments = 0.5, jnp.linspace(0.0, 2.0, 6, dtype=jnp.float32), jax.random.key(2)
    assert_close(gradient(plain)(*arguments), gradient(fused)(*arguments))


def test_on_a_mesh():
    mesh = jax.make_mesh((2,), ("b",))
    plain, fused = rlfx.compile(ppo, length=6, batch=8), rlfx.compile(ppo, length=6, batch=8, mesh=mesh,
                                                                      transform=fuse_steps)  # fmt: skip
    arguments = init(), start(8), jax.random.key(1)
    assert_close(gradient(plain)(*arguments), gradient(fused)(*arguments))


def test_generated_programs():
    fused_loops = 0
    for seed in range(12):
        p = strategies.program(seed, 2)
        plain, fused = both(p.function, **p.options())
        one, other = (outcome(fn, p, jit=True, options=QUICK) for fn in (plain, fused))
        assert not mismatches(other, one), p
        if not isinstance(one, Exception):
            fused_loops += str(fused.explain(*p.arguments(), verbose=True)).count(FUSED)
    assert fused_loops >= 3


def test_lowers_for_cuda():
    fused = rlfx.unroll(lambda w, s, t: ppo(w, s, t)[1:], length=5, batch=64,
                        transform=partial(fuse_steps, backend="triton"))  # fmt: skip
    assert "triton" in lowered(jax.jit(fused), init(), start(64), jax.random.key(0))


def test_interpreted_kernel():
    plain = rlfx.unroll(lambda w, s, t: ppo(w, s, t)[1:], length=4, batch=5)
    fused = rlfx.unroll(lambda w, s, t: ppo(w, s, t)[1:], length=4, batch=5,
                        transform=partial(fuse_steps, backend="interpret", tile=8))  # fmt: skip
    arguments = init(), start(5), jax.random.key(1)
    assert_close(jax.jit(plain)(*arguments), jax.jit(fused)(*arguments))


def coupled(w, x, t):
    return x, x - rlfx.mean(x, "b")


def far(w, x, t):
    y = rlfx.series(jnp.tanh(w * x), start=0.0)
    return y[t], y[t - 1] + y[t - 3]


def searching(w, x, t):
    return x, jax.lax.while_loop(lambda v: v < 0, lambda v: v + 1.0, x - w)


def on_the_host(w, x, t):
    return x, jax.pure_callback(lambda v: v + 1, jax.ShapeDtypeStruct((), jnp.float32), x, vmap_method="sequential")


REFUSED = {
    "reductions": (coupled, "not fused: it reduces over the environments"),
    "rings": (far, "not fused: it reads more than one timestep back"),
    "loops on data": (searching, "not fused: the primitive 'while' has no scalar form here"),
    "callbacks": (on_the_host, "not fused: the primitive 'pure_callback' has no scalar form here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_fused_is_explained_and_runs(case):
    f, reason = REFUSED[case]
    plain, fused = both(f, length=5, batch=3)
    text = str(fused.explain(0.5, jnp.arange(3, dtype=jnp.float32), verbose=True))
    assert reason in text
    assert "test_fuse_programs.py" in text[text.index(reason) :]
    assert FUSED not in text
    assert_close(plain(0.5, jnp.arange(3, dtype=jnp.float32)), fused(0.5, jnp.arange(3, dtype=jnp.float32)))


def test_prints_are_kept(capsys):
    """What the recurrence does not need runs in a loop of its own."""

    def f(w, x, t):
        jax.debug.print("at {}", jnp.asarray(t), ordered=True)
        return x + w, x

    fused = rlfx.unroll(f, length=3, transform=fuse_steps)
    assert FUSED in str(fused.explain(0.5, jnp.float32(1), verbose=True))
    jax.block_until_ready(fused(0.5, jnp.float32(1)))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["at", "0", "at", "1", "at", "2"]


def test_a_large_program_is_left():
    def f(w, x, t):
        return x.sum(), jnp.sort(x * w)

    plain, fused = both(f, length=3, batch=2)
    x = jax.random.normal(jax.random.key(0), (2, 40), jnp.float32)
    assert "not fused: the primitive 'sort' has no scalar form here" in str(fused.explain(0.5, x, verbose=True))
    assert_close(plain(0.5, x), fused(0.5, x))


def test_where_products_prevail_a_cpu_is_left_alone():
    plain, fused = both(ppo, length=3, batch=64)
    arguments = init(16384), start(64), jax.random.key(1)
    text = str(fused.explain(*arguments, verbose=True))
    assert re.search(
        r"not fused: on a CPU its time is that of matrix products, [67].\d million multiplications a timestep \(test_fuse",
        text,
    )
    assert_close(jax.jit(plain)(*arguments), jax.jit(fused)(*arguments))


@pytest.mark.parametrize(("hidden", "n", "prevail"), [
    (16, 4096, False), (32, 4096, False), (64, 64, False), (64, 256, False), (64, 1024, True), (128, 1024, True)])  # fmt: skip
def test_auto_follows_what_was_measured(hidden, n, prevail):
    """Two networks of two hidden layers, as in `benchmarks/envs_ppo.py`."""
    assert products_prevail(2 * (4 * hidden + hidden**2) + 3 * hidden, n) == prevail


def test_a_program_is_tuned_by_measuring():
    f = lambda w, x, t: (w * x, x + 1.0)  # noqa: E731
    make = lambda backend, tile: rlfx.unroll(  # noqa: E731
        f, length=3, batch=2, transform=partial(fuse_steps, backend=backend, tile=tile)
    )
    best, seconds = tune(make, 2.0, jnp.ones(2, jnp.float32), candidates=(("vmap", None), ("scan", None)), repeat=1)
    assert best in seconds
    assert set(seconds) == {("vmap", None), ("scan", None)}


def test_there_is_no_such_backend():
    program = rlfx.trace(lambda w, x, t: (w * x, x), 1.0, jnp.float32(1.0), length=2)
    with pytest.raises(ProgramError, match=r"backend must be .*, got 'cuda'"):
        fuse_loops(program, backend="cuda")


def test_twice_is_once():
    program = rlfx.trace(lambda w, x, t: (w * x, x + 1.0), 1.0, jnp.ones(2, jnp.float32), length=3, batch=2)
    once, twice = fuse_steps(program), fuse_steps(fuse_steps(program))
    assert once.directives == twice.directives
    assert_close(rlfx.lower(once)(2.0, jnp.ones(2, jnp.float32)), rlfx.lower(program)(2.0, jnp.ones(2, jnp.float32)))


@pytest.mark.parametrize(("width", "kernel"), [(64, True), (256, False)])
def test_a_kernel_with_many_weights_is_slower_than_the_loop(width, kernel):
    """As it was measured; who names a backend gets the kernel."""
    weights = jnp.zeros((4, width)), jnp.zeros((width, width)), jnp.zeros((width, 2))

    def act(p, x, t):
        logits = jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
        action = jax.random.categorical(t.key_for("action"), logits)
        return 0.9 * x + 0.1 * action.astype(x.dtype), action

    def explained(transform):
        rollout = rlfx.unroll(act, length=8, batch=32, target="h200", transform=transform)
        return str(rollout.explain(weights, jnp.zeros((32, 4)), jax.random.key(0)))

    said = explained(fuse_steps)
    assert ("fused: its steps are one kernel (triton)" in said) == kernel
    assert ("a kernel with 262 KiB of weights" in said) != kernel
    if not kernel:
        assert 'is slower than the loop; backend="triton" fuses it nevertheless' in said
        assert "fused: its steps are one kernel (triton)" in explained(partial(fuse_steps, backend="triton"))


@pytest.mark.parametrize("of", [
    lambda w: w.T, lambda w: w[::-1], lambda w: w[:, ::-1], lambda w: jnp.flip(w), lambda w: w.T[::-1]
])  # fmt: skip
@pytest.mark.parametrize("size", [3, 8])
def test_a_square_matrix_turned_or_reversed_in_a_branch_is_another(of, size):
    """Its shape stays, and its elements do not; of 64 weights it stays a matrix."""
    w = jax.random.normal(jax.random.key(0), (size, size))
    x = jax.random.normal(jax.random.key(1), (5, size))

    def f(w, x, t):
        y = jax.lax.cond(t.now % 3 == 1, lambda: x @ of(w), lambda: x)
        return jnp.sin(y), y

    expected = []
    for t in range(4):
        y = x @ of(w) if t % 3 == 1 else x
        expected.append(y)
        x = jnp.sin(y)
    start = jax.random.normal(jax.random.key(1), (5, size))
    for backend in ("scan", "interpret"):
        fused = rlfx.unroll(f, length=4, batch=5, transform=partial(fuse_steps, backend=backend))
        np.testing.assert_allclose(fused(w, start)[1], jnp.stack(expected), rtol=1e-5, atol=1e-5)
        assert "  fused: " in str(fused.explain(w, start))
